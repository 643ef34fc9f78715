"""Experiments about linnet's own error bars, which no paper has."""
