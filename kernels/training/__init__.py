"""Training code that does not belong to one paper. Scripts import names from the modules.

This folder is the core, which every run needs. A module imports only from modules above it:

errors      errors of the user, printed lines, @command
progress    progress bars, remaining time
data        tables of texts, from files or memory; columns and their roles
flags       the command line: shared flags, presets of several flags, --resume
ranks       processes of a run: torchrun's variables, joining the process group
out         the folder --out: atomic writes, model cards; checksums of inputs
trackers    --log: TensorBoard and Weights & Biases
loop        batch order, learning-rate schedules, AdamW without bias correction, gradient all-reduce
precision   half precision in losses, and in the rows that ranks exchange
run         a training run: progress, resume, signals, metrics
pretrained  opens model folders and hub names without running their code

text/       sentences: tokens, encoders, checkpoints, masked LM, evaluation
images/     images: data sets, file formats, loading, augmentation, encoders, evaluation
papers/     parts of single papers; each file is named after the script that reads it

Tools: mine (hard negatives), plot (runs), probes (--transfer, --cluster), equal_texts (--ignore-equal)
"""
