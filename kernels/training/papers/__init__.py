"""Parts of single papers that do not fit into their scripts. File names begin with the script's name."""
