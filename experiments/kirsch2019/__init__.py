"""Kirsch, van Amersfoort and Gal 2019, BatchBALD: which labels next."""
