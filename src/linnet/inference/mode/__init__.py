"""The mode of a log-concave posterior."""
