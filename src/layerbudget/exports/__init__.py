"""Plans and pruned folders in the files of other tools: one function per format, and the table of them."""
