"""Parts that bits, the cache and one memory limit share: the table of formats, and the exact choice among them."""
