"""EASE: the entity term against the formula written out, the table of entities against a dense one, its files, its modes."""
import bz2
import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import ease
from ease import EntityTable, draw_entities, ease_loss, load_data, load_vectors, warmup_linear
from test_losses import agree, cosine, points
from test_scripts import DATA, bert, one_cpu_thread, pooled, one_of_several, run, small  # noqa: F401, the fixtures hold here too

both_impls = pytest.mark.parametrize("impl", ["blockwise", "eager"])
ROWS = [line.split("\t") for line in (DATA / "entities.tsv").read_text(encoding="utf-8").splitlines()]


# ── the loss ──


def written_out(z, e, h, temperature, w, ids=None, hard_ids=None):
    """The paper's objective, term by term; the denominator holds the positive once."""
    total = 0
    for i in range(len(z)):
        terms = [torch.exp(cosine(z[i], e[i]) / temperature)]
        for j in range(len(z)):
            if j != i and (ids is None or ids[j] != ids[i]):
                terms.append(torch.exp(cosine(z[i], e[j]) / temperature))
            for k in range(h.shape[1]):
                if hard_ids is None or hard_ids[j, k] != ids[i]:
                    terms.append(torch.exp(cosine(z[i], h[j, k]) / temperature) * math.exp(w) ** (i == j))
        total = total - torch.log(terms[0] / sum(terms))
    return total / len(z)


@both_impls
@pytest.mark.parametrize("temperature, w", [(100.0, 0.0), (100.0, 1.0), (10.0, -2.0), (0.1, 2.0)])
@pytest.mark.parametrize("n, m", [(1, 1), (1, 3), (6, 0), (6, 1), (6, 3)])
def test_loss(impl, n, m, temperature, w):
    z, e, h = points(n, 5, 0), points(n, 5, 1), points(n * m, 5, 2).view(n, m, 5)
    inputs = (z, e, h) if m else (z, e)
    ours = lambda z, e, h=None: ease_loss(z, e, h, temperature, w, impl=impl)
    theirs = lambda z, e, h=h: written_out(z, e, h, temperature, w)
    agree(ours, theirs, *inputs)
    scaled = [theirs(*inputs), *torch.autograd.grad(theirs(*(x.requires_grad_() for x in inputs)), inputs)]
    for a, b in zip([ours(*inputs), *torch.autograd.grad(ours(*inputs), inputs)], scaled):       # at 100 gradients are tiny
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@both_impls
@pytest.mark.parametrize("temperature, w", [(100.0, 0.0), (0.1, 1.0)])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_repeated_entities_are_no_negatives(impl, m, temperature, w):
    z, e, h = points(6, 5, 3), points(6, 5, 4), points(6 * m, 5, 5).view(6, m, 5)
    ids, hard_ids = torch.tensor([7, 2, 7, 7, -1, 2]), torch.tensor([[2, 5, 6], [7, 8, 8], [4, 2, -1], [2, 2, 2], [7, 7, 5], [9, 7, 0]])[:, :m]
    for given in ({}, dict(hard_ids=hard_ids)):
        inputs, ids_of_h = ((z, e, h) if m else (z, e)), given.get("hard_ids")
        agree(lambda z, e, h=None: ease_loss(z, e, h, temperature, w, ids, **given, impl=impl),
              lambda z, e, h=h: written_out(z, e, h, temperature, w, ids, ids_of_h), *inputs)
    assert ease_loss(z, e, entity_ids=ids) < ease_loss(z, e)


@pytest.mark.parametrize("m", [1, 3])
def test_loss_is_the_released_cross_entropy(m):
    """Logits of N entities and m blocks of N hard negatives, w on the diagonal of each block."""
    z, e, h = points(8, 6, 6), points(8, 6, 7), points(8 * m, 6, 8).view(8, m, 6)
    blocks = [F.cosine_similarity(z[:, None], x, dim=2) / 100 for x in (e[None], *h.transpose(0, 1)[:, None])]
    logits = torch.cat([blocks[0], *(block + torch.eye(8) for block in blocks[1:])], 1)
    torch.testing.assert_close(ease_loss(z, e, h, hard_logit=1.0), F.cross_entropy(logits, torch.arange(8)), rtol=1e-12, atol=0)
    assert abs(ease_loss(z, e, h) - math.log(8 * (1 + m))) < 0.02        # 100 divides: logits within ± 0.01


def test_loss_of_ranks_is_the_global_one():
    z, e, h, ids = points(6, 5, 9), points(6, 5, 10), points(12, 5, 11).view(6, 2, 5), torch.tensor([3, 1, 3, 4, 1, 3])
    flags = dict(temperature=0.3, hard_logit=0.7, entity_ids=ids, hard_ids=torch.arange(12).view(6, 2) - 4)
    parts = [ease_loss(z[i : i + 3], e, h, offset=i, **flags) for i in (0, 3)]
    torch.testing.assert_close(sum(parts) / 2, ease_loss(z, e, h, **flags), rtol=1e-12, atol=1e-12)


@both_impls
def test_one_sentence_is_zero(impl):
    z, e = points(1, 5, 12).requires_grad_(), points(1, 5, 13).requires_grad_()
    loss = ease_loss(z, e, impl=impl)
    loss.backward()
    assert loss == 0 and not z.grad.any() and not e.grad.any()
    twice = ease_loss(z.expand(2, 5), e.expand(2, 5), entity_ids=torch.tensor([4, 4]), impl=impl)   # nothing is left either
    assert twice == 0


def test_scale_zero_vectors_and_dtypes():
    z, e, h = points(5, 6, 14), points(5, 6, 15), points(10, 6, 16).view(5, 2, 6)
    scaled = ease_loss(z * torch.arange(1, 6)[:, None], e * 1e3, h * 1e-3, 0.5)
    torch.testing.assert_close(scaled, ease_loss(z, e, h, 0.5), rtol=1e-12, atol=0)
    e[2] = h[1, 0] = 0                                         # an unknown entity's row
    e.requires_grad_()
    loss = ease_loss(z, e, h, 0.5, 1.0)
    loss.backward()
    torch.testing.assert_close(loss.detach(), written_out(z, e.detach(), h, 0.5, 1.0), rtol=1e-10, atol=0)
    assert e.grad.isfinite().all()
    z, e = z.bfloat16(), e.detach().bfloat16()
    exact = torch.autograd.grad(ease_loss(x := z.double().requires_grad_(), e.double(), h.bfloat16().double()), x)[0]
    for dtype in (torch.float32, torch.bfloat16):              # half types are computed in float32
        loss = ease_loss(x := z.to(dtype).requires_grad_(), e.to(dtype), h.bfloat16().to(dtype))
        assert loss.dtype == torch.float32 and x.dtype == dtype
        error = (torch.autograd.grad(loss, x)[0].double() - exact).norm() / exact.norm()
        assert error < (1e-4 if dtype == torch.float32 else 1e-2)


# ── the table ──


@pytest.mark.parametrize("size", [1e-7, 1.0])                 # of gradients: with the small ones AdamW's eps counts
def test_table_is_a_dense_one(size):
    """Rows repeat in a batch, rest for a few steps, for hundreds, for ever; halfway the table goes through a file."""
    torch.manual_seed(0)
    start, steps = torch.randn(40, 6), 500
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
        if step == 250:
            state, table = table.state_dict(), EntityTable(torch.zeros(40, 6), 8)
            table.load_state_dict(state)
            table.schedule(rates, step + 1)
    vectors = table.catch_up(torch.arange(40))[0]
    assert (vectors - start).abs().max() > 0.05 and torch.equal(vectors[30:], start[30:])
    torch.testing.assert_close(vectors, dense.detach(), atol=1e-5, rtol=0)


def test_warmup():
    assert [warmup_linear(step, 6, 2, 4.0) for step in range(6)] == [0, 2, 4, 3, 2, 1]
    assert [warmup_linear(step, 4, 0, 4.0) for step in range(4)] == [4, 3, 2, 1]


# ── the data ──


def loaded(path, *flags):
    args = ease.make_parser().parse_args(["--data", str(path), "--batch-size", "2", *map(str, flags)])
    return *load_data(path, args), args


def write(path, rows, header):
    """The rows in the format of the name; the third column is parted by |, in JSON it is a list."""
    if path.suffix == ".tsv":
        path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text("".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in [header, *rows]), encoding="utf-8")
    else:
        items = [dict(zip(header, row)) for row in rows]
        items = [item | {header[2]: item[header[2]].split("|")} for item in items]
        path.write_text(json.dumps(items) if path.suffix == ".json" else "\n".join(map(json.dumps, items)), encoding="utf-8")
    return path


def test_formats_and_names_of_columns(tmp_path):
    """The released names and others, whatever the order; a title may have _ for a space."""
    rows = [[one, two.replace(" ", "_"), three, five] for one, two, three, _, five in ROWS[1:9]]
    wanted = loaded(DATA / "entities.tsv")
    files = [write(tmp_path / f"one.{kind}", rows, ["text", "positive_entity", "negative_entity", "origin_entity"])
             for kind in ("tsv", "csv", "json", "jsonl")]
    files.append(write(tmp_path / "two.csv", [[row[3], row[1], row[2], "de", row[0]] for row in rows],
                       ["article", "entity", "negative_entity", "language", "sentence"]))
    titles = lambda texts, records, names, _: [(text, names[record[1]], [names[i] for i in record[2]])
                                               for (_, (text,)), record in zip(texts, records)]
    for file in files:
        found = loaded(file)
        assert titles(*found) == titles(*wanted)[:8] and found[-1].hard_negatives == 1
        assert titles(*found)[0] == (rows[0][0], ROWS[1][1], rows[0][2].split("|"))


def test_hard_negatives_of_a_type_are_not_on_the_page(tmp_path):
    rows = [[f"Text {i}.", f"entity {i % 12}", ("a", "b", "a|b")[i % 3], f"page {i % 4}"] for i in range(36)]
    path = tmp_path / "typed.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in [["text", "entity", "entity_type", "page"], *rows]))
    _, records, titles, args = loaded(path, "--hard-negatives", 2)
    drawn = Counter()
    for epoch in range(300):
        for row, picks in zip(rows, draw_entities(records, epoch, args).tolist()):
            own, *others = (titles[i] for i in picks)
            assert own == row[1] and len({own, *others}) == 3
            for other in others:                               # of the type, and linked to by no text of the page
                kind = next(kind for kind in "ab" if (other, kind) and kind in row[2] and any(r[1] == other and kind in r[2] for r in rows))
                assert kind and not any(r[1] == other and r[3] == row[3] for r in rows)
                drawn[row[0], other] += 1
    first = [drawn["Text 0.", f"entity {i}"] for i in range(12)]             # "a": 0 2 3 5 6 8 9 11, without page 0: 2 3 5 6 9 11
    assert sum(first) == 600 and [i for i in range(12) if first[i]] == [2, 3, 5, 6, 9, 11] and min(filter(None, first)) > 60
    assert draw_entities(records, 3, args).equal(draw_entities(records, 3, args))
    parts = torch.cat([draw_entities(records[:10], 3, args), draw_entities(records[10:], 3, args)])
    assert parts.equal(draw_entities(records, 3, args)) and not parts.equal(draw_entities(records, 4, args))
    args.seed += 1
    assert not parts.equal(draw_entities(records, 3, args))


def test_text_is_the_page_where_there_is_none(tmp_path):
    path = tmp_path / "typed.tsv"
    for column in ("", "\tpage"):                              # or an empty cell
        path.write_text("".join(line + column[:1] + "\n" for line in ("A.\ta\tt", "A.\tb\tt", "B.\tc\tt", "C.\td\tt")))
        path.write_text(f"text\tentity\tentity_type{column}\n" + path.read_text())
        _, records, titles, args = loaded(path)
        seen = {(i, titles[pick[1]]) for epoch in range(60) for i, pick in enumerate(draw_entities(records, epoch, args).tolist())}
        assert seen == {(0, "c"), (0, "d"), (1, "c"), (1, "d"), (2, "a"), (2, "b"), (2, "d"), (3, "a"), (3, "b"), (3, "c")}


VECTORS = {"the": [9.0, 9, 9], "ENTITY/New York": [1.0, -2, 0.5], "New York": [8.0, 8, 8], "ENTITY/Ulm": [0.25, 3, 4], "ENTITY/Bonn": [7.0, 7, 7]}


@pytest.mark.parametrize("name", ["default.txt", "word2vec.txt", "glove.txt", "default.txt.gz", "word2vec.txt.bz2"])
def test_entity_vectors(tmp_path, name):
    """Wikipedia2Vec's three text formats; words are no entities, and entities without a vector are random."""
    tab = name.startswith("default")
    lines = [f"{key if tab else key.replace(' ', '_')}{chr(9) if tab else ' '}{' '.join(map(str, row))}\n" for key, row in VECTORS.items()]
    lines = ["5 3\n"] * name.startswith("word2vec") + lines
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack("".join(lines).encode()))
    vectors, found = load_vectors(str(tmp_path / name), ["Ulm", "the", "New York"])
    assert found == 2 and vectors.shape == (3, 3) and vectors[0].tolist() == VECTORS["ENTITY/Ulm"]
    assert vectors[2].tolist() == VECTORS["ENTITY/New York"] and 0 < vectors[1].abs().max() <= 0.05


# ── the script ──


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_first_loss_is_the_papers(form, m, tmp_path, bert):
    """Without dropout, on the folder's own embeddings; the released form in parts of 8 and 4 rows, no id masked."""
    rows = ROWS[1:9] + ROWS[1:5]                               # four entities are there twice
    path = write(tmp_path / "data.jsonl", rows, ROWS[0])
    flags = ["--model", bert, "--pooling", "avg", "--max-length", 512, "--batch-size", 12, "--steps", 1, "--lr", 0]
    result = run("ease", tmp_path / "out", "--data", path, *flags, "--form", form, "--hard-negatives", m, "--entity-weight", 0.5)
    _, records, titles = load_data(path, result.args)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(42)).tolist()
    ids = draw_entities([records[i] for i in order], 0, result.args)
    assert [titles[i] for i in ids[:, 0]] == [rows[i][1] for i in order]
    assert all(titles[i] in rows[at][2].split("|") for at, picks in zip(order, ids[:, 1:].tolist()) for i in picks)
    z = pooled(result.model.encoder, result.model.tokenizer, [rows[i][0] for i in order], "avg").double()
    table, weights = result.model.entities.vectors.double(), [p.double() for p in result.model.entity_map.parameters()]
    assert [len(weights), type(result.model.entity_map).__name__] == ([1, "Linear"] if form == "paper" else [2, "Sequential"])
    e = torch.tanh(F.linear(table[ids], *weights)) if form == "code" else F.linear(table[ids], *weights)
    values = []
    for part in [slice(0, 12)] if form == "paper" else [slice(0, 8), slice(8, 12)]:
        n, w, masked = part.stop - part.start, float(form == "code"), (ids[part, 0], ids[part, 1:]) if form == "paper" else ()
        logits = torch.stack([torch.stack([cosine(a, b) for b in z[part]]) for a in z[part]]) / 0.05
        entity = written_out(z[part], e[part, 0], e[part, 1:], 100.0, w, *masked)
        values.append(torch.stack([F.cross_entropy(logits, torch.arange(n)), entity]) * n / 12)
    simcse, entity = sum(values).tolist()
    step = result.steps[0]
    assert [step["simcse"], step["entity"]] == pytest.approx([simcse, entity], abs=1e-4)
    assert step["loss"] == pytest.approx(simcse + 0.5 * entity, abs=1e-4)


MODES = {"types": ["--hard-negatives", 2], "no hard negatives": [], "code": ["--form", "code"], "none": ["--entity-map", "none"],
         "vectors": ["--entity-map", "tanh", "--hard-logit", 1], "entity term alone": ["--simcse-weight", 0, "--hard-negatives", 3]}


@pytest.mark.parametrize("mode", MODES)
def test_modes_run_and_train_the_table(mode, tmp_path, bert):
    """Three steps of each; rows of two languages share an entity; the folder holds the encoder alone."""
    kept = {"types": [0, 1, 3, 4], "no hard negatives": [0, 1]}.get(mode, range(5))
    rows = [[row[i] for i in kept] for row in ROWS[:37]]
    rows[2][0], rows[2][1] = "Zwei Köche schälten im Hotel Kartoffeln.", rows[1][1]
    (tmp_path / "data.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--model", bert, "--pooling", "avg", "--batch-size", 12, "--steps", 4, "--lr", 1e-2, "--warmup-steps", 1, *MODES[mode]]
    if mode == "vectors":
        (tmp_path / "vectors.txt").write_text("".join(f"ENTITY/{row[1]}\t0.5 -0.5 {i} 0.25\n" for i, row in enumerate(rows[1:])))
        flags += ["--entity-vectors", tmp_path / "vectors.txt"]
    result = run("ease", tmp_path / "out", "--data", tmp_path / "data.tsv", *flags)
    table = result.model.entities
    assert all(map(math.isfinite, result.losses)) and int(table.last.max()) == 4
    assert [step["lr"] for step in result.steps] == pytest.approx([0, 0.01, 0.02 / 3, 0.01 / 3])
    moved = (table.catch_up(torch.arange(len(table.vectors)))[0] - table.vectors).abs().amax(1) > 0
    assert moved.any() and not moved[table.last == 0].any()
    saved, encoder = load_file(tmp_path / "out" / "model.safetensors"), result.model.encoder.state_dict()
    assert saved.keys() == encoder.keys() and all(saved[name].equal(encoder[name]) for name in saved)
    found = len({row[1] for row in rows[1:]})
    assert (f", {found} of them from " if mode == "vectors" else ", random, ") in result.said["entities"]


@pytest.mark.parametrize("form, epochs", [("paper", [0, 0, 0, 1, 1, 1, 2]), ("code", [0] * 7)])
def test_hard_negatives_are_drawn_anew_each_epoch(form, epochs, tmp_path, bert, monkeypatch):
    drawn = []
    monkeypatch.setattr(ease, "draw_entities", lambda records, epoch, args: drawn.append(epoch) or draw_entities(records, epoch, args))
    run("ease", tmp_path / "out", *small("ease", tmp_path, 22), "--model", bert, "--pooling", "avg", "--steps", 7, "--form", form)
    assert drawn == epochs


def test_two_processes_equal_one_in_parts(tmp_path, bert):
    """The released form: parts of 4 rows do not meet, on one process or on two."""
    import socket
    flags = [*small("ease", tmp_path), "--model", bert, "--pooling", "avg", "--steps", 4, "--lr", 1e-3, "--warmup-steps", 1]
    flags += ["--form", "code", "--micro-batch", 4, "--entity-weight", 1, "--entity-temperature", 0.1]
    one = run("ease", tmp_path / "one", *flags)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_of_several, (2, port, "ease", tmp_path / "two", flags), nprocs=2, start_method="forkserver")
    two = torch.load(tmp_path / "two" / "state.pt", weights_only=True)["model"]
    for name in ("vectors", "m", "v", "last"):
        torch.testing.assert_close(two[f"entities.{name}"], one.state["model"][f"entities.{name}"], atol=1e-4, rtol=0)
    assert torch.load(tmp_path / "two" / "norms") == pytest.approx(one.norms, rel=1e-4)


# ── bad input ──


HEAD, TYPED = "text\tpositive_entity\tnegative_entity\n", "text\tentity\tentity_type\tpage\n"
GOOD = HEAD + "A man eats.\tMan\tDog|Sun\nA dog runs.\tDog\tMan|Sun\nThe sun is up.\tSun\tMan|Dog\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.tsv").write_text(GOOD)


def refuse(capfd, wanted, *argv):
    """Exit code 2 and one line on stderr that fits; every file is as it was."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as end:
        ease.main(["--data", "good.tsv", "--model", "scratch", "--batch-size", "2", "--steps", "1", *argv])
    err = capfd.readouterr().err
    assert end.value.code == 2 and re.fullmatch(rf"ease\.py: {wanted}\n", err), err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name, content, wanted", [
    ("a.tsv", "sent0\tsent1\nA\tb\n", r"a\.tsv: columns sent0, sent1; wanted text \(or sentence\) and positive_entity \(or entity\), .*"),
    ("a.tsv", "A man\tMan\nA dog\tDog\n", r"a\.tsv: no names of columns; wanted text .*"),
    ("a.tsv", GOOD + "Who?\t \tMan\n", r"a\.tsv line 5: no positive_entity; fill the cell or delete the row"),
    ("a.tsv", GOOD + "\tMan\tDog\n", r"a\.tsv line 5: no text; fill the cell or delete the row"),
    ("a.tsv", TYPED + "A\tb\t\tc\nB\tc\td\tc\n", r"a\.tsv line 2: no entity_type; fill the cell or delete the row"),
    ("a.tsv", TYPED + "A\tb\t|\tc\nB\tc\td\tc\n", r"a\.tsv line 2: no entity_type; fill the cell or delete the row"),
    ("a.tsv", GOOD + "A pig.\tPig\t\n", r"a\.tsv line 5: 0 hard negatives, wanted at least --hard-negatives, which is 1"),
    ("a.tsv", GOOD + "A pig.\tPig\tPig\n", r"a\.tsv line 5: 0 hard negatives, wanted at least --hard-negatives, which is 1"),
    ("a.jsonl", '{"text": "A", "positive_entity": "a", "negative_entity": ["b"]}\n{"text": "B", "positive_entity": "b", "negative_entity": []}',
     r"a\.jsonl line 2: 0 hard negatives, wanted .*"),
    ("a.jsonl", '{"text": "A", "positive_entity": "a", "negative_entity": [1]}', r"a\.jsonl line 1: wanted a row of texts, found .*"),
    ("a.jsonl", '{"text": "A", "positive_entity": "a"}\n{"text": "B"}', r"a\.jsonl line 2: no positive_entity; .*"),
    ("a.tsv", TYPED + "A\ta\tt\tp\nB\tb\tt\tp\nC\tc\tu\tp\n", r"a\.tsv line 2: 0 entities of type 't' that are not on its page, wanted .* is 1"),
    ("a.tsv", TYPED + "A\ta\tt\tp\nB\tb\tt\tq\nC\tc\tu\tr\n", r"a\.tsv line 4: 0 entities of type 'u' that are not on its page, wanted .* is 1"),
    ("a.tsv", GOOD.replace("|Sun\nA dog", "\nA dog"), r"a\.tsv line 2: 1 hard negatives, wanted at least --hard-negatives, which is 2"),
    ("a.tsv", HEAD + "A\ta\tb\n", r"a\.tsv: 1 rows, --batch-size is 2; wanted at least 2 and as many rows as that")])
def test_bad_data(here, capfd, name, content, wanted):
    Path(name).write_text(content)
    refuse(capfd, wanted, "--data", name, *(["--hard-negatives", "2"] if wanted.endswith("2") else []))


def test_no_hard_negatives_to_draw(here, capfd):
    Path("a.tsv").write_text("text\tentity\nA\ta\nB\tb\n")
    refuse(capfd, r"--hard-negatives 1: a\.tsv has neither negative_entity nor entity_type to draw them from", "--data", "a.tsv", "--hard-negatives", "1")


FILE = "ENTITY/Man\t1 2 3\nENTITY/Dog\t4 5 6\n"


@pytest.mark.parametrize("name, content, wanted", [
    ("v.txt", None, r"v\.txt: No such file or directory"),
    ("v.txt", FILE + "the\t1 2\n", r"v\.txt line 3: 2 numbers, wanted 3 as before"),
    ("v.txt", "2 3\nENTITY/Man 1 2 3\nENTITY/Dog 4 5\n", r"v\.txt line 3: 2 numbers, wanted 3 as before"),
    ("v.txt", FILE + "\n", r"v\.txt line 3: 0 numbers, wanted 3 as before"),
    ("v.txt", FILE + "ENTITY/Sun\t1 2 x\n", r"v\.txt line 3: could not convert string to float: .*"),
    ("v.txt", FILE + "ENTITY/Sun\t1 2 nan\n", r"v\.txt: not all numbers are finite"),
    ("v.txt", b"ENTITY/\xff\t1 2 3\n", r"v\.txt line 1: 'utf-8' codec can't decode .*"),
    ("v.txt", "Man\t1 2 3\n", r"v\.txt: none of the 3 entities; wanted lines like ENTITY/Title 0\.1 0\.2 .*"),
    ("v.txt", "", r"v\.txt: none of the 3 entities; .*"),
    ("v.txt.gz", gzip.compress(FILE.encode())[:-9], r"v\.txt\.gz: Compressed file ended before .*"),
    ("v.txt.bz2", FILE, r"v\.txt\.bz2: Invalid data stream"),
    ("none", FILE, r"--entity-map none: none has 3 numbers a row, embeddings have 128; take linear")])
def test_bad_vectors(here, capfd, name, content, wanted):
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(capfd, wanted, "--entity-vectors", name, *(["--entity-map", "none"] if name == "none" else []))


@pytest.mark.parametrize("flags, wanted", [
    ("--entity-temperature 0", r"argument --entity-temperature: 0: wanted a number of at least 0\.0001"),
    ("--hard-logit -6", r"argument --hard-logit: -6: wanted a number of at least -5"),
    ("--micro-batch 0", r"argument --micro-batch: 0: wanted a number of at least 1"),
    ("--form released", r"argument --form: invalid choice: 'released' \(choose from .*\)"),
    ("--batch-size 4", r"good\.tsv: 3 rows, --batch-size is 4; wanted at least 2 and as many rows as that")])
def test_bad_flags(here, capfd, flags, wanted):
    refuse(capfd, wanted, *flags.split())
