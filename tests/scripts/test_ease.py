"""Test ease.py: sampling of hard negatives, the first loss, and training of the entity vectors."""
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import ease
import loss_formulas
from ease import load_data, sample_entities
from kernels.training.loop import batches
from kernels.training.text.tokens import tokenise
from running import DATA, ONE_BATCH, embed_unbatched, equal, run, saved_weights

HEAD, *ROWS = [line.split("\t") for line in (DATA / "entities.tsv").read_text(encoding="utf-8").splitlines()]


def write_tsv(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("page", [[], ["origin_entity"]])
def test_hard_negatives_share_a_type_and_are_not_on_the_page(page, tmp_path):
    """The hard negatives of a row are distinct entities of one of its types that are not on its page. In 200
    epochs, all these entities are sampled. If the page column is missing or its cell is empty, the text is
    the page. The sample depends only on seed, epoch and row."""
    pages = ["" if i % 2 == 0 else f"p{i % 4}" for i in range(36)]
    links = [(f"T{i % 9}", f"e{i % 12}", ("a", "b", "a|b")[i % 3], pages[i]) for i in range(36)]
    header = "text", "entity", "entity_type", *page
    path = write_tsv(tmp_path / "typed.tsv", [header, *(link[:len(header)] for link in links)])
    args = ease.make_parser().parse_args(["--data", str(path), "--batch-size", "2", "--hard-negatives", "2"])
    _, records, titles = load_data(path, args)
    samples = torch.stack([sample_entities(records, epoch, args) for epoch in range(200)])
    pages = [page and link[3] or link[0] for link in links]
    for i, link in enumerate(links):
        linked = {other[1] for other, its_page in zip(links, pages) if its_page == pages[i]}
        of_type = [{other[1] for other in links if kind in other[2]} - linked for kind in link[2].split("|")]
        drawn = [[titles[pick] for pick in picks] for picks in samples[:, i].tolist()]
        assert all(own == link[1] and one != two for own, one, two in drawn)
        assert {title for _, *picks in drawn for title in picks} in of_type
    parts = torch.cat([sample_entities(half, 3, args) for half in (records[:10], records[10:])])
    args.seed += 1
    others = *samples[3:5], sample_entities(records, 3, args)
    assert [parts.equal(other) for other in others] == [True, False, False]


@pytest.mark.parametrize("form, m, kind, tau, equals", [
    ("paper", 0, "none", 0.1, None), ("paper", 1, "tanh", 0.1, "keep"), ("paper", 3, "linear", 100, None),
    ("code", 0, "linear", 0.1, "mask"), ("code", 3, "tanh", 100, None)])   # τ = 100: use the defaults
def test_first_loss_matches_the_formula(form, m, kind, tau, equals, tmp_path, bert, monkeypatch):
    """The first loss equals the formula on the model's embeddings. With --form code, negatives come from
    groups of 8 and 4 rows, also on a rank that has only the last 4 rows, and equal entities are not masked by
    default. With --form paper, the file has other accepted column names, in another order."""
    rows, paper = ROWS[:8] + ROWS[:4], form == "paper"         # four entities occur twice
    renamed = [["language", "negative_entity", "entity", "sentence"]]
    renamed += [["de", row[2], row[1].replace(" ", "_"), row[0]] for row in rows]
    path = write_tsv(tmp_path / "data.tsv", renamed if paper else [HEAD, *rows])
    flags = ["--data", path, "--model", bert, "--form", form, "--hard-negatives", m, "--pooling", "avg"]
    flags += ["--entity-map", kind, "--entity-temperature", tau] if tau < 1 else []
    flags += ["--equal-entities", equals] if equals else []
    result = run("ease", tmp_path / "out", *flags, *ONE_BATCH, "--simcse-weight", 2, "--entity-weight", 0.5)
    model = result.model
    _, records, titles = load_data(path, result.args)
    order = next(batches(12, 12, 42))
    ids = sample_entities([records[i] for i in order], 0, result.args)
    for row, (own, *hard) in zip(order, ids.tolist()):
        assert titles[own] == rows[row][1] and {titles[i] for i in hard} <= set(rows[row][2].split("|"))
    z = embed_unbatched(model.encoder, model.tokenizer, [rows[i][0] for i in order], "avg").double()
    e, weights = model.entities.weight.detach()[ids].double(), model.entity_map.state_dict()
    assert [*weights] == {"none": [], "linear": ["weight"], "tanh": ["0.weight", "0.bias"]}[kind]
    e = F.linear(e, *(weight.double() for weight in weights.values())) if weights else e
    e = torch.tanh(e) if kind == "tanh" else e
    masks, terms = equals == "mask" or paper and not equals, 0
    for group in [slice(12)] if paper else [slice(8), slice(8, 12)]:
        masked = dict(entity_ids=ids[group, 0], hard_ids=ids[group, 1:]) if masks else {}
        weight = 0.0 if paper else 1.0
        entity = loss_formulas.ease_loss(z[group], e[group, 0], e[group, 1:], tau, weight, **masked)
        simcse = loss_formulas.simcse_loss(z[group], z[group], None, 0.05)
        terms += torch.stack([simcse, entity]) * len(z[group]) / 12
    expected = [*terms.tolist(), (terms @ torch.tensor([2, 0.5]).double()).item()]
    step = [result.steps[0][term] for term in ("simcse", "entity", "loss")]
    assert step == pytest.approx(expected, rel=1e-4)
    if not paper:
        monkeypatch.setattr(ease, "own_rows", lambda _: slice(8, 12))
        monkeypatch.setattr(ease, "gather_rows", lambda *_: ids)
        own = tokenise([rows[i][0] for i in order[8:]], model.tokenizer, 512)[0]
        part = ease.compute_loss(model, (model.batch(own, own), ids[8:]), 12, result.args)[1]["entity"]
        assert part.item() == pytest.approx(entity.item() / 3, rel=1e-4)


@pytest.mark.parametrize("form, epochs", [("paper", [0, 0, 0, 1, 1, 1, 2]), ("code", [0] * 7)])
def test_entities_in_training(form, epochs, tmp_path, bert, monkeypatch):
    """Hard negatives are sampled in each epoch; with --form code, only once. Training changes the vectors of
    the entities in its batches. The saved encoder does not contain these vectors."""
    path = write_tsv(tmp_path / "data.tsv", [row[:2] + row[3:] for row in [HEAD, *ROWS[:22]]])
    titles, sampled = sorted({row[1] for row in ROWS[:22]}), Mock(wraps=sample_entities)
    vectors = write_tsv(tmp_path / "vectors", [[f"ENTITY/{title}", "0.5 -0.5 0.25"] for title in titles])
    monkeypatch.setattr(ease, "sample_entities", sampled)
    flags = ["--data", path, "--model", bert, "--form", form, "--entity-vectors", vectors, "--steps", 7]
    result = run("ease", tmp_path / "out", *flags, "--batch-size", 8, "--lr", 1e-2, "--warmup-steps", 1)
    assert [call.args[1] for call in sampled.call_args_list] == epochs
    moved = (result.model.entities.weight - torch.tensor([0.5, -0.5, 0.25])).abs().amax(1) > 1e-4
    assert moved.all()
    assert equal(saved_weights(tmp_path / "out"), dict(result.model.encoder.state_dict()))
