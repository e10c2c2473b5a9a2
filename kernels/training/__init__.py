"""Everything around a paper that is not the paper; a script imports from the modules by name.

command    flags that are checked, one line for every fault, what is printed
run        a run: progress, resume, signals, metrics
ranks      its processes: torchrun's variables, and how they meet
folder     its --out: checked, its code kept, files replaced whole; checksums of what it reads
state      its state.pt, written whole, compared with the run before it is used
loop       the order of batches, learning rates, gradients over ranks
files      of a user: none is waited for, none changes unnoticed, text in lines
tables     rows of text, of data files or in memory; every fault with its place
in_memory  rows that a program hands over: lists, columns, arrays, DataFrames, Datasets
columns    their names: which is anchor, positive, hard negative
looks      columns without names that are no texts: numbers, ids, labels, single words
tokens     their tokens, on the disk and in batches, in groups of similar length
documents  files of documents: endless pairs of text, half of which follow each other
mine       hard negatives for pairs of texts, found by a trained encoder: python -m kernels.training.mine
pretrained model folders and hub names: no code of theirs is run, no size believed unchecked
encoders   transformers that read sentences, with their pooling, head and prompts
layout     their folders, read and written as transformers and sentence-transformers do
mlm        masked language models: tokens are masked, the loss is read from the chosen ones alone
evaluation what sentence encoders are judged by, while they are trained and by --evaluate
sts        scored pairs of sentences: Spearman, alignment, uniformity
labelled   texts with labels: a logistic regression and k-means on frozen embeddings
study      what each layer and pooling of an encoder is worth
labels     labelled texts, one or two a row, for a classifier; its scores, its folder
ood        texts of classes that it has not seen: three detectors, AUROC, FPR at 95 %, F1
text_views what differs between two views of a text beside dropout: words, embeddings, spans
view_flags their flags and recipes
candidates texts with ranked candidates, and which of them an encoder chooses
optimizers of the papers whose views and losses simcse.py has: steps, rates and clipping
adversarial       where a text's embeddings are changed; noise on them, along the gradient of a loss
wordnet    a WordNet database: words that can replace a word
images     pictures to train on and to be judged by: their views, neighbours, linear probes
picture_files     where they come from: arrays, CIFAR's batches, folders, lists; every fault with its file
picture_sources   how they are read: from memory, row by row, decoded by workers
picture_encoders  what reads them: loaded, saved with its head
views      boxes of pictures that are drawn and cut out, their colours and blur
workers    processes that decode pictures
pickles    CIFAR's pickles, read without unpickling
recipes    flags that belong together, under one name
"""
