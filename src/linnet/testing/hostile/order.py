"""Examples that change their places inside the network, and come back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net
from linnet.testing.hostile.case import Hostile, Register, draw, integers, normal

add = Register("reordered examples")


def reordered(function: Any, c: int = 2) -> Any:
    """A factory of a `Net` with layers a (4, 5), b (5, 5) and head (5, c)."""
    return lambda: Net(function, a=nn.Linear(4, 5), b=nn.Linear(5, 5), head=nn.Linear(5, c))


def body(m: Any, x: Tensor) -> Tensor:
    return m.head(m.b(m.a(x).tanh()).tanh())


def python_order(n: int) -> list[int]:
    """An order in which the first three places stay."""
    return [*range(min(3, n)), *reversed(range(3, n))]


def python_integers(m: Any, x: Tensor) -> Tensor:
    order = python_order(len(x))
    return body(m, x[order])[order]


def python_stack(m: Any, x: Tensor) -> Tensor:
    order = python_order(len(x))
    y = body(m, torch.stack([x[i] for i in order]))
    return torch.stack([y[order.index(i)] for i in range(len(x))])


def all_reversed(m: Any, x: Tensor) -> Tensor:
    order = list(range(len(x)))[::-1]
    return body(m, x[order])[order]


def matrix(m: Any, x: Tensor) -> Tensor:
    P = torch.eye(len(x), dtype=x.dtype)[python_order(len(x))]
    return P.T @ body(m, P @ x)


def matrix_inside(m: Any, x: Tensor) -> Tensor:
    P = torch.eye(len(x), dtype=x.dtype)[python_order(len(x))]
    return m.head((P.T @ m.b(P @ m.a(x).tanh())).tanh())


def matrix_einsum(m: Any, x: Tensor) -> Tensor:
    P = torch.eye(len(x), dtype=x.dtype)[python_order(len(x))]
    return torch.einsum("ij,ic->jc", P, body(m, torch.einsum("ij,jd->id", P, x)))


def copied(m: Any, x: Tensor) -> Tensor:
    order = torch.tensor(python_order(len(x)))
    h = body(m, torch.zeros_like(x).index_copy(0, order, x))
    return h.index_select(0, order)


def copied_back(m: Any, x: Tensor) -> Tensor:
    order = torch.tensor(python_order(len(x)))
    h = body(m, x.index_select(0, order))
    return torch.zeros_like(h).index_copy(0, order, h)


def looked_up(m: Any, x: Tensor) -> Tensor:
    order = torch.tensor(python_order(len(x)))
    h = body(m, F.embedding(order, x))
    return F.embedding(order, h)


def gathered(m: Any, x: Tensor) -> Tensor:
    order = torch.tensor(python_order(len(x)))[:, None]
    h = body(m, x.gather(0, order.expand(-1, 4)))
    return h.gather(0, order.expand(-1, h.shape[1]))


def scattered(m: Any, x: Tensor) -> Tensor:
    order = torch.tensor(python_order(len(x)))[:, None]
    h = body(m, x.gather(0, order.expand(-1, 4)))
    return torch.zeros_like(h).scatter(0, order.expand(-1, h.shape[1]), h)


def in_place_write(m: Any, x: Tensor) -> Tensor:
    order = python_order(len(x))
    h = body(m, x[order])
    out = torch.zeros_like(h)
    for k, i in enumerate(order):
        out[i] = h[k]
    return out


def by_key(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return body(m, x[order])[order.argsort()]


def by_length(m: Any, x: Tensor) -> Tensor:
    """Sorted by a length that is the same for the first examples, as with packed sequences."""
    lengths = (x[:, 0] > 1).long()
    order = lengths.argsort(descending=True, stable=True)
    return body(m, x[order])[order.argsort()]


def flipped(m: Any, x: Tensor) -> Tensor:
    return body(m, x.flip(0)).flip(0)


def rolled(m: Any, x: Tensor) -> Tensor:
    return body(m, x.roll(1, 0)).roll(-1, 0)


def rolled_late(m: Any, x: Tensor) -> Tensor:
    k = 1 if len(x) > 3 else 0
    return body(m, x.roll(k, 0)).roll(-k, 0)


def split_by_flag(m: Any, x: Tensor) -> Tensor:
    on = x[:, 0] > 0
    h = body(m, torch.cat([x[on], x[~on]]))
    out = torch.empty_like(h)
    out[on], out[~on] = h[: int(on.sum())], h[int(on.sum()) :]
    return out


def interleaved(m: Any, x: Tensor) -> Tensor:
    h = body(m, torch.cat([x[::2], x[1::2]]))
    k = (len(x) + 1) // 2
    out = torch.empty_like(h)
    out[::2], out[1::2] = h[:k], h[k:]
    return out


def transposed(m: Any, x: Tensor) -> Tensor:
    """The batch is the last axis inside."""
    h = (m.a.weight @ x.T + m.a.bias[:, None]).tanh()
    return m.head(m.b(h.T).tanh())


def unstacked(m: Any, x: Tensor) -> Tensor:
    rows = [m.a(row) for row in x.unbind()]
    return m.head(m.b(torch.stack(rows[::-1]).tanh()).flip(0).tanh())


def swapped_tokens(m: Any, x: Tensor) -> Tensor:
    """Tokens first, then back: an axis of the same length as the batch may be taken for the batch."""
    h = m.a(x.transpose(0, 1)).tanh()
    return m.head(m.b(h).sum(0).tanh())


def doubled(m: Any, x: Tensor) -> Tensor:
    both = body(m, torch.cat([x, -x.flip(0)]))
    return both[: len(x)] - both[len(x) :].flip(0)


def mirrored_pairs(m: Any, x: Tensor) -> Tensor:
    pairs = torch.stack([x, x.flip(0)], 1)
    h = body(m, pairs.flatten(0, 1)).view(len(x), 2, -1)
    return 0.5 * (h[:, 0] + h[:, 1].flip(0))


def half_layer(m: Any, x: Tensor) -> Tensor:
    """Only one layer sees another order."""
    order = python_order(len(x))
    return m.head(m.b(m.a(x).tanh()[order])[order].tanh())


def deduplicated(m: Any, x: Tensor) -> Tensor:
    rows, inverse = x.unique(dim=0, return_inverse=True)
    return body(m, rows)[inverse]


for name, function in (
    ("python_integers", python_integers),
    ("python_stack", python_stack),
    ("reversed", all_reversed),
    ("permutation_matrix", matrix),
    ("permutation_matrix_inside", matrix_inside),
    ("permutation_einsum", matrix_einsum),
    ("index_copy", copied),
    ("index_copy_back", copied_back),
    ("embedding", looked_up),
    ("gather", gathered),
    ("scatter", scattered),
    ("in_place_write", in_place_write),
    ("sorted_by_key", by_key),
    ("flip", flipped),
    ("roll", rolled),
    ("roll_late", rolled_late),
    ("split_by_flag", split_by_flag),
    ("interleaved", interleaved),
    ("batch_last", transposed),
    ("unstacked", unstacked),
    ("doubled", doubled),
    ("mirrored_pairs", mirrored_pairs),
    ("one_layer", half_layer),
):
    add(f"order_{name}", reordered(function), normal(4))
add("order_one_output", reordered(python_integers, 1), normal(4))
add("order_matrix_one_output", reordered(matrix, 1), normal(4))
add("order_by_length", reordered(by_length), lambda: torch.cat([draw(5, 4).clamp(max=0.9), draw(8, 4, seed=1) + 0.7]))
add("order_tokens_first", reordered(swapped_tokens), normal(13, 4))
add("order_tokens_first_7", reordered(swapped_tokens), normal(7, 4))
add("order_without_duplicates", reordered(deduplicated), lambda: torch.cat([draw(7, 4), draw(6, 4)]))
add(
    "order_tokens",
    lambda: Net(
        lambda m, x: m.head(m.table(x[python_order(len(x))])[python_order(len(x))].sum(1)),
        table=nn.Embedding(6, 4),
        head=nn.Linear(4, 2),
    ),
    lambda: integers(6, 13, 3),
)
add(
    "order_conv",
    lambda: Net(
        lambda m, x: m.head(m.conv(x[python_order(len(x))])[python_order(len(x))].tanh().flatten(1)),
        conv=nn.Conv2d(1, 2, 3),
        head=nn.Linear(8, 2),
    ),
    normal(1, 4, 4),
)


class Packed(nn.Module):
    """Sequences of several lengths, packed, as PyTorch sorts and sorts them back."""

    def __init__(self, enforce_sorted: bool) -> None:
        super().__init__()
        self.enforce, self.cell, self.head = enforce_sorted, nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0])


add(
    "order_packed_sequence",
    lambda: Packed(False),
    lambda: (draw(13, 4, 3), torch.tensor([4] * 5 + [2, 3, 1, 4, 2, 1, 3, 4])),
    expects="either",
)

CASES: list[Hostile] = add.cases
