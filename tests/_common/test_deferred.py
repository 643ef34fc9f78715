"""Rows that are put off: the function sees all of them once, in order, and no more at a time than was asked for."""

from __future__ import annotations

import torch

from linnet._common import Deferred


def test_rows_are_handed_over_when_there_are_many():
    calls = []
    later = Deferred(lambda a, b: calls.append((a.tolist(), b.tolist())), most=4)
    for start in range(0, 8, 2):  # two entries of the first tensor each
        rows = torch.arange(start, start + 2)
        later.add(rows, -rows)
    assert calls == [([0, 1, 2, 3, 4, 5], [0, -1, -2, -3, -4, -5])]
    later.finish()
    later.finish()
    assert calls[1:] == [([6, 7], [-6, -7])]
    later.add(torch.arange(4), torch.arange(4))
    assert len(calls) == 2  # four are not more than four
    later.close()
    later.add(torch.tensor([9]), torch.tensor([9]))
    assert calls[2:] == [([0, 1, 2, 3], [0, 1, 2, 3]), ([9], [9])]
