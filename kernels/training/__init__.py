"""Everything around a paper that is not the paper. A script imports from the modules by name.

This folder has what every run needs, whatever it trains:

cli         the command line: flags that are checked, one line for each error, what is printed
run         a run: progress, resume, signals, metrics
ranks       its processes: torchrun's variables, and how they meet
output_dir  its --out: checked, locked, its code kept, files replaced whole; checksums of its inputs
state       its state.pt, which --resume continues from
loop        the order of batches, learning rates, gradients summed over ranks
progress    bars and log lines, the time that is left
trackers    --log tensorboard or wandb
recipes     flags that belong together, under one name
pretrained  model folders and hub names, opened without running their code
files       a user's files: text in lines, none changes unnoticed
tables      rows of text from data files or memory; every fault with its place
rows        the rows of each format: .txt .csv .tsv .json .jsonl .parquet
columns     column names: which is anchor, positive, hard negative
looks       columns without names that hold no texts: numbers, ids, labels, single words
in_memory   rows that a program hands over: lists, columns, arrays, DataFrames, Datasets
parquet     rows of .parquet files

text/       sentences: tokens, encoders, checkpoints, masked LM, classifiers, evaluation
images/     images: data sets, file formats, loading, augmentation, encoders, evaluation
extras/     what only a flag or a command adds: views and losses of other papers, probes, mining, plots
"""
