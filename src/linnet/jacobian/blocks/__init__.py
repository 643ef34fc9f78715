"""Columns of J of one chunk, and their products."""

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock

__all__ = ["ColumnBlock", "DenseBlock"]
