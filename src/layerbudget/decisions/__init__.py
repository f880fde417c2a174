"""One room a decision: what a block can become, how much each gets, and how a model is given it."""
