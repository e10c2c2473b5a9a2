"""A saved folder gives the same embeddings in transformers, in sentence-transformers and in our scripts. The
tests save an encoder, a decoder, a projection head and a prompt, and run the code of docs/use.md."""
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from kernels.training.images.encoders import ImageEncoder, load_image_encoder, read_mean_std
from loss_formulas import spearman
from running import DATA, ROOT, embed_saved, train

# {name: (bert or family of the model, flags of the run, pooling of the saved folder)}
FOLDERS = {"mean": ("bert", ["--pooling", "avg"], "avg"),
           "first token": ("bert", ["--pooling", "cls", "--head", "keep"], "pooler"),    # as in BERT's pooler
           "before the pooler": ("bert", ["--pooling", "cls_before_pooler"], "cls"),
           "first and last layer": ("bert", ["--pooling", "avg_first_last"], "avg_first_last"),
           "last two layers": ("bert", ["--pooling", "avg_top2"], "avg_top2"),
           "decoder": ("Qwen2", ["--pooling", "last"], "last"),
           "head": ("bert", ["--pooling", "avg", "--head", "keep", "new"], "avg"),
           "prompt": ("bert", ["--pooling", "avg", "--prompt", "say: "], "avg")}
RUNS = {}                                                      # {name: output folder}
every_folder = pytest.mark.parametrize("name", FOLDERS)
PAGE = (ROOT / "docs" / "use.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
LINES = {pooling: row.split("`")[-2] for row in re.findall(r"^\| `.*$", PAGE, re.M)   # {pooling: code of z}
         for pooling in re.findall(r"`(\w+)`", row.split(" | ")[0])}


@pytest.fixture
def library():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def saved(name, tmp_path_factory, bert, folder_of):
    """Return the output folder of a short run of simcse.py with the flags FOLDERS[name]. Each runs once."""
    if name not in RUNS:
        folder, (model, flags, _) = tmp_path_factory.mktemp("run"), FOLDERS[name]
        model = bert if model == "bert" else folder_of(model)
        train(["simcse", "--model", model, "--data", DATA / "nli.csv", "--batch-size", 8, "--steps", 4,
               "--lr", 1e-2, "--out", "out", *flags], folder)
        RUNS[name] = folder / "out"
    return RUNS[name]


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
    printed = train(["simcse", "--evaluate", "--model", saved, "--dev", "dev.tsv"], tmp_path)
    assert float(re.search(r"\ndev +Spearman (-?[0-9.]+) ", printed)[1]) == pytest.approx(wanted, abs=0.1)


@every_folder
def test_sentence_transformers(library, name, saved):
    """SentenceTransformer(folder) gives the embeddings that `embed` computes with transformers."""
    sentences = scored_pairs(12)[0][0]
    found = torch.from_numpy(library.SentenceTransformer(str(saved)).encode(list(sentences)))
    torch.testing.assert_close(found, embed(saved, sentences, name), atol=1e-5, rtol=1e-4)


@every_folder
def test_transformers_on_the_page(name, saved):
    """The code for transformers alone, with the line of each pooling, gives the embeddings of `embed`."""
    flags, names = FOLDERS[name][1], {}
    texts, prompt = ["A man eats.", "Someone is eating."], "say: " if name == "prompt" else ""
    code = BLOCKS[1].replace("out/first", str(saved)).replace(texts[0], prompt + texts[0])
    code = code.replace(texts[1], prompt + texts[1])
    exec(code, names)
    line = LINES.get(flags[1], "")
    exec(f"z = {line}" if line.startswith("states") else f"{line}\n{code.splitlines()[-1]}", names)
    if name == "head":
        exec(BLOCKS[2].replace("out/first", str(saved)), names)
    if name == "first token":
        exec(re.search(r"`(z = model.*pooler_output)`", PAGE)[1], names)
    torch.testing.assert_close(names["z"], embed(saved, texts, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["prompt"])
def test_sentence_transformers_on_the_page(library, name, saved, capsys, monkeypatch):
    """The closest texts are those with the largest cosines. encode() adds the first prompt."""
    monkeypatch.chdir(ROOT)
    first, closest = {}, {}
    exec(BLOCKS[0].replace("out/first", str(saved)), first)
    wanted = F.normalize(embed(saved, ["A man eats.", "Someone is eating."], name), dim=1)
    torch.testing.assert_close(torch.tensor(first["z"]), wanted, atol=1e-5, rtol=1e-4)
    exec(BLOCKS[3].replace("out/first", str(saved)), closest)
    query, *texts = embed(saved, ["Horses eat apples.", *closest["texts"]], name)
    best = F.cosine_similarity(query[None], torch.stack(texts)).topk(3)
    assert closest["rows"].tolist() == [best.indices.tolist()]
    assert f"{best.values[2]:.3f}  {closest['texts'][best.indices[2]]}\n" in capsys.readouterr().out


def test_classifier_and_image_on_the_page(tmp_path, monkeypatch, bert, capsys):
    """The pipeline has the labels of the data. The features are those of the script, of one image."""
    monkeypatch.chdir(tmp_path)
    scratch = ["--steps", 1, "--batch-size", 8, "--out"]
    data = DATA / "topics.tsv"
    printed = train(["childtuning", "--model", bert, "--data", data, *scratch, "out/childtuning"], ".")
    exec(BLOCKS[4], {})
    found = re.findall(r"'label': '(\w+)'", capsys.readouterr().out)
    assert len(found) == 3 and {*found} < {line.split("\t")[1] for line in data.read_text().splitlines()[1:]}
    assert printed.splitlines()[-1].endswith("# the model after the last step")
    images = np.load(DATA / "shapes.npz")["images"]
    Image.fromarray(images[0]).save("photo.jpg", quality=100, subsampling=0)
    train(["simclr", "--model", "resnet-small", "--data", DATA / "shapes.npz", "--probe-epochs", 0, *scratch,
           "out/simclr"], ".")
    names = {}
    exec(BLOCKS[5], names)
    model = ImageEncoder(load_image_encoder("out/simclr"), None, None, *read_mean_std("out/simclr")).eval()
    with torch.no_grad():
        wanted = model.features(torch.tensor(images[:1]).permute(0, 3, 1, 2) / 255)
    assert names["features"].shape == wanted.shape and F.cosine_similarity(names["features"], wanted) > 0.99
