"""simcse.py's flags for ConSERT, DeCLUTR and SimCLS, and their recipes."""
from ..data import RANKING_COLUMNS, SENTENCE_COLUMNS
from ..errors import fail, log
from ..flags import Recipe, at_least

# Views by name, with the default of --view-rates
WORD_VIEWS = dict(crop=0.1, delete=0.1, synonym=0.1)
CUTOFF_VIEWS = dict(feature_cutoff=0.2, token_cutoff=0.15, embedding_dropout=0.2)
EMBEDDING_VIEWS = CUTOFF_VIEWS | dict(shuffle=0.0)
VIEWS = "dropout", *EMBEDDING_VIEWS, *WORD_VIEWS, "spans"
OPTIMIZERS = "simcse", "consert", "declutr", "simcls"          # as in optimizers.py
RECIPES = {
    "consert": Recipe("Yan et al. 2021, released unsupervised BERT-base", dict(
        model="bert-base-uncased", views=["feature_cutoff", "shuffle"], objective="nt-xent", temperature=0.1,
        pooling="avg", dropout=0.0, optimizer_recipe="consert", batch_size=96, lr=5e-7, max_length=64,
        epochs=10, eval_every=200)),
    "declutr": Recipe("Giorgi et al. 2021, released DistilRoBERTa", dict(
        model="distilroberta-base", form="code", views=["spans"], objective="nt-xent", temperature=0.05,
        pooling="avg", mlm_weight=1.0, optimizer_recipe="declutr", batch_size=16, lr=5e-5, max_length=512,
        epochs=1)),
    "simcls": Recipe("Liu and Liu 2021, released for CNN/DailyMail; XSum has --candidate-length 80", dict(
        model="roberta-base", form="code", objective="ranking", margin=0.01, pooling="cls_before_pooler",
        optimizer_recipe="simcls", batch_size=12, lr=2e-3, max_length=512, candidate_length=120, epochs=5,
        eval_every=1000))}


def add_flags(parser):
    """Add the flags of other papers to simcse.py's parser."""
    def add(name, **settings):
        parser.add_argument(name, group="other papers", **settings)

    parser.add_recipes(RECIPES)
    add("--views", nargs="+", choices=VIEWS, default=["dropout"], metavar="VIEW",
        help=f"augmentations, one per view of a sentence (see docs/others.md): {', '.join(VIEWS)}; default "
             "dropout for all views (paper)")
    add("--view-rates", nargs="+", type=float, metavar="RATE",
        help="fraction of features, tokens, embedding entries or words that a view changes, one number per "
             "view; default 0.2 for feature_cutoff and embedding_dropout, 0.15 for token_cutoff, and 0.1 for "
             "crop, delete and synonym (these three change at least one word)")
    add("--spans", nargs=2, type=int, default=[2, 2], metavar=("A", "P"),
        help="for --views spans: number of anchors per document and of positives per anchor; default 2 2 "
             "(DeCLUTR)")
    add("--candidate-length", type=at_least(3, int),
        help="truncate the candidates of --objective ranking to this many tokens in training; default the "
             "value of --max-length")
    add("--optimizer-recipe", choices=OPTIMIZERS, default="simcse",
        help="use the optimizer, learning-rate schedule and gradient clipping of the released code of the "
             "named paper, see kernels/training/extras/optimizers.py; default simcse")
    add("--objective", choices=("infonce", "nt-xent", "ranking"), default="infonce",
        help="loss to train with; default infonce (paper); nt-xent: every view is an anchor, and "
             "negatives come from all views; ranking: SimCLS's ranking of candidates, which each row lists "
             "from best to worst")
    add("--margin", type=at_least(0), default=0.01,
        help="margin between consecutive candidates in --objective ranking; default 0.01 (SimCLS)")
    parser.add_shared("--form", "paper", "paper; code changes only --views spans and --objective ranking",
                      group="other papers")
    parser.add_shared("--adversarial", 0.0, "0 (off); requires data with positives (ConSERT)",
                      group="other papers")
    add("--wordnet", reads="words",
        help="folder of a WordNet database (data.noun etc.); default none; --views synonym requires it")


def roles_of(args):
    """Return the roles of the columns of --data for this --objective, see columns.py."""
    return RANKING_COLUMNS if args.objective == "ranking" else SENTENCE_COLUMNS


def check_flags(args, path, columns):
    """Raise UserError if flags do not fit each other or the data, and fill in what depends on them.

    args.views and args.view_rates get one entry per view. New are:

    args.count      number of views of a row in a batch
    args.anchors    number of vectors of a row in a view: 1, or with --views spans the anchors of a document
    args.masked     whether the anchors' embeddings come from the masked-LM pass, over masked tokens
    args.others     whether to train by sentence_papers.train: some flag differs from SimCSE's setting

    path, columns   of --data: its name and its number of columns
    """
    names, plain = args.views, ["dropout"]
    args.others = (names != plain or args.adversarial > 0 or args.objective != "infonce"
                   or args.optimizer_recipe != "simcse")
    check_objective(args, path, columns)
    if args.recipe and args.model == "scratch" and args.lr == RECIPES[args.recipe].flags["lr"]:
        log("note", f"--recipe {args.recipe} sets the learning rate for a pretrained encoder, {args.lr:g}: "
                    "--model scratch hardly learns with it; add --optimizer-recipe simcse --lr 2e-3")
    check_spans(args)
    if args.prompt and any(name in WORD_VIEWS or name == "spans" for name in names):
        fail(f"--prompt: --views {' '.join(names)} would change the words of the prompt, too; leave one of "
             "them out")
    count, rates = 1 if names == ["spans"] else max(columns, 2), args.view_rates
    args.views = names * count if names == plain else names
    if len(args.views) != count:
        fail(f"--views {' '.join(names)}: expected {count} names, one per view")
    if rates is None:
        rates = [(WORD_VIEWS | EMBEDDING_VIEWS).get(name, 0.0) for name in args.views]
    if len(rates) != count or not all(0 <= rate < 1 for rate in rates):
        fail(f"--view-rates {' '.join(map(str, rates))}: expected {count} numbers from 0 to less than 1")
    args.view_rates = rates
    args.count = 1 + args.spans[1] if names == ["spans"] else count
    if "synonym" in names and not args.wordnet:
        fail("--views synonym: expected --wordnet with the folder of a WordNet database, for example "
             "/usr/share/wordnet of Debian's package wordnet-base")
    if args.wordnet and "synonym" not in names:
        fail("--wordnet: only --views synonym uses it; leave it out")
    if args.adversarial and args.mode == "unsupervised":
        fail(f"--adversarial: {path} has 1 column, expected an anchor and a positive; see --columns")


def check_objective(args, path, columns):
    """Raise UserError if flags or columns do not fit --objective."""
    if args.objective == "nt-xent" and columns > 2 or args.objective == "ranking" and columns < 3:
        found = f"{path} has {columns} columns"
        expected = "a text and its positive" if columns > 2 else "text, reference and candidates"
        fail(f"--objective {args.objective}: {found}, expected {expected}; see --columns")
    if args.objective != "infonce" and (args.ignore_equal or args.hard_negative_weight):
        fail(f"--objective {args.objective}: does not use --ignore-equal and --hard-negative-weight; leave "
             "them out")
    if args.candidate_length and args.objective != "ranking":
        fail("--candidate-length: only --objective ranking uses it; leave it out")


def check_spans(args):
    """Raise UserError if flags do not fit --views spans. Fill args.anchors and args.masked."""
    spans = "spans" in args.views
    if spans and (len(args.views) > 1 or args.mode != "unsupervised"):
        fail("--views spans: expected no other view, and data with a single column, of documents")
    if min(args.spans) < 1:
        fail(f"--spans {' '.join(map(str, args.spans))}: expected numbers above 0")
    if spans and args.ignore_equal:
        fail("--ignore-equal: cannot be combined with --views spans; leave it out")
    args.anchors = args.spans[0] if spans else 1
    args.masked = spans and args.form == "code" and args.mlm_weight > 0
