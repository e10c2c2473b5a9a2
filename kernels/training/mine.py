"""python -m kernels.training.mine: hard negatives for pairs of texts; extras/mine.py has the code."""
if __name__ == "__main__":
    import runpy

    runpy.run_module("kernels.training.extras.mine", run_name="__main__", alter_sys=True)
else:
    from .extras.mine import main, mine  # noqa: F401
