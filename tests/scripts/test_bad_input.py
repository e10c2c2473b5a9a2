"""Mistakes in the data and the flags of one paper: one line says what is wrong. tests/contract has the
mistakes that can be made with every script."""
from pathlib import Path

import pytest

from running import DATA, rejects

ENTITIES = "text,entity,negative_entity\nA cat,Cat,Dog|Sun\nA dog,Dog,Cat|Sun\nThe sun,Sun,Cat|Dog\n"
VECTORS = "ENTITY/Cat\t1 2 3\nENTITY/Dog\t4 5 6\n"
GOOD_FILES = {
    "entities.csv": ENTITIES, "triples.csv": "A dog.,A hound.,A cat.\n" * 4, "texts.txt": "A dog.\nA cat.\n",
    "documents.txt": "A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n", "vectors": VECTORS,
    "labels.tsv": "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"}
GOOD_FLAGS = {
    "selfguided": "--data texts.txt", "vascl": "--data texts.txt --neighbours 1",
    "dclr": "--data texts.txt --guide bert", "ease": "--data entities.csv", "tacl": "--data documents.txt",
    "cline": f"--data triples.csv --tagger lexicon --wordnet {DATA}/wordnet",
    "childtuning": "--data labels.tsv"}
# script and flags, files that are not those of GOOD_FILES, message
MISTAKES = [
    ("selfguided --batch-size 1", {}, r"texts.txt: 2 sentences, .*--batch-size \(1\).* 2"),
    ("selfguided --data a.tsv", {"a.tsv": "1\t2\n3\t4.5\n"}, "a.tsv: 0 sentences, .*"),
    ("selfguided --layers 0 3", {}, "--layers 3: scratch has layers 0, the word embeddings, to 2"),
    ("vascl --neighbours 2", {}, "--neighbours 2: expected fewer than --batch-size, which is 2"),
    ("vascl --radius 15 --relative-radius 0.2", {}, "--radius 15 --relative-radius 0.2: expected one .*"),
    ("vascl", {"texts.txt": "A\nA\nA\n"}, "texts.txt: 1 distinct rows, expected at least 2 .*"),
    ("vascl --data triples.csv", {}, "triples.csv line 1: 3 columns, expected 1 .* or 2 .*"),
    ("dclr --guide scratch", {}, "--guide scratch: a new model is untrained; name a folder or .*"),
    ("dclr --phi 1.2", {}, r"--phi 1\.2: expected a cosine, from -1 to 1"),
    ("dclr --data triples.csv", {}, r"triples.csv line 1: 3 columns, expected 1 \(sentence\); .*"),
    ("ease", {"entities.csv": "sent0,sent1\nA,b\n"}, "entities.csv: columns sent0, sent1; .* text .*"),
    ("ease", {"entities.csv": f"{ENTITIES}Pigs,Pig,Pig\n"}, r"entities.csv line 5: 0 hard .* \(1\)"),
    ("ease --hard-negatives 1", {"entities.csv": "text,entity\nA,a\nB,b\n"}, ".* 1: entities.csv has no .*"),
    ("ease", {"entities.csv": "text,entity,entity_type,page\nA,a,t,p\nB,b,t,p\n"},
     "entities.csv line 2: 0 entities of type 't' that are not on its page, .*"),
    ("ease --entity-vectors vectors", {"vectors": f"{VECTORS}the 4 5\n"}, "vectors line 3: 2 numbers, .*"),
    ("ease --entity-vectors vectors", {"vectors": "ENTITY/Sun\t1 x\n"}, "vectors line 1: could not .*"),
    ("ease --entity-vectors vectors --entity-map none", {}, "--entity-map none: vectors has .* 3 .* 128; .*"),
    ("cline --held-out-rows 3", {}, "triples.csv: 4 rows have a replaced word in both copies, expected .*"),
    ("cline --data a.csv", {"a.csv": "A b,c\n"}, r"a.csv line 1: 2 columns, expected 1 \(text\), 3 .*"),
    ("cline", {"triples.csv": "A,b,c,0:2:2,0:1:4\n"}, "triples.csv line 1: '0:2:2', expected start:end.*"),
    ("cline --save-triples new.csv", {}, "--save-triples new.csv: triples.csv already holds triples; .*"),
    ("cline --data texts.txt --wordnet=", {}, "--wordnet: empty; .*"),
    ("tacl", {"documents.txt": "A.\n\nB.\n\nC.\nD.\n"}, "documents.txt: 1 documents of two or more .*"),
    ("tacl --max-length 4", {}, r"--max-length 4: expected at least 5: \[CLS\], two \[SEP\], .*"),
    ("tacl --model bert --teacher other", {}, "--teacher other: its vocabulary is not that of bert; .*"),
    ("childtuning", {"labels.tsv": "sentence\tlabel\nA\tx\nB\tx\n"}, "labels.tsv: every label is 'x'; .*"),
    ("childtuning --task regression", {"labels.tsv": "A\t1.5\nB\tx\n"}, "labels.tsv line 2: label 'x', .*"),
    ("childtuning --reserve-p 0", {}, r"--reserve-p 0\.0: expected a number above 0 and at most 1"),
    ("childtuning --child-filter h.0", {}, r"--child-filter h\.0: found in no parameter name of scratch; .*")]


@pytest.mark.parametrize("command, files, message", MISTAKES)
def test_bad_input(command, files, message, cwd, bert, folder_of, capfd):
    for name, content in (GOOD_FILES | files).items():
        Path(name).write_text(content)
    Path("bert").symlink_to(bert)
    Path("other").symlink_to(folder_of("Bert"))
    capfd.readouterr()                                         # progress of saving the model
    script, *flags = command.split()
    words = "--model scratch --batch-size 2 --steps 1".split()
    rejects(script, capfd, message, *words, *GOOD_FLAGS[script].split(), *flags)
