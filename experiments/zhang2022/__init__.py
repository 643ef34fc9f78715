"""Zhang et al. 2022: Learning Representation from Neural Fisher Kernel with Low-rank Approximation."""
