"""Approximate inverses that make conjugate gradients converge in few iterations."""
