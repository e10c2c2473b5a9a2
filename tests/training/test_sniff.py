"""Columns without names: numbers, ids, labels and single words are recognised and rejected, texts are not."""
import random
from types import SimpleNamespace

import pytest

import cline
import selfguided
from kernels.training.cli import UserError
from kernels.training.tables import SENTENCE_COLUMNS, Table, read_table
from kernels.training.text.label_columns import find_columns
from kernels.training.text.sts import load_sts
from running import NLI

ANCHORS, POSITIVES, NEGATIVES = ([row[i] for row in NLI[:60]] for i in range(3))
WORDS = "cat dog river stone music friend garden winter bread house window letter doctor teacher".split()
CITIES = "Paris London Rome Berlin Madrid Oslo Vienna Prague Lisbon Athens Dublin Warsaw Cairo Lima".split()
CHINESE = "一个男人在公园里吃饭。 两个孩子在踢足球。 她正在看书。 那位老人走得很慢。 今天天气很好。".split()
JAPANESE = "男の人が公園で食べています。 子供たちがサッカーをしている。 今日は天気がいいです。".split()
THAI = "ผู้ชายกำลังกินข้าวในสวน เด็กสองคนเล่นฟุตบอล เธอกำลังอ่านหนังสือ วันนี้อากาศดีมาก".split()
DRAW = random.Random(0)


def column(source, count=60):
    """Return cells: source(i) for each i, or one text repeated, or random choices from a list."""
    if callable(source):
        return [source(i) for i in range(count)]
    return [source if isinstance(source, str) else DRAW.choice(source) for _ in range(count)]


def find_error(*columns):
    try:
        read_table(Table([*zip(*columns)]), roles=SENTENCE_COLUMNS)
    except UserError as error:
        return str(error).split(": ", 1)[1]


@pytest.mark.parametrize("kind, cells", [
    *(("labels", cells) for cells in (
        ["entailment", "neutral", "contradiction"], "entailment", ["not entailment", "entailment"],
        ["ENTAILMENT", "NEUTRAL", "-"], ["strongly agree", "agree", "strongly disagree"], ["en", "de", "fr"],
        ["en-US", "de-DE"], [True, False], ["yes", "no"], ["Yes.", "No."], ["train", "dev"],
        ["main-captions"], ["蕴含", "中立", "矛盾"], ["含意", "中立"], ["บวก", "ลบ"], ["да", "нет"],
        ["😀", "😡"], ["A", "B", "C"],
        lambda i: "a note on the labels of this file" if i == 30 else "entailment")),
    *(("ids", cells) for cells in (
        lambda i: f"id{i:04}", lambda i: f" q-{i} ", lambda i: f"{i:08x}-aaaa-4bbb-8ccc-{i:012x}",
        lambda i: f"{pow(3, i + 99, 2**160):040x}", lambda i: f"https://example.org/{WORDS[i % 14]}",
        lambda i: f"{WORDS[i % 14]}.jpg", lambda i: f"/data/{WORDS[i % 14]}", lambda i: f"a{i}@example.org",
        lambda i: f"#{WORDS[i % 14]}", lambda i: f"2021-0{i % 9 + 1}-1{i % 9}", lambda i: f"1{i % 9}.1.2021",
        lambda i: f"May {i % 28 + 1}, 2021", lambda i: f"Mon, {i % 28 + 1} May 2021 10:00:0{i % 9} GMT",
        lambda i: f"{i % 12 + 1}:30 PM", lambda i: f"{i} km", lambda i: f"{i / 7:.1f} kg", lambda i: f"{i}%",
        lambda i: f"${i}.99", lambda i: f"{i}ms", lambda i: f"{i}.5e-3", lambda i: f"v1.{i}", ["__label__1"],
        ["not_entailment", "is_entailment"], ["NUM:date", "LOC:city"], ["sci.med", "rec.autos"],
        lambda i: f"id{i}" if i % 40 else "n/a")),
    *(("numbers", cells) for cells in (
        ["0", "1"], [0, 1], ["-1", "1"], lambda i: i / 3, lambda i: f"{i},100", lambda i: f"-{i}.5",
        lambda i: "-" if i == 7 else str(i))),
    ("single words", lambda i: WORDS[i % 14] + "abcde"[i // 14])])
def test_columns_that_are_not_texts(kind, cells):
    """These are rejected next to two text columns. Next to one, single words are accepted as answers."""
    other, kinds = column(cells), dict(labels="few different labels", ids="ids or codes")
    for columns, number, texts in (([ANCHORS, POSITIVES, other], 3, "1 2"),
                                   ([other, ANCHORS, POSITIVES], 1, "2 3")):
        error = find_error(*columns)
        assert error and error.startswith(f"column {number} holds {kinds.get(kind, kind)}, such as '"), error
        advice = f"choose the columns to read: --columns {texts} (or 1 2 3, if all are texts)"
        assert error.endswith(f"'; {advice}"), error
    assert (find_error(ANCHORS, other) is None) == (kind == "single words")
    assert find_error(other) is None                           # a single column is always read


@pytest.mark.parametrize("columns", [
    (ANCHORS, POSITIVES), (ANCHORS, POSITIVES, NEGATIVES), (WORDS, CITIES), (WORDS, WORDS, CITIES),
    (["cat", "dog"], ["feline", "canine"]), (CHINESE, CHINESE), (CHINESE, CHINESE, CHINESE),
    (ANCHORS, CHINESE), (JAPANESE, ANCHORS), (THAI, THAI, THAI), (lambda i: f"我有{i}只猫", CHINESE),
    (THAI, ANCHORS, POSITIVES),
    (ANCHORS, lambda i: CITIES[i % 14] + "abcde"[i // 14]),
    (ANCHORS, lambda i: [*CITIES, "the Nile", "1945", "12 km"][i % 17] + "s" * (i // 17)),
    (lambda i: WORDS[i % 14] + "s" * (i // 14), ANCHORS),
    (ANCHORS, ["Turn the light on.", "Turn it off.", "Close the door."]),
    (ANCHORS, ["How do I reset my password", "How can I delete my account"]),
    (["How are you?", "What is it?"], ANCHORS, POSITIVES),
    (ANCHORS, POSITIVES, ["Nobody eats.", "It rains."]),
    (ANCHORS, lambda i: f"{CITIES[i % 14]} {WORDS[i // 5]}"), (lambda i: f"iPhone {i} case", ANCHORS),
    (lambda i: f"{i} men eat {i} apples", lambda i: f"There are {i} men."),
    (ANCHORS, lambda i: f"see https://example.org/{i} for more"),
    (ANCHORS, lambda i: f"def f{i}(x): return x"), (ANCHORS, lambda i: "ACGT" * 60 + str(i)),
    (ANCHORS, [["He eats.", "He sits."], ["It runs.", "It is."]]),
    (["Geliyorum.", "Yarın evde olacağım.", "Çocuklar oynuyor."], ["Ben geliyorum.", "Oynuyorlar.", "Gel."]),
    ("A man eats.", "He eats."), (["A man eats."], ["He eats."], ["Nobody eats"])])
def test_columns_that_are_texts(columns):
    columns = [cells if cells in (ANCHORS, POSITIVES, NEGATIVES) else column(cells) for cells in columns]
    for count in 60, 10, 3:
        assert find_error(*(cells[:count] for cells in columns)) is None


def test_message_suggests_the_text_columns():
    numbers, ids = column(lambda i: i), column(lambda i: f"q{i}")
    assert find_error(numbers, ids, ANCHORS, POSITIVES, column(["1"])) == (
        "column 1 holds numbers, such as '0', column 2 holds ids or codes, such as 'q0', column 5 holds "
        "numbers, such as '1'; choose the columns to read: --columns 3 4 (or 1 2 3 4 5, if all are texts)")
    assert find_error(numbers, numbers).endswith("; expected texts")
    rows = [*zip(ids, ANCHORS, POSITIVES)]
    for columns, read in (["2", "3"], slice(1, 3)), (["1", "2", "3"], slice(0, 3)):
        _, table = read_table(Table(rows), roles=SENTENCE_COLUMNS, columns=columns)
        assert [tuple(cells) for _, cells in table] == [row[read] for row in rows]
    named = [dict(zip(("anchor", "positive"), row)) for row in zip(ANCHORS, column(["yes", "no"]))]
    assert len(read_table(Table(named), roles=SENTENCE_COLUMNS)[1]) == 60  # a known name decides


def test_sorted_rows_are_sampled_from_the_whole_table():
    """In a sorted table the first hundreds of rows may have the same short query."""
    queries = [f"{a} {b}" for a in WORDS for b in CITIES for _ in range(40)]
    texts = [f"{query} and what is told of it in line {i}" for i, query in enumerate(queries)]
    assert find_error(queries, texts) is None
    assert find_error(queries[:500], texts).startswith("column 1 holds few different labels, such as 'cat P")


def test_word_columns_of_cline(tmp_path):
    """Without a header, word positions are accepted in columns 4 and 5; labels in column 3 are rejected."""
    rows = [f"{a},{b},{c}".replace('"', "") for a, b, c in zip(WORDS, CITIES, WORDS)]
    path, parser = tmp_path / "a.csv", cline.make_parser()
    args = parser.parse_args(["--data", str(path), "--batch-size", "2"])
    path.write_text("".join(f"The {row} of it now.,The new {row},The old {row} is,0:3:1,0:3:4 4:7:5\n"
                            for row in WORDS))
    assert len(cline.load_data(path, args)[0]) == len(rows)
    path.write_text("".join(f"The {row} of it now.,The new {row} is,entailment\n" for row in WORDS))
    with pytest.raises(UserError, match="column 3 holds few different labels, such as 'entailment'; .* 1 2 "):
        cline.load_data(path, args)


def test_readers_of_other_files_reject_labels_and_ids(tmp_path):
    """Readers of sentences reject a column of labels, those of labelled texts and scored pairs a column of
    ids. Columns that a flag names are accepted."""
    path, flags = tmp_path / "a.tsv", ["--data", str(tmp_path / "a.tsv"), "--batch-size", "2"]

    def write(*columns):
        path.write_text("".join("\t".join(row) + "\n" for row in zip(*columns)))

    def read_sentences(*more):
        args = selfguided.make_parser().parse_args([*flags, *more])
        return [text for _, (text,) in selfguided.load_data(path, args)]

    def find_texts(text_columns=None):
        return find_columns(path, SimpleNamespace(text_columns=text_columns, label_column=None))[1]

    ids, labels, scores = column(lambda i: f"q{i}"), column(["good", "bad"]), column(lambda i: str(i % 6))
    for head in [], ["sentence", "label"]:
        write([*head[:1], *ANCHORS], [*head[1:], *labels])
        with pytest.raises(UserError, match=r"column 2 holds few .*; .*: --columns 1 \(or 1 2, "):
            read_sentences()
        assert read_sentences("--columns", "1") == ANCHORS
    assert read_sentences("--columns", "sentence") == ANCHORS
    assert len(read_sentences("--columns", "1", "2")) == 120
    write(ANCHORS, POSITIVES, scores)
    assert len(read_sentences()) == 120 and len(load_sts(path)) == 60
    assert find_texts() == [0, 1]
    write(ids, ANCHORS, labels)
    with pytest.raises(UserError, match="column 1 holds ids or codes, such as 'q0'; "):
        find_texts()
    assert find_texts(["column 1", "column 2"]) == [0, 1]
    write(column(["food", "price"]), ANCHORS, labels)          # aspects count as texts
    assert find_texts() == [0, 1]
    write(ids, ANCHORS, scores)
    with pytest.raises(UserError, match="column 1 holds ids or codes, such as 'q0'; "):
        load_sts(path)
    write(column(WORDS), ANCHORS, scores)
    assert len(load_sts(path)) == 60
