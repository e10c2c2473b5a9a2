"""Small random models of many architectures, with a tokenizer in which each character is a token."""
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast

SHAPE = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=130, initializer_range=0.2, pad_token_id=0)
DECODER = SHAPE | dict(num_key_value_heads=1, head_dim=16)
ENCODERS = {
    "Bert": SHAPE, "Roberta": SHAPE, "XLMRoberta": SHAPE, "MPNet": SHAPE,
    "DistilBert": dict(dim=32, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=130,
                       initializer_range=0.2, pad_token_id=0),
    "SqueezeBert": SHAPE | dict(embedding_size=32), "Esm": SHAPE,  # Esm saves LayerNorm's weight as gamma
    "XLM": dict(emb_dim=32, n_layers=3, n_heads=2, max_position_embeddings=130, init_std=0.2, pad_index=0),
    "DebertaV2": SHAPE | dict(relative_attention=True, position_buckets=16, pos_att_type="p2c|c2p",
                              position_biased_input=False, norm_rel_ebd="layer_norm", share_att_key=True),
    "ModernBert": SHAPE | dict(global_attn_every_n_layers=2, local_attention=8)}
DECODERS = {name: DECODER for name in ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma")}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))]


def small_tokenizer(decoder=False, **more):
    """Return a tokenizer with one token per character, which pads on the left for a decoder."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, "[UNK]"))
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    special = dict(unk_token="[UNK]", eos_token="[SEP]", pad_token="[PAD]")
    if not decoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        special |= dict(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    side = "left" if decoder else "right"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=side, **special | more)


def small_model(family, folder, **more):
    """Write a random model of an architecture to a folder, and return the folder. more: config settings."""
    special = dict(pad_token=None) if family == "Llama" else {}                # Llama has no padding token
    small_tokenizer(family not in ENCODERS, **special).save_pretrained(folder)
    shape = (ENCODERS | DECODERS)[family] | more
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=len(VOCABULARY), **shape)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder
