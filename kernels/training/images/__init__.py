"""Images: what simclr.py and moco.py share.

dataset       the images of --data and --dev: labels, views
formats       where images come from: arrays, CIFAR's batches, folders and tables of files
pickles       CIFAR's batches, without what a pickle can do
loading       arrays and files as they are read, decoded and cut
workers       processes that decode, and their signals
augmentation  boxes, resizing, colours, blur
encoders      ResNets and other encoders: made, loaded, saved with their heads
evaluation    nearest neighbours, the linear probe, a classifier's accuracy
lars          LARS and its alternatives
"""
