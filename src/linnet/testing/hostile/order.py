"""Examples that change their places inside the network, and come back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, draw, integers, net, normal

add = Register("reordered examples")


def reorder(function: Any, c: int = 2) -> Any:
    """A network with layers a (4, 5), b (5, 5) and head (5, c)."""
    return net(function, a=(4, 5), b=(5, 5), head=(5, c))


def body(m: Any, x: Tensor) -> Tensor:
    return m.head(m.b(m.a(x).tanh()).tanh())


def python_order(x: Tensor) -> list[int]:
    """An order in which the first three places stay. It is its own inverse."""
    return [*range(min(3, len(x))), *reversed(range(3, len(x)))]


def tensor_order(x: Tensor) -> Tensor:
    return torch.tensor(python_order(x))


def permutation(x: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype)[python_order(x)]


def python_stack(m: Any, x: Tensor) -> Tensor:
    order = python_order(x)
    y = body(m, torch.stack([x[i] for i in order]))
    return torch.stack([y[order.index(i)] for i in range(len(x))])


def copy_back(m: Any, x: Tensor) -> Tensor:
    h = body(m, x.index_select(0, tensor_order(x)))
    return torch.zeros_like(h).index_copy(0, tensor_order(x), h)


def gather(x: Tensor, like: Tensor) -> Tensor:
    return x.gather(0, tensor_order(like)[:, None].expand(-1, x.shape[1]))


def scatter_back(m: Any, x: Tensor) -> Tensor:
    h = body(m, gather(x, x))
    return torch.zeros_like(h).scatter(0, tensor_order(x)[:, None].expand(-1, h.shape[1]), h)


def write_in_place(m: Any, x: Tensor) -> Tensor:
    order = python_order(x)
    h = body(m, x[order])
    out = torch.zeros_like(h)
    for k, i in enumerate(order):
        out[i] = h[k]
    return out


def sort_by(key: Any) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        order = key(x)
        return body(m, x[order])[order.argsort()]

    return forward


def roll_late(m: Any, x: Tensor) -> Tensor:
    k = 1 if len(x) > 3 else 0
    return body(m, x.roll(k, 0)).roll(-k, 0)


def split_by_flag(m: Any, x: Tensor) -> Tensor:
    on = x[:, 0] > 0
    h = body(m, torch.cat([x[on], x[~on]]))
    out = torch.empty_like(h)
    out[on], out[~on] = h[: int(on.sum())], h[int(on.sum()) :]
    return out


def interleave(m: Any, x: Tensor) -> Tensor:
    h, k = body(m, torch.cat([x[::2], x[1::2]])), (len(x) + 1) // 2
    out = torch.empty_like(h)
    out[::2], out[1::2] = h[:k], h[k:]
    return out


def batch_last(m: Any, x: Tensor) -> Tensor:
    h = (m.a.weight @ x.T + m.a.bias[:, None]).tanh()
    return m.head(m.b(h.T).tanh())


def unstack(m: Any, x: Tensor) -> Tensor:
    rows = [m.a(row) for row in x.unbind()]
    return m.head(m.b(torch.stack(rows[::-1]).tanh()).flip(0).tanh())


def tokens_first(m: Any, x: Tensor) -> Tensor:
    """Tokens first, then back: an axis of the same length as the batch may be taken for the batch."""
    return m.head(m.b(m.a(x.transpose(0, 1)).tanh()).sum(0).tanh())


def double(m: Any, x: Tensor) -> Tensor:
    both = body(m, torch.cat([x, -x.flip(0)]))
    return both[: len(x)] - both[len(x) :].flip(0)


def mirror(m: Any, x: Tensor) -> Tensor:
    h = body(m, torch.stack([x, x.flip(0)], 1).flatten(0, 1)).view(len(x), 2, -1)
    return 0.5 * (h[:, 0] + h[:, 1].flip(0))


def deduplicate(m: Any, x: Tensor) -> Tensor:
    rows, inverse = x.unique(dim=0, return_inverse=True)
    return body(m, rows)[inverse]


WAYS: dict[str, Any] = {
    "python_integers": lambda m, x: body(m, x[python_order(x)])[python_order(x)],
    "python_stack": python_stack,
    "reversed": lambda m, x: body(m, x[list(range(len(x)))[::-1]])[list(range(len(x)))[::-1]],
    "permutation_matrix": lambda m, x: permutation(x).T @ body(m, permutation(x) @ x),
    "permutation_matrix_inside": lambda m, x: m.head((permutation(x).T @ m.b(permutation(x) @ m.a(x).tanh())).tanh()),
    "permutation_einsum": lambda m, x: torch.einsum(
        "ij,ic->jc", permutation(x), body(m, torch.einsum("ij,jd->id", permutation(x), x))
    ),
    "index_copy": lambda m, x: body(m, torch.zeros_like(x).index_copy(0, tensor_order(x), x)).index_select(
        0, tensor_order(x)
    ),
    "index_copy_back": copy_back,
    "embedding": lambda m, x: F.embedding(tensor_order(x), body(m, F.embedding(tensor_order(x), x))),
    "gather": lambda m, x: gather(body(m, gather(x, x)), x),
    "scatter": scatter_back,
    "in_place_write": write_in_place,
    "sorted_by_key": sort_by(lambda x: x[:, 0].argsort()),
    "flip": lambda m, x: body(m, x.flip(0)).flip(0),
    "roll": lambda m, x: body(m, x.roll(1, 0)).roll(-1, 0),
    "roll_late": roll_late,
    "split_by_flag": split_by_flag,
    "interleaved": interleave,
    "batch_last": batch_last,
    "unstacked": unstack,
    "doubled": double,
    "mirrored_pairs": mirror,
    "one_layer": lambda m, x: m.head(m.b(m.a(x).tanh()[python_order(x)])[python_order(x)].tanh()),
}
add.each(
    "order_",
    reorder,
    **WAYS,
)
add("order_one_output", reorder(WAYS["python_integers"], 1))
add("order_matrix_one_output", reorder(WAYS["permutation_matrix"], 1))
add(
    "order_by_length",  # the length is the same for the first examples, as with packed sequences
    reorder(sort_by(lambda x: (x[:, 0] > 1).long().argsort(descending=True, stable=True))),
    lambda: torch.cat([draw(5, 4).clamp(max=0.9), draw(8, 4, seed=1) + 0.7]),
)
add("order_tokens_first", reorder(tokens_first), normal(13, 4))
add("order_tokens_first_7", reorder(tokens_first), normal(7, 4))
add("order_without_duplicates", reorder(deduplicate), lambda: torch.cat([draw(7, 4), draw(6, 4)]))
add(
    "order_tokens",
    net(
        lambda m, x: m.head(m.table(x[python_order(x)])[python_order(x)].sum(1)),
        table=partial(nn.Embedding, 6, 4),
        head=(4, 2),
    ),
    lambda: integers(6, 13, 3),
)
add(
    "order_conv",
    net(
        lambda m, x: m.head(m.conv(x[python_order(x)])[python_order(x)].tanh().flatten(1)),
        conv=partial(nn.Conv2d, 1, 2, 3),
        head=(8, 2),
    ),
    normal(1, 4, 4),
)


class Packed(nn.Module):
    """Sequences of several lengths, packed, as PyTorch sorts and sorts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0])


add(
    "order_packed_sequence",
    Packed,
    lambda: (draw(13, 4, 3), torch.tensor([4] * 5 + [2, 3, 1, 4, 2, 1, 3, 4])),
    expects="either",
)

CASES: list[Hostile] = add.cases
