"""Transformers that read sentences: loaded, pooled, saved for transformers and sentence-transformers."""
import json
import math
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertTokenizer

from kernels import embed_in_chunks

from .command import fail, say
from .folder import model_card, new_files
from .tokens import grouped, pad, tokenise

POOLINGS = ("cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last")


def load_encoder(name, texts=None, auto=AutoModel, flag="--model", **config):
    """(model, tokenizer) of a folder or a hub name; "scratch" is a small random BERT with word pieces of the
    texts.

    auto     which of transformers' models: with a head for masked tokens, for labels, ...
    config   more of the model's configuration
    The model has `missing`, the names of its weights that the checkpoint lacks: they are random.
    """
    if name == "scratch" and texts is not None:
        tokenizer = scratch_tokenizer(texts)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        model = auto.from_config(BertConfig(vocab_size=len(tokenizer), **shape, **config))
        model.missing = []
        return model, tokenizer
    local = Path(name).is_dir()
    if local and not (Path(name) / "config.json").is_file():
        fail(f"{flag} {name}: no config.json in this folder, so it is no transformers model")
    if not local:
        say("hub", f"{name} is fetched, unless it is in the cache")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, info = auto.from_pretrained(name, dtype=torch.float32, output_loading_info=True,
                                           ignore_mismatched_sizes=True, **config)
    except Exception as error:  # whatever the network or a damaged file makes of it
        if local:
            fail(f"{flag} {name}: {type(error).__name__}: {str(error).strip()}".splitlines()[0])
        fail(f"{flag} {name}: no such folder, and the hub does not give it; name a local folder"
             + (", or take scratch" if texts is not None else ""))
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        fail(f"{flag} {name}: {kind} is a slow tokenizer; wanted one with a tokenizer.json")
    model.missing = [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]
    if auto is AutoModel and any("pooler" in part for part in model.missing):
        model.pooler = None                                    # it would be random
    lost = [part for part in model.missing if "pooler" not in part
            and part.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict()]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"{flag} {name}: {what} are missing or do not fit its config.json")
    return model, tokenizer


def scratch_tokenizer(texts):
    """BERT's, with the letters and the most frequent words of the texts."""
    words, normalise, split = Counter(), BertNormalizer().normalize_str, BertPreTokenizer().pre_tokenize_str
    for text in texts:
        words.update(word for word, _ in split(normalise(text)))
    letters = sorted(set("".join(words)))  # tokenizers' own trainer breaks ties anew in every process
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    pieces += [word for word, times in words.most_common(8000) if times > 1 and len(word) > 1]
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=512)


def longest_input(model, tokenizer):
    """Tokens that an encoder reads at most; RoBERTa's kind has fewer positions than places for them."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    reserved = 0 if getattr(table, "padding_idx", None) is None else table.padding_idx + 1
    positions = getattr(model.config, "max_position_embeddings", -1)  # XLNet and T5 have no limit
    return min(tokenizer.model_max_length, positions - reserved if positions > 0 else math.inf)


def begin_linear(linear, std):
    """The linear layer, drawn as BERT draws its own."""
    torch.nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear


class SentenceEncoder(torch.nn.Module):
    """A transformer, the pooling of its token states, and a head: tanh of a linear layer on the pooled
    vector.

    pooling      one of POOLINGS: the first token (cls: with the head), or the mean over tokens of the last
                 layer, of the last two, or of the first and the last
    head         None, or what is behind the pooling in training; keep_head: and after it
    flag         that named it; only --model, which is trained, has to read --max-length tokens
    """

    def __init__(self, encoder, tokenizer, run, pooling="cls", head=None, keep_head=False, flag="--model"):
        super().__init__()
        args, name = run.args, getattr(run.args, flag.removeprefix("--"))
        if not hasattr(encoder, "embeddings"):
            kind = type(encoder).__name__
            fail(f"{flag} {name}: {kind} is no encoder like BERT, RoBERTa or DistilBERT")
        self.has_pooler = hasattr(encoder, "pooler")           # BERT, RoBERTa: save can write the head there
        encoder.pooler = None
        self.encoder, self.head, self.keep_head = encoder, head, keep_head and head is not None
        self.tokenizer, self.pooling = tokenizer, pooling
        self.device, self.bf16, self.chunk_size = run.device, run.bf16, getattr(args, "chunk_size", None)
        encoder.config.output_hidden_states = pooling in ("avg_top2", "avg_first_last")
        self.longest = longest_input(encoder, tokenizer)
        if flag == "--model" and args.max_length > self.longest:
            fail(f"--max-length {args.max_length}: {name} reads at most {self.longest} tokens")

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

    def forward(self, batch):
        """(rows, H) float32 embeddings in the order of the rows: one path for training and evaluation."""
        module = self.encoder if self.chunk_size else None
        return in_order(embed_in_chunks(lambda group: self.pool(*group[1:]), batch, module), batch)

    def pool(self, ids, mask):
        """(n, H) float32 embeddings of ids (n, L)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.encoder(input_ids=ids, attention_mask=mask)
            hidden = output.last_hidden_state                  # (n, L, H)
            if self.pooling == "avg_top2":
                hidden = (hidden + output.hidden_states[-2]) / 2
            if self.pooling == "avg_first_last":  # the first transformer layer; 0 is the word embeddings
                hidden = (hidden + output.hidden_states[1]) / 2
            if self.pooling.startswith("avg"):                 # special tokens count, padding does not
                z = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            else:
                z = hidden[:, 0]
            if self.head is not None and (self.training or self.keep_head):
                z = torch.tanh(self.head(z))
        return z.float()

    def read(self, sentences, size=128):
        """(N, H) embeddings of texts, which are not cut to --max-length."""
        rows, _ = tokenise(sentences, self.tokenizer, self.longest)
        return torch.cat([self(self.batch(rows[i : i + size])) for i in range(0, len(rows), size)])

    def restore(self, folder):
        """Puts the saved checkpoint back."""
        weights = load_file(folder / "model.safetensors").items()
        self.encoder.load_state_dict({name: x for name, x in weights if not name.startswith("pooler.")})
        for file in folder.glob("*_Dense/model.safetensors"):
            weights = load_file(file).items()
            self.head.load_state_dict({name.removeprefix("linear."): x for name, x in weights})


def in_order(x, batch):
    """The rows of a batch's groups, back in the order of the batch."""
    return x[torch.cat([places for places, *_ in batch]).argsort()]


def describe_model(model, args):
    size = sum(p.numel() for p in model.encoder.parameters()) / 1e6
    return f"{args.model}, {size:.1f} M parameters, {model.pooling} pooling"


def save(model, run):
    """The encoder of a SentenceEncoder as transformers and sentence-transformers read it, into --out."""
    if run.rank:
        return
    encoder, config = model.encoder, model.encoder.config
    width, layers = config.hidden_size, config.num_hidden_layers
    head = model.head.state_dict() if model.keep_head else {}
    weights, by_cls = encoder.state_dict(), model.pooling.startswith("cls")
    if model.has_pooler:  # plain transformers finds the head as its pooler_output
        weights |= {f"pooler.dense.{name}": tensor for name, tensor in head.items()}
    size = dict(word_embedding_dimension=width)
    pooling = dict(pooling_mode_cls_token=by_cls, pooling_mode_mean_tokens=not by_cls)
    modules = [("Pooling", size | pooling, {})]
    if config.output_hidden_states:
        mix = torch.zeros(layers + 1)  # weights of the word embeddings and of each layer
        mix[[-2 if model.pooling == "avg_top2" else 1, -1]] = 1
        settings = size | dict(layer_start=0, num_hidden_layers=layers)
        modules.insert(0, ("WeightedLayerPooling", settings, {"layer_weights": mix}))
    if head:
        settings = dict(in_features=width, out_features=width, bias=True,
                        activation_function="torch.nn.modules.activation.Tanh")
        modules.append(("Dense", settings, {f"linear.{name}": tensor.cpu() for name, tensor in head.items()}))
    with new_files(run) as aside:
        encoder.save_pretrained(aside, state_dict=weights)
        save_tokenizer(model.tokenizer, aside)
        index = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer")]
        for i, (kind, settings, tensors) in enumerate(modules, 1):
            folder = aside / f"{i}_{kind}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(settings, indent=1))
            if tensors:
                save_file(tensors, folder / "model.safetensors")
            kind = f"sentence_transformers.models.{kind}"
            index.append(dict(idx=i, name=str(i), path=folder.name, type=kind))
        (aside / "modules.json").write_text(json.dumps(index, indent=1))
        longest = {"max_seq_length": model.longest, "do_lower_case": False}
        (aside / "sentence_bert_config.json").write_text(json.dumps(longest))
        text = f"Sentence embeddings of {width} numbers, compared by cosine; {model.pooling} pooling."
        tags = ["sentence-transformers", "sentence-similarity", "feature-extraction"]
        card = model_card(run, "sentence-similarity", tags, text, load_line(model, run))
        (aside / "README.md").write_text(card, encoding="utf-8")


def save_tokenizer(tokenizer, folder):
    tokenizer.backend_tokenizer.no_truncation()                # tokenise's, which would be saved
    tokenizer.save_pretrained(folder)


def load_line(model, run):
    """How others load the folder; a BERT saved without head must not get a random pooler."""
    bare = ", add_pooling_layer=False" if model.has_pooler and not model.keep_head else ""
    return f'SentenceTransformer("{run.args.out}")  or  AutoModel.from_pretrained("{run.args.out}"{bare})'
