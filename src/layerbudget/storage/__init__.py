"""How files come and go. No torch, and nothing of this package but errors and canonical JSON.

``writing``: one file, whole or not at all. ``folders``: a folder of files with a manifest of them; only these are ever
removed. ``parts``: finished parts of a long run. ``reading``: JSON within bounds, with the types that were promised.
"""
