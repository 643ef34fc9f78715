"""Maddox et al. 2021: Fast Adaptation with Linearized Neural Networks."""
