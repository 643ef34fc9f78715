"""Yang et al. 2024: Bayesian Low-rank Adaptation for Large Language Models."""
