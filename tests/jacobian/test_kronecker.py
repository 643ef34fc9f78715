"""Kronecker factors of the curvature and the coordinates they give, against dense float64 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.data import Batch
from linnet.jacobian import Jacobian, Rotation, constant_over, gram, kronecker
from linnet.jacobian.blocks.base import Scale
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.kronecker import EXACT, Decomposed, DenseSide, Kronecker, SketchedSide
from linnet.probability import Bernoulli, Categorical, Likelihood
from tests.support.drawn import double, normal


class Positions(nn.Module):
    """Tokens with positions, used several times per example, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(7, 4), nn.Parameter(torch.zeros(3, 4))
        self.inner, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(self.table(ids) + self.place))).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(torch.tanh(self.one(x)))))


class Transposed(nn.Module):
    """A weight stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def ids(n: int) -> Tensor:
    return torch.randint(7, (n, 3), generator=torch.Generator().manual_seed(1))


CASES = {
    "mlp": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), normal(9, 4)),
    "no bias": (nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), normal(9, 4)),
    "norms": (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), normal(9, 4)),
    "cnn": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 3)),
        normal(7, 2, 4, 4),
    ),
    "groups": (
        nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
        normal(7, 4, 3, 3),
    ),
    "tokens": (Positions(), ids(8)),
    "tied": (Tied(), normal(9, 4)),
    "transposed": (Transposed(), normal(9, 4)),
}


def case(name: str) -> Jacobian:
    model, X = CASES[name]
    return linnet.linearize(double(model).eval()).jacobian(X, batch_size=4)


def root_of(J: Jacobian, likelihood: Likelihood | None = None) -> Tensor:
    return (likelihood or Categorical()).root(J.outputs())


def curvature(J: Jacobian, root: Tensor) -> Tensor:
    """J^T B J, dense."""
    D = J.dense().view(J.n, J.c, -1)
    H = torch.einsum("ncm,ncp->nmp", root, D) if root.ndim == 3 else root[..., None] * D
    return torch.einsum("nmp,nmq->pq", H, H)


@pytest.mark.parametrize("name", list(CASES))
def test_a_rotated_jacobian_is_the_jacobian_times_an_orthonormal_matrix(name: str) -> None:
    J = case(name)
    root = root_of(J)
    rotation, _ = J.kronecker(root).decomposed()
    p = J.shape[1]
    Q = rotation.back(torch.eye(p, dtype=torch.float64))
    torch.testing.assert_close(Q.T @ Q, torch.eye(p, dtype=torch.float64), rtol=0, atol=1e-12)
    JQ, R = J.dense() @ Q, J.rotated(rotation)
    D, V, U = normal(p, seed=3).square(), normal(p, 3, seed=4), normal(J.shape[0], 2, seed=5)
    C = (JQ * D) @ JQ.T
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(R @ V, JQ @ V, **close)
    torch.testing.assert_close(R.T @ U, JQ.T @ U, **close)
    torch.testing.assert_close(R.gram(scale=D), C, **close)
    torch.testing.assert_close(R.gram_diag(scale=D), C.diagonal(), **close)
    at = torch.arange(J.n)
    blocks = C.view(J.n, J.c, J.n, J.c)[at, :, at]
    torch.testing.assert_close(R.gram_blocks(scale=D), blocks, **close)
    torch.testing.assert_close(R.column_norms(root @ root.mT), (Q.T @ curvature(J, root) @ Q).diagonal(), **close)
    torch.testing.assert_close(rotation.rows(J.dense()), JQ, **close)
    kept = R.cached()
    torch.testing.assert_close(kept.gram_diag(scale=D), C.diagonal(), **close)
    torch.testing.assert_close(kept.subset(torch.tensor([3, 1])).dense(), JQ.view(J.n, J.c, p)[[3, 1]].flatten(0, 1))
    torch.testing.assert_close(R.subset(torch.tensor([3, 1])).dense(), JQ.view(J.n, J.c, p)[[3, 1]].flatten(0, 1))


def factors_by_hand(X: Tensor, g: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of a linear layer with inputs X (n, T, d) and output gradients g (n, c, T, e)."""
    n, T = X.shape[:2]
    A = torch.einsum("ntd,nte->de", X, X) / (n * T)
    h = torch.einsum("ncm,nctd->nmtd", root, g)
    return A, torch.einsum("nmtd,nmte->de", h, h)


def test_the_factors_of_a_linear_layer_are_the_published_ones() -> None:
    """Also where an example uses the weight several times: a mean over uses on one side, a sum on the other."""
    inner, head = double(nn.Linear(4, 5)), double(nn.Linear(5, 3), seed=1)
    X = normal(8, 6, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = inner, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(x)).mean(1))

    J = linnet.linearize(Net()).jacobian(X, batch_size=3)
    root = root_of(J)
    found = J.kronecker(root)
    hidden = torch.tanh(inner(X)).detach()
    g = head.weight.detach()[None, :, None] * (1 - hidden.square())[:, None] / 6
    A, G = factors_by_hand(X, g, root)
    pair = found.pairs[0, 20]
    torch.testing.assert_close(pair.A[0], A, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pair.G[0], G, rtol=1e-9, atol=1e-12)
    rotation, values = found.decomposed()
    Q = rotation.back(torch.eye(J.shape[1], dtype=torch.float64))
    H = (Q * values) @ Q.T
    torch.testing.assert_close(H[:20, :20], torch.kron(G, A), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(H[20:25, 20:25], G, rtol=1e-8, atol=1e-10)
    exact = curvature(J, root)
    torch.testing.assert_close(H[40:, 40:], exact[40:, 40:], rtol=1e-8, atol=1e-10)  # the head's bias


def test_one_use_and_one_output_without_curvature_is_exact() -> None:
    """With equal inputs there is nothing to approximate."""
    model = double(nn.Linear(4, 2))
    X = normal(1, 4).expand(5, 4).contiguous()
    J = linnet.linearize(model).jacobian(X)
    rotation, values = J.kronecker().decomposed()
    Q = rotation.back(torch.eye(10, dtype=torch.float64))
    exact = J.dense().T @ J.dense()
    torch.testing.assert_close(((Q * values) @ Q.T)[:8, :8], exact[:8, :8], rtol=1e-9, atol=1e-10)


def test_norm_layers_keep_their_exact_blocks_and_tables_their_diagonal() -> None:
    J = case("tokens")
    root = root_of(J)
    found = J.kronecker(root)
    rotation, values = found.decomposed()
    Q = rotation.back(torch.eye(J.shape[1], dtype=torch.float64))
    H, exact = (Q * values) @ Q.T, curvature(J, root)
    layout = J.lin.layout
    for name in ("norm.weight", "norm.bias", "place"):
        s = layout.slices[name]
        assert (s.start, s.stop) in found.exact
        torch.testing.assert_close(H[s, s], exact[s, s], rtol=1e-8, atol=1e-11)
    s = layout.slices["table.weight"]
    torch.testing.assert_close(values[s], exact.diagonal()[s], rtol=1e-9, atol=1e-12)
    assert (s.start, s.stop) not in rotation.turns


def test_large_parameters_without_kronecker_form_keep_their_diagonal() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.head = nn.Parameter(torch.zeros(EXACT + 1)), nn.Linear(EXACT + 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x + self.shift))

    J = linnet.linearize(double(Shift()), "shift").jacobian(normal(5, EXACT + 1))
    found = J.kronecker()
    assert not found.exact and not found.pairs
    torch.testing.assert_close(found.decomposed()[1], J.column_norms(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
def test_chunks_and_shapes_of_the_root_do_not_matter(likelihood: Likelihood) -> None:
    model, X = CASES["mlp"]
    lin = linnet.linearize(double(model))
    J = lin.jacobian(X)
    root = likelihood.root(J.outputs())
    one = J.kronecker(root)
    full = root if root.ndim == 3 else torch.diag_embed(root)
    for other in (lin.jacobian(X, batch_size=2).kronecker(root), J.kronecker(full)):
        for key, pair in one.pairs.items():
            torch.testing.assert_close(other.pairs[key].A, pair.A, rtol=1e-10, atol=0)
            torch.testing.assert_close(other.pairs[key].G, pair.G, rtol=1e-10, atol=1e-14)


def test_an_outer_product_is_weighed_without_its_rows() -> None:
    x, g = normal(4, 2, 1, 3), normal(4, 2, 2, 1, 5, seed=1)
    D = normal(40, seed=2).square()
    for swapped in (False, True):
        block = OuterProductBlock(x, g, weight=(0, 30), bias=(30, 40), swapped=swapped)
        rows = block.expand()
        torch.testing.assert_close(block.diag(Scale(D)), rows.diag(Scale(D)), rtol=1e-10, atol=0)
        torch.testing.assert_close(block.gram_blocks(Scale(D)), rows.gram_blocks(Scale(D)), rtol=1e-10, atol=1e-12)
        lone = OuterProductBlock(x, g, weight=None, bias=(30, 40), swapped=swapped)
        torch.testing.assert_close(lone.diag(Scale(D)), lone.expand().diag(Scale(D)), rtol=1e-10, atol=0)


def test_a_rotation_survives_its_file() -> None:
    J = case("transposed")
    rotation, _ = J.kronecker().decomposed()
    again = Rotation.from_tensors(rotation.tensors(), J.lin.layout)
    assert torch.equal(J.rotated(again).dense(), J.rotated(rotation).dense())


# What is refused.


def test_errors_name_what_is_wrong() -> None:
    J = case("mlp")
    found = J.kronecker()
    rotation, _ = found.decomposed()
    with pytest.raises(ValueError, match=r"root of shape \(9, 3\[, m\]\); got \(4, 3\)"):
        J.kronecker(normal(4, 3))
    with pytest.raises(ValueError, match="rotated already"):
        J.rotated(rotation).rotated(rotation)
    with pytest.raises(ValueError, match="own coordinates"):
        J.rotated(rotation).kronecker()
    with pytest.raises(ValueError, match="different coordinates"):
        J.rotated(rotation).gram(J)
    with pytest.raises(ValueError, match="different coordinates"):
        J.rotated(rotation).gram_normal(J)
    with pytest.raises(ValueError, match="no Kronecker factors"):
        J.cached().kronecker()
    variance = torch.ones(J.shape[1], dtype=torch.float64)
    constant_over(rotation.turns, variance, J.lin.layout)
    variance[0] = 2
    with pytest.raises(ValueError, match=r"one prior variance for all of .*0\.weight.*got 1 to 2"):
        constant_over(rotation.turns, variance, J.lin.layout)


def test_a_layer_in_another_form_is_refused_by_name() -> None:
    J = case("mlp")
    sample = [f for f in J._sample if f.ranges[0][0] == 0]
    found = Kronecker(sample, layout=J.lin.layout, p=J.shape[1], dtype=torch.float64, device=J.device)
    rows = sample[0].expand()
    with pytest.raises(ValueError, match=r"0\.weight.* is used in another way"):
        found.add([rows], None, 4)
    rotation, _ = J.kronecker().decomposed()
    part = type(rows)([(0, 3)], [rows.parts[0][..., :3]])
    with pytest.raises(ValueError, match=r"0\.weight.* is used in another way"):
        rotation(part)


def test_factors_that_are_not_finite_are_refused() -> None:
    J = case("mlp")
    found = J.kronecker()
    found.pairs[0, 20].A[0, 0, 0] = float("nan")
    with pytest.raises(ArithmeticError, match=r"0\.weight.*not finite"):
        found.decomposed()


def test_eigenvalues_belong_to_their_directions_in_every_layout() -> None:
    """With one output gradient for all examples the two factors are exact, also for a weight stored as (in, out)."""
    for model in (nn.Linear(4, 3), Transposed()):
        J = linnet.linearize(double(model)).jacobian(normal(9, 4), batch_size=4)
        rotation, values = J.kronecker().decomposed()
        Q = rotation.back(torch.eye(15, dtype=torch.float64))
        D = J.dense()
        torch.testing.assert_close(((Q * values) @ Q.T)[:12, :12], (D.T @ D)[:12, :12], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(CASES))
def test_examples_leave_factors_and_come_back(name: str) -> None:
    """The sums come back from what was decomposed, and those of some examples are taken away or added."""
    J = case(name)
    root = root_of(J)
    gone, kept = torch.tensor([1, 4]), torch.tensor([i for i in range(J.n) if i not in (1, 4)])

    def some(index: Tensor) -> Kronecker:
        return J.subset(index).kronecker(root[index])

    def decomposed(factors: Kronecker) -> Decomposed:
        traces = factors.traces
        return Decomposed(*factors.decomposed(), traces, factors.n)

    whole, less, left = decomposed(J.kronecker(root)), some(gone), some(kept)
    assert whole.complete and whole.matches(less)
    less.join(whole, -1)
    more = some(gone)
    more.join(decomposed(some(kept)), 1)
    for found, expected in ((less, left), (more, J.kronecker(root))):
        assert found.n == expected.n
        for key, total in expected.sums.items():
            atol = 1e-12 * max(1.0, float(total.abs().max()))
            torch.testing.assert_close(found.sums[key], total, rtol=1e-9, atol=atol, msg=key)


def test_factors_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketches, layers without curvature, and layers in another form: these factors are made again."""
    J = case("mlp")
    root = root_of(J)

    def decomposed(J: Jacobian, root: Tensor | None) -> Decomposed:
        factors = J.kronecker(root)
        return Decomposed(*factors.decomposed(), factors.traces, factors.n)

    factors, whole = J.kronecker(root), decomposed(J, root)
    assert whole.matches(factors) and not decomposed(case("no bias"), None).matches(factors)
    assert not decomposed(J, 0 * root).complete
    monkeypatch.setattr(kronecker, "CUBES", {"cpu": 0})
    sketched = J.kronecker(root)
    assert not whole.matches(sketched) and not decomposed(J, root).complete


def test_factors_are_added_up_in_float64() -> None:
    """One large input, then ones in chunks of their own, which a sum in float32 would round away."""
    X = torch.ones(65, 1)
    X[0] = 1e4
    J = linnet.linearize(nn.Linear(1, 1, bias=False)).jacobian(X, 1)
    assert float(J.kronecker().pairs[0, 1].A) * 65 == pytest.approx(1e8 + 64, rel=1e-12)


# Adapters, and sides that are too long to be decomposed whole.


class Adapter(nn.Module):
    """A frozen layer and its low-rank change."""

    def __init__(self, d: int, e: int, r: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(d, e), nn.Linear(d, r, bias=False), nn.Linear(r, e, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """Two adapters that read the same tokens, one above them, and a mean over the tokens."""

    def __init__(self, r: int) -> None:
        super().__init__()
        self.q, self.v, self.o = Adapter(6, 5, r), Adapter(6, 5, r), Adapter(5, 7, r)
        self.head = nn.Linear(7, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.q(x)) * self.v(x)
        return self.head(torch.tanh(self.o(h)).mean(1))


def adapted(r: int) -> tuple[Adapted, Tensor]:
    model = double(Adapted(r))
    assert isinstance(model, Adapted)
    return model, normal(8, 4, 6, seed=2)


def dense_kfac(model: nn.Module, X: Tensor, root: Tensor) -> dict[str, Tensor]:
    """Layer name to ``G kron A`` of its weight, from inputs and output gradients that hooks and autograd give."""
    seen: dict[str, list[Tensor]] = {}
    layers = {k: m for k, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    hooks = [
        m.register_forward_hook(lambda _, given, out, k=k: seen.update({k: [given[0], out]}))  # type: ignore[misc]
        for k, m in layers.items()
    ]
    f = model(X)
    for hook in hooks:
        hook.remove()
    found = {}
    for k, (x, out) in seen.items():
        g = torch.stack([torch.autograd.grad(f[:, u].sum(), out, retain_graph=True)[0] for u in range(f.shape[1])], 1)
        A, G = factors_by_hand(x.detach(), g, root)
        found[k] = torch.kron(G, A)
    return found


def dense_curvature(J: Jacobian, found: Kronecker) -> Tensor:
    rotation, values = found.decomposed()
    Q = rotation.back(torch.eye(J.shape[1], dtype=torch.float64))
    torch.testing.assert_close(Q.T @ Q, torch.eye(J.shape[1], dtype=torch.float64), rtol=0, atol=1e-12)
    return (Q * values) @ Q.T


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize("r", [1, 3])
def test_adapters_have_the_dense_factors(r: int, sketched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sketched:
        monkeypatch.setattr(kronecker, "CUBES", {"cpu": 0})
    model, X = adapted(r)
    J = linnet.linearize(model).jacobian(X, batch_size=3)
    root = root_of(J)
    found = J.kronecker(root)
    sides = [side for pair in found.pairs.values() for side in (pair.inputs, pair.gradients)]
    assert {type(side) for side in sides} == {SketchedSide if sketched else DenseSide}
    H, expected = dense_curvature(J, found), dense_kfac(model, X, root)
    for name, block in expected.items():
        s = J.lin.layout.slices[f"{name}.weight"]
        torch.testing.assert_close(H[s, s], block, rtol=1e-9, atol=1e-9 * float(block.abs().max()))
    rotation, _ = found.decomposed()
    slices = J.lin.layout.slices
    turns = [rotation.turns[slices[f"{k}.down.weight"].start, slices[f"{k}.down.weight"].stop] for k in ("q", "v")]
    assert turns[0].Qx is turns[1].Qx  # one decomposition for layers that read the same input
    assert turns[0].Qg is not turns[1].Qg


@pytest.mark.parametrize("name", list(CASES))
def test_sketches_of_full_rank_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reflections in place of eigenvectors, in every layout, give the same curvature and the same products."""
    J = case(name)
    root = root_of(J)
    expected = dense_curvature(J, J.kronecker(root))
    monkeypatch.setattr(kronecker, "CUBES", {"cpu": 0})
    found = J.kronecker(root)
    torch.testing.assert_close(dense_curvature(J, found), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    rotation, values = found.decomposed()
    again = Rotation.from_tensors(rotation.tensors(), J.lin.layout)
    Q = rotation.back(torch.eye(J.shape[1], dtype=torch.float64))
    for turned in (rotation, again):
        R = J.rotated(turned)
        torch.testing.assert_close(R.dense(), J.dense() @ Q, rtol=1e-9, atol=1e-11)
        diagonal = ((J.dense() @ Q).square() * values).sum(1)
        torch.testing.assert_close(R.gram_diag(scale=values), diagonal, rtol=1e-9, atol=1e-11)


def test_few_rows_are_exact_in_a_sketch_and_many_rows_keep_the_leading_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kronecker, "CUBES", {"cpu": 100**3})
    monkeypatch.setattr(kronecker, "LEADING", 20)
    d = 120
    model = double(nn.Linear(d, 1, bias=False))
    scales = 0.5 ** torch.arange(d).double()
    for n in (8, 300):
        X = normal(n, d) * (1.0 if n == 8 else scales + 1e-3)
        A = X.T @ X / n
        J = linnet.linearize(model).jacobian(X, batch_size=7)
        found = J.kronecker()
        side = found.pairs[0, d].inputs
        assert isinstance(side, SketchedSide)
        if n == 8:  # as many columns as rows and some more: nothing is left out, and nothing is said
            H = dense_curvature(J, found) / n
            torch.testing.assert_close(H, A, rtol=1e-9, atol=1e-10 * float(A.abs().max()))
            continue
        assert side.omega.shape[1] == 20
        with pytest.warns(
            UserWarning, match=r"'weight' are too long to be decomposed whole.*Their 20 leading directions"
        ):
            H = dense_curvature(J, found) / n
        assert float(H.trace()) == pytest.approx(float(A.trace()), rel=1e-9)
        exact, Q = torch.linalg.eigh(A)
        torch.testing.assert_close((Q.T @ H @ Q).diagonal()[-3:], exact[-3:], rtol=1e-2, atol=0)


def test_a_sketch_says_the_largest_share_that_it_leaves_out_of_any_group() -> None:
    d, k = 12, 4
    side = SketchedSide(2, torch.linalg.qr(normal(d, k))[0], torch.finfo(torch.float64).eps)
    rows = torch.stack([normal(30, d, seed=1), normal(30, 2, seed=2) @ normal(2, d, seed=3)])  # of rank 12, and of 2
    side.add(rows)
    found = side.decompose()
    left = side.trace - found.values[:, :k].sum(1)
    assert found.rest == pytest.approx(float(left[0] / side.trace[0]), rel=1e-9) and found.rest > 0.1
    torch.testing.assert_close(found.values.sum(1), side.trace, rtol=1e-9, atol=0)


def test_sides_are_sketched_where_memory_is_short() -> None:
    model, X = double(nn.Linear(400, 2, bias=False)), normal(300, 400)
    lin = linnet.linearize(model)
    long = lin.jacobian(X, batch_size=50, memory=2**21).kronecker().pairs[0, 800]
    assert isinstance(long.inputs, SketchedSide) and isinstance(long.gradients, DenseSide)
    whole = lin.jacobian(X, batch_size=50, memory=2**23).kronecker().pairs[0, 800]
    assert isinstance(whole.inputs, DenseSide)
    with pytest.raises(MemoryError, match=r"Kronecker factors of all layers takes .* memory= allows 9.8 KiB"):
        lin.jacobian(X, batch_size=50, memory=10_000).kronecker()


def test_rows_turn_before_or_after_they_are_made() -> None:
    """Convolutions and tokens: the rows of an outer product may turn in place of its sides; both are the same."""
    for name in ("cnn", "groups", "tokens"):
        J = case(name)
        rotation, _ = J.kronecker(root_of(J)).decomposed()
        for block in J._sample:
            one, two = (rotation(block, whole=whole).expand() for whole in (False, True))
            for a, b in zip(one.parts, two.parts, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# Streams: a backward pass for each column of the root, in chunks that do not hold the gradients of all layers.


class Encoder(nn.Module):
    """Tokens, an adapter, attention by hand, a norm, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.v = nn.Embedding(7, 6), Adapter(6, 5, 2), Adapter(6, 5, 2)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        q, v = self.q(h), self.v(h)
        return self.head(self.norm((q @ q.mT).softmax(-1) @ v).mean(1))


STREAMED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: CASES["mlp"],
    "tokens": lambda: (Positions(), ids(8)),
    "adapters": lambda: adapted(2),
    "encoder": lambda: (Encoder(), ids(8)),
}


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", list(STREAMED))
def test_streams_give_what_whole_chunks_give(name: str, diagonal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = STREAMED[name]()
    lin = linnet.linearize(double(model).eval())

    def root(batch: Batch) -> Tensor:
        assert batch.f is not None
        return batch.f.square() + 1 if diagonal else Categorical().root(batch.f)

    def u(batch: Batch) -> Tensor:
        assert batch.f is not None
        return batch.f.cos()

    whole = lin.jacobian(X, batch_size=3).curvature("kron", root, u)
    monkeypatch.setattr(gram, "streams", lambda passes: True)
    found = lin.jacobian(X, batch_size=3).curvature("kron", root, u)
    assert not lin.rules.denied("stream")
    torch.testing.assert_close(found.f, whole.f, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.gradient, whole.gradient, rtol=1e-9, atol=1e-11)
    assert found.factors is not None and whole.factors is not None
    assert found.factors.n == whole.factors.n == len(X)
    for key, pair in whole.factors.pairs.items():
        torch.testing.assert_close(found.factors.pairs[key].A, pair.A, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.factors.pairs[key].G, pair.G, rtol=1e-9, atol=1e-12)
    for r, block in whole.factors.exact.items():
        torch.testing.assert_close(found.factors.exact[r], block, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.factors.squares, whole.factors.squares, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("memory", ["auto", 2**10])  # in the second the sparse matrices are not kept
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", list(STREAMED))
def test_squares_of_groups_by_streams(name: str, rotated: bool, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X = STREAMED[name]()
    lin = linnet.linearize(double(model).eval())
    rows = linnet.testing.dense_jacobian(model, X)
    J = lin.jacobian(X, batch_size=3, memory=memory)
    if rotated:
        rotation, _ = lin.jacobian(X).kronecker().decomposed()
        J, rows = J.rotated(rotation), rotation.rows(rows)
    parts = [(torch.rand(lin.p).double(), torch.randint(5, (lin.p,))) for _ in range(2)]
    expected = torch.stack(
        [sum(rows[:, group == i].square() @ scale[group == i] for scale, group in parts) for i in range(5)], 1
    )
    torch.testing.assert_close(J.grouped_squares(parts, 5), expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(gram, "streams", lambda passes: True)
    torch.testing.assert_close(J.grouped_squares(parts, 5), expected, rtol=1e-9, atol=1e-12)
    assert not lin.rules.denied("stream")


@pytest.mark.parametrize("spanned", [True, False])
def test_a_gradient_that_the_columns_span_takes_no_backward_pass(
    spanned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, X = adapted(2)
    lin, y = linnet.linearize(model), torch.arange(len(X)) % 3

    def residual(batch: Batch) -> Tensor:
        assert batch.f is not None
        found = batch.f.softmax(1) - torch.nn.functional.one_hot(y[batch.start : batch.start + batch.n], 3)
        return found if spanned else found + 0.1

    whole = lin.jacobian(X, batch_size=3).curvature("kron", softmax_root, residual)
    monkeypatch.setattr(gram, "streams", lambda passes: True)
    original, passes = gram.streamed, list[Tensor]()

    def counted(out: Tensor, *args: Any, seed: Tensor, **options: Any) -> bool:
        passes.append(seed)
        return original(out, *args, seed=seed, **options)

    monkeypatch.setattr(gram, "streamed", counted)
    found = lin.jacobian(X, batch_size=len(X)).curvature("kron", softmax_root, residual)
    assert len(passes) == (2 if spanned else 3)  # the curvature of three classes has rank two
    torch.testing.assert_close(found.gradient, whole.gradient, rtol=1e-9, atol=1e-11)


def test_networks_stream_where_their_gradients_do_not_fit() -> None:
    def asks(name: str, **options: Any) -> bool:
        model, X = {**CASES, "adapters": adapted(2)}[name]
        J = linnet.linearize(double(model).eval()).jacobian(X, **options)
        assert J.c == 3  # the first examples have run
        return gram.streams(J.passes)

    assert asks("adapters", memory=2**12) and asks("mlp", memory=2**10)
    assert not asks("adapters")  # all of it fits
    assert not asks("cnn", memory=2**12) and not asks("tied", memory=2**10)
    model, X = adapted(2)
    J = linnet.linearize(model).jacobian(X, memory=2**15)
    assert J.passes.chunk_size() < gram._stream_size(J.passes)


def softmax_root(batch: Batch) -> Tensor:
    assert batch.f is not None
    return Categorical().root(batch.f)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_stream_that_does_not_reach_all_layers_or_is_wrong_is_made_again(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, X = adapted(2)
    lin = linnet.linearize(model)
    whole = lin.jacobian(X).curvature("kron", softmax_root, lambda batch: torch.ones(batch.n, 3).double())
    monkeypatch.setattr(kronecker, "find_dense_budget", lambda *_: 2**30)
    if wrong:
        original = gram.build_blocks

        def spoiled(use: Any, kept: Any, g: Tensor, **options: Any) -> Any:
            return original(use, kept, 1.01 * g, **options)

        monkeypatch.setattr(gram, "build_blocks", spoiled)
    else:
        monkeypatch.setattr(gram, "streamed", lambda *_, **__: False)
    J = lin.jacobian(X, memory=2**14)
    found = J.curvature("kron", softmax_root, lambda batch: torch.ones(batch.n, 3).double())
    assert lin.rules.denied("stream")
    assert found.factors is not None and whole.factors is not None
    for key, pair in whole.factors.pairs.items():
        torch.testing.assert_close(found.factors.pairs[key].G, pair.G, rtol=1e-9, atol=1e-12)


def test_rows_turn_in_float32_where_the_network_runs_in_bf16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    lin, X = linnet.linearize(model), torch.randn(12, 6)
    rotation, _ = lin.jacobian(X).kronecker().decomposed()
    J = lin.jacobian(X, precision="bf16")
    torch.testing.assert_close(J.rotated(rotation).gram(), J.gram(), rtol=1e-4, atol=1e-4)
