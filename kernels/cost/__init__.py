"""python -m kernels.cost: what each kernel would take on a chip, predicted without one; see predict.py."""
