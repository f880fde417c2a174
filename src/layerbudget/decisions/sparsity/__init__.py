"""Apply a sparsity plan to a model: magnitude, Wanda, SparseGPT; recovery; export."""
