"""Save models that are no sentence encoders: those of tacl.py, childtuning.py and docs/eleventh/cil.py."""
from safetensors.torch import save_file

from ..out import atomic_output, save_tokenizer, write_card


def save_transformer(run, model, tokenizer, kind, text, load_code, more=None):
    """Write a model and its tokenizer into --out in transformers' format, with a model card; on rank 0 only.

    kind, text, load_code   as for write_card; text is the description
    more                    {file name: {name: tensor}} to write beside the model
    """
    if run.rank:
        return
    with atomic_output(run) as aside:
        model.save_pretrained(aside)
        save_tokenizer(tokenizer, aside)
        for name, tensors in (more or {}).items():
            save_file({part: tensor.cpu() for part, tensor in tensors.items()}, aside / name)
        write_card(aside, run, kind, ["transformers"], text, load_code)
