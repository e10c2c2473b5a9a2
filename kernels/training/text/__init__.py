"""Sentences: tokens, encoders, model folders, masked language models, classifiers, evaluation."""
