"""A saved folder gives the same embeddings in transformers, in sentence-transformers and in our scripts. The
tests save an encoder, a decoder, a projection head and a prompt."""
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from loss_formulas import spearman
from running import DATA, embed_saved, train

# {name: (bert or family of the model, flags of the run, pooling of the saved folder)}
FOLDERS = {"mean": ("bert", ["--pooling", "avg"], "avg"),
           "first token": ("bert", ["--pooling", "cls", "--head", "keep"], "pooler"),    # the head is BERT's
           "before the pooler": ("bert", ["--pooling", "cls_before_pooler"], "cls"),
           "first and last layer": ("bert", ["--pooling", "avg_first_last"], "avg_first_last"),
           "last two layers": ("bert", ["--pooling", "avg_top2"], "avg_top2"),
           "decoder": ("Qwen2", ["--pooling", "last"], "last"),
           "head": ("bert", ["--pooling", "avg", "--head", "keep", "new"], "avg"),
           "prompt": ("bert", ["--pooling", "avg", "--prompt", "say: "], "avg")}
every_folder = pytest.mark.parametrize("name", FOLDERS)


@pytest.fixture
def saved(name, tmp_path, bert, folder_of):
    """Return the output folder of a short run of simcse.py with the flags FOLDERS[name]."""
    model, flags = FOLDERS[name][:2]
    model = bert if model == "bert" else folder_of(model)
    train(["simcse", "--model", model, "--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 4,
           "--lr", 1e-2, "--out", "out", *flags], tmp_path)
    return tmp_path / "out"


def scored_pairs(count=60):
    """Return the sentences (2, count) and gold scores (count,) of the first pairs of sts.tsv."""
    rows = [line.split("\t") for line in (DATA / "sts.tsv").read_text("utf-8").splitlines()[1:1 + count]]
    return list(zip(*(row[:2] for row in rows))), torch.tensor([float(row[2]) for row in rows])


def embed(folder, sentences, name):
    """Embed sentences one by one with transformers alone, by the definition of each pooling."""
    prompt = "say: " if name == "prompt" else ""
    rows = embed_saved(folder, [prompt + sentence for sentence in sentences], FOLDERS[name][2])
    if name == "head":
        head = load_file(folder / "2_Dense" / "model.safetensors")
        rows = torch.tanh(F.linear(rows, head["linear.weight"], head.get("linear.bias")))
    return rows


@every_folder
def test_transformers(name, saved, tmp_path):
    """--evaluate prints the score of transformers alone, up to ranks that rounding swaps."""
    (first, second), gold = scored_pairs()
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(
        f"{a}\t{b}\t{score}\n" for a, b, score in zip(first, second, gold.tolist())), "utf-8")
    wanted = 100 * spearman(F.cosine_similarity(embed(saved, first, name), embed(saved, second, name)), gold)
    printed = train(["simcse", "--evaluate", "--model", "out", "--dev", "dev.tsv"], tmp_path)
    assert float(re.search(r"\ndev +Spearman (-?[0-9.]+) ", printed)[1]) == pytest.approx(wanted, abs=0.1)


@every_folder
def test_sentence_transformers(name, saved):
    """SentenceTransformer(folder) gives the embeddings that `embed` computes with transformers."""
    library = pytest.importorskip("sentence_transformers")
    sentences = scored_pairs(12)[0][0]
    found = torch.from_numpy(library.SentenceTransformer(str(saved)).encode(list(sentences)))
    torch.testing.assert_close(found, embed(saved, sentences, name), atol=1e-5, rtol=1e-4)
