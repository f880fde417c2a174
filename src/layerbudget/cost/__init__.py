"""Expected cost of the long verbs: what they count, times seconds that are measured here.

A verb counts what it does to a text in forward equivalents; a backward is two (:mod:`.work`; what only one decision does is
counted in its folder, in ``forecast.py``). Their seconds are those of one layer and of the head, which are timed
(:mod:`.timing`). Beside them a verb counts the matrices that it rounds, sorts or factors, which are timed on a few rows.

Memory is the weights, the activations of one batch, the graph that is kept, and what is held of one layer (:mod:`.price`).
Weights that stay in their files count as far as there is room for them. Expect a factor of 1.5: benchmarks/results/size.md has
both beside what commands took.
"""
