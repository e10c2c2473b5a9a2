"""Code for training, from which the scripts import.

Scripts for texts and scripts for images share these modules. A module imports only from modules above it:

errors      user errors, printed messages, and @command, which prints an error without a traceback
progress    progress bars and the remaining time
data        tables of texts from files, and the roles of their columns
flags       the command line: flags that scripts share, --recipe (preset values of flags), --resume
ranks       the processes (ranks) of a run: torchrun's environment variables, and joining the process group
out         the output folder --out: atomic writes, and checksums of the inputs
loop        batch order, learning-rate schedules, parameter groups of optimizers, gradient all-reduce
precision   the float16 parts of --precision bf16: losses, and embeddings that ranks send to each other
run         a training run from start to end: steps, metrics, checkpoints, --resume, stopping on Ctrl-C
pretrained  opens a pretrained model, from a folder or the hub, without running its code

text/       sentences: tokens, encoders, checkpoints, masked language models, evaluation
images/     images: data sets, file formats, loading, augmentation, encoders, evaluation
papers/     modules for one paper each; a file name begins with the name of the paper's script

plot        python -m kernels.training.plot: draws the loss and the score of runs
"""
