"""Allingham, Antorán, Fortuin 2023: Linearised neural networks (slides)."""
