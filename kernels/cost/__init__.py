"""Predict the time of the losses on GPUs that you do not have: python -m kernels.cost; see predict.py."""
