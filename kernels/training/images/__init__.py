"""Modules for training on images, shared by simclr.py and moco.py.

dataset       the images of --data and --dev with their labels; iterators over training and evaluation views
formats       reads data sets: .npz and .npy arrays, CIFAR's python batches, folders and tables of image files
loading       image arrays and image files as sources of views; worker processes that decode files
augmentation  random crop boxes, crop and resize, colour jitter, blur
encoders      ResNets and other image encoders: create, load and save them with their heads
evaluation    kNN accuracy, linear probe, accuracy of a classifier
lars          the LARS optimizer, and the optimizers that can replace it
"""
