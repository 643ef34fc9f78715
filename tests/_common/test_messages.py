"""Words of errors, and checks of options."""

from __future__ import annotations

import pytest
import torch

from linnet._common import kind, listing
from linnet._common.messages import check_batch_size, check_memory, check_seed


def test_words() -> None:
    assert (kind(torch.ones(2)), kind(3), kind("a")) == ("a Tensor", "an int", "a str")
    assert listing(["a", "b"]) == "'a', 'b'"
    assert listing(list("abcdefgh")) == "'a', 'b', 'c', 'd', 'e', 'f' and 2 more"


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_memory, ["auto", 1, 2.5e9], [0, -1.0, True, "1e9", None]),
        (check_seed, [0, -(2**63), 2**64 - 1], [True, 0.5, 2**64, None]),
        (check_batch_size, ["auto", 1], [0, True, 2.0, "all"]),
    ],
)
def test_options(check, good, bad) -> None:  # type: ignore[no-untyped-def]
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ValueError, match=r"must be a .*; got "):
            check(value)
