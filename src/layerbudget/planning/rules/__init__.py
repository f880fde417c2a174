"""Rules that several decisions have; each decision registers its own beside its plan."""
