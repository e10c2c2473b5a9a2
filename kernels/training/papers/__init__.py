"""Parts of single papers that do not fit into their scripts. Each file is named after its script."""
