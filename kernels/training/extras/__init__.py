"""Code that only a flag or a command needs: views and losses of other papers, probes, mining, plots."""
