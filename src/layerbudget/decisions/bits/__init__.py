"""Plans of bits applied: weights in their formats, files that runtimes read, recipes for other tools."""
