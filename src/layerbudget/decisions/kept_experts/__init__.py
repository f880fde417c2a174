"""Which experts of a model stay, and how many of each layer: the plan, and smaller models."""
