"""Columns of J of one chunk, and their products."""
