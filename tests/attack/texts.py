"""Damaged text files, and paths that are not regular files, for every flag that reads text."""
import collections
import csv
import gzip
import importlib.util
import io
import itertools
import json
import os
import random
import shutil
import socket
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cases import DATA, NLI, Case, all_of, change_file, write_file

case = partial(Case, "texts")
ROWS = [[cell.replace('"', "") for cell in row] for row in NLI[:12]]
HEADERS = {"simcse": ["sent0", "sent1", "hard_neg"], "vascl": ["sentence1", "sentence2"],
           "dclr": ["sentence"],
           "selfguided": ["text"], "cline": ["text"], "ease": ["text", "entity"],
           "childtuning": ["sentence", "label"]}
NOISE = random.Random(0).randbytes(5000)


def table_bytes(kind, script):
    """Return the bytes of a good file of this format (kind) for a script."""
    header = HEADERS[script]
    rows = [[row[0], "ab"[i % 2]] if script == "childtuning" else row[: len(header)] for i,
            row in enumerate(ROWS)]
    if kind.startswith("json"):
        texts = [json.dumps(dict(zip(header, row))) for row in rows]
        return f"[{', '.join(texts)}]\n".encode() if kind == "json" else ("\n".join(texts) + "\n").encode()
    quote, comma = ('"{}"'.format, ",") if kind == "csv" else (str, "\t")
    rows = rows if kind == "txt" else [header, *rows]
    return "".join(comma.join(map(quote, row)) + "\n" for row in rows).encode()


def flip_bits(data):
    """Return the data with nine random bits flipped."""
    data, draw = bytearray(data), random.Random(len(data))
    for place in draw.choices(range(len(data)), k=9):
        data[place] ^= 1 << draw.randrange(8)
    return bytes(data)


def insert_in_middle(data, new, old=b" "):
    """Return the data with the first `old` after its middle replaced by `new`."""
    start = data.index(old, len(data) // 2)
    return data[:start] + new + data[start + len(old) :]


REFUSED = {                                                    # whatever the file format
    "latin-1": lambda data: insert_in_middle(data, b" caf\xe9 "), "empty": lambda data: b"",
    "blank": lambda data: b"\n" * 9,
    "utf-16": lambda data: data.decode().encode("utf-16"), "noise": lambda data: NOISE,
    "utf-16 without a mark": lambda data: data.decode().encode("utf-16-le"),
    "one line": lambda data: data[: data.index(b"\n") + 1][:200]}
EITHER = {
    "truncated": lambda data: data[: len(data) // 2 + 7], "flipped": flip_bits,
    "nul": lambda data: insert_in_middle(data, b" \0 "), "cr": lambda data: data.replace(b"\n", b"\r"),
    "huge cell": lambda data: insert_in_middle(data, b"x" * 10**6),
    "ragged": lambda data: insert_in_middle(data, b" ",
                                            next(comma for comma in (b'","', b"\t", b" ") if comma in data)),
    "short row": lambda data: data + data.split(b" ")[0] + b"\n", "twice": lambda data: data + data,
    "odd spaces": lambda data: insert_in_middle(data, " \x85 \u2028 \x0c \x1b[2J ".encode()),
    "separators": lambda data: insert_in_middle(data, b"," * 10**5 + b"\t" * 10**5)}
SAME = {"crlf": lambda data: data.replace(b"\n", b"\r\n"), "a mark": lambda data: b"\xef\xbb\xbf" + data}
JSON = ['"\\ud800 eats"', "NaN", "1e999", "9" * 5000, "[" * 10**5 + "]" * 10**5, '["a", ["b"]]', '{"a": {}}',
        "null",
        '"a\\u0000b"', '"a\\nb\\r\\u2028"', '"\\u001b[2J"', '"\\x"', '"a']
CSV = ['"A man eats\nA dog runs\n', 'A "man" eats\nb\nc\n', '"A man" eats\nb\nc\n', "a;b\nc;d\ne;f\n",
       "sentence,sentence\na b,c d\ne f,g h\n", ",sentence1,sentence2\n0,a b,c d\n1,e f,g h\n",
       " , \na b,c d\n",
       'text\n"a man\neats"\n"a dog\r\nruns"\n"the sun"\n"rain"\n',
       "sentence1,sentence2\na b,c d\n,\n e f, \n"]


def data_cases():
    scripts, kinds = itertools.cycle(HEADERS), itertools.cycle(["csv", "txt", "json", "tsv", "jsonl"])
    for (name, damage), _ in itertools.product((REFUSED | EITHER | SAME).items(), range(3)):
        kind = next(kinds)
        script = next(script for script in scripts if kind != "txt" or script not in ("ease", "childtuning"))
        good, more = table_bytes(kind, script), dict(expected="one line" if name in REFUSED else "either")
        if name in SAME:
            more = dict(expected="accepted", same_as=[f"--data=good.{kind}", "--out", "like"])
        make = all_of(write_file(f"bad.{kind}", damage(good)), write_file(f"good.{kind}", good))
        yield case(f"{kind}: {name}", script, [f"--data=bad.{kind}"], make, **more)
    good = "\n\n".join("\n".join(row) for row in ROWS).encode() + b"\n"
    for name, damage in (REFUSED | EITHER | SAME).items():
        yield case(f"documents: {name}", "tacl", ["--data=bad"], write_file("bad", damage(good)))
    for value, (kind, start, comma, end) in zip(JSON, itertools.cycle([
            ("json", "[", ",", "]"), ("jsonl", "", "\n", "")])):
        script = next(script for script in scripts if script in ("dclr", "simcse", "vascl", "selfguided"))
        rows = [json.dumps({"sentence": row[0]}) for row in ROWS] + [f'{{"sentence": {value}}}']
        text = start + comma.join(rows) + end
        yield case(f"{kind}: {value[:12]}", script, [f"--data=bad.{kind}"], write_file(f"bad.{kind}", text))
    for text in ('{"a": 1}', "3", '["a b", "c d", "e f"]', '[{"text": "a", "text": "b"}]',
                 '[["a"], {"text": "b"}]'):
        yield case(f"json: {text}", "dclr", ["--data=bad.json"], write_file("bad.json", text))
    for cells in ('["a b"]', "[]", '[["a b"]]', "[1]", '[""]', '["a b", "c d"]', '"a b"'):
        rows = [json.dumps({"query": row[0], "pos": [row[1]], "neg": [row[2]]}) for row in ROWS]
        rows.append(f'{{"query": "a b", "pos": ["c d"], "neg": {cells}}}')
        make = write_file("bad.jsonl", "\n".join(rows))
        yield case(f"jsonl: negatives {cells}", "simcse", ["--data=bad.jsonl"], make)
    for text in CSV:
        yield case(f"csv: {text!r:.30}", next(scripts), ["--data=bad.csv"], write_file("bad.csv", text))
    good = gzip.compress(table_bytes("csv", "simcse"), mtime=0)
    for name, data in {"truncated": good[:-9], "flipped": flip_bits(good), "text": b"A b.\nC d.\n",
                       "empty": b"",
                       "empty within": gzip.compress(b"", mtime=0),
                       "a line of 30 MB": gzip.compress(bytes(30 * 2**20), 1, mtime=0),
                       "packed twice": gzip.compress(good, mtime=0)}.items():
        yield case(f"csv.gz: {name}", "simcse", ["--data=bad.csv.gz"], write_file("bad.csv.gz", data),
                   "one line")
    make = all_of(write_file("a.csv.gz", good), write_file("good.csv", gzip.decompress(good)))
    yield case("csv.gz", "simcse", ["--data=a.csv.gz"], make, "accepted",
               same_as=["--data=good.csv", "--out", "like"])
    for data in (NOISE, b"", b"PAR1" * 9) if importlib.util.find_spec("pyarrow") else ():
        yield case(f"parquet: {data!r:.10}", "vascl", ["--data=a.parquet"], write_file("a.parquet", data),
                   "one line")


SCORES = ["nan", "inf", "1e400", "high", "", "9" * 5000, "-3", "0x10", "٣"]
LABELS = ["nan", "", "9" * 5000, "1" + "0" * 30, "a\x0b", "a" * 5000, "inf", "1e400", "only"]
VECTORS = b"3 2\nENTITY/Sun 1 2\nman 0.5 1\nENTITY/Two_waiters 3 4\n"


def other_flag_cases():
    scripts = itertools.cycle(["simcse", "selfguided", "ease", "vascl", "dclr"])
    for score, flag in zip(SCORES, itertools.cycle(["--dev", "--test"])):
        text = "".join(f"{a}\t{b}\t{score if i % 2 else 3}\n" for i, (a, b, _) in enumerate(ROWS))
        yield case(f"{flag}: {score[:9]}", next(scripts), [flag, "a.tsv"], write_file("a.tsv", text))
    for label, flag in zip(LABELS, itertools.cycle(["--data", "--transfer", "--cluster"])):
        script = "childtuning" if flag == "--data" else next(scripts)
        text = "".join(f"{row[0]}\t{'ab'[i % 2] if i % 3 and label != 'only' else label}\n" for i,
                       row in enumerate(ROWS))
        yield case(f"{flag}: label {label!r:.9}", script, [flag, "a.tsv"], write_file("a.tsv", text))
    for name, bad in {"a lying count": b"1000000000000 300\n", "wide": b"1 " + b"9" * 20 + b"\nENTITY/A 1\n",
                      "empty": b"",
                      "nan": VECTORS.replace(b"3 4", b"nan inf"), "ragged": VECTORS.replace(b"3 4", b"3 4 5"),
                      "noise": NOISE, "latin-1": VECTORS.replace(b"man", b"m\xe9n"),
                      "truncated": VECTORS[:-3],
                      "words": VECTORS.replace(b"3 4", b"three four")}.items():
        yield case(f"--entity-vectors: {name}", "ease", ["--entity-vectors", "v.txt"],
                   write_file("v.txt", bad))
    for name in ("truncated", "flipped", "noise"):
        own = lambda here: shutil.copytree(DATA / "wordnet", here / "wordnet")
        make = all_of(own, change_file("wordnet/data.noun", (REFUSED | EITHER)[name]))
        yield case(f"--wordnet: {name}", "cline", ["--wordnet", "wordnet"], make)
    kinds = itertools.cycle(BAD_FILES.items())
    for (script, *flags), _ in itertools.product(TEXT_FLAGS, range(2)):
        path, make = next(kinds)
        yield case(f"{flags[0]}: {path!r:.20}", script, [*flags, path], make, "one line",
                   enforce_permissions=True,
                   stdin=b"A man eats.\nA dog runs.\n")


def make_socket(here):
    with socket.socket(socket.AF_UNIX) as ear:
        ear.bind(str(here / "socket.txt"))


BYTES = os.fsdecode(b"a\xff.txt")
BAD_FILES = {
    "pipe.txt": lambda here: os.mkfifo(here / "pipe.txt"),
    "folder.txt": lambda here: os.mkdir(here / "folder.txt"),
    "zero.txt": lambda here: (here / "zero.txt").symlink_to("/dev/zero"), "none.txt": None,
    "/dev/stdin": None,
    "dangling.txt": lambda here: (here / "dangling.txt").symlink_to("none"), "socket.txt": make_socket,
    "itself.txt": lambda here: (here / "itself.txt").symlink_to("itself.txt"),
    "a\nb.txt": write_file("a\nb.txt", b"\xff"),
    "bare.txt": all_of(write_file("bare.txt", "A man eats.\n"), lambda here: (here / "bare.txt").chmod(0)),
    BYTES: write_file(BYTES, b"\xff"), "\x1b[2Ja.txt": None, "": None, "a" * 5000 + ".txt": None}
TEXT_FLAGS = [*((script, "--data") for script in (*HEADERS, "tacl")), ("simcse", "--dev"),
              ("vascl", "--test"),
              ("dclr", "--transfer"), ("selfguided", "--cluster"), ("ease", "--entity-vectors"),
              ("tacl", "--dev"),
              ("cline", "--wordnet"), ("childtuning", "--dev"),
              ("childtuning", "--contrast-set", "topics.tsv"),
              ("childtuning", "--dev=topics.tsv", "--ood"),
              ("simcse", "--evaluate", "--test")]


# ── data in memory, for main(data=...) ──


def few_columns():
    """Return {name: cells} of the columns of few.csv."""
    head, *rows = csv.reader(open("few.csv", newline="", encoding="utf-8"))
    return dict(zip(head, map(list, zip(*rows))))


def few_rows():
    return [*zip(*few_columns().values())]


class Frame:
    """Stand-in for a pandas DataFrame: iterating over it yields its column names."""
    columns = property(lambda self: [*self.parts])

    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return len(next(iter(self.parts.values())))

    def __iter__(self):
        return iter(self.parts)

    def __getitem__(self, name):
        return self.parts[name]


class Dataset(Frame):
    """Stand-in for a Dataset of the package datasets: iterating over it yields rows as dicts."""
    features = column_names = Frame.columns

    def __iter__(self):
        return (dict(zip(self.parts, row)) for row in zip(*self.parts.values()))


class Stream(Dataset):
    """Stand-in for an IterableDataset, which has no length."""
    __len__ = None


TRAINABLE = {                                                  # each gives the same weights as few.csv
    "rows": few_rows, "tuple": lambda: tuple(map(list, few_rows())), "columns": few_columns,
    "columns of arrays": lambda: {name: np.array(cells) for name, cells in few_columns().items()},
    "reordered columns": lambda: dict(reversed(few_columns().items())),
    "a frame": lambda: Frame(few_columns()),
    "a Dataset": lambda: Dataset(few_columns()), "an array": lambda: np.array(few_rows()),
    "an array of objects": lambda: np.array(few_rows(), object), "path": lambda: "few.csv",
    "Path": lambda: Path("few.csv"), "dicts": lambda: [*Dataset(few_columns())],
    "deque": lambda: collections.deque(few_rows()),
    "a subset": lambda: torch.utils.data.Subset(few_rows(), range(len(few_rows()))),
    "a frame without names": lambda: Frame(dict(enumerate(few_columns().values())))}
UNSUPPORTED = {
    "a generator": lambda: (row for row in few_rows()), "zip": lambda: zip(*few_columns().values()),
    "a file": lambda: open("few.csv"), "StringIO": lambda: io.StringIO("a b,c d\n"),
    "csv.reader": lambda: csv.reader(open("few.csv")), "a set": lambda: {*few_rows()},
    "keys": lambda: few_columns().keys(), "bytes": lambda: b"few.csv", "a number": lambda: 7,
    "a class": lambda: list,
    "a function": lambda: few_columns, "True": lambda: True, "no rows": list, "no columns": dict,
    "a stream": lambda: Stream(few_columns()), "a loader": lambda: torch.utils.data.DataLoader([1]),
    "tables": lambda: {"train": Frame(few_columns()), "test": Frame(few_columns())},
    "columns of other lengths": lambda: few_columns() | {"sent0": ["a b"]},
    "a text for a column": lambda: {"sent0": "a b"}, "a dict for a column": lambda: {"sent0": {0: "a b"}},
    "a generator for a column": lambda: {"sent0": iter(["a b"])},
    "three dimensions": lambda: np.array([few_rows()]), "no dimension": lambda: np.array("a b"),
    "numbers": lambda: np.ones((9, 3)), "bytes in an array": lambda: np.char.encode(few_rows(), "utf-8"),
    "records": lambda: np.rec.fromrecords(few_rows()), "a tensor": lambda: torch.ones(9, 3),
    "range": lambda: range(9),
    "None": lambda: [*few_rows(), None], "None within": lambda: [*few_rows(), ("a b", None, "c d")],
    "nan": lambda: few_columns() | {"sent0": [float("nan")] * len(few_rows())},
    "bytes within": lambda: [b"a b", b"c d"] * 9, "sets": lambda: [{"a b", "c d"}] * 9,
    "frames": lambda: [Frame(few_columns())] * 9, "arrays of numbers": lambda: [np.ones(3)] * 9,
    "a row too short": lambda: [*few_rows(), ("a b", "c d")], "numbers of tokens": lambda: [[1, 2, 3]] * 9,
    "a name twice": lambda: [dict.fromkeys(["sent0", 0], "a b"), {0: "a", "0": "b"}] * 9,
    "no such path": lambda: "none.csv", "an empty path": lambda: "", "NUL": lambda: "a\0b",
    "a text": lambda: "A man eats.", "an endless text": lambda: "a" * 10**5,
    "labels": lambda: [(*row[:2], "ab"[i % 2]) for i, row in enumerate(few_rows())]}


def make_data(name):
    """Return the data of this name. Lambdas cannot be pickled for another process, so cases pass names."""
    return (TRAINABLE | UNSUPPORTED)[name]()


def memory_cases():
    """Yield cases that pass data in memory: main(data=...)."""
    for name in TRAINABLE:
        yield case(f"data: {name}", "simcse", ["--model", "bert"], data=partial(make_data, name),
                   expected="accepted", same_as=["--model", "bert", "--out", "like"])
    for name in UNSUPPORTED:
        yield case(f"data: {name}", "simcse", [], data=partial(make_data, name), expected="one line")
    yield case("data: and --data", "simcse", ["--data", "few.csv"], data=partial(make_data, "rows"),
               expected="one line")


# ── files without a header ──

NOT_TEXTS = {"a label": "entailment neutral".split(), "a label of words": ["not entailment", "entailment"],
             "an id": [f"id{i:04}" for i in range(12)], "a date": [f"2021-05-{i + 10}" for i in range(12)],
             "a link": [f"https://example.org/{i}" for i in range(12)], "a language": ["en", "de"],
             "a number with a unit": [f"{i} km" for i in range(12)],
             "a hash": [f"{3**i:016x}a" for i in range(12)],
             "a file": [f"{i}.jpg" for i in range(12)], "a score": [f"{i / 3:.2f}" for i in range(12)],
             "a word": "cat dog river stone music friend garden winter bread house door sun".split()}
AS_TEXTS = {"Chinese": "今天天气很好。 他在吃饭。 她正在看书。 我们去湖边。".split(),
            "sentences again": ["He eats.", "It runs."],
            "answers": "Paris;the Nile;1945;a whale;in Rome;Oslo;two;never;the sun;Lima;no one".split(";")}


def column_cases():
    kinds, commas = itertools.cycle(["csv", "tsv", "json"]), {"csv": ",", "tsv": "\t"}
    for name, cells in (NOT_TEXTS | AS_TEXTS).items():
        kind, last = next(kinds), name != "an id"
        rows = [[*row[:2], cells[i % len(cells)]] if last else [cells[i % len(cells)], *row[:2]]
                for i, row in enumerate(ROWS)]
        text = json.dumps(rows) if kind == "json" else "".join(
            commas[kind].join(cell.replace(",", "") for cell in row) + "\n" for row in rows)
        columns, make = (["1", "2"] if last else ["2", "3"]), write_file(f"bad.{kind}", text)
        yield case(f"no names: {name}", "simcse", [f"--data=bad.{kind}"], make,
                   "one line" if name in NOT_TEXTS else "accepted")
        flags = [f"--data=bad.{kind}", "--columns", *columns]
        yield case(f"no names: {name}, --columns", "simcse", flags, make, "accepted")
    text = "".join(f"{row[0]}\t{'ab'[i % 2]}\n" for i, row in enumerate(ROWS))
    yield case("no names: a label", "selfguided", ["--data=bad.tsv"], write_file("bad.tsv", text), "one line")
    yield case("no names: a label, --columns", "selfguided", ["--data=bad.tsv", "--columns", "1"],
               write_file("bad.tsv", text), "accepted")
    text = "".join(f"id{i}\t{row[0]}\t{'ab'[i % 2]}\n" for i, row in enumerate(ROWS))
    yield case("no names: an id", "childtuning", ["--data=bad.tsv"], write_file("bad.tsv", text), "one line")
    flags = ["--transfer", "bad.tsv"]
    yield case("no names: an id, labelled", "simcse", flags, write_file("bad.tsv", text), "one line")
    text = "".join(f"id{i}\t{row[0]}\t{i % 6}\n" for i, row in enumerate(ROWS))
    yield case("no names: an id, scored", "simcse", ["--dev", "bad.tsv"], write_file("bad.tsv", text),
               "one line")


# ── long cells ──


def long_rows(kind, count=24):
    """Return the content of a file of this format with `count` texts of one MB each."""
    text = "a man eats " * (2**20 // 11)
    return {"csv": lambda: "sent0\n" + f'"{text}"\n' * count, "txt": lambda: f"{text}\n" * count,
            "jsonl": lambda: (json.dumps({"sent0": text}) + "\n") * count}[kind]()


def write_parquet(name, columns, **flags):
    """Return a `make` that writes a Parquet file.

    columns  {name: cells}, or {name: (distinct texts, number of rows)}
    flags    arguments of pyarrow's write_table
    """
    def make(here):
        import pyarrow
        from pyarrow.parquet import write_table

        arrays = {}
        for column, cells in columns.items():
            if isinstance(cells, tuple):
                numbers = pyarrow.array(np.arange(cells[1]) % len(cells[0]), pyarrow.int32())
                cells = pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(cells[0]))
            arrays[column] = cells
        write_table(pyarrow.table(arrays), here / name, store_schema=False, compression="zstd", **flags)
    return make


def length_cases():
    """Yield cases with texts of a MB or more, and with Parquet files of various layouts."""
    for kind in "csv", "txt", "jsonl":
        yield case(f"{kind}: 24 cells of a MB", "simcse", [f"--data=long.{kind}"],
                   lambda here, kind=kind: write_file(f"long.{kind}", long_rows(kind))(here), "accepted")
    if not importlib.util.find_spec("pyarrow"):
        return
    many, long = ["a man eats " * (2**20 // 11) + str(i) for i in range(3)], "x" * 2**27
    for name, columns, more in [
            ("3,000 of a MB", {"sent0": (many, 3000), "sent1": (["He eats.", "It runs.", ""], 3000)}, {}),
            ("one of 128 MB", {"sent0": ["a b"] * 50 + [long] + ["c d"] * 50}, {}),
            ("some of 128 MB", {"sent0": ["a b"] * 50 + [long] * 9}, dict(use_dictionary=False)),
            ("the same 9 times", {"sent0": ["a b"] * 50 + [long] * 9}, {}),
            ("lists of 9 GB", {"query": ["a b"] * 9, "pos": [many[:1] * 1000] * 9}, {}),
            ("null", {"sent0": ["a b"] * 50 + [None]}, {}), ("bytes", {"sent0": [b"a b"] * 50}, {}),
            ("numbers", {"sent0": [*range(50)], "sent1": [*range(50)]}, {}),
            ("no rows", {"sent0": [""] * 0}, {})]:
        make = write_parquet("a.parquet", columns, **more)
        yield case(f"parquet: {name}", "simcse", ["--data=a.parquet"], make,
                   "either" if name == "numbers" else "one line")
    texts = {name: [row[i] for row in ROWS] for i, name in enumerate(HEADERS["simcse"])}
    for name, more in {"plain": dict(use_dictionary=False), "small pages": dict(data_page_size=10),
                       "row groups": dict(row_group_size=5),
                       "version 2": dict(data_page_version="2.0")}.items():
        make = all_of(write_parquet("a.parquet", texts, **more),
                      write_file("good.csv", table_bytes("csv", "simcse")))
        yield case(f"parquet: {name}", "simcse", ["--data=a.parquet"], make, "accepted",
                   same_as=["--data=good.csv", "--out", "like"])


def cases():
    yield from data_cases()
    yield from other_flag_cases()
    yield from memory_cases()
    yield from column_cases()
    yield from length_cases()
