"""Mistakes in the data and the flags of one paper: one line says what is wrong. tests/contract has the
mistakes that can be made with every script."""
from pathlib import Path

import pytest

from running import rejects

ENTITIES = "text,entity,negative_entity\nA cat,Cat,Dog|Sun\nA dog,Dog,Cat|Sun\nThe sun,Sun,Cat|Dog\n"
GOOD_FILES = {
    "entities.csv": ENTITIES, "texts.txt": "A dog.\nA cat.\n",
    "documents.txt": "A man eats.\nHe likes it.\n\nA dog runs.\nIt is fast.\n",
    "labels.tsv": "sentence\tlabel\nI ran.\tmotion\nI sat.\trest\nHe ran.\tmotion\nHe sat.\trest\n"}
GOOD_FLAGS = {
    "vascl": "--data texts.txt --neighbours 1", "dclr": "--data texts.txt --guide bert",
    "ease": "--data entities.csv", "tacl": "--data documents.txt", "childtuning": "--data labels.tsv"}
# script and flags, files that are not those of GOOD_FILES, message
MISTAKES = [
    ("ease", {"entities.csv": "sent0,sent1\nA,b\n"}, "entities.csv: columns sent0, sent1; .* text .*"),
    ("ease", {"entities.csv": f"{ENTITIES}Pigs,Pig,Pig\n"}, r"entities.csv line 5: 0 hard .* \(1\)"),
    ("tacl --model bert --teacher other", {}, "--teacher other: its vocabulary is not that of bert; .*"),
    ("childtuning", {"labels.tsv": "sentence\tlabel\nA\tx\nB\tx\n"}, "labels.tsv: every label is 'x'; .*"),
    ("childtuning --task regression", {"labels.tsv": "A\t1.5\nB\tx\n"}, "labels.tsv line 2: label 'x', .*"),
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
