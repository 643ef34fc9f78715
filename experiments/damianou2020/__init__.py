"""Damianou 2020: Deep Learning in the Function Space (talk)."""
