"""Load transformers and their tokenizers from a folder or the hub, or make small new ones ("scratch")."""
import math
from collections import Counter

import torch
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertTokenizer

from ..errors import fail
from ..pretrained import loading, read_config


def load_text_model(name, texts=None, auto_class=AutoModel, flag="--model", **config):
    """Load a model and its tokenizer from a folder or the hub. The name "scratch" makes a small random BERT.

    texts       texts that define the vocabulary of "scratch"; None: "scratch" is an error
    auto_class  class of transformers that loads the model, such as AutoModelForMaskedLM
    flag        name of the flag that selects the model, for messages
    config      further settings of the model's configuration
    returns     (model, tokenizer); model.missing names the weights that the checkpoint does not provide
    """
    source = f"{flag} {name}"
    if name == "scratch" and texts is None:
        fail(f"{source}: scratch is a new, untrained model; give a folder or the name of a model on the hub")
    if name == "scratch":
        tokenizer = scratch_tokenizer(texts)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        model = auto_class.from_config(BertConfig(vocab_size=len(tokenizer), **shape, **config))
        model.missing = []
        return model, tokenizer
    hint = ", or take scratch" if texts is not None else ""
    config = read_config(source, name, overrides=config, hint=hint)
    with loading(source):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, info = auto_class.from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
            trust_remote_code=False)
        check_tokenizer(source, tokenizer, model)
    model.missing = [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]
    if auto_class is AutoModel and any("pooler" in part for part in model.missing):
        model.pooler = torch.nn.Identity()     # this replaces a pooler with random weights
    # a head may be missing, but not a weight of the encoder
    lost = [part for part in model.missing if "pooler" not in part
            and part.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict()]
    if lost:
        fail(f"{source}: {len(lost)} weights, such as {min(lost)}, are missing or do not fit its config.json")
    if bad := [part for part, weight in model.state_dict().items() if not weight.isfinite().all()]:
        fail(f"{source}: {bad[0]} contains NaN or infinity; take a model whose training did not diverge")
    return model, tokenizer


def check_tokenizer(source, tokenizer, model):
    """Fail if a tokenizer is slow, or if the model lacks embeddings for the tokenizer's ids. If the
    tokenizer has no padding token, let it use another token for padding."""
    if not tokenizer.is_fast:
        fail(f"{source}: {type(tokenizer).__name__} is a slow tokenizer, expected one with a tokenizer.json")
    rows = getattr(model.get_input_embeddings(), "num_embeddings", math.inf)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        fail(f"{source}: the tokenizer gives {token!r} id {largest:,}, the model has {rows:,} embeddings; "
             "call model.resize_token_embeddings(len(tokenizer)), and save the model again")
    if tokenizer.pad_token is None:                            # as in GPT-2 and Llama
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


def scratch_tokenizer(texts):
    """Make a BERT tokenizer whose word pieces are the characters and the most frequent words of the texts."""
    words, normalise, split = Counter(), BertNormalizer().normalize_str, BertPreTokenizer().pre_tokenize_str
    for text in texts:
        words.update(word for word, _ in split(normalise(text)))
    # The package tokenizers could train a vocabulary, but it breaks ties differently in every process.
    letters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    pieces += [word for word, times in words.most_common(8000) if times > 1 and len(word) > 1]
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=512)


def longest_input(model, tokenizer):
    """Return the largest number of tokens that an encoder reads."""
    # Models like RoBERTa reserve the position embeddings up to padding_idx, and so read fewer tokens.
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    reserved = 0 if getattr(table, "padding_idx", None) is None else table.padding_idx + 1
    positions = getattr(model.config, "max_position_embeddings", -1)   # -1: no limit, as for XLNet and T5
    return min(tokenizer.model_max_length, positions - reserved if positions > 0 else math.inf)
