"""Timings of linnet's passes, alone and beside the ways they replace; not part of the package."""
