"""Data files of every kind as inputs and targets."""
