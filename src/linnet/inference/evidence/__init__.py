"""The evidence of scales and noise, and the search for its maximum."""
