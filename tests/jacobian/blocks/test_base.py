"""Blocks of the Jacobian: every product against the dense columns, written as the definition says."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from linnet.jacobian import DenseBlock
from linnet.jacobian.blocks import base
from linnet.jacobian.blocks.base import Scale, Size, as_tf32
from linnet.jacobian.blocks.composite import SumBlock, add_rmatmul, combine, pack
from linnet.jacobian.blocks.convolution import ChannelsLastBlock, LazyBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from tests.support.drawn import normal

P = 40  # columns of the whole Jacobian; blocks cover some of them
N, C = 5, 3


def close(value: Tensor, reference: Tensor) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= 1e-12 * max(1.0, float(reference.abs().max()))


def placed(n, c, *blocks):
    """Dense (n c, P) from (start, columns (n, c, q)) pairs, which add up where they overlap."""
    J = torch.zeros(n, c, P, dtype=torch.float64)
    for start, columns in blocks:
        J[..., start : start + columns.shape[-1]] += columns
    return J.flatten(0, 1)


def outer(n, c, seed, *, T=1, groups=1, dx=3, dg=2, weight=None, bias=None, swapped=False, padded=False):
    x, g = normal(n, groups, T, dx, seed=seed), normal(n, c, groups, T, dg, seed=seed + 1)
    if padded:
        g[0] = g[1, :, :, 2:] = g[2, :, :, :2] = g[3, 1] = 0.0  # before, behind, and of one output alone
    spec = "njtx,ncjtg->ncjxg" if swapped else "njtx,ncjtg->ncjgx"
    q = groups * dx * dg
    blocks = []
    if weight is not None:
        blocks.append((weight, torch.einsum(spec, x, g).flatten(2)))
    if bias is not None:
        blocks.append((bias, g.sum(3).flatten(2)))
    ranges = {
        "weight": None if weight is None else (weight, weight + q),
        "bias": None if bias is None else (bias, bias + groups * dg),
    }
    return OuterProductBlock(x, g, **ranges, swapped=swapped), placed(n, c, *blocks)


def rows(n, c, seed, *, starts=(2, 20), sizes=(4, 3)):
    parts = [normal(n, c, q, seed=seed + i) for i, q in enumerate(sizes)]
    ranges = [(a, a + q) for a, q in zip(starts, sizes, strict=True)]
    return DenseBlock(ranges, parts), placed(n, c, *zip(starts, parts, strict=True))


def tokens(n, c, seed, *, padding=False, start=4, vocabulary=5, T=4, d=3):
    g = normal(n, c, T, d, seed=seed)
    ids = torch.randint(-1 if padding else 0, vocabulary, (n, T), generator=torch.Generator().manual_seed(seed))
    if padding:
        ids[0] = -1  # one example is padding only
    J = torch.zeros(n, c, vocabulary, d, dtype=torch.float64)
    for i in range(n):
        for t in range(T):
            if ids[i, t] >= 0:
                J[i, :, ids[i, t]] += g[i, :, t]
    table = (start, start + vocabulary * d)
    return EmbeddingBlock(ids, g, table), placed(n, c, (start, J.flatten(2)))


def lazy(n, c, seed, *, factored=True):
    found, J = outer(n, c, seed, T=4, groups=2, weight=3, bias=30)
    return LazyBlock(
        found.ranges,
        lambda: found.expand().parts,
        n=n,
        c=c,
        size=found.size,
        held=(found.x, found.g),
        outer=(lambda: found) if factored else None,
    ), J


def summed(n, c, seed):
    """An embedding table that is also the output layer, and is read directly once more."""
    table, A = tokens(n, c, seed)
    layer, B = outer(n, c, seed + 7, T=2, dx=3, dg=5, weight=4)
    direct, D = rows(n, c, seed + 9, starts=(4,), sizes=(15,))
    return SumBlock([table, layer, direct]), A + B + D


MAKE = {
    "rows": rows,
    "outer": lambda *a: outer(*a, weight=4, bias=20),
    "outer_weight": lambda *a: outer(*a, weight=4),
    "outer_bias": lambda *a: outer(*a, bias=20),
    "outer_swapped": lambda *a: outer(*a, weight=4, bias=20, swapped=True),
    "outer_tokens": lambda *a: outer(*a, T=4, weight=20, bias=4),
    "outer_groups": lambda *a: outer(*a, groups=3, weight=1, bias=33),
    "outer_groups_tokens": lambda *a: outer(*a, groups=2, T=3, dx=4, weight=1, bias=33),
    "outer_groups_swapped": lambda *a: outer(*a, groups=2, T=3, dg=4, weight=1, swapped=True),
    "outer_long": lambda *a: outer(*a, T=9, weight=4, bias=20),  # where the diagonal prefers rows
    "outer_padded": lambda *a: outer(*a, T=4, weight=4, bias=20, padded=True),
    "outer_padded_swapped": lambda *a: outer(*a, T=4, weight=4, swapped=True, padded=True),
    "outer_padded_groups": lambda *a: outer(*a, groups=2, T=4, weight=1, bias=33, padded=True),
    "outer_wide": lambda *a: outer(*a, T=2, dx=5, dg=5, weight=4, bias=30),  # where it does not
    "tokens": tokens,
    "tokens_padding": lambda *a: tokens(*a, padding=True),
    "lazy": lazy,
    "lazy_rows_only": lambda *a: lazy(*a, factored=False),
    "lazy_factored": lambda *a: (lazy(*a)[0].as_outer_product(), lazy(*a)[1]),
    "sum": summed,
}


@pytest.fixture(params=[None, 1, 50], ids=["whole", "single", "tiles"])
def temporary(request, monkeypatch):
    """The largest intermediate: as it is, one entry, a few."""
    if request.param is not None:
        monkeypatch.setattr(base, "TEMPORARY", request.param)


@pytest.fixture(params=list(MAKE))
def make(request):
    return MAKE[request.param]


def scales(block):
    level = torch.full((P,), 0.7, dtype=torch.float64)
    for i, (start, stop) in enumerate(block.ranges):
        level[start:stop] = 1.5 + i
    ramp = torch.linspace(-1.0, 2.0, P, dtype=torch.float64)
    zero = level.clone()
    zero[slice(*block.ranges[0])] = 0.0
    return {"none": None, "constant": level, "zero on a range": zero, "varying": ramp}


def test_expand(make):
    block, J = make(N, C, 0)
    expanded = block.expand()
    close(placed(N, C, *((r[0], part) for r, part in zip(expanded.ranges, expanded.parts, strict=True))), J)
    assert block.ranges == expanded.ranges
    assert block.q == block.size.q == sum(stop - start for start, stop in block.ranges)
    assert block.bytes == sum(t.numel() * t.element_size() for t in block.tensors()) > 0


def test_uses_without_gradients_are_left_out():
    used = outer(N, C, 0, T=4, weight=4, padded=True)[0]._used
    assert used is not None
    assert used.tolist() == [
        [False] * 4,
        [True, True, False, False],
        [False, False, True, True],
        [True] * 4,
        [True] * 4,
    ]
    assert outer(N, C, 0, T=4, weight=4)[0]._used is None
    block = outer(N, C, 0, T=4, weight=4)[0]
    block.g[0, :, :, -1] = 0.0  # one of 20
    assert block._used is None


@pytest.mark.parametrize("where", [slice(0, 2), slice(2, 4)])
def test_uses_without_gradients_are_found_on_either_side(where):
    block = outer(N, C, 0, T=4, weight=4)[0]
    block.g[1:, :, :, where] = 0.0
    expected = torch.ones(N, 4, dtype=torch.bool)
    expected[1:, where] = False
    assert torch.equal(block._used, expected)


@pytest.mark.parametrize("k", [1, 4])
def test_matmul(make, temporary, k):
    block, J = make(N, C, 0)
    V = normal(P, k, seed=5)
    close(block.matmul(V), (J @ V).view(N, C, k))


@pytest.mark.parametrize("k", [1, 4])
def test_products_add_to_what_is_there_and_write_over_it(make, temporary, k):
    block, J = make(N, C, 0)
    V, U, before = normal(P, k, seed=5), normal(N, C, k, seed=6), normal(N, C, k, seed=7)
    out = before.clone()
    block.add_matmul(V, out)
    close(out, before + (J @ V).view(N, C, k))
    out = normal(P, k, seed=8)
    for start, stop in block.ranges:
        out[start:stop] = torch.nan
    expected = out.nan_to_num(0.0) + J.T @ U.flatten(0, 1)
    block.write_rmatmul(U, out)
    close(out, expected)


@pytest.mark.parametrize("k", [1, 4])
def test_rmatmul_adds_to_its_columns_only(make, temporary, k):
    block, J = make(N, C, 0)
    U, before = normal(N, C, k, seed=5), normal(P, k, seed=6)
    out = before.clone()
    block.rmatmul(U, out)
    close(out, before + J.T @ U.flatten(0, 1))
    covered = torch.zeros(P, dtype=torch.bool)
    for start, stop in block.ranges:
        covered[start:stop] = True
    assert torch.equal(out[~covered], before[~covered])


@pytest.mark.parametrize("scale", ["none", "constant", "zero on a range", "varying"])
def test_gram_adds(make, temporary, scale):
    (a, A), (b, B) = make(N, C, 0), make(4, 2, 10)  # other examples, another number of outputs
    d = scales(a)[scale]
    S = torch.ones(P, dtype=torch.float64) if d is None else d
    for block, matrix in ((a, A), (b, B)):
        before = normal(len(A), len(matrix), seed=8)
        out = before.clone()
        a.gram(block, Scale(d), out)
        close(out, before + (A * S) @ matrix.T)


@pytest.mark.parametrize("scale", ["none", "constant", "zero on a range", "varying"])
def test_diag(make, scale):
    block, J = make(N, C, 0)
    d = scales(block)[scale]
    S = torch.ones(P, dtype=torch.float64) if d is None else d
    close(block.diag(Scale(d)), (J * J @ S).view(N, C))


@pytest.mark.parametrize("weight", [None, (N, C), (N, C, C)])
def test_squares_add(make, weight):
    block, J = make(N, C, 0)
    w = None if weight is None else normal(*weight, seed=3)
    W = torch.eye(N * C, dtype=torch.float64)
    if w is not None:
        W = torch.diag(w.flatten()) if w.ndim == 2 else torch.block_diag(*w)
    before = normal(P, seed=4)
    out = before.clone()
    block.squares(w, out)
    close(out, before + (J * (W @ J)).sum(0))


def test_gram_of_unlike_factors_over_the_same_columns():
    """The same columns may come as a weight, as a bias, transposed or in other groups: then rows meet."""
    q = (4, 10)
    alike = {
        "weight": outer(N, C, 0, dx=3, dg=2, weight=4),
        "other width": outer(N, C, 1, dx=2, dg=3, weight=4),
        "swapped": outer(N, C, 2, dx=3, dg=2, weight=4, swapped=True),
        "groups": outer(N, C, 3, groups=2, dx=3, dg=1, weight=4),
        "bias": outer(N, C, 4, dx=3, dg=6, bias=4),
        "one input": outer(N, C, 5, dx=1, dg=6, weight=4),
        "rows": rows(N, C, 6, starts=(4,), sizes=(6,)),
        "tokens": tokens(N, C, 7, vocabulary=2),
    }
    for a, A in alike.values():
        for b, B in alike.values():
            assert a.ranges == b.ranges == (q,)
            out = torch.zeros(N * C, N * C, dtype=torch.float64)
            a.gram(b, Scale(), out)
            close(out, A @ B.T)


def test_scale_is_constant_where_it_has_one_value():
    scale = Scale(torch.tensor([2.0, 2.0, 3.0]))
    assert scale.constant((0, 2)) == 2.0
    assert scale.constant((1, 3)) is None
    assert scale.constant(None) == 0.0
    assert Scale().constant((0, 2)) == 1.0


def test_lazy_rows_are_made_when_asked_for():
    asked = []

    def make_rows():
        asked.append(1)
        return [normal(N, C, 4)]

    block = LazyBlock([(0, 4)], make_rows, n=N, c=C, size=Size(4), held=())
    assert block.as_outer_product() is block
    assert not asked
    block.expand()
    assert asked


# Tied parameters.


def check_combined(pairs, *, kinds=None):
    """The blocks cover disjoint columns and add up to the dense sum, also where products are not linear."""
    found = combine([block for block, _ in pairs])
    J = sum(matrix for _, matrix in pairs)
    ranges = sorted(r for block in found for r in block.ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    if kinds is not None:
        assert [type(block) for block in found] == kinds
    K = torch.zeros(len(J), len(J), dtype=torch.float64)
    V, U, X = normal(P, 2), normal(N, C, 2), torch.zeros(P, 2, dtype=torch.float64)
    for block in found:
        block.gram(block, Scale(), K)
        block.rmatmul(U, X)
    close(K, J @ J.T)
    close(X, J.T @ U.flatten(0, 1))
    close(sum(block.matmul(V) for block in found).flatten(0, 1), J @ V)
    close(sum(block.diag(Scale()) for block in found).flatten(), (J * J).sum(1))
    return found


def test_disjoint_factors_stay_as_they_are():
    pairs = [outer(N, C, 0, weight=20, bias=30), tokens(N, C, 1), rows(N, C, 2, starts=(0,), sizes=(4,))]
    assert check_combined(pairs) == [block for block, _ in pairs]
    assert combine([]) == []


def test_repeated_calls_lie_side_by_side():
    pairs = [outer(N, C, i, T=T, weight=4, bias=20) for i, T in enumerate((1, 3, 2))]
    (found,) = check_combined(pairs, kinds=[OuterProductBlock])
    assert found.size.T == 6


@pytest.mark.parametrize(
    ("pairs", "kinds"),
    [
        pytest.param(
            [outer(N, C, 0, weight=4, dx=3, dg=3), outer(N, C, 1, weight=4, dx=3, dg=3, swapped=True)],
            [SumBlock],
            id="transposed",
        ),
        pytest.param(
            [outer(N, C, 0, weight=4, dx=3, dg=5), tokens(N, C, 1)], [SumBlock], id="embedding and output layer"
        ),
        pytest.param(
            [outer(N, C, 0, weight=4, dx=1, dg=3), outer(N, C, 1, bias=4, dx=1, dg=3)],
            [SumBlock],
            id="weight and bias",
        ),
        pytest.param(
            [outer(N, C, 0, weight=4, dx=3, dg=1), outer(N, C, 1, bias=4, dx=3, dg=3)],
            [SumBlock],
            id="weight and bias of other shapes",
        ),
        pytest.param(
            [outer(N, C, 0, bias=4, dx=3), outer(N, C, 1, bias=4, dx=2)], [SumBlock], id="biases of frozen weights"
        ),
        pytest.param(
            [outer(N, C, 0, weight=4, bias=20), outer(N, C, 1, weight=4, bias=22)],
            [OuterProductBlock, DenseBlock, DenseBlock],
            id="one weight, two biases",
        ),
        pytest.param(
            [outer(N, C, 0, weight=4, bias=20), outer(N, C, 1, weight=12, bias=20)],
            None,
            id="two weights, one bias",
        ),
        pytest.param([lazy(N, C, 0), outer(N, C, 1, weight=3, dx=3, dg=4)], None, id="convolution's weight read alone"),
        pytest.param([lazy(N, C, 0), lazy(N, C, 5)], [SumBlock], id="convolution called twice"),
        pytest.param(
            [outer(N, C, i, weight=4 + 6 * i) for i in range(3)] + [rows(N, C, 9, starts=(4,), sizes=(18,))],
            [DenseBlock],
            id="thirds and the whole",
        ),
        pytest.param(
            [
                rows(N, C, 0, starts=(2,), sizes=(6,)),
                rows(N, C, 1, starts=(12,), sizes=(6,)),
                outer(N, C, 2, weight=6, dx=4, dg=2),
                rows(N, C, 3, starts=(18,), sizes=(6,)),
            ],
            None,
            id="a chain of overlaps, and a neighbor",
        ),
        pytest.param([rows(N, C, 0), outer(N, C, 1, weight=20, bias=3, dx=1, dg=3)], None, id="crosswise overlaps"),
    ],
)
def test_shared_columns_add_up(pairs, kinds):
    check_combined(pairs, kinds=kinds)
    check_combined(pairs[::-1])


def taps(n, c, seed, *, bias=None):
    out, channels, count = 2, 3, 4
    stored = normal(n * c, out, count, channels, seed=seed)
    weight = stored.transpose(2, 3).reshape(n, c, -1)
    shift = normal(n, c, out, seed=seed + 1)
    blocks = [(1, weight)] if bias is None else [(1, weight), (bias, shift)]
    where = None if bias is None else ((bias, bias + out), shift)
    return ChannelsLastBlock((1, 25), stored, n=n, bias=where), placed(n, c, *blocks)


@pytest.mark.parametrize("bias", [None, 30])
def test_taps(bias) -> None:
    block, J = taps(N, C, 3, bias=bias)
    V, U = normal(P, 6, seed=8), normal(N * C, 6, seed=9)
    close(block.matmul(V).flatten(0, 1), J @ V)
    out = normal(P, 6, seed=10)
    expected = out + J.T @ U
    block.rmatmul(U.view(N, C, -1), out)
    close(out, expected)
    expand = block.expand()
    close(placed(N, C, *[(r[0], part) for r, part in zip(expand.ranges, expand.parts, strict=True)]), J)


def test_a_block_counts_costs_as_if_it_had_other_outputs() -> None:
    block, _ = rows(N, C, 0)
    other = block.with_outputs(C + 4)
    assert (other.c, block.c) == (C + 4, C) and block.with_outputs(C) is block
    assert all(one is two for one, two in zip(other.tensors(), block.tensors(), strict=True))


def test_packed_rows_are_the_same_rows() -> None:
    made = [rows(N, C, seed, starts=(start,), sizes=(size,)) for seed, start, size in
            ((1, 0, 4), (2, 6, 5), (3, 14, 1), (4, 20, 7), (5, 33, 2))]  # fmt: skip
    J = sum(dense for _, dense in made)
    packed = pack([block for block, _ in made])
    assert len(packed) == 1
    V, U = normal(P, 6, seed=8), normal(N * C, 6, seed=9)
    close(packed[0].matmul(V).flatten(0, 1), J @ V)
    out = torch.zeros(P, 6, dtype=torch.float64)
    packed[0].rmatmul(U.view(N, C, -1), out)
    close(out, J.T @ U)
    parts = packed[0].expand()
    close(placed(N, C, *[(r[0], part) for r, part in zip(parts.ranges, parts.parts, strict=True)]), J)


def test_packed_rows_add_and_write() -> None:
    made = [rows(N, C, i, starts=(a, a + 4), sizes=(3, 2)) for i, a in enumerate((12, 1, 24, 33))]
    packed, J = pack([block for block, _ in made])[0], sum(dense for _, dense in made)
    V, U, before = normal(P, 2, seed=5), normal(N, C, 2, seed=6), normal(N, C, 2, seed=7)
    out = before.clone()
    packed.add_matmul(V, out)
    close(out, before + (J @ V).view(N, C, 2))
    out = torch.full((P, 2), torch.nan, dtype=torch.float64)
    packed.write_rmatmul(U, out)
    covered = [i for start, stop in packed.ranges for i in range(start, stop)]
    close(out[covered], (J.T @ U.flatten(0, 1))[covered])
    assert out.isnan().sum() == 2 * (P - len(covered))


def test_pack_leaves_few_or_large_rows_alone() -> None:
    few = [rows(N, C, seed, starts=(start,), sizes=(2,))[0] for seed, start in ((1, 0), (2, 4), (3, 8), (4, 12))]
    assert pack(few[:3]) == few[:3]
    assert len(pack([*few, outer(N, C, 9, weight=20)[0]])) == 2
    assert pack(few, small=1) == few


def test_the_first_chunk_is_written_over_whatever_was_there() -> None:
    made = [rows(N, C, 1, starts=(2,), sizes=(4,)), outer(N, C, 2, weight=8, bias=20), taps_at_end()]
    J = sum(dense for _, dense in made)
    U = normal(N * C, 6, seed=9)
    out = torch.full((P, 6), torch.nan, dtype=torch.float64)
    add_rmatmul([block for block, _ in made], U.view(N, C, -1), out, first=True)
    close(out, J.T @ U)
    add_rmatmul([block for block, _ in made], U.view(N, C, -1), out, first=False)
    close(out, 2 * (J.T @ U))


def taps_at_end():
    stored = normal(N * C, 2, 2, 3, seed=5)
    dense = placed(N, C, (P - 12, stored.transpose(2, 3).reshape(N, C, -1)))
    return ChannelsLastBlock((P - 12, P), stored, n=N), dense


def test_long_rows_on_the_cpu_are_cut_and_add_up() -> None:
    part = normal(2, 1, 8192, seed=1)
    V = normal(8200, 3, seed=2)
    out = normal(2, 1, 3, seed=3)
    expected = out[:, 0] + part[:, 0] @ V[4:8196]
    DenseBlock([(4, 8196)], [part]).add_matmul(V, out)
    assert (out[:, 0] - expected).abs().max() < 1e-10


def test_tf32_is_the_nearest():
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 1e-30])])
    found = as_tf32(x)
    assert not bool((found.view(torch.int32) & 0x1FFF).any())
    finite = torch.isfinite(x)
    assert bool(((found - x).abs() <= 2**-11 * x.abs())[finite].all()) and torch.equal(found[~finite], x[~finite])
    assert abs(float((found / x)[:1000].double().mean()) - 1) < 5e-5  # cut off, they would be smaller by 3e-4
    assert as_tf32(torch.tensor(float("nan"))).isnan()
    torch.testing.assert_close(as_tf32(found), found, rtol=0, atol=0)
    with pytest.raises(TypeError, match="float64"):
        as_tf32(x.double())


@pytest.mark.parametrize("kind", ["rows", "outer", "tokens"])
def test_rounded_factors_hold_numbers_of_tf32(kind):
    if kind == "rows":
        block = DenseBlock([(3, 10)], [torch.randn(N, C, 7)])
    elif kind == "outer":
        block = OuterProductBlock(torch.randn(N, 1, 2, 3), torch.randn(N, C, 1, 2, 2), weight=(4, 10), bias=(10, 12))
    else:
        block = EmbeddingBlock(torch.randint(0, 4, (N, 3)), torch.randn(N, C, 3, 2), (4, 12))
    found = block.rounded()
    assert found is not block and type(found) is type(block) and found.ranges == block.ranges
    for old, new in zip(block.tensors(), found.tensors(), strict=True):
        if old.is_floating_point():
            assert torch.equal(new, as_tf32(old)) and not torch.equal(new, old)
    torch.testing.assert_close(found.expand().parts, block.expand().parts, rtol=1e-2, atol=1e-2)
