"""What only a flag or a command adds: views and losses of other papers, probes, mining, plots."""
