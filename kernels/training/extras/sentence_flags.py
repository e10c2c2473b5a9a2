"""The flags and recipes of ConSERT, DeCLUTR and SimCLS in simcse.py, known before torch is loaded."""
from ..cli import at_least, fail, say
from ..columns import RANKING, SENTENCES
from ..recipes import Recipe, say_recipe

# name: the share of it that is changed where --view-rates does not say
WORDS = dict(crop=0.1, delete=0.1, synonym=0.1)
CUTS = dict(feature_cutoff=0.2, token_cutoff=0.15, embedding_dropout=0.2)
EMBEDDINGS = CUTS | dict(shuffle=0.0)
NAMES = "dropout", *EMBEDDINGS, *WORDS, "spans"
OPTIMIZERS = "simcse", "consert", "declutr", "simcls"          # of optimizers.py
RECIPES = {
    "consert": Recipe("Yan et al. 2021, released unsupervised BERT-base", dict(
        model="bert-base-uncased", views=["feature_cutoff", "shuffle"], objective="nt-xent", temperature=0.1,
        pooling="avg", dropout=0.0, optimizer_of="consert", batch_size=96, lr=5e-7, max_length=64, epochs=10,
        eval_every=200)),
    "declutr": Recipe("Giorgi et al. 2021, released DistilRoBERTa", dict(
        model="distilroberta-base", form="code", views=["spans"], objective="nt-xent", temperature=0.05,
        pooling="avg", mlm_weight=1.0, optimizer_of="declutr", batch_size=16, lr=5e-5, max_length=512,
        epochs=1)),
    "simcls": Recipe("Liu and Liu 2021, released for CNN/DailyMail; XSum has --candidate-length 80", dict(
        model="roberta-base", form="code", objective="ranking", margin=0.01, pooling="cls_before_pooler",
        optimizer_of="simcls", batch_size=12, lr=2e-3, max_length=512, candidate_length=120, epochs=5,
        eval_every=1000))}


def add_flags(parser):
    add = parser.add_argument
    parser.add_recipes(RECIPES)
    add("--views", nargs="+", choices=NAMES, default=["dropout"], metavar="VIEW",
        help=f"what changes a text, a name for each view: {', '.join(NAMES)}; default dropout alone (paper)")
    add("--view-rates", nargs="+", type=float, metavar="RATE",
        help="share that each view changes; default 0.2 of features, 0.15 of tokens, 0.2 of entries, 0.1 of "
             "words, of which it is one at the least")
    add("--spans", nargs=2, type=int, default=[2, 2], metavar=("A", "P"),
        help="anchors of a document, positives of an anchor; default 2 2 (DeCLUTR)")
    add("--candidate-length", type=at_least(3, int),
        help="tokens that a candidate of --objective ranking keeps in training; default --max-length")
    add("--optimizer-of", choices=OPTIMIZERS, default="simcse",
        help="whose optimizer, learning rates and clipping: see optimizers.py; default simcse (paper)")
    objectives = "infonce", "nt-xent", "ranking"
    add("--objective", choices=objectives, default="infonce", help="see above; default infonce (paper)")
    add("--margin", type=at_least(0), default=0.01, help="of --objective ranking; default 0.01 (SimCLS)")
    parser.common("--form", "paper")
    parser.common("--adversarial", 0.0, "0: none; for rows with a positive (ConSERT)")
    add("--wordnet", reads="words", help="folder of a WordNet database (data.noun and so on), for texts")


def roles_of(args):
    """The roles of the columns of --data, see columns.py: those of SimCLS's candidates, or of SimCSE."""
    return RANKING if args.objective == "ranking" else SENTENCES


def check(args, path, columns):
    """Refuse flags that do not go together; path and columns are --data and how many columns it has.

    Fills args.views and args.view_rates with one of each view, and

    args.count      views of a row in a batch
    args.anchors    vectors of a row in a view: 1, or as many spans as a document gives
    args.masked     whether anchors are embedded with the masked LM's tokens masked, in one pass with it
    args.others     whether any of this is asked for: then sentence_papers.train is the loop
    """
    names, plain = args.views, ["dropout"]
    args.others = (names != plain or args.adversarial > 0 or args.objective != "infonce"
                   or args.optimizer_of != "simcse")
    check_objective(args, path, columns)
    say_recipe(args, RECIPES)
    if args.recipe and args.model == "scratch" and args.lr == RECIPES[args.recipe].flags["lr"]:
        say("note", f"--recipe {args.recipe} has the learning rate of a pretrained encoder, {args.lr:g}: "
                    "--model scratch hardly learns with it; add --optimizer-of simcse --lr 2e-3")
    check_spans(args)
    if args.prompt and any(name in WORDS or name == "spans" for name in names):
        fail(f"--prompt: --views {' '.join(names)} would change its words too")
    count, rates = 1 if names == ["spans"] else max(columns, 2), args.view_rates
    args.views = names * count if names == plain else names
    if len(args.views) != count:
        fail(f"--views {' '.join(names)}: wanted {count} names, one for each view")
    if rates is None:
        rates = [(WORDS | EMBEDDINGS).get(name, 0.0) for name in args.views]
    if len(rates) != count or not all(0 <= rate < 1 for rate in rates):
        fail(f"--view-rates {' '.join(map(str, rates))}: wanted {count} shares from 0 to less than 1")
    args.view_rates, args.count = rates, 1 + args.spans[1] if names == ["spans"] else count
    if ("synonym" in names) != bool(args.wordnet):
        fail("--views synonym and --wordnet, a WordNet folder, want each other: "
             "Debian's package wordnet-base has /usr/share/wordnet")
    if args.adversarial and args.mode == "unsupervised":
        fail("--adversarial: wants rows with a positive, which is what the noise is against")


def check_objective(args, path, columns):
    """Refuse flags and columns that do not fit --objective."""
    if args.objective == "nt-xent" and columns > 2 or args.objective == "ranking" and columns < 3:
        wanted = "a text and its positive" if columns > 2 else "text, reference and candidates"
        fail(f"--objective {args.objective}: {path} has {columns} columns, wanted {wanted}; see --columns")
    if args.objective != "infonce" and (args.ignore_equal or args.hard_negative_weight):
        fail(f"--objective {args.objective}: has no --ignore-equal and no --hard-negative-weight")
    if args.candidate_length and args.objective != "ranking":
        fail("--candidate-length: is for --objective ranking, which is not given")


def check_spans(args):
    """Refuse flags that do not go with --views spans; fills args.anchors and args.masked."""
    spans = "spans" in args.views
    if spans and (len(args.views) > 1 or args.mode != "unsupervised"):
        fail("--views spans: stands alone, and wants rows of one text, a document")
    if min(args.spans) < 1:
        fail(f"--spans {' '.join(map(str, args.spans))}: wanted numbers above 0")
    if spans and args.ignore_equal:
        fail("--ignore-equal: spans are no rows; leave it out")
    args.anchors = args.spans[0] if spans else 1
    args.masked = spans and args.form == "code" and args.mlm_weight > 0
