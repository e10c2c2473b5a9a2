"""EASE: its loss against the formula written out, its table against a dense one, its files, its runs."""
import bz2
import gzip
import math
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import ease
from ease import EntityTable, draw_entities, ease_loss, load_data, load_vectors, warmup_linear
from running import DATA, equal, one_by_one, refuse, run
from test_losses import agree, cosine, points

HEAD, *ROWS = [line.split("\t") for line in (DATA / "entities.tsv").read_text(encoding="utf-8").splitlines()]

# ── the loss ──


def written_out(z, e, h, temperature, w, ids=None, hard_ids=None):
    """The paper's objective, term by term; the denominator holds the positive once."""
    total, power = 0, lambda a, b: torch.exp(cosine(a, b) / temperature)
    for i in range(len(z)):
        terms = [power(z[i], e[i])]
        for j in range(len(z)):
            if j != i and (ids is None or ids[j] != ids[i]):
                terms.append(power(z[i], e[j]))
            for k in range(h.shape[1]):
                if hard_ids is None or hard_ids[j, k] != ids[i]:
                    terms.append(power(z[i], h[j, k]) * math.exp(w) ** (i == j))
        total = total - torch.log(terms[0] / sum(terms))
    return total / len(z)


@pytest.mark.parametrize("impl", ["blockwise", "eager"])
@pytest.mark.parametrize("tau, w", [(100.0, 0.0), (10.0, -2.0), (0.1, 1.0)])
@pytest.mark.parametrize("n, m", [(1, 0), (1, 3), (2, 0), (6, 0), (6, 1), (6, 3)])
def test_loss(impl, n, m, tau, w):
    """Entities that repeat are no negatives: where there is one alone, as in one row, none is left."""
    z, e, h = points(n, 5, 0), points(n, 5, 1), points(n * m, 5, 2).view(n, m, 5)
    ids = torch.tensor([2, 2] if n == 2 else [7, 2, 7, 7, -1, 2][:n])
    hard_ids = torch.tensor([[2, 5, 6], [7, 8, 8], [4, 2, -1], [2, 2, 2], [7, 7, 5], [9, 7, 0]])[:n, :m]
    for masked in ((None, None), (ids, None), (ids, hard_ids)):
        flags = dict(entity_ids=masked[0], hard_ids=masked[1], impl=impl)      # gradients are tiny at τ = 100
        agree(lambda z, e, h=None: ease_loss(z, e, h, tau, w, **flags) * tau,
              lambda z, e, h=h: written_out(z, e, h, tau, w, *masked) * tau, *(z, e, h)[: 3 if m else 2])


def test_zero_vectors_and_dtypes():
    z, e, h = points(5, 6, 14), points(5, 6, 15), points(10, 6, 16).view(5, 2, 6)
    for dtype in (torch.float32, torch.bfloat16):              # computed in float32
        rounded = [x.to(dtype) for x in (z, e, h)]
        exact, loss = ease_loss(*(x.double() for x in rounded), 0.1), ease_loss(*rounded, 0.1)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=1e-5)
    e[2] = h[1, 0] = 0                                         # an unknown entity's row
    loss = ease_loss(z, e.requires_grad_(), h, 0.5, 1.0)
    torch.testing.assert_close(loss, written_out(z, e, h, 0.5, 1.0), rtol=1e-10, atol=0)
    assert torch.autograd.grad(loss, e)[0].isfinite().all()


@pytest.mark.parametrize("form, cut, size", [("paper", 5, None), ("code", 8, 4)])
def test_ranks_make_the_global_loss(form, cut, size, monkeypatch):
    """And its gradients, those of the table too, of two ranks; in the released form only 4 rows meet."""
    args = ease.make_parser().parse_args(["--data", "x", "--form", form])
    ease.fill(args, dict(micro_batch=size, entity_temperature=0.1, hard_logit=0.5, entity_weight=0.7))
    z1, z2, table = points(12, 5, 0), points(12, 5, 1), EntityTable(points(14, 5, 2), 24)
    table.schedule([0.0], 0)
    leaves = z1.requires_grad_(), z2.requires_grad_(), table.used
    model = Mock(side_effect=lambda i: torch.cat([z1[i], z2[i]]), entities=table, entity_map=torch.tanh)
    ids = torch.stack([torch.arange(12) % 9, 9 + torch.arange(12) % 5], 1)

    def total(*parts):
        monkeypatch.setattr(ease, "own_rows", Mock(side_effect=parts))
        loss = sum(ease.compute_loss(model, (part, ids[part]), 12, args)[0] for part in parts)
        return loss, *torch.autograd.grad(loss, leaves)

    whole = total(slice(0, 12))
    monkeypatch.setattr(ease, "gather_rows", lambda x, _: z2 if x.is_floating_point() else ids)
    torch.testing.assert_close(total(slice(0, cut), slice(cut, 12)), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1e-7, 1.0])                  # of gradients: AdamW's eps counts, or not
def test_table_is_a_dense_one(size):
    """Rows repeat in a batch, rest for a few steps, for hundreds, for ever."""
    torch.manual_seed(0)
    start, steps = torch.randn(40, 6), 300
    rates = [warmup_linear(step, steps, 20, 3e-3) for step in range(steps)]
    dense, table = start.clone().requires_grad_(), EntityTable(start.clone(), 8)
    table.schedule(rates, 0)
    optimizer = torch.optim.AdamW([dense], weight_decay=0.0)
    for step in range(steps):
        ids = torch.randint(0, 30 if step % 200 < 20 else 5, (4, 2))
        gradient, optimizer.param_groups[0]["lr"] = torch.randn(4, 2, 6) * size, rates[step]
        optimizer.zero_grad()
        (dense[ids] * gradient).sum().backward()
        optimizer.step()
        (table(ids) * gradient).sum().backward()
        table.step()
    vectors = table.catch_up(torch.arange(40))[0]
    assert (vectors - start).abs().max() > 0.05 and torch.equal(vectors[30:], start[30:])
    torch.testing.assert_close(vectors, dense.detach(), atol=1e-5, rtol=0)


# ── files and runs ──


def write(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("page", [[], ["page"], ["article"], ["origin_entity"]])
def test_hard_negatives_of_a_type_are_not_on_the_page(page, tmp_path):
    """All others of the type are drawn, equally often, none twice; without a page it is the text."""
    links = [(f"T{i % 9}", f"e{i % 12}", ("a", "b", "a|b")[i % 3], f"p{i % 4}" * (i % 2)) for i in range(36)]
    header = "text", "entity", "entity_type", *page
    path = write(tmp_path / "typed.tsv", [header, *(link[:len(header)] for link in links)])
    args = ease.make_parser().parse_args(["--data", str(path), "--batch-size", "2", "--hard-negatives", "2"])
    (_, records, titles), drawn, chosen = load_data(path, args), [Counter() for _ in links], set()
    for epoch in range(200):
        for times, picks in zip(drawn, draw_entities(records, epoch, args).tolist()):
            times.update(titles[i] for i in set(picks))
    page_of = lambda link: page and link[3] or link[0]
    for link, times in zip(links, drawn):
        linked = {other[1] for other in links if page_of(other) == page_of(link)}
        of_type = [{other[1] for other in links if kind in other[2]} - linked for kind in link[2].split("|")]
        assert times.pop(link[1]) == 200 and times.total() == 400
        chosen.add(of_type.index(times.keys()))                # of several types one is drawn
        assert min(times.values()) > 0.6 * 400 / len(times)
    parts = torch.cat([draw_entities(half, 3, args) for half in (records[:10], records[10:])])
    found = [parts.equal(draw_entities(records, epoch, args)) for epoch in (3, 4)]
    args.seed += 1
    assert [*found, parts.equal(draw_entities(records, 3, args))] == [True, False, False] and chosen == {0, 1}


TABS = "the\t9 9 9\nENTITY/New York\t1 -2 0.5\nNew York\t8 8 8\nENTITY/Ulm\t0.25 3 4\nENTITY/Bonn\t7 7 7\n"
GLOVE = TABS.replace(" York", "_York").replace("\t", " ")


@pytest.mark.parametrize("pack, name", [(bytes, "a.txt"), (gzip.compress, "a.gz"), (bz2.compress, "a.bz2")])
@pytest.mark.parametrize("text", [TABS, GLOVE, "5 3\n" + GLOVE])
def test_entity_vectors(text, pack, name, tmp_path):
    """Wikipedia2Vec's three text formats; words are no entities, and entities without a vector are random."""
    (tmp_path / name).write_bytes(pack(text.encode()))
    vectors, found = load_vectors(str(tmp_path / name), ["Ulm", "the", "New York"])
    assert found == 2 and vectors[[0, 2]].tolist() == [[0.25, 3, 4], [1, -2, 0.5]]
    assert vectors.shape == (3, 3) and 0 < vectors[1].abs().max() <= 0.05


@pytest.mark.parametrize("form, m, maps", [
    ("paper", 0, "none"), ("paper", 1, "tanh"), ("paper", 3, None), ("code", 0, "linear"), ("code", 3, None)])
def test_first_loss_is_the_papers(form, m, maps, tmp_path, bert):
    """Without dropout, on the folder's own embeddings; the released form in parts of 8 and 4 rows, no id
    masked. Columns go by the released names, or by others in another order; _ in a title is a space."""
    rows, paper = ROWS[:8] + ROWS[:4], form == "paper"         # four entities are there twice
    renamed = [["de", row[2], row[1].replace(" ", "_"), row[0]] for row in rows]
    renamed.insert(0, ["language", "negative_entity", "entity", "sentence"])
    flags = ["--data", write(tmp_path / "data.tsv", renamed if paper else [HEAD, *rows]), "--model", bert]
    flags += ["--form", form, "--hard-negatives", m, "--pooling", "avg", "--max-length", 512, "--steps", 1]
    flags += ["--simcse-weight", 2, *(["--entity-map", maps, "--entity-temperature", 0.1] if maps else [])]
    result = run("ease", tmp_path / "out", *flags, "--batch-size", 12, "--entity-weight", 0.5)
    model, (_, records, titles) = result.model, load_data(result.args.data, result.args)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(42)).tolist()
    ids = draw_entities([records[i] for i in order], 0, result.args)
    for at, (own, *others) in zip(order, ids.tolist()):
        assert titles[own] == rows[at][1] and {titles[i] for i in others} <= set(rows[at][2].split("|"))
    z = one_by_one(model.encoder, model.tokenizer, [rows[i][0] for i in order], "avg").double()
    e, weights = model.entities.vectors[ids].double(), model.entity_map.double().state_dict().values()
    wanted, kind, tau = 0, maps or {"paper": "linear", "code": "tanh"}[form], 0.1 if maps else 100.0
    found = len(weights), "Tanh()" in str(model.entity_map), result.args.entity_temperature
    assert found == (*{"none": (0, False), "linear": (1, False), "tanh": (2, True)}[kind], tau)
    e = F.linear(e, *weights) if weights else e
    e = torch.tanh(e) if kind == "tanh" else e
    for part in [slice(12)] if paper else [slice(8), slice(8, 12)]:
        n, masked = len(z[part]), (ids[part, 0], ids[part, 1:]) if paper else ()
        logits = F.cosine_similarity(z[part, None], z[part], dim=2) / 0.05
        entity = written_out(z[part], e[part, 0], e[part, 1:], tau, float(not paper), *masked)
        wanted += torch.stack([F.cross_entropy(logits, torch.arange(n)), entity]) * n / 12
    step = result.steps[0]
    assert [step["simcse"], step["entity"]] == pytest.approx(wanted.tolist(), rel=1e-4)
    assert step["loss"] == pytest.approx(2 * step["simcse"] + 0.5 * step["entity"], rel=1e-6)


@pytest.mark.parametrize("form, epochs", [("paper", [0, 0, 0, 1, 1, 1, 2]), ("code", [0] * 7)])
def test_training(form, epochs, tmp_path, bert, monkeypatch):
    """Hard negatives, of a type, are drawn in each epoch, or once; the table is trained, and not saved."""
    path = write(tmp_path / "data.tsv", [row[:2] + row[3:] for row in [HEAD, *ROWS[:22]]])
    titles, drawn = sorted({row[1] for row in ROWS[:22]}), Mock(wraps=draw_entities)
    (tmp_path / "vectors.txt").write_text("".join(f"ENTITY/{title}\t0.5 -0.5 0.25\n" for title in titles))
    monkeypatch.setattr(ease, "draw_entities", drawn)
    flags = ["--data", path, "--model", bert, "--form", form, "--entity-vectors", tmp_path / "vectors.txt"]
    flags += ["--batch-size", 8, "--steps", 7, "--lr", 1e-2, "--warmup-steps", 1]
    result = run("ease", tmp_path / "out", *flags)
    table, encoder = result.model.entities, result.model.encoder
    assert [call.args[1] for call in drawn.call_args_list] == epochs
    assert f"{len(titles)} vectors of 3, {len(titles)} of them from " in result.said["entities"]
    assert [600 * step["lr"] for step in result.steps] == pytest.approx([0, 6, 5, 4, 3, 2, 1])
    moved = (table.vectors - torch.tensor([0.5, -0.5, 0.25])).abs().amax(1) > 1e-4
    assert table.last.max() == 7 and moved[table.last > 2].all() and not moved[table.last == 0].any()
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), dict(encoder.state_dict()))


# ── bad input ──

GOOD = "text\tentity\tnegative_entity\nA cat\tCat\tDog|Sun\nA dog\tDog\tCat|Sun\nThe sun\tSun\tCat|Dog\n"
TYPED, FILE = "text\tentity\tentity_type\tpage\n", "ENTITY/Cat\t1 2 3\nENTITY/Dog\t4 5 6\n"
JSON = '{"text": "A", "positive_entity": "a", "negative_entity": '


@pytest.mark.parametrize("flags, content, wanted", [
    ("--data a.tsv", "sent0\tsent1\nA\tb\n", "a.tsv: columns sent0, sent1; wanted text .*"),
    ("--data a.tsv", "A cat\tCat\nA dog\tDog\n", "a.tsv: no names of columns; wanted text .*"),
    ("--data a.tsv", GOOD + "\tCat\tDog\n", "a.tsv line 5: no text; fill the cell or delete the row"),
    ("--data a.jsonl", JSON + '["b"]}\n{"text": "B"}', "a.jsonl line 2: no positive_entity; .*"),
    ("--data a.jsonl", JSON + "[1]}", "a.jsonl line 1: wanted a row of texts, found .*"),
    ("--data a.jsonl", JSON + '["b"]}\n' + JSON + "[]}", "a.jsonl line 2: 0 hard negatives, .* is 1"),
    ("--data a.tsv", GOOD + "Pigs\tPig\tPig\n", "a.tsv line 5: 0 hard negatives, wanted .* is 1"),
    ("--data a.tsv --hard-negatives 2", GOOD + "Pigs\tPig\tCat\n", "a.tsv line 5: 1 hard .* is 2"),
    ("--data a.tsv --hard-negatives 1", "text\tentity\nA\ta\nB\tb\n", ".* 1: a.tsv has neither .*"),
    ("--data a.tsv", TYPED + "A\tb\t|\tc\nB\tc\td\tc\n", "a.tsv line 2: no entity_type; .*"),
    ("--data a.tsv", TYPED + "A\ta\tt\tp\nB\tb\tt\tp\n", "a.tsv line 2: 0 entities of type 't' that .*"),
    ("--data a.tsv", TYPED + "A\ta\tt\tp\nB\tb\tu\tq\n", "a.tsv line 2: 0 entities of type 't' that .*"),
    ("--batch-size 4", None, "good.tsv: 3 rows, --batch-size is 4; wanted at least 2 and as many .*"),
    ("--batch-size 1", None, "good.tsv: 3 rows, --batch-size is 1; wanted .*"),
    ("--entity-vectors none", None, "none: No such file or directory"),
    ("--entity-vectors v", FILE + "the\t1 2\n", "v line 3: 2 numbers, wanted 3 as before"),
    ("--entity-vectors v", "2 3\nENTITY/Cat 1 2 3\nENTITY/Dog 4 5\n", "v line 3: 2 numbers, .*"),
    ("--entity-vectors v", FILE + "\n", "v line 3: 0 numbers, wanted 3 as before"),
    ("--entity-vectors v", FILE + "ENTITY/Sun\t1 2 x\n", "v line 3: could not convert string to float: .*"),
    ("--entity-vectors v", FILE + "ENTITY/Sun\t1 2 nan\n", "v: not all numbers are finite"),
    ("--entity-vectors v", b"ENTITY/\xff\t1 2 3\n", "v line 1: 'utf-8' codec can't decode .*"),
    ("--entity-vectors v", "Cat\t1 2 3\n", "v: none of the 3 entities; wanted lines like .*"),
    ("--entity-vectors v", "", "v: none of the 3 entities; .*"),
    ("--entity-vectors v.gz", gzip.compress(FILE.encode())[:-9], "v.gz: Compressed file ended before .*"),
    ("--entity-vectors v.bz2", FILE, "v.bz2: Invalid data stream"),
    ("--entity-vectors v --entity-map none", FILE, "--entity-map none: v has 3 .*, embeddings have 128; .*"),
    ("--entity-temperature 0", None, "argument --entity-temperature: 0: wanted a number of at least 0.0001"),
    ("--hard-logit -6", None, "argument --hard-logit: -6: wanted a number of at least -5"),
    ("--micro-batch 0", None, "argument --micro-batch: 0: wanted a number of at least 1")])
def test_bad_input(flags, content, wanted, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("good.tsv").write_text(GOOD)
    if content is not None:
        Path(flags.split()[1]).write_bytes(content if isinstance(content, bytes) else content.encode())
    small = ["--data", "good.tsv", "--model", "scratch", "--batch-size", "2", "--steps", "1"]
    refuse("ease", capfd, wanted, *small, *flags.split())
