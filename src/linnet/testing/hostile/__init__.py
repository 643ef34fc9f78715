"""Unusual networks, and the judge of what linnet says of them."""
