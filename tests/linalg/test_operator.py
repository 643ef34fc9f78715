"""The operator algebra against dense matrices, and the number of passes it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import linnet
from linnet.linalg import LinearOperator, LowRank, Matrix, RowFn, Stack
from linnet.linalg.affine import Affine
from linnet.testing import check_operator

ROWS, COLS, C = 12, 7, 3


class Streamed(LinearOperator):
    """A matrix that is read in chunks of rows, shuffled or in order, and counts its passes."""

    def __init__(self, A: Tensor, *, chunk: int = 2 * C, shuffled: bool = False) -> None:
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.inner = Matrix(A)
        self.chunk, self.shuffled = chunk, shuffled
        self.passes: Counter[str] = Counter()

    def _matmul(self, V: Tensor) -> Tensor:
        self.passes["matmul"] += 1
        return self.inner._matmul(V)

    def _rmatmul(self, U: Tensor) -> Tensor:
        self.passes["rmatmul"] += 1
        return self.inner._rmatmul(U)

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        self.passes["fused"] += 1
        X, sums = torch.zeros_like(V), V.new_zeros(V.shape[1])
        starts = list(range(0, self.shape[0], self.chunk))
        for start in reversed(starts) if self.shuffled else starts:
            stop = min(start + self.chunk, self.shape[0])
            rows = torch.arange(start, stop) if self.shuffled else slice(start, stop)
            U = fn(self.inner.A[rows] @ V, rows)
            X += self.inner.A[rows].T @ U
            sums += U.sum(0)
        return X, sums

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        self.passes["gram"] += 1
        assert other is None or isinstance(other, Streamed)
        return self.inner.gram(None if other is None else other.inner, scale)

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        self.passes["gram_diag"] += 1
        return self.inner.gram_diag(scale)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        self.passes["column_norms"] += 1
        return self.inner.column_norms(weight)


class TwoMethods(LinearOperator):
    """The least an operator has to write."""

    def __init__(self, A: Tensor) -> None:
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.A = A

    def _matmul(self, V: Tensor) -> Tensor:
        return self.A @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.A.T @ U


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def block_diagonal(weight: Tensor | None, rows: int) -> Tensor:
    if weight is None:
        return torch.eye(rows, dtype=torch.float64)
    return torch.diag(weight) if weight.ndim == 1 else torch.block_diag(*weight)


A0, D, Z = normal(ROWS, COLS), normal(COLS, seed=1), normal(COLS, seed=2)
INDEX = torch.tensor([5, 0, 3, 3])  # out of order, and one column twice
MASK = torch.tensor([True, False, True, True, False, True, False])
E, Y = normal(len(INDEX), seed=3), normal(len(INDEX), seed=4)

# name -> (composition of an operator, the same composition of a dense matrix)
COMPOSITIONS: dict[str, tuple[Callable[[LinearOperator], LinearOperator], Callable[[Tensor], Tensor]]] = {
    "plain": (lambda op: op, lambda A: A),
    "scaled": (lambda op: op.scaled(D), lambda A: A * D),
    "centered": (lambda op: op.centered(Z), lambda A: A - Z),
    "columns": (lambda op: op.columns(INDEX), lambda A: A[:, INDEX]),
    "mask": (lambda op: op.columns(MASK), lambda A: A[:, MASK]),
    "fisher": (lambda op: op.centered(Z).scaled(D), lambda A: (A - Z) * D),
    "recentered": (
        lambda op: op.centered(Z).scaled(D).centered(Z).scaled(D),
        lambda A: ((A - Z) * D - Z) * D,
    ),
    "dropped": (
        lambda op: op.centered(Z).scaled(D).columns(INDEX).scaled(E),
        lambda A: ((A - Z) * D)[:, INDEX] * E,
    ),
    "dropped twice": (
        lambda op: op.columns(MASK).columns(torch.tensor([3, 1])),
        lambda A: A[:, MASK][:, [3, 1]],
    ),
    "all": (
        lambda op: op.scaled(D).columns(INDEX).centered(Y).scaled(E).centered(Y),
        lambda A: ((A * D)[:, INDEX] - Y) * E - Y,
    ),
}
BASES: dict[str, Callable[[Tensor], LinearOperator]] = {
    "matrix": Matrix,
    "chunks": Streamed,
    "shuffled chunks": lambda A: Streamed(A, shuffled=True),
    "low rank": lambda A: LowRank(*(x.mT if i == 2 else x for i, x in enumerate(torch.linalg.svd(A, False)))),
    "stack": lambda A: Stack([Streamed(A[:C]), Streamed(A[C:], shuffled=True)]),
}


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> LinearOperator:
    return BASES[request.param](A0)


@pytest.fixture(params=COMPOSITIONS)
def pair(request: pytest.FixtureRequest, base: LinearOperator) -> tuple[LinearOperator, Tensor]:
    compose, reference = COMPOSITIONS[request.param]
    return compose(base), reference(A0)


WEIGHTS = {"none": None, "rows": normal(ROWS, seed=5), "blocks": normal(ROWS // C, C, C, seed=6)}


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest) -> Tensor | None:
    return WEIGHTS[request.param]


# ------------------------------------------------------------------------- products against the matrix


def test_products(pair: tuple[LinearOperator, Tensor]) -> None:
    op, A = pair
    V, U = normal(A.shape[1], 4, seed=7), normal(ROWS, 4, seed=8)
    assert op.shape == tuple(A.shape) and op.dtype == A.dtype and op.device == A.device
    close(op @ V, A @ V)
    close(op @ V[:, 0], A @ V[:, 0])
    close(op.T @ U, A.T @ U)
    close(op.T @ U[:, 0], A.T @ U[:, 0])
    close(op.dense(), A)
    close(op.dense(block=2), A)
    close(op.T.dense(), A.T)
    assert op.T.T is op


def test_normal(pair: tuple[LinearOperator, Tensor], weight: Tensor | None) -> None:
    op, A = pair
    V, W = normal(A.shape[1], 4, seed=7), block_diagonal(weight, ROWS)
    close(op.normal(V, weight), A.T @ W @ A @ V)
    close(op.normal(V[:, 0], weight), A.T @ W @ A @ V[:, 0])


def test_fused_with_a_nonlinear_function_of_the_rows(pair: tuple[LinearOperator, Tensor]) -> None:
    op, A = pair
    V, target = normal(A.shape[1], 4, seed=7), normal(ROWS, 4, seed=9)
    close(op.fused(lambda U, rows: (U - target[rows]).tanh(), V), A.T @ (A @ V - target).tanh())


def test_fused_of_a_vector_gives_the_function_a_vector(base: LinearOperator) -> None:
    seen = []
    value = base.fused(lambda U, rows: seen.append(U.ndim) or U.square(), D)
    close(value, A0.T @ (A0 @ D).square())
    assert set(seen) == {1}


def test_fused_returns_column_sums(pair: tuple[LinearOperator, Tensor]) -> None:
    op, A = pair
    V = normal(A.shape[1], 4, seed=7)
    _, sums = op._fused(lambda U, rows: U.square(), V)
    close(sums, (A @ V).square().sum(0))


@pytest.mark.parametrize("scaled", [False, True])
def test_gram_and_its_diagonal(pair: tuple[LinearOperator, Tensor], scaled: bool) -> None:
    op, A = pair
    scale = normal(A.shape[1], seed=10) if scaled else None
    K = A @ A.T if scale is None else A * scale @ A.T
    close(op.gram(scale=scale), K)
    close(op.gram(op, scale), K)
    close(op.gram_diag(scale), K.diagonal())


def test_column_norms(pair: tuple[LinearOperator, Tensor], weight: Tensor | None) -> None:
    op, A = pair
    close(op.column_norms(weight), (A.T @ block_diagonal(weight, ROWS) @ A).diagonal())


def test_adjoint_norms(base: LinearOperator) -> None:
    w = normal(ROWS, seed=5)
    close(base.T.gram_diag(w), (A0.T * w @ A0).diagonal())
    close(base.T.column_norms(D), (A0 * D @ A0.T).diagonal())


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_cross_gram_of_one_composition_over_two_bases(kind: str, name: str) -> None:
    compose, reference = COMPOSITIONS[name]
    B0 = normal(5, COLS, seed=11)
    a, b = compose(BASES[kind](A0)), compose(BASES[kind](B0))
    A, B = reference(A0), reference(B0)
    scale = normal(A.shape[1], seed=10)
    close(a.gram(b), A @ B.T)
    close(a.gram(b, scale), A * scale @ B.T)
    close(b.gram(a, scale), B * scale @ A.T)


@pytest.mark.parametrize("left", ["plain", "scaled", "centered", "fisher"])
@pytest.mark.parametrize("right", ["plain", "scaled", "centered", "fisher"])
def test_cross_gram_of_different_compositions(left: str, right: str) -> None:
    B0 = normal(5, COLS, seed=11)
    (f, F), (g, G) = COMPOSITIONS[left], COMPOSITIONS[right]
    scale = normal(COLS, seed=10)
    close(f(Streamed(A0)).gram(g(Streamed(B0)), scale), F(A0) * scale @ G(B0).T)
    shared = Streamed(A0)
    close(f(shared).gram(g(shared), scale), F(A0) * scale @ G(A0).T)


def test_cross_gram_between_a_low_rank_and_any_operator() -> None:
    low, other = BASES["low rank"](A0), normal(5, COLS, seed=11)
    close(low.gram(TwoMethods(other), D), A0 * D @ other.T)
    close(Matrix(other).gram(low, D), other * D @ A0.T)
    close(Matrix(other).gram(low.centered(Z), D), other * D @ (A0 - Z).T)


# --------------------------------------------------------------------------------- how many passes


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_fused_products_take_one_pass_of_the_base(name: str) -> None:
    base = Streamed(A0)
    op = COMPOSITIONS[name][0](base)
    V = normal(op.shape[1], 4, seed=7)
    op.normal(V, WEIGHTS["blocks"])
    assert base.passes == {"fused": 1}
    op.fused(lambda U, rows: U.square(), V)
    assert base.passes == {"fused": 2}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gram_takes_one_product_beside_the_gram_of_the_base(name: str) -> None:
    base = Streamed(A0)
    op = COMPOSITIONS[name][0](base)
    centered = isinstance(op, Affine) and op.z is not None
    op.gram()
    assert base.passes == ({"gram": 1, "matmul": 1} if centered else {"gram": 1})
    base.passes.clear()
    op.gram_diag()
    assert base.passes == ({"gram_diag": 1, "matmul": 1} if centered else {"gram_diag": 1})
    base.passes.clear()
    op.column_norms(WEIGHTS["rows"])
    assert base.passes == ({"column_norms": 1, "rmatmul": 1} if centered else {"column_norms": 1})


def test_compositions_fold_into_one() -> None:
    base = Matrix(A0)
    op = base.scaled(D).columns(INDEX).centered(Y).scaled(E)
    assert isinstance(op, Affine) and op.base is base


def test_scale_stays_none_unless_it_is_needed() -> None:
    # An operator with a cheaper way for constant scales must be able to see that there is none.
    class Spy(Streamed):
        def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
            assert scale is None
            return super()._gram(other, scale)

    close(Spy(A0).centered(Z).gram(), (A0 - Z) @ (A0 - Z).T)


def test_dense_multiplies_on_the_shorter_side() -> None:
    wide, tall = Streamed(A0.T.contiguous()), Streamed(A0)
    close(wide.dense(), A0.T)
    close(tall.dense(), A0)
    assert wide.passes == {"rmatmul": 1} and tall.passes == {"matmul": 1}


# ---------------------------------------------------------------------------------------------- laws

sizes = st.integers(1, 6)


@settings(deadline=None, max_examples=40)
@given(n=sizes, c=st.integers(1, 3), cols=sizes, k=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_laws(n: int, c: int, cols: int, k: int, seed: int) -> None:
    """Adjoint identity, linearity, symmetry, and chunks that do not matter."""
    rows = n * c
    A, V, U = normal(rows, cols, seed=seed), normal(cols, k, seed=seed + 1), normal(rows, k, seed=seed + 2)
    d, z, weight = normal(cols, seed=seed + 3), normal(cols, seed=seed + 4), normal(n, c, c, seed=seed + 5)
    whole = Matrix(A).centered(z).scaled(d)
    chunked = Streamed(A, chunk=c, shuffled=bool(seed % 2)).centered(z).scaled(d)
    size = whole.dense().abs().max() + 1
    torch.testing.assert_close((U * (whole @ V)).sum(), ((whole.T @ U) * V).sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole @ (2 * V - V[:, :1]), 2 * (whole @ V) - whole @ V[:, :1])
    torch.testing.assert_close(whole.gram(), whole.gram().T)
    assert torch.linalg.eigvalsh(whole.gram()).min() >= -1e-9 * size**2 * cols
    torch.testing.assert_close(whole.normal(V, weight), chunked.normal(V, weight), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole.gram_diag(), whole.gram().diagonal(), rtol=1e-9, atol=1e-9)


def test_gradients_flow_through_a_scale() -> None:
    d = D.clone().requires_grad_()
    Matrix(A0).scaled(d).gram().trace().backward()
    assert d.grad is not None
    close(d.grad, 2 * D * A0.square().sum(0))


def test_float32_keeps_its_dtype() -> None:
    op = Matrix(A0.float()).centered(Z.float()).scaled(D.float()).columns(MASK)
    K = op.gram()
    assert K.dtype == torch.float32 == op.column_norms().dtype
    close(
        K.double(),
        COMPOSITIONS["fisher"][1](A0)[:, MASK] @ COMPOSITIONS["fisher"][1](A0)[:, MASK].T,
        rtol=1e-5,
    )


@pytest.mark.parametrize("of", ["a Jacobian", "a matrix"])
def test_rows_and_moments_of_compositions(of: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    J = linnet.linearize(model).jacobian(normal(10, 6))
    A: LinearOperator = J if of == "a Jacobian" else Matrix(J.dense(), block=3)
    z, keep = normal(A.shape[1], seed=4), torch.arange(A.shape[1]) % 4 > 0
    index = torch.tensor([5, 0, 5, 9])
    rows = (3 * index[:, None] + torch.arange(3)).flatten()
    for op in (A, A.centered(z), A.centered(z).columns(keep).scaled(z[keep]), A.scaled(z)):
        found = op.rows(index)
        assert found is not None and found.block == 3
        close(found.dense(), op.dense()[rows])
        assert op.checksums() == A.checksums() != {} and op.has_gram
        for centered in (False, True):
            moments = op.moments(centered=centered)
            assert (moments is None) == (of == "a matrix")
            if moments is not None:
                mean = op.dense().mean(0) if centered else torch.zeros(op.shape[1], dtype=torch.float64)
                close(moments[0], mean)
                close(moments[1], (op.dense() - mean).square().mean(0))


def test_an_operator_need_not_know_its_rows() -> None:
    op = Streamed(A0)
    assert op.rows(torch.tensor([0])) is None and op.scaled(D).rows(torch.tensor([0])) is None
    assert (op.checksums(), op.moments(), op.has_gram) == ({}, None, True)


def test_repr_names_the_operator() -> None:
    assert repr(Matrix(A0).T) == f"Matrix.T(shape=({COLS}, {ROWS}), dtype=torch.float64, device=cpu)"


# -------------------------------------------------------------------------------------------- errors


def test_wrong_length_says_what_is_needed() -> None:
    op = Matrix(A0)
    with pytest.raises(ValueError, match=r"shape \(12, 7\), so A @ V needs V of shape \(7,\) or \(7, k\); got"):
        op @ torch.ones(5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got \(12,\)\. For the transpose use A\.T @ V\."):
        op @ torch.ones(ROWS, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Matrix\.T has .* A\.T @ V needs .* For the transpose use A @ V\."):
        op.T @ torch.ones(COLS, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got \(7, 1, 1\)\.$"):
        op @ torch.ones(COLS, 1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got \(\)\.$"):
        op.normal(torch.tensor(1.0, dtype=torch.float64))


def test_wrong_kind_says_how_to_convert() -> None:
    with pytest.raises(TypeError, match=r"torch\.float64 on cpu, so V must be too; got torch\.float32"):
        Matrix(A0) @ torch.ones(COLS)
    with pytest.raises(TypeError, match=r"got torch\.float64 on meta\. Convert it with V\.to\(torch\.float64"):
        Matrix(A0) @ torch.ones(COLS, dtype=torch.float64, device="meta")
    with pytest.raises(TypeError, match=r"multiplies tensors of shape \(7,\) or \(7, k\); got list"):
        Matrix(A0) @ [1.0] * COLS  # type: ignore[operator]
    with pytest.raises(TypeError, match="so weight must be too"):
        Matrix(A0).normal(D, torch.ones(ROWS))
    with pytest.raises(TypeError, match="so scale must be too"):
        Matrix(A0).gram(scale=D.float())


@pytest.mark.parametrize("shape", [(ROWS + 1,), (ROWS, 1), (ROWS, C, C), (4, 3, 2), (ROWS, 1, 1, 1)])
def test_wrong_weight(shape: tuple[int, ...]) -> None:
    w = torch.ones(shape, dtype=torch.float64)
    text = r"12 rows, so weight needs shape \(12,\), or \(n, c, c\) with n \* c = 12; got"
    with pytest.raises(ValueError, match=text):
        Matrix(A0).normal(D, w)
    with pytest.raises(ValueError, match=text):
        Matrix(A0).scaled(D).column_norms(w)


def test_wrong_vectors() -> None:
    op, short = Matrix(A0), torch.ones(3, dtype=torch.float64)
    for target in (op, op.scaled(D)):
        with pytest.raises(ValueError, match=r"so scaled needs d of shape \(7,\); got \(3,\)"):
            target.scaled(short)
        with pytest.raises(ValueError, match=r"so centered needs z of shape \(7,\); got \(3,\)"):
            target.centered(short)
        with pytest.raises(ValueError, match=r"so gram needs scale of shape \(7,\); got \(3,\)"):
            target.gram(scale=short)
        with pytest.raises(ValueError, match=r"so gram_diag needs scale of shape \(7,\); got \(3,\)"):
            target.gram_diag(short)


def test_wrong_columns() -> None:
    for op in (Matrix(A0), Matrix(A0).scaled(D)):
        with pytest.raises(ValueError, match=r"so a mask needs shape \(7,\); got \(3,\)"):
            op.columns(torch.tensor([True, False, True]))
        with pytest.raises(TypeError, match=r"int64 column numbers; got torch\.float64 of shape \(7,\)"):
            op.columns(D)
        with pytest.raises(TypeError, match=r"of shape \(1, 1\)"):
            op.columns(torch.tensor([[1]]))
        with pytest.raises(IndexError, match=r"columns 0 to 6; got column 7"):
            op.columns(torch.tensor([0, 7]))
        with pytest.raises(IndexError, match=r"columns 0 to 6; got column -1"):
            op.columns(torch.tensor([-1]))
        with pytest.raises(ValueError, match=r"7 columns and none was selected"):
            op.columns(torch.zeros(COLS, dtype=torch.bool))


def test_wrong_fused_function() -> None:
    with pytest.raises(ValueError, match=r"fn to return the shape it is given, \(12,\); got \(1, 12\)"):
        Matrix(A0).fused(lambda U, rows: U[None], D)


def test_wrong_other() -> None:
    with pytest.raises(ValueError, match=r"Matrix has 7 columns, so gram needs .* as many; got Matrix of shape"):
        Matrix(A0).gram(Matrix(A0[:, :3]))
    with pytest.raises(NotImplementedError, match="selects other columns of its base"):
        Matrix(A0).columns(INDEX).gram(Matrix(A0).columns(INDEX.flip(0)))


def test_what_is_not_written_is_named() -> None:
    op = TwoMethods(A0)
    close(op.normal(D), A0.T @ (A0 @ D))
    for target in (op, op.scaled(D)):
        with pytest.raises(NotImplementedError, match=r"TwoMethods has no gram$"):
            target.gram()
        with pytest.raises(NotImplementedError, match="TwoMethods has no gram_diag"):
            target.gram_diag()
        with pytest.raises(NotImplementedError, match="TwoMethods has no column_norms"):
            target.column_norms()
    with pytest.raises(NotImplementedError, match=r"Matrix\.T has no gram$"):
        Matrix(A0).T.gram()
    with pytest.raises(NotImplementedError, match=r"Matrix\.T has no column_norms with a block-diagonal"):
        Matrix(normal(4, 6)).T.column_norms(torch.ones(2, 3, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="abstract"):
        LinearOperator((1, 1), dtype=torch.float64, device=torch.device("cpu"))  # type: ignore[abstract]


def test_dense_refuses_large_operators() -> None:
    with pytest.raises(ValueError, match=r"84 entries, and dense\(\) stops at 50\. Use products such as A @ V"):
        Matrix(A0).dense(limit=50)


def test_wrong_matrix_and_low_rank() -> None:
    with pytest.raises(ValueError, match=r"floating tensor of shape \(rows, cols\); got \(7,\)"):
        Matrix(D)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        Matrix(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"U \(rows, r\), s \(r,\) and V \(cols, r\); got \(3, 2\), \(1,\)"):
        LowRank(torch.ones(3, 2), torch.ones(1), torch.ones(4, 2))
    with pytest.raises(TypeError, match=r"one floating dtype on one device; got torch\.float32"):
        LowRank(torch.ones(3, 1), torch.ones(1).double(), torch.ones(4, 1))


# -------------------------------------------------------------------------------------------- stacks


B0 = normal(5, COLS, seed=11)


def parts(A: Tensor) -> list[LinearOperator]:
    """Every kind of operator, three rows each."""
    a, b, c, d = A.split(C)
    low = LowRank(*(x.mT if i == 2 else x for i, x in enumerate(torch.linalg.svd(b, False))))
    return [Matrix(a), low, Matrix(c + Z).centered(Z), Matrix(d / D).scaled(D)]


def test_stack_of_every_kind_is_an_operator() -> None:
    stack = Stack(parts(A0))
    check_operator(stack, A0, blocks=C, other=(Stack([Matrix(B0[:2]), Matrix(B0[2:])]), B0))
    check_operator(Stack([stack]), A0, blocks=C, other=(Matrix(B0).centered(Z), B0 - Z))
    check_operator(Stack([stack, Matrix(B0)]), torch.cat([A0, B0]), other=(stack.scaled(D), A0 * D))


@pytest.mark.parametrize("name", ["plain", "scaled", "centered", "fisher"])
def test_gram_with_a_stack_from_either_side(name: str) -> None:
    stack, scale = Stack(parts(A0)), normal(COLS, seed=10)
    compose, reference = COMPOSITIONS[name]
    for kind in ("matrix", "low rank"):
        other, B = compose(BASES[kind](B0)), reference(B0)
        for s in (None, scale):
            K = A0 @ B.T if s is None else A0 * s @ B.T
            close(stack.gram(other, s), K)
            close(other.gram(stack, s), K.T)
            close(stack.centered(Z).gram(other, s), K - (Z @ B.T if s is None else Z * s @ B.T))


def test_fused_products_of_a_stack_take_one_pass_over_each_part() -> None:
    bases = [Streamed(A0[: 2 * C]), Streamed(A0[2 * C :], shuffled=True)]
    V = normal(COLS, 4, seed=7)
    seen = []

    def fn(U: Tensor, rows: slice | Tensor) -> Tensor:
        seen.extend(torch.arange(ROWS)[rows].tolist())
        close(U, A0[rows] @ V)
        return U

    close(Stack(bases).fused(fn, V), A0.T @ A0 @ V)
    assert sorted(seen) == list(range(ROWS))
    assert [base.passes for base in bases] == [{"fused": 1}] * 2


def test_the_block_of_a_stack_is_that_of_all_its_parts() -> None:
    pair = Stack([Matrix(A0[:3], block=3), Matrix(A0[3:], block=3)])
    assert pair.block == 3
    X = A0.view(-1, 3, COLS)
    close(pair.gram_blocks(D), (X * D) @ X.mT)
    close(pair.scaled(D).gram_blocks(), (X * D * D) @ X.mT)
    mixed = Stack([Matrix(A0[:4], block=2), Matrix(A0[4:])])
    assert mixed.block is None
    with pytest.raises(NotImplementedError, match="Stack has no gram_blocks: its 12 rows"):
        mixed.gram_blocks()
    for product in (mixed.column_norms, lambda W: mixed.normal(D, W)):
        with pytest.raises(ValueError, match=r"blocks of 3 rows, and a chunk of rows 0 to 4 cuts through one"):
            product(WEIGHTS["blocks"])


def test_gradients_flow_through_the_scale_of_a_stack() -> None:
    scale = D.square().requires_grad_()
    Stack(parts(A0)).gram(scale=scale).diagonal().sum().backward()
    close(scale.grad, A0.square().sum(0))


def test_wrong_stacks() -> None:
    for wrong, came in (([], "none"), ([Matrix(A0), A0], "Matrix, Tensor")):
        with pytest.raises(TypeError, match=rf"Stack needs one or more linear operators; got {came}\."):
            Stack(wrong)
    with pytest.raises(ValueError, match=r"one number of columns; got Matrix of shape \(12, 7\) and .* \(7, 12\)"):
        Stack([Matrix(A0), Matrix(A0).T])
    with pytest.raises(TypeError, match=r"one dtype .* torch\.float64 on cpu and Matrix in torch\.float32"):
        Stack([Matrix(A0), Matrix(A0.float())])


# ----------------------------------------------------------------------------- blocks of a Gram matrix


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gram_blocks(name: str) -> None:
    compose, reference = COMPOSITIONS[name]
    op, A = compose(Matrix(A0, block=C)), reference(A0)
    check_operator(op, A, blocks=C)
    assert op.block == C


def test_gram_blocks_need_blocks() -> None:
    with pytest.raises(NotImplementedError, match="Affine has no gram_blocks: its 12 rows"):
        Matrix(A0).scaled(D).gram_blocks()
    with pytest.raises(NotImplementedError, match="TwoMethods has no gram_blocks"):
        op = TwoMethods(A0)
        op.block = C
        op.gram_blocks()
    with pytest.raises(ValueError, match="12 rows, so block needs to be a divisor of it; got 5"):
        Matrix(A0, block=5)
