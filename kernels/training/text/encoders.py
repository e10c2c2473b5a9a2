"""Load sentence encoders (transformer, pooling, head) and embed texts. checkpoint.py saves the encoders."""
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from kernels import embed_in_chunks

from ..data import iter_texts
from ..errors import fail, log
from ..pretrained import loading
from ..progress import progress
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


class SentenceEncoder(torch.nn.Module):
    """A transformer, the pooling of its token states, and a projection head.

    pooling      a value of --pooling, whose help text explains the values
    head         module to apply after pooling in training, or None
    keep_head    whether the head is also applied at inference

    SavedSettings explains normalise, max_length, lower_case and the attributes with prompts.
    """

    def __init__(self, encoder, tokenizer, run, pooling="cls", head=None, keep_head=False):
        super().__init__()
        self.has_pooler = hasattr(encoder, "pooler")           # if true, save() can write a head as pooler
        self.encoder, self.head, self.keep_head = encoder, head, keep_head and head is not None
        self.pretrained_pooler = (getattr(encoder, "pooler", None),)   # the tuple hides it from parameters()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = torch.nn.Identity()               # not None: SqueezeBERT would call None
        self.tokenizer, self.pooling = tokenizer, pooling
        self.device, self.bf16 = run.device, run.bf16
        self.chunk_limits = [getattr(run.args, name, None) for name in ("chunk_size", "chunk_tokens")]
        self.in_chunks = any(self.chunk_limits)
        encoder.config.output_hidden_states = pooling in ("avg_top2", "avg_first_last")
        self.no_cache = {"use_cache": False} if hasattr(encoder.config, "use_cache") else {}   # no KV cache
        self.max_length, self.normalise, self.lower_case = longest_input(encoder, tokenizer), False, False
        self.prompts, self.default_prompt, self.all_prompts = ("",), "", {}

    def batch(self, *views):
        """Group texts of similar length, and pad. Return [(row indices (n,), ids (n, L), mask (n, L))].

        views   one list of texts (token ids) per view. Row indices number all texts, view after view
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
        """Return a row's texts, each after its column's prompt. Further columns use the last prompt."""
        prompts = (self.prompts[min(i, len(self.prompts) - 1)] for i in range(len(cells)))
        texts = [prompt + cell for prompt, cell in zip(prompts, cells)]
        return [*map(str.lower, texts)] if self.lower_case else texts

    @property
    def width(self):
        """The number of dimensions H of the embeddings in training."""
        linears = [part for part in (self.head or []) if isinstance(part, torch.nn.Linear)]
        return linears[-1].out_features if linears else self.encoder.config.hidden_size

    def forward(self, batch):
        """Embed a batch made by self.batch(). Return (rows, H) float32, in row order."""
        module = self.encoder if self.in_chunks else None
        return restore_order(embed_in_chunks(lambda group: self.pool(*group[1:]), batch, module), batch)

    def pool(self, ids, mask):
        """Embed token ids (n, L) with the attention mask (n, L). Return (n, H) float32."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.encoder(input_ids=ids, attention_mask=mask, **self.no_cache)
            return self.pool_states(output.last_hidden_state, mask, output.hidden_states)

    def pool_states(self, hidden, mask, layers=None):
        """Pool the hidden states (n, L, H) of the last layer, and apply the head. Return (n, H) float32.

        layers  the hidden states of all layers, which only avg_top2 and avg_first_last need
        """
        if self.pooling == "avg_top2":
            hidden = (hidden + layers[-2]) / 2
        if self.pooling == "avg_first_last":   # layers[0] has the word embeddings
            hidden = (hidden + layers[1]) / 2
        if self.pooling.startswith("avg"):     # special tokens count, padding does not
            z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.pooling == "last":           # the text's last token: padding is on the right
            z = hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
        else:
            z = hidden[:, 0]
        if self.head is not None and (self.training or self.keep_head):
            z = self.head(z)
        return z.float()

    def embed_texts(self, sentences, size=128):
        """Embed N texts in batches of `size`. Return (N, H). Texts are not truncated to --max-length."""
        texts = (self.default_prompt + text for text in sentences)
        texts = [*map(str.lower, texts)] if self.lower_case else [*texts]
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
        # from_pretrained renames weights: in the files of some models, such as GTE, they have other names
        self.encoder.load_state_dict(loaded.state_dict())
        linears = list(self.head)[::2] if self.keep_head else []
        for linear, file in zip(linears, sorted(folder.glob("*_Dense/model.safetensors"))):
            linear.load_state_dict({name.removeprefix("linear."): x for name, x in load_file(file).items()})


def build_encoder(args, run, pooling="cls", head=None, auto_class=AutoModel, columns=1, flag="--model",
                  texts=None):
    """Load --model as a SentenceEncoder. --pooling, --head, --prompt, --max-length override saved settings.

    pooling         default of --pooling for models without saved settings; decoders default to "last" instead
    head            default of --head for models with cls pooling and without a saved head: "keep" or
                    "train-only" for a new head, None for no head
    auto_class      class of transformers that loads the model
    columns         number of texts in a row of the data
    flag            name of the flag that selects the model, for messages
    texts           texts for the vocabulary of --model scratch; None: the texts of --data
    returns         a SentenceEncoder with four more attributes. lm: the model around the encoder, or None.
                    pooler: (head,), where the head is the pretrained pooler, or (None,). head_origin: "new",
                    "saved", "pooler" or None (no head). saved_settings: SavedSettings or None
    """
    name, source, evaluating = args.model, f"{flag} {args.model}", getattr(args, "evaluate", False)
    local = Path(name).is_dir() and name != "scratch"
    saved = read_saved_settings(name, flag) if local else None
    if texts is None and not evaluating:
        texts = iter_texts(args.data)
    loaded, tokenizer = load_text_model(name, texts, auto_class, flag, saved.subfolder if saved else "")
    if not local and name != "scratch":        # only now: load_text_model has reported an unknown name
        saved = read_saved_settings(name, flag)
    with loading(source):
        return make_encoder(loaded, tokenizer, saved, args, run, source, (pooling, head, columns))


def make_encoder(lm, tokenizer, saved, args, run, source, defaults):
    """Make a SentenceEncoder of a loaded language model (lm). Error messages begin with `source`.
    `defaults` has the arguments (pooling, head, columns) of build_encoder."""
    encoder = lm.base_model
    default_pooling, default_head, columns = defaults
    if encoder.config.is_encoder_decoder:
        fail(f"{source}: {type(encoder).__name__} reads two texts, expected a model like BERT or Qwen")
    kind = encoder.config.model_type
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        default_pooling = "last"                               # for decoders
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
    model = SentenceEncoder(encoder, tokenizer, run, pooling, head, keep_head=use == "keep")
    model.lm = None if lm is encoder else lm
    model.head_origin, model.saved_settings = origin, saved
    if model.lm is not None and not (has_decoder(model.lm) and tokenizer.mask_token_id is not None):
        fail(f"{source}: {type(model.lm).__name__} is not a masked language model like BERT or DistilBERT")
    model.pooler = (pooler,)
    apply_saved_settings(model, saved, args, columns)
    if hasattr(args, "pooling"):
        args.pooling = pooling
    return model


def choose_head(args, saved, pooling, default_use, pooler, config):
    """Choose the head from --head, the saved settings and the default.

    default_use     "keep", "train-only", or None for no head
    pooler          the pretrained pooler as a head, or None
    returns         (head, origin "new" | "saved" | "pooler", use "keep" | "train-only"), or three Nones
    """
    asked = {*(getattr(args, "head", None) or [])}
    if {"keep", "train-only"} <= asked or {"new", "pooler"} <= asked:
        fail(f"--head {' '.join(args.head)}: expected one of keep and train-only, and one of new and pooler")
    use = next(iter(asked & {"keep", "train-only"}), None)
    weights = next(iter(asked & {"new", "pooler"}), None)
    saved_head = saved.head if saved and saved.pooling == pooling and weights is None else None
    if weights == "pooler" or saved_head == "pooler":
        if pooler is None:
            fail(f"--head pooler: {args.model} has no pooler")
        default_use = "keep" if saved_head == "pooler" else default_use or "keep"
        return pooler, "pooler", use or default_use
    if saved_head is not None:
        return saved_head, "saved", use or "keep"
    if getattr(args, "evaluate", False) or not (use or default_use):
        return None, None, None
    linear = init_linear(torch.nn.Linear(config.hidden_size, config.hidden_size), config)     # SimCSE's head
    return torch.nn.Sequential(linear, torch.nn.Tanh()), "new", use or default_use


def apply_saved_settings(model, saved, args, columns):
    """Set prompts, maximum length, case and normalisation. Print the saved settings that flags override."""
    evaluating = getattr(args, "evaluate", False)
    asked, differs = tuple(getattr(args, "prompt", None) or ()), []
    if len(asked) > 1 and len(asked) not in (2, columns) or len(asked) > columns:
        wanted = "1" if columns == 1 else f"1 for all columns, or 1 for each of the {columns} columns"
        fail(f"--prompt: found {len(asked)} texts, expected {wanted}")
    if saved:
        model.normalise, model.max_length = saved.normalise, min(saved.max_length, model.max_length)
        model.prompts, model.default_prompt = saved.prompts, saved.default_prompt
        model.lower_case, model.all_prompts = saved.lower_case, saved.all_prompts
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
    if differs:
        log("note", f"{args.model} was saved with {', '.join(differs)}; the flags override this")


def dropout_attributes(encoder):
    """Find all dropout probabilities, also those of attention layers. Return [(module, attribute name)]."""
    return [(part, name) for part in encoder.modules() for name, value in vars(part).items()
            if type(value) in (int, float)
            and ("dropout" in name or name == "p" and isinstance(part, torch.nn.Dropout))]


def set_dropout(encoder, p, name):
    """Set the dropout probabilities of all modules to p. The config, which is saved, is not changed. If p > 0
    and the encoder has no dropout, raise UserError with the model's `name`."""
    for part in list(encoder.modules()):
        for child_name, child in list(part.named_children()):  # ModernBERT has Identity for Dropout(0.0)
            if "drop" in child_name and type(child) is torch.nn.Identity:
                setattr(part, child_name, torch.nn.Dropout(0.0))
    attributes = dropout_attributes(encoder)
    if p and not attributes:
        fail(f"--dropout {p}: {name} has no dropout layers")
    for part, attribute in attributes:
        setattr(part, attribute, p)


def describe_model(model, args):
    """Return a line such as "bert-base-cased, 108.3 M parameters, cls pooling, new head (training only)"."""
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    text = f"{args.model}, {size:.1f} M parameters, {model.pooling} pooling"
    if model.head is not None:
        heads = {"new": "new head", "saved": "saved head", "pooler": "pooler as head"}
        text += f", {heads[model.head_origin]}"
        if not model.keep_head:
            text += " (training only)"
    has_dropout = any(getattr(part, name) for part, name in dropout_attributes(model.encoder))
    if not getattr(args, "evaluate", False) and not has_dropout:       # no dropout: both views are equal
        text += ", without dropout"
    return text + "".join(f", prompt {prompt!r}" for prompt in model.prompts if prompt)
