"""How files come and go: one way of writing, one of resuming, one of reading. No torch, and no other room of this package.

``writing``: one file, whole or not at all. ``folders``: a folder of files with a manifest of what was written, so that only
that is ever removed. ``locks``: who is still at work on something temporary. ``parts``: finished parts of a long run, each
with a checksum that is keyed by what was asked for. ``reading``: JSON within bounds, with the types that were promised.
"""
