"""Transformers that read sentences: loaded, with pooling and head; checkpoint.py has their folders."""
import contextlib
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel

from kernels import embed_in_chunks

from ..cli import fail, say
from ..pretrained import blaming
from ..progress import progress
from ..tables import texts_of
from .checkpoint import read_layout
from .models import has_decoder, load_text_model, longest_input
from .tokens import grouped, in_order, pad, tokenise


def begin_linear(linear, config):
    """The linear layer, drawn as BERT draws its own; XLM's kind has another name for the deviation."""
    std = getattr(config, "initializer_range", getattr(config, "init_std", 0.02))
    torch.nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear


def is_causal(encoder, named):
    """Whether a token's state depends on those before it alone, as in a decoder."""
    ids, training = torch.tensor([[2, 3], [2, 4]]), encoder.training
    try:
        with torch.no_grad():
            output = encoder.eval()(input_ids=ids, attention_mask=ids > 0)
        _, (first, second) = output.hidden_states, output.last_hidden_state[:, 0]
    except Exception:                # T5 wants two texts, BART has states of the second, CLIP wants a picture
        fail(f"{named}: {type(encoder).__name__} gives no states of a text's tokens; wanted a model like "
             "BERT or Qwen")
    encoder.train(training)
    return bool((first - second).norm() < 1e-5 * first.norm())                 # rounding aside: the same


class SentenceEncoder(torch.nn.Module):
    """A transformer, the pooling of its token states, and a head.

    pooling      one of command.POOLINGS: the first token, the last one, or the mean over tokens of the last
                 layer, of the last two, or of the first and the last
    head         None, or what is behind the pooling in training; keep_head: and after it
    """

    def __init__(self, encoder, tokenizer, run, pooling="cls", head=None, keep_head=False):
        super().__init__()
        self.has_pooler = hasattr(encoder, "pooler")           # BERT, RoBERTa: save can write the head there
        self.encoder, self.head, self.keep_head = encoder, head, keep_head and head is not None
        self.unused_pooler = (getattr(encoder, "pooler", None),)       # in a tuple: not trained, but saved
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = torch.nn.Identity()               # SqueezeBERT's kind calls it in any case
        self.tokenizer, self.pooling = tokenizer, pooling
        self.device, self.bf16, self.chunk_size = run.device, run.bf16, getattr(run.args, "chunk_size", None)
        encoder.config.output_hidden_states = pooling in ("avg_top2", "avg_first_last")
        self.no_cache = {"use_cache": False} if hasattr(encoder.config, "use_cache") else {}   # a decoder's
        self.longest, self.normalise, self.lower = longest_input(encoder, tokenizer), False, False
        self.prompts, self.scored = ("",), ""                  # before the texts of each column; of pairs
        self.change_pass = None        # (mask, *more) → a context that changes the encoder's pass, see pool

    def batch(self, *views):
        """[(places (n,), ids (n, L), mask (n, L))] of lists of token ids: one view behind the other, in
        groups of similar length. The loss needs the embeddings alone, so no row is padded to the longest of
        its batch."""
        flat, padding = [ids for view in views for ids in view], self.tokenizer.pad_token_id or 0
        groups = []
        for places in grouped([len(ids) for ids in flat], self.device, self.chunk_size):
            lengths = torch.tensor([len(flat[i]) for i in places])
            ids = pad([flat[i] for i in places], padding)
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            groups.append([x.to(self.device) for x in (torch.tensor(places), ids, mask)])
        return groups

    def prompted(self, cells):
        """The texts of a row's columns behind their prompts, the last of which goes on."""
        prompts = (self.prompts[min(i, len(self.prompts) - 1)] for i in range(len(cells)))
        return [self.spelt(prompt + cell) for prompt, cell in zip(prompts, cells)]

    def spelt(self, text):
        return text.lower() if self.lower else text

    @property
    def width(self):
        """H, of the embeddings in training."""
        linears = [part for part in (self.head or []) if isinstance(part, torch.nn.Linear)]
        return linears[-1].out_features if linears else self.encoder.config.hidden_size

    def forward(self, batch):
        """(rows, H) float32 embeddings in the order of the rows: one path for training and evaluation."""
        module = self.encoder if self.chunk_size else None
        return in_order(embed_in_chunks(lambda group: self.pool(*group[1:]), batch, module), batch)

    def pool(self, ids, mask, *how):
        """(n, H) float32 embeddings of ids (n, L). how: what else a batch's groups hold, for change_pass."""
        changed = self.change_pass(mask, *how) if how else contextlib.nullcontext()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16), changed:
            output = self.encoder(input_ids=ids, attention_mask=mask, **self.no_cache)
            return self.pool_states(output.last_hidden_state, mask, output.hidden_states)

    def pool_states(self, hidden, mask, layers=None):
        """(n, H) float32 embeddings of the last hidden states (n, L, H), or of all layers' where the pooling
        wants them."""
        if self.pooling == "avg_top2":
            hidden = (hidden + layers[-2]) / 2
        if self.pooling == "avg_first_last":  # the first transformer layer; 0 is the word embeddings
            hidden = (hidden + layers[1]) / 2
        if self.pooling.startswith("avg"):                     # special tokens count, padding does not
            z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.pooling == "last":                           # of the text: padding is on the right
            z = hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
        else:
            z = hidden[:, 0]
        if self.head is not None and (self.training or self.keep_head):
            z = self.head(z)
        return z.float()

    def embed_texts(self, sentences, size=128):
        """(N, H) embeddings of texts, which are not cut to --max-length."""
        texts = [self.spelt(self.scored + text) for text in sentences]
        rows, _ = tokenise(texts, self.tokenizer, self.longest)
        return torch.cat([self(self.batch(rows[i : i + size])) for i in range(0, len(rows), size)])

    @torch.no_grad()
    def embed(self, texts, size=1024):
        """((M, H) embeddings of the different ones among N texts, at rest; the row of each of the N)"""
        distinct, training = sorted(set(texts), key=lambda text: (len(text), text)), self.training
        self.eval()
        bar = progress(range(0, len(distinct), size), "embedding texts")
        z = torch.cat([self.embed_texts(distinct[i : i + size]) for i in bar])
        self.train(training)
        places = {text: i for i, text in enumerate(distinct)}
        return z, [places[text] for text in texts]

    def restore(self, folder):
        """Puts the saved checkpoint back."""
        saved = type(self.encoder).from_pretrained(folder, dtype=torch.float32)
        saved.pooler = getattr(self.encoder, "pooler", None)
        self.encoder.load_state_dict(saved.state_dict())       # whose names are others in the file, as GTE's
        linears = list(self.head)[::2] if self.keep_head else []
        for linear, file in zip(linears, sorted(folder.glob("*_Dense/model.safetensors"))):
            linear.load_state_dict({name.removeprefix("linear."): x for name, x in load_file(file).items()})


def build_encoder(args, run, pooling="cls", head=None, auto=AutoModel, columns=1, flag="--model"):
    """The SentenceEncoder of --model, as its folder was written (layout.Layout), but for what --pooling,
    --head, --prompt and --max-length say.

    pooling, head   where neither flag nor folder speaks. head: "keep", "train-only" or None, behind cls. A
                    decoder's pooling is last
    columns         of texts in a row of the data
    Beside what is saved the model has `layout`, the folder's or None; `lm`, what auto made around the encoder
    or None; `pooler`, the pretrained one as a head, or None, in a tuple; `origin`, whose head it is: "new",
    "own", "pooler" or None.
    """
    name, local, reading = args.model, Path(args.model).is_dir(), getattr(args, "evaluate", False)
    layout = read_layout(name, flag) if local else None
    texts = None if reading else texts_of(args.data)
    loaded, tokenizer = load_text_model(name, texts, auto, flag, layout.subfolder if layout else "")
    if not local and name != "scratch":                        # a hub that does not answer is asked once
        layout = read_layout(name, flag)
    with blaming(f"{flag} {name}"):
        return assemble(loaded, tokenizer, layout, args, run, f"{flag} {name}", (pooling, head, columns))


def assemble(lm, tokenizer, layout, args, run, named, usual):
    """The SentenceEncoder of what build_encoder has read; usual: its pooling, head and columns."""
    encoder, (pooling, head, columns) = lm.base_model, usual
    refuse_classifier(encoder, named)
    usual = "last" if is_causal(encoder, named) else pooling
    pooling = getattr(args, "pooling", None) or (layout.pooling if layout else usual)
    if usual == "last" and pooling.startswith("cls"):
        fail(f"--pooling {pooling}: the first token of {args.model}, a decoder, sees no other; "
             "take last or avg")
    pooler = getattr(getattr(encoder, "pooler", None), "dense", None)
    pooler = pooler and torch.nn.Sequential(pooler, torch.nn.Tanh())
    usual = head if pooling == "cls" and not getattr(args, "evaluate", False) else None
    head, origin, where = choose_head(args, layout, pooling, usual, pooler, encoder.config)
    check_widths(head, encoder.config.hidden_size, named)
    model = SentenceEncoder(encoder, tokenizer, run, pooling, head, keep_head=where == "keep")
    model.lm, model.origin, model.layout = None if lm is encoder else lm, origin, layout
    if model.lm is not None and not has_decoder(model.lm):
        fail(f"{named}: {type(model.lm).__name__} is no masked language model like BERT or DistilBERT")
    model.pooler = (pooler,)                                   # in a tuple: no part of it
    fit_to_layout(model, layout, args, columns)
    if hasattr(args, "pooling"):
        args.pooling = pooling
    try_out(model, named)
    return model


@torch.no_grad()
def try_out(model, named):
    """Embeds two texts of 5 and 3 tokens, before --out is begun."""
    special = model.tokenizer.all_special_ids
    word = next((i for i in range(len(model.tokenizer)) if i not in special), 0)
    training, mask = model.training, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    z = model.eval().pool(torch.full_like(mask, word), mask)
    model.train(training)
    if z.shape != (2, model.width if model.keep_head else model.encoder.config.hidden_size):
        fail(f"{named}: embeds two texts as {tuple(z.shape)}; wanted a vector for each")
    if not z.isfinite().all():
        fail(f"{named}: embeds a text as NaN or infinity; wanted a checkpoint of a training that went well")


def check_widths(head, width, named):
    """Refuses a head whose layers do not fit behind an encoder of this width, or each other."""
    for linear in head or ():
        if isinstance(linear, torch.nn.Linear):
            if linear.in_features != width:
                fail(f"{named}: a dense layer behind it reads {linear.in_features} numbers, where there are "
                     f"{width}; wanted the layers of this encoder")
            width = linear.out_features


def refuse_classifier(encoder, named):
    heads = "For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice"
    if kinds := [kind for kind in encoder.config.architectures or [] if re.search(heads, kind)]:
        fail(f"{named}: a classifier, {kinds[0]}; wanted an encoder of sentences, such as it was made from")


def choose_head(args, layout, pooling, usual, pooler, config):
    """(head or None, whose it is, where it is at work) by --head, the folder, and what is usual."""
    asked = getattr(args, "head", None) or []
    where = [flag for flag in asked if flag in ("keep", "train-only")]
    start = [flag for flag in asked if flag in ("new", "pooler")]
    if max(len(where), len(start)) > 1:
        fail(f"--head {' '.join(asked)}: wanted keep or train-only, and new or pooler")
    where, start = (flags[0] if flags else None for flags in (where, start))
    theirs = layout.head if layout and layout.pooling == pooling and start is None else None
    if start == "pooler" or theirs == "pooler":
        if pooler is None:
            fail(f"--head pooler: {args.model} has none")
        return pooler, "pooler", where or theirs and "keep" or usual or "keep"
    if theirs is not None:
        return theirs, "own", where or "keep"
    where = None if getattr(args, "evaluate", False) else where or usual
    return (new_head(config), "new", where) if where else (None, None, None)


def new_head(config):
    """SimCSE's: a linear layer, drawn as BERT draws its own, and tanh."""
    linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
    return torch.nn.Sequential(begin_linear(linear, config), torch.nn.Tanh())


def fit_to_layout(model, layout, args, columns):
    """Prompts, longest input and length 1 of the folder; says in one line where flags differ from it."""
    asked, differs = tuple(getattr(args, "prompt", None) or ()), []
    if len(asked) > 1 and len(asked) not in (2, columns) or len(asked) > columns:
        wanted = "one" if columns == 1 else f"one for all, or one for each of {columns} columns"
        fail(f"--prompt: found {len(asked)}, wanted {wanted}")
    if layout:
        model.normalise, model.longest = layout.normalise, min(layout.longest, model.longest)
        model.prompts, model.scored, model.lower = layout.prompts, layout.scored, layout.lower
        had_head = layout.head is not None and not (model.keep_head and model.origin in ("own", "pooler"))
        if model.pooling.removesuffix("_before_pooler") != layout.pooling:
            differs.append(f"{layout.pooling} pooling")
        differs += ["a head"] * had_head + ["other prompts"] * (asked not in ((), layout.prompts))
    if asked:
        model.prompts, model.scored = asked, asked[0]
    reads = longest_input(model.encoder, model.tokenizer)
    if not getattr(args, "evaluate", False) and args.max_length > model.longest:
        if args.max_length > reads:
            fail(f"--max-length {args.max_length}: {args.model} reads at most {reads} tokens")
        differs.append(f"texts of up to {model.longest} tokens")
        model.longest = args.max_length
    reads = model.longest if getattr(args, "evaluate", False) else args.max_length
    for prompt, ids in zip(model.prompts, tokenise(model.prompts, model.tokenizer, reads)[0]):
        if prompt and len(ids) == reads:
            fail(f"the prompt {prompt[:40]!r} of {len(prompt):,} letters leaves no room for a text: "
                 f"{reads} tokens are read, see --prompt and --max-length")
    if differs:
        say("note", f"{args.model} was saved with {', '.join(differs)}; the flags win")


def dropouts(encoder):
    """[(module, attribute)] of its probabilities of dropout: p of a layer, or a number that attention has."""
    return [(part, name) for part in encoder.modules() for name, value in vars(part).items()
            if type(value) in (int, float)
            and ("dropout" in name or name == "p" and isinstance(part, torch.nn.Dropout))]


def set_dropout(encoder, p, name):
    """Dropout with probability p wherever the encoder has one. Its config, which is saved, stays its own."""
    if p >= 1:
        fail(f"--dropout {p}: wanted a probability from 0 to less than 1")
    for part in list(encoder.modules()):
        for its, child in list(part.named_children()):         # ModernBERT has no layer where its own p is 0
            if "drop" in its and type(child) is torch.nn.Identity:
                setattr(part, its, torch.nn.Dropout(0.0))
    if not (places := dropouts(encoder)):
        fail(f"--dropout {p}: {name} has no dropout that could be set")
    for place in places:
        setattr(*place, p)


def describe_model(model, args):
    """distilbert-base-cased, 65.2 M parameters, cls pooling, a new head in training alone"""
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    text = f"{args.model}, {size:.1f} M parameters, {model.pooling} pooling"
    if model.head is not None:
        text += {"new": ", a new head", "own": ", its head", "pooler": ", its pooler as head"}[model.origin]
        text += "" if model.keep_head else " in training alone"
    dropped = any(getattr(*place) for place in dropouts(model.encoder))
    if not getattr(args, "evaluate", False) and not dropped:   # two views of a text are one
        text += ", without dropout"
    return text + "".join(f", prompt {prompt!r}" for prompt in model.prompts if prompt)
