"""Conditioning on observations with Gaussian noise."""
