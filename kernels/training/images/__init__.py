"""Modules for training on images, shared by simclr.py and moco.py."""
