"""Test sentence encoders: transformers gives the same embeddings from saved folders, and flags that do not
fit the model are refused."""
import pytest
import torch
from safetensors.torch import load_file
from saved_encoders import make_encoder, save
from transformers import AutoModel, AutoTokenizer, BertConfig

from families import DECODERS, ENCODERS
from kernels.training.errors import UserError
from kernels.training.text.encoders import init_linear
from running import NLI, embed_unbatched

TEXTS = ["Yes, [PAD].", "no, " * 20, *(row[0] for row in NLI[:4])]


@pytest.mark.parametrize("family, pooling, use", [
    *((name, "cls", "keep") for name in ENCODERS), *((name, "last", "train-only") for name in DECODERS),
    ("Bert", "avg", "keep"), ("Bert", "cls_before_pooler", "keep"), ("Qwen2", "avg_top2", "keep"),
    ("XLM", "avg_first_last", "train-only")])
def test_saved_folders(family, pooling, use, folder_of, tmp_path):
    """Our embeddings equal those computed by definition from the files in the folder, also with heads and
    prompts. --evaluate, and `restore` at the end of a run, load the same model."""
    prompts, out = ["query: ", "passage: "], tmp_path
    model = make_encoder(folder_of(family), pooling=pooling, head=[use], prompt=prompts).eval()
    ours = model.embed_texts(TEXTS)
    save(model, out)
    encoder, found = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())                             # libraries would warn of missing weights
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.padding_side == "right"
    z = embed_unbatched(encoder, tokenizer, ["query: " + text for text in TEXTS], pooling)
    for file in out.glob("*_Dense/model.safetensors"):
        weights = load_file(file)
        z = torch.tanh(z @ weights["linear.weight"].T + weights["linear.bias"])
    assert len([*out.glob("*_Dense")]) == (use == "keep")
    torch.testing.assert_close(ours, z, atol=1e-4, rtol=0)
    loaded = make_encoder(out, evaluate=True).eval()
    torch.testing.assert_close(loaded.embed_texts(TEXTS), z, atol=1e-4, rtol=0)
    for weight in model.parameters():
        weight.data.zero_()
    model.restore(out)
    torch.testing.assert_close(model.embed_texts(TEXTS), ours, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family, flags, wanted", [
    ("Qwen2", dict(pooling="cls"), "--pooling cls: .* is a decoder, whose first token does not see"),
    ("Bert", dict(prompt=[*"abcd"]), "--prompt: found 4 texts, expected 1 for"),
    ("Roberta", dict(max_length=130), "--max-length 130: .* reads at most 129 tokens"),
    ("Llama", dict(max_length=131), "--max-length 131: .* reads at most 130 tokens")])
def test_flags_that_do_not_fit_the_model(family, flags, wanted, folder_of):
    with pytest.raises(UserError, match=f"^{wanted}"):
        make_encoder(folder_of(family), **flags)


def test_new_layers_have_the_models_initialisation():
    linear = init_linear(torch.nn.Linear(300, 300), BertConfig(initializer_range=0.3))
    assert linear.weight.std().item() == pytest.approx(0.3, rel=0.05) and linear.bias.eq(0).all()
