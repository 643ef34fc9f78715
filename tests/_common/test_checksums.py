"""Checksums against whole numbers of Python: they are kept in files, so that they must stay what they are."""

from __future__ import annotations

import struct

import pytest
import torch

from linnet._common import checksums
from linnet._common.checksums import BLOCK, combine_codes, odd_numbers, row_codes, tensor_code

ALL = 2**64 - 1


def odd(i: int) -> int:
    """Number i of the generator splitmix64 (Steele, Lea and Flood 2014), made odd."""
    z = i * 0x9E3779B97F4A7C15 & ALL
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & ALL
    return (z ^ z >> 31) | 1


def code(words: list[int]) -> int:
    """The checksum of a row of signed words."""
    blocks = [words[start : start + BLOCK] for start in range(0, len(words), BLOCK)]
    sums = [sum((w ^ w >> 32) * odd(j) for j, w in enumerate(block)) for block in blocks]
    whole = len(words) // BLOCK
    total = sum(s * (odd(b + 1) if b < whole else 1) for b, s in enumerate(sums)) & ALL
    return total - 2**64 if total >= 2**63 else total


def test_the_weights():
    found = odd_numbers(200, 3, torch.device("cpu"))
    assert [int(w) & ALL for w in found] == [odd(i) for i in range(3, 203)]


@pytest.mark.parametrize("words", [5, BLOCK, 2 * BLOCK + 3])
def test_rows(words):
    rows = torch.randint(-(2**63), 2**63 - 1, (2, words), generator=torch.Generator().manual_seed(0))
    assert row_codes(rows).tolist() == [code(row) for row in rows.tolist()]


@pytest.mark.parametrize(("size", "kind"), [(8, "<q"), (12, "<i"), (16, "<q"), (6, "B")])
@pytest.mark.parametrize("start", [0, 2, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_bytes_wherever_they_begin(size, kind, start, dtype):
    """Words as long as the length of a row allows."""
    whole = torch.randint(0, 256, (start + 2 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows = whole[start:].view(2, size)
    expected = [code([w for (w,) in struct.iter_unpack(kind, bytes(row.tolist()))]) for row in rows]
    assert row_codes(rows.view(dtype)).tolist() == expected
    assert int(tensor_code(rows[0].view(dtype))) == expected[0]


def test_many_rows_are_the_same_as_few():
    rows = torch.randn(70, 2**11, generator=torch.Generator().manual_seed(0))  # more than go at once
    assert torch.equal(row_codes(rows), torch.cat([row_codes(row[None]) for row in rows]))
    long = torch.randn(2, 3 * 2**16 + 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_codes(long), torch.cat([row_codes(row[None]) for row in long]))


def test_what_is_empty_or_has_no_memory():
    assert row_codes(torch.empty(3, 0)).tolist() == [0, 0, 0]
    assert int(tensor_code(torch.empty(0))) == 0 and int(tensor_code(torch.ones(3, device="meta"))) == 0
    sparse = torch.eye(3)
    assert torch.equal(tensor_code(sparse.to_sparse()), tensor_code(sparse))


def test_weights_that_inference_mode_has_made_serve_autograd():
    checksums._block_weights.cache_clear()
    with torch.inference_mode():
        row_codes(torch.ones(2, 3))
    assert not checksums._block_weights(torch.device("cpu")).is_inference()


def test_positions_count():
    codes = torch.tensor([3, 1, 4, -1])
    assert combine_codes(codes, 5) == sum(c * odd(5 + i) for i, c in enumerate(codes.tolist())) & ALL
    assert 0 <= checksums.text_code("a") < 2**63 and checksums.text_code("a") != checksums.text_code("b")
