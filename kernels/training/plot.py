"""python -m kernels.training.plot: draws the metrics of runs; extras/plot.py has the code."""
from .extras.plot import main

if __name__ == "__main__":
    main()
