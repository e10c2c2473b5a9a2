"""Training code that does not belong to one paper. Scripts import names from the modules.

This folder is the core, which every run needs:

cli         the command line: checked flags, one-line errors, printed lines, signals
run         a training run: progress, resume, signals, metrics
ranks       processes of a run: torchrun's environment variables, joining the process group
output_dir  the folder --out: checks, atomic writes; checksums of inputs
state       state.pt, from which --resume continues
loop        batch order, learning-rate schedules, gradient all-reduce
precision   half precision in losses, and in the rows that ranks exchange
progress    progress bars, log lines, remaining time
trackers    --log: TensorBoard and Weights & Biases
recipes     presets of several flags
pretrained  opens model folders and hub names without running their code
files       opens and reads files of the user
tables      rows of text from data files or memory; errors name the row
rows        the file formats: .txt .csv .tsv .json .jsonl .parquet
columns     column names and roles: anchor, positive, hard negative
in_memory   rows that a program passes: lists, columns, arrays, DataFrames, Datasets
parquet     rows of .parquet files

text/       sentences: tokens, encoders, checkpoints, masked LM, classifiers, evaluation
images/     images: data sets, file formats, loading, augmentation, encoders, evaluation
extras/     features that a flag or a command adds: views and losses of other papers, probes, mining, plots
"""
