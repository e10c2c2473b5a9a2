"""python -m kernels.training.plot: plot the metrics of runs. The code is in extras/plot.py."""
from .extras.plot import main

if __name__ == "__main__":
    main()
