"""Products in float64 of rows that a network makes in its own dtype."""

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian import Jacobian
from tests.support.drawn import double, normal

ENGINES = ("auto", "rows", "bilinear", "ghost", "autodiff")


class Convolutions(nn.Module):
    """Convolutions with groups, a normalization, a linear layer and a parameter without a layer rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, groups=2)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 6 * 6, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.second(torch.tanh(self.first(x)))))
        return self.head(h.flatten(1)) * self.scale


class Tokens(nn.Module):
    """A transformer layer between an embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(x)).mean(1) @ self.embedding.weight[:4].T


CASES = {
    "convolutions": (Convolutions, lambda: torch.randn(12, 1, 8, 8)),
    "tokens": (Tokens, lambda: torch.randint(30, (12, 7))),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    build, data = CASES[request.param]
    return build().eval(), data()


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.dtype == torch.float64
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("engine", ENGINES)
def test_gram_matrices_add_up_in_float64(case, engine):
    model, X = case
    lin = linnet.linearize(model).with_products(torch.float64)
    J = lin.jacobian(X, batch_size=5, engine=engine)
    D, s = J.dense(), torch.rand(lin.p, dtype=torch.float64)
    close(J.gram(), D @ D.T, 1e-13)
    close(J.gram(scale=s), (D * s) @ D.T, 1e-13)
    close(J.gram_diag(scale=s), (D * s * D).sum(1), 1e-13)
    close(sum(J.layer_grams().values()), D @ D.T, 1e-13)
    # The first chunk: float32 kernels may round in another way with another number of examples.
    close(J.gram(J.subset(torch.arange(5))), D @ D[: 5 * J.c].T, 1e-13)
    close(J.normal_matrix(), D.T @ D, 1e-13)
    close(J.gram_blocks(), torch.einsum("ncp,ndp->ncd", *2 * [D.view(J.n, J.c, -1)]), 1e-13)
    other = linnet.linearize(model).to(torch.float64)
    close(D, other.jacobian(X if X.dtype == torch.long else X.double()).dense(), 1e-6)


def products(J: Jacobian, tolerance: float) -> None:
    D = J.dense()
    V, U = (torch.randn(size, 3, dtype=torch.float64) for size in reversed(J.shape))
    weight = torch.rand(J.n, J.c, J.c, dtype=torch.float64)
    weight = weight @ weight.mT
    for v, u in ((V, U), (V[:, 0], U[:, 0])):
        close(J @ v, D @ v, tolerance)
        close(J.T @ u, D.T @ u, tolerance)
        close(J.normal(v), D.T @ (D @ v), tolerance)
        f, product = J.outputs_and_product(v)
        assert f.dtype == torch.float64
        close(product, D @ v, tolerance)
    rows = D.view(J.n, J.c, -1)
    close(J.column_norms(weight), torch.einsum("ncp,ncd,ndp->p", rows, weight, rows), 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_products_are_those_of_the_rows(case, engine):
    model, X = case
    lin = linnet.linearize(model).with_products(torch.float64)
    products(lin.jacobian(X, batch_size=5, engine=engine), 1e-6)


def test_products_of_rows_in_memory_are_exact(case):
    model, X = case
    J = linnet.linearize(model).with_products(torch.float64).jacobian(X, batch_size=5, engine="rows")
    products(J.cached(), 1e-13)


def test_kronecker_factors_and_coordinates(case):
    model, X = case
    lin = linnet.linearize(model)
    root = torch.rand(len(X), lin.jacobian(X).c, dtype=torch.float64)
    values = []
    for one in (lin.with_products(torch.float64), lin.to(torch.float64)):
        J = one.jacobian(X)
        rotation, value = J.kronecker(root).decomposed()
        assert value.dtype == torch.float64
        close(J.rotated(rotation).gram(), J.gram(), 1e-6)
        close(J.rotated(rotation).gram_diag(scale=value), J.rotated(rotation).gram(scale=value).diagonal(), 1e-6)
        values.append(value.sort().values)
    close(values[0], values[1], 1e-6)


def test_squares_in_the_dtype_of_the_rows(case):
    model, X = case
    J = linnet.linearize(model).with_products(torch.float64).jacobian(X, batch_size=5)
    scale = torch.rand(J.shape[1])
    for one in (J, J.cached()):
        quick = one.in_row_dtype()
        assert quick.outputs().dtype == torch.float32
        assert quick.gram_diag(scale=scale).dtype == torch.float32
        close(quick.gram_diag(scale=scale).double(), one.gram_diag(scale=scale.double()), 1e-6)
        close(quick.gram_blocks(scale=scale).double(), one.gram_blocks(scale=scale.double()), 1e-6)
    exact = linnet.linearize(model).to(torch.float64).jacobian(X)
    assert exact.in_row_dtype() is exact


def test_the_plan_names_both_dtypes(case):
    model, X = case
    lin = linnet.linearize(model)
    assert lin.jacobian(X).plan.note == "float32 on cpu, precision highest"
    note = lin.with_products(torch.float64).jacobian(X).plan.note
    assert note == "float32, products in float64, on cpu, precision highest"


def test_nothing_is_copied(case):
    model, X = case
    lin = linnet.linearize(model).with_products(torch.float64)
    own = {t.data_ptr() for t in model.parameters()}
    lin.jacobian(X).gram()
    assert {t.data_ptr() for t in lin.module.parameters()} == own
    assert (lin.model_dtype, lin.dtype) == (torch.float32, torch.float64)


def test_products_never_have_fewer_digits_than_the_rows():
    lin = linnet.linearize(nn.Linear(3, 2).double()).with_products(torch.float32)
    assert lin.dtype == torch.float64
    with pytest.raises(ValueError, match=r"computes in torch\.float32 or torch\.float64"):
        lin.with_products(torch.bfloat16)


def test_half_precision_rows_are_float32():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(torch.bfloat16)
    X = torch.randn(5, 4, dtype=torch.bfloat16)
    J = linnet.linearize(model).with_products(torch.float64).jacobian(X)
    D = J.dense()
    close(J.gram(), D @ D.T, 1e-13)
    close(D, linnet.linearize(model).jacobian(X).dense().double(), 1e-6)


def test_a_product_that_is_folded_keeps_no_rows() -> None:
    model = double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    x, V = normal(11, 3), normal(32, 4, seed=1)
    whole = linnet.linearize(model).jacobian(x)
    J = linnet.linearize(model).jacobian(x, batch_size=3)

    def join(rows: list[Tensor], JV: Tensor, batch: linnet.Batch) -> list[Tensor]:
        assert JV.shape[-2] == 2 * batch.n and torch.equal(batch.f.flatten(), whole.outputs()[batch.index].flatten())
        return [*rows, JV]

    rows = J.fold_product(join, V, list)
    torch.testing.assert_close(torch.cat(rows), whole.dense() @ V, rtol=1e-9, atol=1e-12)
    parts = torch.cat(J.fold_product(join, V, list, by_layer=True), 1)
    edge = 3 * 5 + 5
    for part, own in zip(parts, (slice(0, edge), slice(edge, None)), strict=True):
        torch.testing.assert_close(part, whole.dense()[:, own] @ V[own], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"fold_product needs V of shape \(32, k\)"):
        J.fold_product(join, V[:, 0], list)
    with pytest.raises(TypeError, match=r"V must be too"):
        J.fold_product(join, V.float(), list)
