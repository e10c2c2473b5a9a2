"""Transformers and tokenizers of a folder, a hub name, or "scratch"."""
import math
from collections import Counter
from pathlib import Path

import torch
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertTokenizer

from ..cli import fail
from ..pretrained import blaming, check_size, no_code, own_memory, read_config, refuse_nan


def load_text_model(name, texts=None, auto=AutoModel, flag="--model", subfolder="", **config):
    """(model, tokenizer) of a folder or a hub name; "scratch" is a small random BERT with word pieces of the
    texts.

    auto        which of transformers' models: with a head for masked tokens, for labels, ...
    subfolder   where it lies in there
    config      more of the model's configuration
    The model has `missing`, the names of its weights that the checkpoint lacks: they are random.
    """
    local, named = Path(name).is_dir(), f"{flag} {name}"
    if name == "scratch" and texts is not None:
        tokenizer = scratch_tokenizer(texts)
        shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
        model = auto.from_config(BertConfig(vocab_size=len(tokenizer), **shape, **config))
        model.missing = []
        return model, tokenizer
    if name == "scratch" and not local:
        fail(f"{named}: a new model has learnt nothing; name a folder or one of the hub")
    config = read_config(named, name, subfolder, config, ", or take scratch" if texts is not None else "")
    folder = Path(name, subfolder) if local else None
    source = dict(subfolder=subfolder, trust_remote_code=False)
    with blaming(named):
        check_size(named, config, lambda: auto.from_config(config, trust_remote_code=False), folder)
        with no_code():
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
            model, info = auto.from_pretrained(name, dtype=torch.float32, output_loading_info=True,
                                               ignore_mismatched_sizes=True, config=config, **source)
        check_tokenizer(named, tokenizer, model)
    own_memory(model)
    model.missing = [*info["missing_keys"], *(part for part, *_ in info["mismatched_keys"])]
    if auto is AutoModel and any("pooler" in part for part in model.missing):
        model.pooler = torch.nn.Identity()                     # it would be random
    lost = [part for part in model.missing if "pooler" not in part
            and part.removeprefix(f"{model.base_model_prefix}.") in model.base_model.state_dict()]
    what = f"{len(lost)} weights, such as {min(lost)}," if lost else "the words of its tokenizer"
    if lost or len(tokenizer) <= len(tokenizer.all_special_ids):
        fail(f"{named}: {what} are missing or do not fit its config.json")
    refuse_nan(named, model)
    return model, tokenizer


def check_tokenizer(named, tokenizer, model):
    """Refuses a tokenizer that is slow, has no limit that is a number, or gives ids that the model has no
    embedding of; one without a padding token gets another's place."""
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        fail(f"{named}: {kind} is a slow tokenizer; wanted one with a tokenizer.json")
    length = tokenizer.model_max_length
    if type(length) not in (int, float) or not length >= 3:
        fail(f"{named}: model_max_length of its tokenizer is {length!r}; wanted a number of at least 3")
    rows = getattr(model.get_input_embeddings(), "num_embeddings", math.inf)
    used = [*tokenizer.get_vocab().values(), *tokenizer("a")["input_ids"], *tokenizer("a", "a")["input_ids"]]
    largest = max(used)
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        fail(f"{named}: its tokenizer gives {token!r} the id {largest:,}, its embeddings have {rows:,} rows; "
             "call model.resize_token_embeddings(len(tokenizer)), and save the model again")
    if tokenizer.pad_token is None:                            # GPT-2, Llama
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


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


def has_decoder(lm):
    """Whether its head ends in a linear layer that reads a state of each token; MobileBERT's does not."""
    decoder, training, ids, seen = lm.get_output_embeddings(), lm.training, torch.tensor([[2, 3]]), []
    if not isinstance(decoder, torch.nn.Linear):
        return False
    try:
        with torch.no_grad(), decoder.register_forward_pre_hook(lambda *given: seen.append(given)):
            lm.eval()(input_ids=ids, attention_mask=ids > 0)
    except Exception:                                          # it wants more than texts
        return False
    lm.train(training)
    return bool(seen)
