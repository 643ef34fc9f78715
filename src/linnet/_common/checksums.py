r"""64-bit checksums of tensors, computed where the tensors are: one read of their memory, and no copy to the CPU.

.. math:: c_i = \sum_j w_j \, m(x_{ij}) \bmod 2^{64}

:math:`x_{ij}` are the words of row i, :math:`m` mixes the upper half of a word into the lower half, and the
:math:`w_j` are odd numbers without a pattern. One changed word always changes the checksum. Changes of many words go
unnoticed once in :math:`2^{33}` cases or less often. `linnet._common.files.fingerprint` is the SHA-256 that files hold:
slower, and safe also against changes on purpose.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

BLOCK = 2**16
"""Words after which the weights start again, times another odd number; part of what a checksum is."""


def row_codes(t: Tensor) -> Tensor:
    """A checksum of the bytes of each row of t (n, ...), as int64 (n,), on the device of t.

    >>> a = row_codes(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))
    >>> bool(a[0] == a[2]), bool(a[0] == a[1])
    (True, False)
    """
    if t.numel() == 0:
        return torch.zeros(len(t), dtype=torch.int64, device=t.device)
    words = _words(t)
    # Words at once: on a CPU what fits its cache, on a GPU what makes few calls.
    most = 2**24 if words.is_cuda else 2**16
    parts = [_row_codes(part, most) for part in words.split(max(1, most // words.shape[1]))]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _row_codes(words: Tensor, most: int) -> Tensor:
    n, m = words.shape
    codes = torch.zeros(n, dtype=torch.int64, device=words.device)
    whole = m // BLOCK * BLOCK
    if whole:
        blocks = words[:, :whole].unflatten(1, (-1, BLOCK))
        step = max(1, most // (n * BLOCK))
        for start in range(0, blocks.shape[1], step):
            part = _mixed(blocks[:, start : start + step], BLOCK).sum(2)
            codes += (part * odd_numbers(part.shape[1], start + 1, part.device)).sum(1)
    if whole < m:
        codes += _mixed(words[:, whole:], m - whole).sum(1)
    return codes


def tensor_code(t: Tensor) -> Tensor:
    """A checksum of the bytes of a whole tensor, as an int64 without dimensions, on its device.

    >>> bool(tensor_code(torch.zeros(3)) == tensor_code(torch.tensor([0.0, -0.0, 0.0])))
    False
    """
    given: Any = t
    if is_traceable_wrapper_subclass(given):  # such as quantized weights, which are made of several tensors
        return torch.stack([tensor_code(getattr(given, name)) for name in given.__tensor_flatten__()[0]]).sum()
    if t.is_meta or t.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device="cpu" if t.is_meta else t.device)
    t = t.detach()
    return row_codes((t if t.layout is torch.strided else t.to_dense()).reshape(1, -1))[0]


def odd_numbers(count: int, start: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers without a pattern, (count,): the same on every device, for positions from ``start`` on.

    >>> bool(odd_numbers(3, 5, torch.device("cpu"))[2] == odd_numbers(1, 7, torch.device("cpu"))[0])
    True
    """
    z = torch.arange(start, start + count, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # splitmix64
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z ^ ((z >> 31) & ((1 << 33) - 1)) | 1


def combine_codes(codes: Tensor, start: int = 0) -> int:
    """One checksum (0 to 2^64 - 1) of codes (n,) and their positions; those of parts add up to that of all.

    >>> codes = torch.tensor([3, 1, 4, 1])
    >>> combine_codes(codes) == (combine_codes(codes[:2]) + combine_codes(codes[2:], 2)) % 2**64
    True
    """
    return int((codes * odd_numbers(len(codes), start, codes.device)).sum()) % 2**64


def text_code(value: Any) -> int:
    """A checksum of what ``value`` prints as, from 0 to 2^63 - 1."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8]) >> 1


def _words(t: Tensor) -> Tensor:
    """The bytes of each row as integers, (n, m)."""
    t = t.detach().resolve_conj().resolve_neg()
    rows = t.reshape(len(t), -1).contiguous()
    size, offset = rows.shape[1] * rows.element_size(), rows.storage_offset() * rows.element_size()
    for unit in (torch.int64, torch.int32):
        if size % unit.itemsize == 0:
            return (rows.clone() if offset % unit.itemsize else rows).view(unit)
    return rows.view(torch.uint8)


def _mixed(words: Tensor, count: int) -> Tensor:
    """Words (..., count) times their weights; a change of the upper bits alone reaches the lower ones."""
    words = words.to(torch.int64)
    return (words ^ (words >> 32)).mul_(_weights(count, words.device))


def _weights(count: int, device: torch.device) -> Tensor:
    return _block_weights(device)[:count]


@lru_cache(maxsize=8)
def _block_weights(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return odd_numbers(BLOCK, 0, device)
