"""Small random models of the text encoders in transformers. A script must train with such a model, or refuse
it before it writes any file."""
from functools import partial

import torch
from cases import Case
from transformers import AutoConfig, AutoModel
from transformers.utils.logging import disable_progress_bar

from families import VOCABULARY, small_tokenizer

SIZES = {32: "hidden_size d_model n_embd emb_dim dim embedding_size word_embed_proj_dim",
         64: "intermediate_size hidden_dim d_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim "
             "moe_intermediate_size",
         16: "d_kv head_dim",
         2: "num_hidden_layers n_layers n_layer num_layers num_decoder_layers encoder_layers decoder_layers "
            "num_attention_heads n_heads n_head num_heads encoder_attention_heads decoder_attention_heads "
            "num_key_value_heads num_experts num_local_experts num_experts_per_tok bos_token_id",
         0: "pad_token_id decoder_start_token_id", 3: "eos_token_id", 130: "max_position_embeddings"}
KINDS = """albert bart bert big_bird camembert canine convbert cpmant deberta deberta-v2 distilbert electra
    ernie esm eurobert flaubert fnet gemma gpt2 gte ibert jina_embeddings_v3 layoutlm led llama longformer
    mamba mbart megatron-bert mixtral mobilebert modernbert mpnet mra mt5 nomic_bert opt qwen2
    qwen3 qwen3_moe rembert roberta roberta-prelayernorm roformer squeezebert t5 xglm xlm xlm-roberta
    xlm-roberta-xl xmod yoso""".split()
FLAGS = {"simcse": ["", "--pooling avg --data few.txt --views token_cutoff shuffle",
                    "--pooling avg --mlm-weight 0.1"],
         "childtuning": ["", "--ood-epochs 1 --supcon-weight 0.5"],
         "selfguided": [""], "cline": [""], "tacl": [""],
         "ease": ["--pooling avg"], "vascl": ["--pooling avg"], "dclr": ["--pooling avg"]}


def save_small_model(kind, here):
    """Write a small random model of this kind, with one token per character, to here/small."""
    default = AutoConfig.for_model(kind)
    sizes = {name: size for size in SIZES for name in SIZES[size].split()}
    sizes = {name: size for name, size in sizes.items() if hasattr(default, name) or name.endswith("_id")}
    disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=len(VOCABULARY), **sizes))
    model.save_pretrained(here / "small")
    small_tokenizer().save_pretrained(here / "small")


def cases():
    for kind in KINDS:
        for script, ways in FLAGS.items():
            for way in ways:
                flags = ["--model", "small", "--max-length", "24", *way.split()]
                yield Case("kinds", f"{kind} {way}".strip(), script, flags, partial(save_small_model, kind))
