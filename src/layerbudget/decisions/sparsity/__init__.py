"""Apply a sparsity plan to a model: magnitude, Wanda, SparseGPT; structured removal; recovery; export."""
