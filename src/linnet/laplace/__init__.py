"""Door 2: `Laplace` and `train_with_evidence`."""
