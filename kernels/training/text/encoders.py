"""Load sentence encoders (transformer, pooling, head) and embed texts. checkpoint.py saves the encoders."""
import torch
from safetensors.torch import load_file
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED_LMS

from kernels import embed_in_chunks

from ..data import iter_texts
from ..errors import fail
from ..progress import progress
from .checkpoint import AVERAGED_LAYERS, SavedSettings, read_saved_settings
from .models import load_text_model, longest_input
from .tokens import group_by_length, pad, restore_order, tokenise


def init_linear(linear, config):
    """Initialise a linear layer as BERT does (normal weights, zero bias) and return it."""
    std = getattr(config, "initializer_range", getattr(config, "init_std", 0.02))      # XLM calls it init_std
    torch.nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear


class SentenceEncoder(torch.nn.Module):
    """A transformer, the pooling of its token states, and a projection head.

    pretrained_pooler  (pooler of the encoder or None,), for save(). No pooling uses the pooler, so Identity
                       replaces it in the encoder. The tuple hides it from parameters()
    pooling            a value of --pooling, whose help text explains the values
    head               module that is applied after pooling in training, or None
    head_origin        "new head", "saved head", "pooler as head", or "" without a head
    keep_head          whether the head is also applied at inference
    lm                 the masked language model around the encoder, or None

    SavedSettings explains normalise, max_length, lower_case and the attributes with prompts.
    """

    def __init__(self, encoder, tokenizer, run, pooling="cls", saved=None):
        super().__init__()
        saved = saved or SavedSettings()
        self.encoder, self.tokenizer = encoder, tokenizer
        self.pretrained_pooler = (getattr(encoder, "pooler", None),)
        if self.pretrained_pooler[0] is not None:
            encoder.pooler = torch.nn.Identity()               # SqueezeBERT would try to call None
        self.pooling, self.lm = pooling, None
        self.head, self.keep_head = None, False
        self.head_origin = ""
        self.device, self.bf16 = run.device, run.bf16
        self.chunk_size = getattr(run.args, "chunk_size", None)
        encoder.config.output_hidden_states = pooling in AVERAGED_LAYERS
        self.no_cache = {"use_cache": False} if hasattr(encoder.config, "use_cache") else {}   # no KV cache
        self.max_length = min(saved.max_length, longest_input(encoder, tokenizer))
        self.normalise, self.lower_case = saved.normalise, saved.lower_case
        self.prompts, self.all_prompts = saved.prompts, saved.all_prompts
        self.default_prompt = saved.default_prompt

    @property
    def pooler(self):
        """The pretrained pooler as a head: its linear layer, then tanh. None if the model has no pooler."""
        dense = getattr(self.pretrained_pooler[0], "dense", None)
        return None if dense is None else torch.nn.Sequential(dense, torch.nn.Tanh())

    def batch(self, *views):
        """Group texts of similar length, and pad. Return [(row indices (n,), ids (n, L), mask (n, L))].

        views   one list of texts (token ids) per view. Row indices number all texts, view after view
        """
        flat, padding = [ids for view in views for ids in view], self.tokenizer.pad_token_id or 0
        groups = []
        for indices in group_by_length([len(ids) for ids in flat], self.device, self.chunk_size):
            lengths = torch.tensor([len(flat[i]) for i in indices])
            ids = pad([flat[i] for i in indices], padding)
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            groups.append([x.to(self.device) for x in (torch.tensor(indices), ids, mask)])
        return groups

    def add_prompts(self, cells):
        """Return a row's texts, each after its column's prompt. Further columns use the last prompt."""
        prompts = self.prompts + self.prompts[-1:] * len(cells)
        texts = [prompt + cell for prompt, cell in zip(prompts, cells)]
        return [*map(str.lower, texts)] if self.lower_case else texts

    @property
    def width(self):
        """The number of dimensions H of the embeddings in training."""
        linears = [part for part in (self.head or []) if isinstance(part, torch.nn.Linear)]
        return linears[-1].out_features if linears else self.encoder.config.hidden_size

    def forward(self, batch):
        """Embed a batch made by self.batch(). Return (rows, H) float32, in row order."""
        module = self.encoder if self.chunk_size else None
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
        if self.pooling in AVERAGED_LAYERS:
            other, _ = AVERAGED_LAYERS[self.pooling]
            hidden = (hidden + layers[other]) / 2
        if self.pooling.startswith("avg"):     # special tokens count, padding does not
            z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        elif self.pooling == "last":           # padding is on the right of the last token
            z = hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
        else:
            z = hidden[:, 0]
        if self.head is not None and (self.training or self.keep_head):
            z = self.head(z)
        return z.float()

    def embed_texts(self, sentences, prompt=None):
        """Embed a batch of N texts, each after the prompt (None: default_prompt), without truncation to
        --max-length. Return (N, H)."""
        prompt = self.default_prompt if prompt is None else prompt
        texts = [prompt + text for text in sentences]
        texts = [*map(str.lower, texts)] if self.lower_case else texts
        return self(self.batch(tokenise(texts, self.tokenizer, self.max_length)[0]))

    @torch.no_grad()
    def embed(self, texts, prompt=None):
        """Embed N texts in eval mode, with a prompt as in embed_texts. Return embeddings (M, H) of the M
        distinct texts, and for each of the N texts the row of its embedding."""
        distinct = sorted(set(texts), key=lambda text: (len(text), text))
        training = self.training
        self.eval()
        bar = progress(range(0, len(distinct), 128), "embedding texts")
        z = torch.cat([self.embed_texts(distinct[i : i + 128], prompt) for i in bar])
        self.train(training)
        row_of = {text: i for i, text in enumerate(distinct)}
        return z, [row_of[text] for text in texts]

    def restore(self, folder):
        """Load the weights of the checkpoint saved in `folder` into this model."""
        loaded = type(self.encoder).from_pretrained(folder, dtype=torch.float32)
        loaded.pooler = getattr(self.encoder, "pooler", None)
        # from_pretrained also renames weights, because files of some models, such as GTE, use other names
        self.encoder.load_state_dict(loaded.state_dict())
        linears = list(self.head)[::2] if self.keep_head else []
        for linear, file in zip(linears, sorted(folder.glob("*_Dense/model.safetensors"))):
            linear.load_state_dict({name.removeprefix("linear."): x for name, x in load_file(file).items()})


def build_encoder(args, run, pooling="cls", head=None, auto_class=AutoModel, columns=1, flag="--model",
                  texts=None):
    """Load --model as a SentenceEncoder. --pooling, --head, --prompt override saved settings.

    pooling         default of --pooling for models without saved settings; decoders default to "last" instead
    head            default of --head for models with cls pooling and without a saved head: "keep" or
                    "train-only" for a new head, None for no head
    auto_class      class of transformers that loads the model
    columns         number of texts in a row of the data
    flag            name of the flag that selects the model, for messages
    texts           texts for the vocabulary of --model scratch; None: the texts of --data
    """
    source = f"{flag} {args.model}"
    if texts is None and not getattr(args, "evaluate", False):
        texts = iter_texts(args.data)
    lm, tokenizer = load_text_model(args.model, texts, auto_class, flag)
    saved = SavedSettings() if args.model == "scratch" else read_saved_settings(args.model, flag)
    encoder = lm.base_model
    if encoder.config.is_encoder_decoder:
        fail(f"{source}: {type(encoder).__name__} is an encoder-decoder, expected a model like BERT or Qwen")
    if lm is not encoder:
        has_decoder = isinstance(lm.get_output_embeddings(), torch.nn.Linear)
        if not has_decoder or tokenizer.mask_token_id is None:
            fail(f"{source}: {type(lm).__name__} is not a masked language model like BERT or DistilBERT")
    pooling = choose_pooling(encoder, saved, args, pooling)
    model = SentenceEncoder(encoder, tokenizer, run, pooling, saved)
    set_head(model, saved, args, head)
    set_prompts_and_length(model, args, columns)
    if lm is not encoder:
        model.lm = lm
    return model


def choose_pooling(encoder, saved, args, default):
    """Return --pooling or, if it is not given, the saved pooling. Without a saved pooling, return "last" for
    a decoder and `default` for all other models."""
    kind = encoder.config.model_type
    is_decoder = kind in CAUSAL_LMS and kind not in MASKED_LMS
    pooling = getattr(args, "pooling", None) or saved.pooling or ("last" if is_decoder else default)
    if is_decoder and pooling.startswith("cls"):
        fail(f"--pooling {pooling}: {args.model} is a decoder, whose first token does not see later tokens; "
             "use last or avg")
    return pooling


def set_head(model, saved, args, default_use):
    """Give a SentenceEncoder the head that --head describes. Without --head, it gets the saved head if it
    has the saved pooling. If there is no such head, a model with cls pooling gets a new head, unless
    default_use is None. With --evaluate, no model gets a new head.

    default_use     "keep" or "train-only": use of a new head if --head does not say it. None: no new head
    """
    asked, evaluating = {*(getattr(args, "head", None) or [])}, getattr(args, "evaluate", False)
    if {"keep", "train-only"} <= asked or {"new", "pooler"} <= asked:
        fail(f"--head {' '.join(args.head)}: expected at most one of keep, train-only and one of new, pooler")
    saved_head, use = None, None
    if saved.pooling == model.pooling and not asked & {"new", "pooler"}:
        saved_head = saved.head
    if saved_head is not None:
        use = "keep"
    elif model.pooling == "cls" and not evaluating:
        use = default_use
    if "pooler" in asked or saved_head == "pooler":
        if model.pooler is None:
            fail(f"--head pooler: {args.model} has no pooler")
        model.head, model.head_origin = model.pooler, "pooler as head"
    elif saved_head is not None:
        model.head, model.head_origin = saved_head, "saved head"
    elif use or asked and not evaluating:
        size = model.encoder.config.hidden_size                # a new head has the form of SimCSE's head
        linear = init_linear(torch.nn.Linear(size, size), model.encoder.config)
        model.head, model.head_origin = torch.nn.Sequential(linear, torch.nn.Tanh()), "new head"
    use = next(iter(asked & {"keep", "train-only"}), use)
    model.keep_head = model.head is not None and use != "train-only"


def set_prompts_and_length(model, args, columns):
    """Replace the saved prompts by --prompt, and the saved length by --max-length if this is larger."""
    prompts = tuple(getattr(args, "prompt", None) or ())
    if prompts:
        model.prompts, model.default_prompt = prompts, prompts[0]
    if getattr(args, "evaluate", False):                       # --evaluate does not truncate to --max-length
        return
    if len(prompts) not in (0, 1, min(2, columns), columns):
        wanted = "1 for all, 2 for anchors and all others, or 1 for each" if columns > 1 else "1"
        fail(f"--prompt: found {len(prompts)} texts, expected {wanted} (texts in a row: {columns})")
    longest = longest_input(model.encoder, model.tokenizer)
    if args.max_length > longest:
        fail(f"--max-length {args.max_length}: {args.model} reads at most {longest} tokens")
    model.max_length = max(model.max_length, args.max_length)


def dropout_attributes(encoder):
    """Find all dropout probabilities, also those of attention layers. Return [(module, attribute name)]."""
    return [(part, name) for part in encoder.modules() for name, value in vars(part).items()
            if type(value) in (int, float)
            and ("dropout" in name or name == "p" and isinstance(part, torch.nn.Dropout))]


def set_dropout(encoder, p, name):
    """Set the dropout probabilities of all modules to p. The config, which is saved, is not changed. If p > 0
    and the encoder has no dropout, raise UserError with the model's `name`."""
    for part in list(encoder.modules()):
        for child_name, child in list(part.named_children()):  # ModernBERT replaces Dropout(0.0) by Identity
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
        text += f", {model.head_origin}" + ("" if model.keep_head else " (training only)")
    has_dropout = any(getattr(part, name) for part, name in dropout_attributes(model.encoder))
    if not getattr(args, "evaluate", False) and not has_dropout:   # without dropout, a text's views are equal
        text += ", without dropout"
    return text + "".join(f", prompt {prompt!r}" for prompt in model.prompts if prompt)
