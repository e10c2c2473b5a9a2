"""Load sentence encoders (transformer, pooling, head) and embed texts. checkpoint.py has their folders."""
import contextlib
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel

from kernels import embed_in_chunks

from ..cli import fail, log
from ..pretrained import one_line_errors
from ..progress import progress
from ..tables import iter_texts
from .checkpoint import read_saved_settings
from .models import has_decoder, load_text_model, longest_input
from .tokens import group_by_length, pad, restore_order, tokenise


def init_linear(linear, config):
    """Initialise a linear layer as BERT does (normal weights, zero bias) and return it."""
    std = getattr(config, "initializer_range", getattr(config, "init_std", 0.02))      # XLM: init_std
    torch.nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear


def is_causal(encoder, source):
    """Return whether the first token's state is independent of later tokens, as in a decoder. Messages begin
    with `source`, the flag and the model's name."""
    ids, training = torch.tensor([[2, 3], [2, 4]]), encoder.training
    try:
        with torch.no_grad():
            output = encoder.eval()(input_ids=ids, attention_mask=ids > 0)
        _ = output.hidden_states       # BART has only decoder_hidden_states, of a second text
        first, second = output.last_hidden_state[:, 0]
    except Exception:                  # T5 needs two texts, CLIP needs an image
        fail(f"{source}: {type(encoder).__name__} does not return a state for each token of a text, expected "
             "a model like BERT or Qwen")
    encoder.train(training)
    return bool((first - second).norm() < 1e-5 * first.norm())         # equal up to rounding


class SentenceEncoder(torch.nn.Module):
    """A transformer, the pooling of its token states, and a head.

    pooling      one of cli.POOLINGS. cls, cls_before_pooler: the first token's state; last: the last token's;
                 avg, avg_top2, avg_first_last: mean over the tokens of the last layer, the last two layers,
                 or the first and the last layer
    head         module to apply after pooling in training, or None
    keep_head    also apply the head at inference

    For the attributes max_length, normalise, lower_case, prompts and default_prompt see SavedSettings.
    """

    def __init__(self, encoder, tokenizer, run, pooling="cls", head=None, keep_head=False):
        super().__init__()
        self.has_pooler = hasattr(encoder, "pooler")           # BERT: then a head can be saved as the pooler
        self.encoder, self.head, self.keep_head = encoder, head, keep_head and head is not None
        self.pretrained_pooler = (getattr(encoder, "pooler", None),)   # the tuple hides it from parameters()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = torch.nn.Identity()               # SqueezeBERT would call None
        self.tokenizer, self.pooling = tokenizer, pooling
        self.device, self.bf16 = run.device, run.bf16
        self.chunk_limits = [getattr(run.args, name, None) for name in ("chunk_size", "chunk_tokens")]
        self.in_chunks = any(self.chunk_limits)
        encoder.config.output_hidden_states = pooling in ("avg_top2", "avg_first_last")
        self.no_cache = {"use_cache": False} if hasattr(encoder.config, "use_cache") else {}   # decoders
        self.max_length, self.normalise, self.lower_case = longest_input(encoder, tokenizer), False, False
        self.prompts, self.default_prompt = ("",), ""
        # None, or a function (mask, *extra) -> context manager that can change the encoder's forward pass
        self.change_pass = None

    def batch(self, *views):
        """Return groups of texts of similar length, padded: [(row indices (n,), ids (n, L), mask (n, L))].

        views   lists of token ids, one list per view; rows are numbered through all views
        """
        flat, padding = [ids for view in views for ids in view], self.tokenizer.pad_token_id or 0
        groups = []
        for indices in group_by_length([len(ids) for ids in flat], self.device, *self.chunk_limits):
            lengths = torch.tensor([len(flat[i]) for i in indices])
            ids = pad([flat[i] for i in indices], padding)
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            groups.append([x.to(self.device) for x in (torch.tensor(indices), ids, mask)])
        return groups

    def add_prompts(self, cells):
        """Return a row's texts, each after the prompt of its column. Further columns use the last prompt."""
        prompts = (self.prompts[min(i, len(self.prompts) - 1)] for i in range(len(cells)))
        return [self.normalise_case(prompt + cell) for prompt, cell in zip(prompts, cells)]

    def normalise_case(self, text):
        """Return the text, in lower case if the model's settings say so."""
        return text.lower() if self.lower_case else text

    @property
    def width(self):
        """H, the number of dimensions of the embeddings in training."""
        linears = [part for part in (self.head or []) if isinstance(part, torch.nn.Linear)]
        return linears[-1].out_features if linears else self.encoder.config.hidden_size

    def forward(self, batch):
        """Return (rows, H) float32 embeddings of the groups in `batch`, in row order."""
        module = self.encoder if self.in_chunks else None
        return restore_order(embed_in_chunks(lambda group: self.pool(*group[1:]), batch, module), batch)

    def pool(self, ids, mask, *extra):
        """Return (n, H) float32 embeddings of ids (n, L) with mask (n, L).

        extra   further items of a batch's group, such as view numbers; passed on to self.change_pass
        """
        changed = self.change_pass(mask, *extra) if extra else contextlib.nullcontext()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16), changed:
            output = self.encoder(input_ids=ids, attention_mask=mask, **self.no_cache)
            return self.pool_states(output.last_hidden_state, mask, output.hidden_states)

    def pool_states(self, hidden, mask, layers=None):
        """Return (n, H) float32 embeddings of the last layer's states (n, L, H).

        layers  the states of all layers, which avg_top2 and avg_first_last need
        """
        if self.pooling == "avg_top2":
            hidden = (hidden + layers[-2]) / 2
        if self.pooling == "avg_first_last":   # layers[0] is the word embeddings
            hidden = (hidden + layers[1]) / 2
        if self.pooling.startswith("avg"):     # includes special tokens, excludes padding
            z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.pooling == "last":           # the text's last token: padding is on the right
            z = hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
        else:
            z = hidden[:, 0]
        if self.head is not None and (self.training or self.keep_head):
            z = self.head(z)
        return z.float()

    def embed_texts(self, sentences, size=128):
        """Return (N, H) embeddings of texts, in batches of `size`, without truncation to --max-length."""
        texts = [self.normalise_case(self.default_prompt + text) for text in sentences]
        rows, _ = tokenise(texts, self.tokenizer, self.max_length)
        return torch.cat([self(self.batch(rows[i : i + size])) for i in range(0, len(rows), size)])

    @torch.no_grad()
    def embed(self, texts, size=1024):
        """Embed N texts in eval mode. Return embeddings (M, H) of the M distinct texts, and for each of the N
        texts the row of its embedding."""
        distinct = sorted(set(texts), key=lambda text: (len(text), text))
        training = self.training
        self.eval()
        bar = progress(range(0, len(distinct), size), "embedding texts")
        z = torch.cat([self.embed_texts(distinct[i : i + size]) for i in bar])
        self.train(training)
        row_of = {text: i for i, text in enumerate(distinct)}
        return z, [row_of[text] for text in texts]

    def restore(self, folder):
        """Load the weights of the checkpoint saved in `folder` into this model."""
        loaded = type(self.encoder).from_pretrained(folder, dtype=torch.float32)
        loaded.pooler = getattr(self.encoder, "pooler", None)
        # The file is not read directly, because some models, such as GTE, rename their weights in it.
        self.encoder.load_state_dict(loaded.state_dict())
        linears = list(self.head)[::2] if self.keep_head else []
        for linear, file in zip(linears, sorted(folder.glob("*_Dense/model.safetensors"))):
            linear.load_state_dict({name.removeprefix("linear."): x for name, x in load_file(file).items()})


def build_encoder(args, run, pooling="cls", head=None, auto_class=AutoModel, columns=1, flag="--model",
                  texts=None):
    """Load --model as a SentenceEncoder. --pooling, --head, --prompt, --max-length override saved settings.

    pooling         default for models without saved settings; decoders always default to last
    head            used if --head is not given, no head is saved and pooling is cls. "keep" or "train-only":
                    add a new head for this use; None: no head
    auto_class      class of transformers that loads the model
    columns         number of texts in a row of the data
    flag            the flag that names the model, for messages
    texts           texts for the vocabulary of --model scratch; None: those of the table --data
    returns         a SentenceEncoder with four more attributes. lm: the model around the encoder, or None.
                    pooler: (the pretrained pooler as a head, or None,), a tuple to hide it from parameters().
                    head_origin: "new", "saved", "pooler" or None. saved_settings: SavedSettings or None
    """
    name, local, evaluating = args.model, Path(args.model).is_dir(), getattr(args, "evaluate", False)
    saved = read_saved_settings(name, flag) if local else None
    if texts is None and not evaluating:
        texts = iter_texts(args.data)
    loaded, tokenizer = load_text_model(name, texts, auto_class, flag, saved.subfolder if saved else "")
    if not local and name != "scratch":        # after the model: a hub that is down is asked only once
        saved = read_saved_settings(name, flag)
    with one_line_errors(f"{flag} {name}"):
        return make_encoder(loaded, tokenizer, saved, args, run, f"{flag} {name}", (pooling, head, columns))


def make_encoder(lm, tokenizer, saved, args, run, source, defaults):
    """Return the SentenceEncoder of a loaded model. Messages begin with `source`. defaults: build_encoder's
    (pooling, head, columns)."""
    encoder = lm.base_model
    default_pooling, default_head, columns = defaults
    refuse_classifier(encoder, source)
    if is_causal(encoder, source):
        default_pooling = "last"
    pooling = getattr(args, "pooling", None) or (saved.pooling if saved else default_pooling)
    if default_pooling == "last" and pooling.startswith("cls"):
        fail(f"--pooling {pooling}: {args.model} is a decoder, whose first token does not see the others; "
             "use last or avg")
    pooler = getattr(getattr(encoder, "pooler", None), "dense", None)
    if pooler is not None:
        pooler = torch.nn.Sequential(pooler, torch.nn.Tanh())
    if pooling != "cls" or getattr(args, "evaluate", False):
        default_head = None
    head, origin, use = choose_head(args, saved, pooling, default_head, pooler, encoder.config)
    check_widths(head, encoder.config.hidden_size, source)
    model = SentenceEncoder(encoder, tokenizer, run, pooling, head, keep_head=use == "keep")
    model.lm = None if lm is encoder else lm
    model.head_origin, model.saved_settings = origin, saved
    if model.lm is not None and not has_decoder(model.lm):
        fail(f"{source}: {type(model.lm).__name__} is not a masked language model like BERT or DistilBERT")
    if model.lm is not None and tokenizer.mask_token_id is None:
        fail(f"{source}: its tokenizer has no mask; expected a masked language model like BERT")
    model.pooler = (pooler,)
    apply_saved_settings(model, saved, args, columns)
    if hasattr(args, "pooling"):
        args.pooling = pooling
    smoke_test(model, source)
    return model


@torch.no_grad()
def smoke_test(model, source):
    """Embed two texts of 5 and 3 tokens, so that an unusable model fails before --out is created."""
    special = model.tokenizer.all_special_ids
    word = next((i for i in range(len(model.tokenizer)) if i not in special), 0)
    training, mask = model.training, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    z = model.eval().pool(torch.full_like(mask, word), mask)
    model.train(training)
    if z.shape != (2, model.width if model.keep_head else model.encoder.config.hidden_size):
        fail(f"{source}: embeddings of two texts have shape {tuple(z.shape)}, expected one vector per text")
    if not z.isfinite().all():
        fail(f"{source}: the embedding of a text is NaN or infinite, expected a model whose training did not "
             "diverge")


def check_widths(head, width, source):
    """Raise UserError if the head's linear layers do not fit each other or the hidden size `width`."""
    for linear in head or ():
        if isinstance(linear, torch.nn.Linear):
            if linear.in_features != width:
                fail(f"{source}: a dense layer of its head has {linear.in_features} input features, expected "
                     f"{width}; take the dense layers that were saved with this encoder")
            width = linear.out_features


def refuse_classifier(encoder, source):
    """Raise UserError if the model was fine-tuned as a classifier."""
    heads = "For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice"
    if kinds := [kind for kind in encoder.config.architectures or [] if re.search(heads, kind)]:
        fail(f"{source}: {kinds[0]} is a classifier, expected a sentence encoder, such as the model it was "
             "fine-tuned from")


def choose_head(args, saved, pooling, default_use, pooler, config):
    """Choose the head from --head, the saved settings and the default.

    default_use     "keep", "train-only", or None for no head
    pooler          the pretrained pooler as a head, or None
    returns         head, origin ("new" | "saved" | "pooler") and use ("keep" | "train-only"), or three None
    """
    asked = getattr(args, "head", None) or []
    uses = [word for word in asked if word in ("keep", "train-only")]
    weights = [word for word in asked if word in ("new", "pooler")]
    if max(len(uses), len(weights)) > 1:
        fail(f"--head {' '.join(asked)}: expected one of keep and train-only, and one of new and pooler")
    use = uses[0] if uses else None
    weights = weights[0] if weights else None
    saved_head = saved.head if saved and saved.pooling == pooling and weights is None else None
    if weights == "pooler" or saved_head == "pooler":
        if pooler is None:
            fail(f"--head pooler: {args.model} has no pooler")
        return pooler, "pooler", use or (saved_head and "keep") or default_use or "keep"
    if saved_head is not None:
        return saved_head, "saved", use or "keep"
    if getattr(args, "evaluate", False) or not (use or default_use):
        return None, None, None
    return new_head(config), "new", use or default_use


def new_head(config):
    """Return SimCSE's head: a linear layer, initialised as in BERT, and tanh."""
    linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
    return torch.nn.Sequential(init_linear(linear, config), torch.nn.Tanh())


def apply_saved_settings(model, saved, args, columns):
    """Set the model's prompts, maximum length, case and normalisation, and print what the flags override."""
    evaluating = getattr(args, "evaluate", False)
    asked, differs = tuple(getattr(args, "prompt", None) or ()), []
    if len(asked) > 1 and len(asked) not in (2, columns) or len(asked) > columns:
        wanted = "1" if columns == 1 else f"1 for all columns, or 1 for each of the {columns} columns"
        fail(f"--prompt: found {len(asked)} texts, expected {wanted}")
    if saved:
        model.normalise, model.max_length = saved.normalise, min(saved.max_length, model.max_length)
        model.prompts, model.default_prompt = saved.prompts, saved.default_prompt
        model.lower_case = saved.lower_case
        if model.pooling.removesuffix("_before_pooler") != saved.pooling:
            differs.append(f"{saved.pooling} pooling")
        if saved.head is not None and not (model.keep_head and model.head_origin in ("saved", "pooler")):
            differs.append("a head")
        if asked and asked != saved.prompts:
            differs.append("other prompts")
    if asked:
        model.prompts, model.default_prompt = asked, asked[0]
    limit = longest_input(model.encoder, model.tokenizer)
    if not evaluating and args.max_length > model.max_length:
        if args.max_length > limit:
            fail(f"--max-length {args.max_length}: {args.model} reads at most {limit} tokens")
        differs.append(f"a maximum length of {model.max_length} tokens")
        model.max_length = args.max_length
    length = model.max_length if evaluating else args.max_length
    for prompt, ids in zip(model.prompts, tokenise(model.prompts, model.tokenizer, length)[0]):
        if prompt and len(ids) == length:
            fail(f"the prompt {prompt[:40]!r} ({len(prompt):,} characters) leaves no room for a text: inputs "
                 f"have at most {length} tokens, see --prompt and --max-length")
    if differs:
        log("note", f"{args.model} was saved with {', '.join(differs)}; the flags override this")


def dropout_attributes(encoder):
    """Return [(module, attribute name)] of all dropout probabilities, those of attention layers included."""
    return [(part, name) for part in encoder.modules() for name, value in vars(part).items()
            if type(value) in (int, float)
            and ("dropout" in name or name == "p" and isinstance(part, torch.nn.Dropout))]


def set_dropout(encoder, p, name):
    """Set all dropout probabilities of the encoder to p, but not those in its config, which is saved. If it
    has none, and p is not 0, raise UserError with the model's `name`."""
    if p >= 1:
        fail(f"--dropout {p}: expected a probability from 0 to less than 1")
    for part in list(encoder.modules()):
        for child_name, child in list(part.named_children()):  # ModernBERT has Identity where p was 0
            if "drop" in child_name and type(child) is torch.nn.Identity:
                setattr(part, child_name, torch.nn.Dropout(0.0))
    attributes = dropout_attributes(encoder)
    if p and not attributes:
        fail(f"--dropout {p}: {name} has no dropout layers")
    for part, attribute in attributes:
        setattr(part, attribute, p)


def describe_model(model, args):
    """Return for example "bert-base-cased, 108.3 M parameters, cls pooling, new head (training only)"."""
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    text = f"{args.model}, {size:.1f} M parameters, {model.pooling} pooling"
    if model.head is not None:
        heads = {"new": "new head", "saved": "saved head", "pooler": "pooler as head"}
        text += f", {heads[model.head_origin]}"
        if not model.keep_head:
            text += " (training only)"
    has_dropout = any(getattr(part, name) for part, name in dropout_attributes(model.encoder))
    if not getattr(args, "evaluate", False) and not has_dropout:       # two views of a text are identical
        text += ", without dropout"
    return text + "".join(f", prompt {prompt!r}" for prompt in model.prompts if prompt)
