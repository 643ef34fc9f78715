"""Likelihoods and their expectations, priors, Gaussian posteriors."""
