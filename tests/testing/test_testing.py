"""The contract catches what is wrong, and the zoo is what it says."""

import functools
import importlib
import re

import pytest
import torch
from torch import Tensor, nn

from linnet.linalg import Matrix
from linnet.testing import Case, call, check_operator, dense_jacobian, zoo

CASES = list(zoo().values())
ROWS, COLS, BLOCKS = 6, 5, 2


def change(name: str, wrap) -> type[Matrix]:
    """A dense matrix with one method changed: `wrap` gets the method as it was, and its arguments."""
    method = getattr(Matrix, name)

    def changed(self, *args, **kwargs):
        return wrap(functools.partial(method, self), *args, **kwargs)

    return type("Changed", (Matrix,), {name: changed})


def spoil(name: str, change_result) -> type[Matrix]:
    """A dense matrix with the result of one method changed."""

    def wrap(do, *args):
        out = do(*args)
        return (change_result(out[0]), out[1]) if name == "_fused" else change_result(out)

    return change(name, wrap)


def matrix(rows: int = ROWS, cols: int = COLS, seed: int = 3) -> Tensor:
    return torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def raise_not_implemented(out):
    raise NotImplementedError("Changed has none")


def skip(case: Case) -> None:
    if case.needs is not None:
        pytest.importorskip(case.needs)


def example(data, i: int):
    if isinstance(data, dict):
        return {key: value[i : i + 1] for key, value in data.items()}
    return tuple(x[i : i + 1] for x in data) if isinstance(data, tuple) else data[i : i + 1]


# The contract.


def test_right_operator_passes():
    A, B = matrix(), matrix(rows=4, seed=4)
    check_operator(Matrix(A, block=BLOCKS), A, blocks=BLOCKS, other=(Matrix(B), B))


def test_right_compositions_pass():
    A, d, z = matrix(), matrix(1)[0], matrix(1, seed=5)[0]
    op = Matrix(A).centered(z).scaled(d).columns(torch.tensor([3, 0, 1]))
    check_operator(op, ((A - z) * d)[:, [3, 0, 1]], blocks=3)


def test_float32_passes_at_its_own_tolerance():
    A = matrix().float()
    check_operator(Matrix(A), A, rtol=1e-5)
    with pytest.raises(AssertionError, match=r"above rtol 1\.0e-12"):
        check_operator(Matrix(A), A, rtol=1e-12)


def test_zero_matrix_passes():
    A = torch.zeros(ROWS, COLS, dtype=torch.float64)
    check_operator(Matrix(A), A)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ("_matmul", "A @ v"),
        ("_rmatmul", "A.T @ u"),
        ("_fused", r"normal\(v\)"),
        ("_gram", r"gram\(\)"),
        ("_gram_diag", r"gram_diag\(\)"),
        ("_column_norms", r"column_norms\(\)"),
    ],
)
@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_each_wrong_product_is_named(wrong, names, factor):
    A = matrix()
    with pytest.raises(AssertionError, match=rf"^{names} disagrees .* relative error 1\.0e-03, above .* entry \("):
        check_operator(spoil(wrong, lambda out: factor * out)(A), A, blocks=BLOCKS)


def test_the_worst_entry_is_named():
    A = matrix().abs()
    wrong = torch.tensor([0.0, 1.0, -2.0, 0.5, 0.0]).double()
    needed = A.square().sum(0)
    text = f"worst at entry (2,): got {float(needed[2] - 2):.9g}, needed {float(needed[2]):.9g}"
    with pytest.raises(AssertionError, match=re.escape(text)):
        check_operator(spoil("_column_norms", lambda out: out + wrong)(A), A)


@pytest.mark.parametrize("wrong", ["_gram", "_gram_diag", "_column_norms", "_fused"])
def test_missing_methods_are_accepted_only_when_allowed(wrong):
    A = matrix()
    op = spoil(wrong, raise_not_implemented)(A)
    method = "normal" if wrong == "_fused" else wrong[1:]
    with pytest.raises(
        AssertionError, match=rf"{method}\(.*not implemented \(Changed has none\); allow=\('{method}',\)"
    ):
        check_operator(op, A)
    check_operator(op, A, allow=("normal", "fused") if wrong == "_fused" else (method,))


def drop_operand(do, *args, ndim=1, **kwargs):
    """A product that ignores weights and scales with so many axes, behind its first operand."""
    given = [None if isinstance(x, Tensor) and x.ndim == ndim else x for x in (*args, *kwargs.values())]
    return do(*args[:1], *given[1:]) if args else do(**dict(zip(kwargs, given, strict=True)))


@pytest.mark.parametrize(
    ("method", "wrap", "names"),
    [
        ("normal", drop_operand, r"normal\(V, w\) with w \(rows,\) disagrees"),
        ("normal", functools.partial(drop_operand, ndim=3), r"normal\(V, W\) with W \(n, c, c\) disagrees"),
        ("normal", lambda do, V, w=None: do(V, w.mT if w is not None and w.ndim == 3 else w), r"normal\(V, W\)"),
        ("gram", drop_operand, r"gram\(scale\) disagrees"),
        ("gram_diag", drop_operand, r"gram_diag\(scale\) disagrees"),
        ("column_norms", lambda do, w=None: do(w if w is None or w.ndim > 1 else None), r"column_norms\(w\) with w"),
        ("column_norms", lambda do, w=None: do(w if w is None or w.ndim < 3 else None), r"column_norms\(W\) with W"),
        ("fused", lambda do, fn, V: do(lambda out, rows: out, V), r"fused\(tanh, v\) disagrees"),
        ("_matmul", lambda do, V: do(V[:, :1].expand_as(V)), r"^A @ V disagrees"),
        ("_matmul", lambda do, V: do(V.mul_(2)) / 2, r"A @ v changed an operand of shape \(5,\) in place"),
        ("__matmul__", lambda do, V: do(V[:COLS]), r"A @ V with V \(6,\) must raise .* it returned a result"),
    ],
)
def test_changed_operands_are_caught(method, wrap, names):
    A = matrix()
    with pytest.raises(AssertionError, match=names):
        check_operator(change(method, wrap)(A), A, blocks=BLOCKS)


def test_wrong_cross_gram_is_caught():
    A, B = matrix(), matrix(rows=4, seed=4)
    with pytest.raises(AssertionError, match=r"^gram\(other\) disagrees"):
        check_operator(Matrix(A), A, other=(Matrix(2 * B), B))


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda out: out.float(), "A @ v has dtype torch.float32, needed torch.float64"),
        (lambda out: out[:-1], r"A @ v has shape \(5,\), needed \(6,\)"),
        (lambda out: out * torch.nan, "A @ v disagrees .* got nan"),
    ],
)
def test_wrong_kind_of_result_is_caught(result, names):
    A = matrix()
    with pytest.raises(AssertionError, match=names):
        check_operator(spoil("_matmul", result)(A), A)


def test_shape_dtype_and_transpose_of_the_operator_are_checked():
    A = matrix()
    with pytest.raises(AssertionError, match=r"A.shape is \(6, 5\), needed \(5, 6\)"):
        check_operator(Matrix(A), A.T)
    with pytest.raises(AssertionError, match=r"A.dtype is torch.float64, needed torch.float32"):
        check_operator(Matrix(A), A.float())

    new = type("NewTranspose", (Matrix,), {"T": property(lambda self: Matrix(A.T))})
    with pytest.raises(AssertionError, match=r"A.T.T is not A itself"):
        check_operator(new(A), A)


@pytest.mark.parametrize(
    ("error", "names"),
    [(ValueError("wrong"), "refused by a text without 5: wrong"), (KeyError("V"), "it raised KeyError")],
)
def test_unhelpful_refusal_is_caught(error, names):
    def refuse(do, V):
        if V.shape[0] != COLS:
            raise error
        return do(V)

    A = matrix()
    with pytest.raises(AssertionError, match=names):
        check_operator(change("__matmul__", refuse)(A), A)


def test_arguments_of_the_check_are_checked():
    A = matrix()
    with pytest.raises(ValueError, match=r"allow takes names among normal, .*; got grams"):
        check_operator(Matrix(A), A, allow=("grams",))
    with pytest.raises(ValueError, match="must divide the 6 rows of the matrix; got 4"):
        check_operator(Matrix(A), A, blocks=4)


# The reference.


def test_dense_jacobian_of_a_linear_map_is_known():
    x = matrix(2, 3)
    J = dense_jacobian(nn.Linear(3, 2).double(), x)
    by_hand = torch.cat([torch.kron(torch.eye(2), x[i]).reshape(2, 6) for i in range(2)])
    torch.testing.assert_close(J, torch.cat([by_hand, torch.eye(2).repeat(2, 1)], 1).double())


def test_dense_jacobian_takes_names():
    x, model = matrix(2, 3), nn.Linear(3, 2).double()
    J = dense_jacobian(model, x)
    torch.testing.assert_close(dense_jacobian(model, x, names=["bias"]), J[:, 6:])
    with pytest.raises(ValueError, match="at least one parameter"):
        dense_jacobian(model, x, names=[])


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_dense_jacobian_is_right_where_vectorized_reverse_mode_is_not(p):
    """torch's batched backward pass of `torch.cdist` is wrong: the reference is held against differences."""

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(matrix(4, 3, seed=5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.centers, p=p)

    model, x, h = Distances(), matrix(3, 3), 1e-6
    J = dense_jacobian(model, x)
    columns = []
    with torch.no_grad():
        for i in range(12):
            step = h * torch.eye(12, dtype=torch.float64)[i].view(4, 3)
            sides = [torch.cdist(x, model.centers + s * step, p=p).flatten() for s in (1, -1)]
            columns.append((sides[0] - sides[1]) / (2 * h))
    torch.testing.assert_close(J, torch.stack(columns, 1), rtol=1e-7, atol=1e-8)


def test_dense_jacobian_sees_parameters_that_a_closure_reads():
    layer = nn.Linear(3, 2).double()
    model = nn.Sequential(layer)
    model.forward = lambda x: layer(x)
    torch.testing.assert_close(dense_jacobian(model, matrix(4, 3)), dense_jacobian(layer, matrix(4, 3)))


def test_dense_jacobian_leaves_model_and_data_as_they_were():
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2).double()
            self.register_buffer("calls", torch.zeros(()))
            self.a.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x -= x.mean(1, keepdim=True)
            return self.a(x)

    model, x = Careless(), matrix(4, 3)
    J = dense_jacobian(model, x, names=["a.weight"])
    assert model.calls == 0
    assert not model.a.weight.requires_grad
    assert torch.equal(x, matrix(4, 3))
    torch.testing.assert_close(J[0, :3], x[0] - x[0].mean())


def test_dense_jacobian_of_a_model_that_needs_several_examples():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) < 2:
                raise ValueError("two or more")
            return self.a(x)

    model = Pairs()
    torch.testing.assert_close(dense_jacobian(model, matrix(4, 3)), dense_jacobian(model.a, matrix(4, 3)))


def test_call_understands_logits_and_vectors():
    class Output:
        logits = torch.ones(3, 2)

    assert call(lambda x: Output(), torch.ones(3)).shape == (3, 2)
    assert call(lambda x: x, torch.ones(3)).shape == (3, 1)


# The zoo.


def test_zoo_is_large_and_named():
    assert len(CASES) >= 36
    assert all(name == case.name for name, case in zoo().items())
    files = ("attention", "conv", "dense", "norm", "sequence", "sharing", "transformers")
    defined = sum(len(importlib.import_module(f"linnet.testing.architectures.{file}").CASES) for file in files)
    assert defined == len(CASES), "two cases share a name"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zoo_case_is_what_it_says(case):
    skip(case)
    state = torch.get_rng_state()
    model, data = case.build(), case.data(3, 1)
    assert torch.equal(torch.get_rng_state(), state), "building moved the global random numbers"
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert 10 <= sum(p.numel() for p in model.parameters() if p.requires_grad) <= 3_000

    f = case.outputs(model, data)
    assert f.shape[0] == 3
    assert f.ndim == 2
    assert f.dtype == torch.float64
    assert f.isfinite().all()

    again = case.outputs(case.build(), case.data(3, 1))
    assert torch.equal(f, again), "the case is not deterministic"
    alone = torch.cat([case.outputs(model, example(data, i)) for i in range(3)])
    torch.testing.assert_close(alone, f, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zoo_reference_agrees_with_plain_backward_passes(case):
    skip(case)
    model, data = case.build(), case.data(2, 2)
    before = list(model.named_parameters(remove_duplicate=False))
    J = case.dense(model, data)
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True)), "the reference changed the model"

    theta = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for value in case.outputs(model, data).flatten():
        grads = torch.autograd.grad(value, theta, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    torch.testing.assert_close(J, torch.stack(rows), rtol=1e-9, atol=1e-9 * float(J.abs().max()))
    assert J.abs().max() > 0


def test_zoo_takes_a_single_example_and_other_seeds():
    case = zoo()["routing"]
    model = case.build()
    gates = {int(model.gate(case.data(1, seed)).argmax()) for seed in range(20)}
    assert gates == {0, 1}, "some batches leave an expert without examples, others do not"
    assert case.dense(model, case.data(1, 0)).shape == (3, 68)


def cut(position: int, size: int):
    """A product that cuts one of its operands to the size that it needs."""

    def wrap(do, *args, **kwargs):
        given = [*args, *kwargs.values()]
        if len(given) > position and given[position] is not None:
            given[position] = given[position][:size]
        return do(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    return wrap


@pytest.mark.parametrize(
    ("method", "wrap", "names"),
    [
        ("__matmul__", lambda do, V: do(V[:, :, 0] if V.ndim == 3 else V), "A @ V with V (5, 1, 1)"),
        ("__matmul__", lambda do, V: do(V.double()), "A @ V with V in torch.float32"),
        ("normal", cut(0, COLS), "normal(V) with V (6,)"),
        ("normal", cut(1, ROWS), "normal(V, w) with w (7,)"),
        ("gram", cut(0, COLS), "gram(scale) with scale (6,)"),
        ("gram_diag", cut(0, COLS), "gram_diag(scale) with scale (6,)"),
        ("gram_blocks", cut(0, COLS), "gram_blocks(scale) with scale (6,)"),
        ("column_norms", cut(0, ROWS), "column_norms(w) with w (7,)"),
    ],
)
def test_each_method_that_takes_any_operand_is_named(method, wrap, names):
    A = matrix()
    with pytest.raises(AssertionError, match=f"^{re.escape(names)} must raise .* it returned a result"):
        check_operator(change(method, wrap)(A, block=BLOCKS), A, blocks=BLOCKS)


@pytest.mark.parametrize(
    ("method", "names"),
    [("_matmul", "A @ V"), ("_rmatmul", "A.T @ U"), ("_fused", "normal(V)")],
)
def test_a_product_that_is_wrong_for_several_columns_alone_is_named(method, names):
    def wrap(do, *args):
        out = do(*args)
        if args[-1].shape[1] == 1:
            return out
        return (1.001 * out[0], out[1]) if method == "_fused" else 1.001 * out

    A = matrix()
    with pytest.raises(AssertionError, match=f"^{re.escape(names)} disagrees"):
        check_operator(change(method, wrap)(A), A, blocks=BLOCKS)
