"""python -m kernels.training.mine: mine hard negatives for pairs of texts. The code is in extras/mine.py."""
if __name__ == "__main__":
    import runpy

    runpy.run_module("kernels.training.extras.mine", run_name="__main__", alter_sys=True)
else:
    from .extras.mine import main, mine  # noqa: F401
