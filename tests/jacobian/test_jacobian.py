"""The Jacobian as an operator over data: order, passes, settings, and what it leaves behind."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import linnet
from linnet.jacobian import Jacobian
from linnet.jacobian import chunk as chunk_module
from linnet.jacobian import gram as grams_module
from linnet.jacobian import passes as passes_module
from linnet.jacobian.blocks import base
from linnet.jacobian.blocks.base import Scale
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.chunk import ChunkBuilder
from linnet.linalg import Matrix, Stack
from linnet.network import FunctionalModel
from linnet.testing import check_operator, dense_jacobian, zoo
from linnet.testing.case import Net, parameter
from tests.support.drawn import double, normal

N, D, C = 7, 4, 3


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def mlp(*, d: int = D, width: int = 5, c: int = C, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(d, width), nn.Tanh(), nn.Linear(width, c)), seed)


@pytest.fixture
def model():
    return mlp()


@pytest.fixture
def x():
    return normal(N, D, seed=1)


# Rows, columns, outputs.


@pytest.mark.parametrize("engine", ["auto", "rows", "autodiff"])
def test_rows_by_example_columns_by_parameter(model, x, engine):
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 3, engine=engine)
    assert J.shape == (N * C, lin.p)
    assert (J.n, J.c) == (N, C)
    assert list(lin.theta) == [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(model(x)[4, 2], list(model.parameters()))
    close(J.T @ torch.eye(N * C, dtype=torch.float64)[4 * C + 2], torch.cat([g.flatten() for g in grads]))
    theta = torch.eye(lin.p, dtype=torch.float64)[lin.layout.offsets["2.bias"] + 1]
    assert (J @ theta).view(N, C).tolist() == [[0.0, 1.0, 0.0]] * N


def test_outputs(model, x):
    lin = linnet.linearize(model)
    close(lin.jacobian(x, 3).outputs(), model(x).detach())
    close(lin(x), model(x).detach())
    assert not lin(x).requires_grad
    one = linnet.linearize(model, output=lambda out: out[:, 0])
    assert one(x).shape == one.jacobian(x, 3).outputs().shape == (N, 1)


def test_linearization_is_first_order(model, x):
    """f(x; theta0 + e v) - f(x; theta0) - e J v is of second order in e."""
    lin = linnet.linearize(model)
    v = normal(lin.p, seed=3)

    def error(e: float) -> float:
        moved = copy.deepcopy(model)
        moved.load_state_dict({k: t + e * lin.layout.unflatten(v)[k] for k, t in lin.theta.items()})
        step = (lin.jacobian(x) @ v).view(N, C)
        return float((moved(x) - lin(x) - e * step).detach().abs().max())

    assert error(1e-3) / error(1e-4) == pytest.approx(100, rel=0.05)


def test_says_what_it_is(model, x):
    lin = linnet.linearize(model)
    assert repr(lin) == "Linearization(Sequential, p=43 in 2 layers, torch.float64)"
    assert repr(lin.jacobian(x)) == "Jacobian(shape=(21, 43), dtype=torch.float64, device=cpu)"


def test_a_rank_without_examples_adds_nothing(model, x, monkeypatch):
    """Its sums start from memory that holds anything: here, from what is not a number."""
    J = linnet.linearize(model).jacobian(x)
    U, V = normal(N * C, 2), normal(J.shape[1], 2)
    monkeypatch.setattr(type(J.passes), "pieces", lambda *given, **options: iter(()))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        assert bool(torch.empty(3).isnan().all())
        found = [J.T @ U, J.normal(V), J.pullback(lambda batch: batch.f)]
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(bool((t == 0).all()) for t in found)


# Fused products.


def test_fused_gives_the_gradient_of_any_loss(model, x):
    """At V = 0 the linear model is the network, so its loss gradient is the network's own."""
    y = torch.arange(N) % C
    J = linnet.linearize(model).jacobian((x, y), 3)

    def residual(JV, batch):
        return (batch.f.softmax(1) - nn.functional.one_hot(batch.rest, C)).flatten()

    found = J.fused(residual, torch.zeros(J.shape[1], dtype=torch.float64))
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    grads = torch.autograd.grad(loss, list(model.parameters()))
    close(found, torch.cat([g.flatten() for g in grads]))


@pytest.mark.parametrize("k", [None, 4])
def test_fused_sees_each_chunk_with_its_batch(model, x, k):
    A = dense_jacobian(model, x)
    V = normal(A.shape[1], *(() if k is None else (k,)))
    weights, seen = torch.linspace(0.5, 2, N, dtype=torch.float64), []

    def fn(JV, batch):
        seen.append(batch.index)
        assert JV.shape == (batch.n * C, *V.shape[1:])
        assert torch.equal(batch.rest["y"], batch.index * 10)
        close(batch.f, model(batch.kwargs["input"]).detach())
        w = weights[batch.index].repeat_interleave(C)
        return (w if k is None else w[:, None]) * JV**2

    J = linnet.linearize(model).jacobian({"input": x, "y": torch.arange(N) * 10}, 3)
    W = torch.diag(weights.repeat_interleave(C))
    close(J.fused(fn, V), A.T @ W @ (A @ V) ** 2)
    assert [part.tolist() for part in seen] == [[0, 1, 2], [3, 4, 5], [6]]


# Pullbacks.


@pytest.fixture
def passes(monkeypatch):
    """Counts the network's forward passes and autograd's backward passes."""
    counts = {"forward": 0, "backward": 0}

    def counted(kind, fn):
        def call(*args, **kwargs):
            counts[kind] += 1
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(FunctionalModel, "forward", counted("forward", FunctionalModel.forward))
    monkeypatch.setattr(torch.autograd, "grad", counted("backward", torch.autograd.grad))
    return counts


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("c", [1, C])
def test_pullback_is_the_gradient_of_any_loss(x, c, flat):
    model, y = mlp(c=c), normal(N, c, seed=2)
    lin = linnet.linearize(model)
    J = lin.jacobian((x, y), 3)
    found = J.pullback(lambda batch: (batch.f**3 * batch.rest).flatten(0, int(flat)))
    u = (model(x) ** 3 * y).detach()
    close(found, dense_jacobian(model, x).T @ u.flatten())
    grads = torch.autograd.grad((model(x) ** 4 / 4 * y).sum(), list(model.parameters()))
    close(found, torch.cat([g.flatten() for g in grads]))


@pytest.mark.parametrize("c", [1, C])
def test_pullback_takes_one_forward_and_one_backward_pass(x, c, passes):
    J = linnet.linearize(mlp(c=c)).jacobian(x, 4)
    passes.update(forward=0, backward=0)
    J.pullback(lambda batch: batch.f)  # which compares the chunks
    passes.update(forward=0, backward=0)
    J.pullback(lambda batch: batch.f)
    assert passes == {"forward": 2, "backward": 2}  # one each for two chunks
    passes.update(forward=0, backward=0)
    J.T @ normal(N * c)
    assert passes == {"forward": 2, "backward": 2}


def test_one_fused_column_takes_one_forward_pass(x, passes):
    J = linnet.linearize(mlp(c=9)).jacobian(x)
    v = normal(J.shape[1])
    close(J.normal(v), J.T @ (J @ v))
    passes.update(forward=0, backward=0)
    J.normal(v)
    assert passes == {"forward": 1, "backward": 1}  # forward mode in the pass that is differentiated


@pytest.mark.parametrize("engine", ["auto", "rows", "autodiff"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp_elu_scalar",
        "conv2d",
        "tied_weights",
        "frozen_layers",
        "unused_layer",
        "routing",
        "embedding_padding",
        "dict_inputs",
        "lstm",
        "attention",
    ],
)
@pytest.mark.filterwarnings("ignore:linnet.s layer rules do not reproduce:UserWarning")
def test_pullback_of_architectures(name, engine):
    case = zoo()[name]
    model, data = case.build(), case.data(5, 0)
    lin = linnet.linearize(model, output=case.output)
    J = lin.jacobian(data, 2, engine=engine)
    expected = case.dense(model, data).T @ case.outputs(model, data).detach().sin().flatten()
    close(J.pullback(lambda batch: batch.f.sin()), expected)
    close(J.cached().pullback(lambda batch: batch.f.sin()), expected)


def test_pullback_of_a_subset_knows_its_examples(model, x):
    J = linnet.linearize(model).jacobian(x, 2)
    index, w = torch.tensor([5, 0, 3]), normal(N, C, seed=3)
    found = J.subset(index).pullback(lambda batch: w[batch.index])
    close(found, dense_jacobian(model, x[index]).T @ w[index].flatten())


def test_pullback_in_half_precision_adds_up_in_float32():
    model = mlp().half()
    x, u = normal(300, D, seed=1).half(), normal(300, C, seed=2).float()
    J = linnet.linearize(model).jacobian(x)
    found = J.pullback(lambda batch: u[batch.index])
    assert found.dtype == torch.float32
    close(found, J.dense().T @ u.flatten(), rtol=1e-5)


def test_pullback_checks_what_fn_returns(model, x):
    J = linnet.linearize(model).jacobian(x)
    with pytest.raises(ValueError, match=r"fn to return \(7, 3\) or \(21,\) in torch.float64; got \(7,\) in"):
        J.pullback(lambda batch: batch.f[:, 0])
    with pytest.raises(ValueError, match=r"in torch.float64; got \(7, 3\) in torch.float32"):
        J.pullback(lambda batch: batch.f.float())


# Other weights.


def test_at_other_weights(model, x):
    lin = linnet.linearize(model)
    J, bias = lin.jacobian(x, 3), normal(5, seed=4)
    moved = copy.deepcopy(model)
    moved[0].bias.data = bias
    other, A = J.at({"0.bias": bias}), dense_jacobian(moved, x)
    close(other.outputs(), moved(x).detach())
    for k in (1, 50):
        close(other.T @ normal(N * C, k), A.T @ normal(N * C, k))
        close(other @ normal(J.shape[1], k), A @ normal(J.shape[1], k))
    close(other.gram(), A @ A.T)
    close(other.cached().gram(), A @ A.T)
    close(J.gram(), dense_jacobian(model, x) @ dense_jacobian(model, x).T)
    assert torch.equal(lin.theta["0.bias"], model[0].bias)
    with pytest.raises(ValueError, match="cannot go to other weights"):
        J.cached().at({"0.bias": bias})


def test_at_checks_the_weights(model, x):
    lin = linnet.linearize(model, "2.*")
    with pytest.raises(ValueError, match=r"'0\.bias' is not a selected parameter; these are 2\.weight, 2\.bias"):
        lin.at({"0.bias": normal(5)})
    with pytest.raises(ValueError, match=r"'2\.bias' has shape \(3,\) in torch\.float64 on cpu; got \(4,\) in"):
        lin.at({"2.bias": normal(4)})
    with pytest.raises(ValueError, match=r"got \(3,\) in torch\.float32 on cpu"):
        lin.at({"2.bias": normal(3).float()})


# Minibatches and subsets.


def test_minibatches_cover_every_example_once(model, x):
    J = linnet.linearize(model).jacobian(x)
    parts = list(J.minibatches(3, seed=1))
    assert sorted(part.shape for part in parts) == [(6, 43), (6, 43), (9, 43)]
    order = torch.cat([part.index for part in parts])
    assert sorted(order.tolist()) == list(range(N))
    again = torch.cat([part.index for part in J.minibatches(3, seed=1)])
    assert torch.equal(order, again)
    assert not torch.equal(order, torch.cat([part.index for part in J.minibatches(3, seed=2)]))
    assert J.index.tolist() == list(range(N))


def test_minibatches_add_up(model, x):
    A = dense_jacobian(model, x)
    J = linnet.linearize(model).jacobian((x, torch.arange(N)), 2)
    V, U = normal(43, 2), normal(N, C, 2, seed=2)
    total = {"rmatmul": 0, "normal": 0, "fused": 0, "norms": 0}
    for part in J.minibatches(3, seed=0):
        rows = U[part.index].flatten(0, 1)
        close(part @ V, (A @ V).view(N, C, 2)[part.index].flatten(0, 1))
        close(part.outputs(), model(x)[part.index].detach())
        total["rmatmul"] += part.T @ rows
        total["normal"] += part.normal(V)
        total["norms"] += part.column_norms()
        total["fused"] += part.fused(lambda JV, batch: JV * (1.0 + batch.rest).repeat_interleave(C)[:, None], V)
    close(total["rmatmul"], A.T @ U.flatten(0, 1))
    close(total["normal"], A.T @ (A @ V))
    close(total["norms"], (A * A).sum(0))
    weights = (1.0 + torch.arange(N).double()).repeat_interleave(C)[:, None]
    close(total["fused"], A.T @ (weights * (A @ V)))


def test_subsets_in_any_order(model, x):
    A = dense_jacobian(model, x).view(N, C, -1)
    J = linnet.linearize(model).jacobian(x, 2)
    index = torch.tensor([5, 0, 0, 3])
    part = J.subset(index)
    B = A[index].flatten(0, 1)
    check_operator(part, B, blocks=C, other=(J, A.flatten(0, 1)))
    again = part.subset(torch.tensor([3, 0]))
    assert again.index.tolist() == [3, 5]
    close(again.gram(part), A[[3, 5]].flatten(0, 1) @ B.T)


# Chunks and memory.


@pytest.mark.parametrize("batch_size", [1, 2, N, 1000, "auto"])
def test_products_do_not_depend_on_the_chunks(model, x, batch_size):
    check_operator(linnet.linearize(model).jacobian(x, batch_size), dense_jacobian(model, x), blocks=C)


def test_memory_decides_the_chunks(model, x):
    lin, A = linnet.linearize(model), dense_jacobian(model, x)
    small, large = (lin.jacobian(x, memory=memory) for memory in (1, 10**9))
    assert small.plan.chunk == 1
    assert large.plan.chunk == N
    each = large.plan.per_example
    assert lin.jacobian(x, memory=3 * each).plan.chunk == 3
    check_operator(small, A, blocks=C, other=(large, A))


def test_an_example_takes_what_it_takes_however_many_there_are(model, x):
    lin = linnet.linearize(model)
    few, part = lin.jacobian(x.clone()), lin.jacobian(x.repeat(100, *(1,) * (x.ndim - 1)))
    assert few.plan.per_example == part.plan.per_example


def watch_chunks(monkeypatch, look) -> None:
    """Looks at every batch before its chunk is built."""
    for name in ("build_by_rules", "build_by_autodiff"):
        build = getattr(ChunkBuilder, name)

        def watched(self, batch, *args, build=build, **kwargs):
            look(batch)
            return build(self, batch, *args, **kwargs)

        monkeypatch.setattr(ChunkBuilder, name, watched)


def test_a_chunk_never_holds_all_examples(model, x, monkeypatch):
    sizes = []

    J = linnet.linearize(model).jacobian(x, 2, engine="rows")
    assert J.shape == (N * C, 43)  # the first examples have been run
    watch_chunks(monkeypatch, lambda batch: sizes.append(batch.n))
    J.normal(normal(43, 2))
    assert sizes == [2, 2, 2, 1]  # one pass


# The plan.


def test_plan_names_layers_rules_and_engines(x):
    def forward(m, x):
        return m.fc(m.conv(x.view(-1, 1, 2, 2)).flatten(1)) * m.scale.exp()

    net = double(Net(forward, conv=nn.Conv2d(1, 2, 2), fc=nn.Linear(2, 3), scale=parameter(3), spare=parameter(2)))
    text = str(linnet.linearize(net).jacobian(x, 3).plan)
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    assert "Jacobian (21 x 24): 7 examples (in memory on cpu), 3 outputs, float64 on cpu" in text
    assert "chunks of 3 examples" in text
    assert lines["conv"][1:4] == ["Conv", "10", "1"]
    assert lines["fc"][1:3] == ["Linear", "9"]
    assert lines["scale"][1] == "none"
    assert "autodiff" in lines["scale"]
    assert lines["scale"][-1] == "?"
    assert lines["spare"][1:] == ["unused", "2", "0", "zero", "zero", "0"]


def test_plan_counts_multiply_adds(x):
    plan = linnet.linearize(double(nn.Linear(4, 3))).jacobian(x, engine="rows").plan
    assert sum(line.cost for line in plan.lines) == 3 * (4 * 3 + 2 * 15 * 32)  # form c rows, multiply them twice
    plan = linnet.linearize(double(nn.Linear(4, 3))).jacobian(x, engine="bilinear").plan
    assert sum(line.cost for line in plan.lines) == 2 * 32 * 3 * (4 + 3) + 2 * 32 * 3 * 3  # weight, bias


@pytest.mark.parametrize("engine", ["rows", "bilinear", "ghost", "autodiff"])
def test_plan_shows_the_engine_asked_for(model, x, engine):
    plan = linnet.linearize(model).jacobian(x, engine=engine).plan
    shown = {line.gram if engine == "ghost" else line.products for line in plan.lines}
    assert all(engine in part for part in shown)
    assert repr(plan) == str(plan)


# Progress.


@pytest.mark.parametrize("progress", [None, False])
def test_passes_report_their_progress(model, x, monkeypatch, progress):
    bars = []

    @contextmanager
    def bar(total, label="", *, progress=None):
        bars.append([label, total, progress, 0])

        def tick(done):
            bars[-1][3] += done

        yield tick

    for module in ("passes", "jacobian"):
        monkeypatch.setattr(f"linnet.jacobian.{module}.show_progress", bar)
    J = linnet.linearize(model).jacobian(x, 3, progress=progress)
    J @ normal(43)
    J.T @ normal(N * C)
    J.normal(normal(43))
    J.gram_diag()
    J.column_norms()
    J.outputs()
    labels = ["J V", "J^T U", "J^T J V", "diag J J^T", "diag J^T W J", "f"]
    assert bars == [[label, N, progress, N] for label in labels]


def test_short_passes_print_nothing(model, x, capfd):
    J = linnet.linearize(model).jacobian(x, 1, progress=True)
    J.normal(normal(43))
    assert capfd.readouterr() == ("", "")


# Laws.

SIZES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 6),
        "d": st.integers(1, 4),
        "width": st.integers(1, 5),
        "c": st.integers(1, 4),
        "seed": st.integers(0, 2**16),
        "chunk": st.integers(1, 7),
        "engine": st.sampled_from(["auto", "rows", "bilinear", "ghost", "autodiff"]),
    }
)


def drawn(n: int, d: int, width: int, c: int, seed: int, chunk: int, engine: str) -> Jacobian:
    net = mlp(d=d, width=width, c=c, seed=seed)
    return linnet.linearize(net).jacobian(normal(n, d, seed=seed), chunk, engine=engine)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, k=st.integers(1, 5))
def test_adjoint_and_linear(sizes, k):
    J = drawn(**sizes)
    V, W, U = normal(J.shape[1], k), normal(J.shape[1], k, seed=1), normal(J.shape[0], k, seed=2)
    left, right = (U * (J @ V)).sum(), ((J.T @ U) * V).sum()
    assert abs(left - right) <= 1e-9 * U.norm() * (J @ V).norm()
    close(J @ (2 * V - 3 * W), 2 * (J @ V) - 3 * (J @ W))
    close(J.T @ (2 * U), 2 * (J.T @ U))
    close(J.normal(V), J.T @ (J @ V))


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES)
def test_gram_is_symmetric_and_positive(sizes):
    J = drawn(**sizes)
    K = J.gram()
    size = K.abs().max()
    assert (K - K.T).abs().max() <= 1e-12 * size
    assert torch.linalg.eigvalsh(K).min() >= -1e-10 * size
    close(K.diagonal(), J.gram_diag())
    close(sum(J.layer_grams().values()), K)
    close(J.column_norms().sum(), K.trace())


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, other=st.integers(1, 7))
def test_invariant_to_chunks_and_engines(sizes, other):
    J, reference = drawn(**sizes), drawn(**(sizes | {"chunk": other, "engine": "autodiff"}))
    V, U, s = normal(J.shape[1], 2), normal(J.shape[0], 2), normal(J.shape[1]).abs()
    close(J @ V, reference @ V)
    close(J.T @ U, reference.T @ U)
    close(J.gram(scale=s), reference.gram(scale=s))
    close(J.column_norms(U[:, 0].abs()), reference.column_norms(U[:, 0].abs()))


# Composition.


def test_compositions_of_a_jacobian(model, x):
    A, d, z = dense_jacobian(model, x), normal(43), normal(43, seed=1)
    J = linnet.linearize(model).jacobian(x, 2)
    index = torch.tensor([40, 2, 3, 17])
    op = J.centered(z).scaled(d).columns(index)
    check_operator(op, ((A - z) * d)[:, index], blocks=C)
    B = normal(5, 43, seed=4)
    close(J.gram(Matrix(B), d), (A * d) @ B.T)
    close(J.gram(J.centered(z)), A @ (A - z).T)
    close(J.centered(z).gram(J), (A - z) @ A.T)


def test_gram_between_models_of_other_outputs(x):
    """The parameters have the same shapes, the outputs are read in another way."""
    net, other = mlp(), mlp(seed=1)
    A = dense_jacobian(net, x)
    B = dense_jacobian(other, x[:4], output=lambda out: out[:, :2].square())
    J = linnet.linearize(net).jacobian(x, 3)
    K = linnet.linearize(other, output=lambda out: out[:, :2].square()).jacobian(x[:4], 3)
    close(J.gram(K), A @ B.T)
    close(K.gram(J), B @ A.T)


# What surrounds a call, and what a call leaves behind.


def flags() -> dict[str, object]:
    return {
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": torch.backends.cudnn.enabled,
        "tf32": [p.fp32_precision for p in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)],
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": torch.overrides._get_current_function_mode(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
    }


def state(model: nn.Module) -> tuple:
    parameters = [(k, id(p), p._version, p.requires_grad, p.grad) for k, p in model.named_parameters()]
    modules = [
        (k, m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for k, m in model.named_modules()
    ]
    return parameters, modules, [(k, id(b), b._version) for k, b in model.named_buffers()]


class Interrupted(nn.Module):
    """A network with all that needs a setting; it is interrupted when its countdown ends."""

    left = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        Interrupted.left -= 1
        if Interrupted.left < 0:
            raise KeyboardInterrupt
        h = self.rnn(x)[0]
        h = self.attend(h, h, h, need_weights=False)[0].mean(1)
        return self.head(self.drop(self.norm(h)))


PASSES = {
    "J V": lambda J: J @ normal(J.shape[1]),
    "J V, many columns": lambda J: J @ normal(J.shape[1], 9),
    "J^T U": lambda J: J.T @ normal(J.shape[0], 9),
    "normal": lambda J: J.normal(normal(J.shape[1])),
    "gram": lambda J: J.gram(),
    "layer_grams": lambda J: J.layer_grams(),
    "gram_diag": lambda J: J.gram_diag(),
    "column_norms": lambda J: J.column_norms(),
    "outputs": lambda J: J.outputs(),
}


@pytest.mark.parametrize("engine", ["auto", "autodiff"])
@pytest.mark.parametrize("name", list(PASSES))
def test_interrupting_a_pass_leaves_nothing_changed(name, engine, monkeypatch):
    net = Interrupted().double().train()
    monkeypatch.setattr(Interrupted, "left", 10**9)
    before, around = state(net), flags()
    lin = linnet.linearize(net)
    J = lin.jacobian(normal(6, 5, 3), 2, engine=engine)
    whole = PASSES[name](J)
    Interrupted.left = 2
    with pytest.raises(KeyboardInterrupt) as caught:
        PASSES[name](J)
    # While the traceback, and with it the frames of the pass, is still alive.
    assert caught.tb is not None
    assert flags() == around
    assert state(net) == before
    Interrupted.left = 10**9
    again = PASSES[name](J)
    assert str(again) == str(whole)


def test_interrupting_the_linearization_leaves_nothing_changed(monkeypatch):
    net = Interrupted().double().train()
    before, around = state(net), flags()
    for left in (0, 1, 2, 3):
        monkeypatch.setattr(Interrupted, "left", left)
        with pytest.raises(KeyboardInterrupt):
            linnet.linearize(net).jacobian(normal(6, 5, 3)).outputs()
        assert flags() == around
        assert state(net) == before


def test_settings_end_with_the_pass_that_fails(model, x, monkeypatch):
    """The settings of a pass are not left to the garbage collector."""
    inside = []

    @contextmanager
    def arithmetic(precision, device):
        inside.append(precision)
        try:
            yield
        finally:
            inside.pop()

    def fail(*_):
        assert inside == ["high"]
        raise ZeroDivisionError

    J = linnet.linearize(model).jacobian(x, 2, precision="high", memory=1)
    monkeypatch.setattr(passes_module, "arithmetic", arithmetic)
    monkeypatch.setattr(grams_module, "_matched", fail)
    for product in (lambda: J.fused(fail, normal(43)), J.gram):
        with pytest.raises(ZeroDivisionError) as caught:
            product()
        assert caught.tb is not None
        assert inside == []


def test_a_model_in_train_mode_is_read_in_eval_mode(x):
    net = double(nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, C)))
    net[1].running_mean, net[1].running_var = normal(5), normal(5).square() + 0.5
    A = dense_jacobian(net.eval(), x)
    net.train()
    before = state(net)
    check_operator(linnet.linearize(net).jacobian(x, 3), A, blocks=C)
    assert state(net) == before
    assert net.training


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_what_surrounds_a_call_does_not_change_it(x, around):
    parts = {"a": nn.Linear(D, 5), "act": nn.PReLU(5), "b": nn.Linear(5, C), "spare": nn.Linear(2, 2)}
    net = double(Net(lambda m, x: m.b(m.act(m.a(x))), **parts)).float()  # rules, autodiff, and nothing at all
    x = x.float()
    A = dense_jacobian(net, x)
    V = normal(A.shape[1], 9).float()
    expected = [A @ V, A @ V[:, 0], A.T @ (A @ V), A @ A.T, net(x).detach(), (A * A).sum(0)]
    with around():
        lin = linnet.linearize(net)
        J = lin.jacobian(x, 3)
        found = [J @ V, J @ V[:, 0], J.normal(V), J.gram(), J.outputs(), J.column_norms()]
        inside = lin(x)
    for value, reference in zip([*found, inside], [*expected, expected[4]], strict=True):
        close(value, reference, rtol=1e-5)
        assert not value.requires_grad


# Out of memory.


def limit_chunks(monkeypatch, most: int) -> None:
    def limit(batch):
        if batch.n > most:
            raise torch.OutOfMemoryError(f"no memory for {batch.n} examples")

    watch_chunks(monkeypatch, limit)


def test_out_of_memory_goes_on_with_smaller_chunks(model, x, monkeypatch):
    J = linnet.linearize(model).jacobian(x)
    assert J.plan.chunk == N
    limit_chunks(monkeypatch, 2)
    with pytest.warns(UserWarning, match="ran out of memory with chunks of 7 examples") as caught:
        check_operator(J, dense_jacobian(model, x), blocks=C)
    assert len(caught) == 1
    assert J.plan.chunk == 1  # 7, 3, 1
    J.subset(torch.arange(5)).gram()  # knows it too


def test_out_of_memory_with_one_example_is_an_error(model, x, monkeypatch):
    J = linnet.linearize(model).jacobian(x)
    assert J.c == C  # the first examples have been run
    limit_chunks(monkeypatch, 0)
    with (
        pytest.warns(UserWarning, match="ran out of memory"),
        pytest.raises(torch.OutOfMemoryError, match="no memory for 1 examples"),
    ):
        J.gram()


# Parameters that change, parameters that are chosen.


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_changed_parameters_are_refused(model, x, name):
    """Also those that are not selected: the outputs depend on them."""
    lin = linnet.linearize(model, "2.*")
    J = lin.jacobian(x, 3)
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)
    for product in (lambda: J @ normal(lin.p), J.gram, J.outputs, lambda: lin.jacobian(x)):
        with pytest.raises(RuntimeError, match=rf"'{name}' has changed since.*linearize\(model\) again"):
            product()
    check_operator(linnet.linearize(model).jacobian(x, 3), dense_jacobian(model, x))


def test_training_after_linearizing_is_noticed(model, x):
    J = linnet.linearize(model).jacobian(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"'0\.weight' has changed"):
        J.gram()


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("2.*", ["2.weight", "2.bias"]),
        (["*.bias"], ["0.bias", "2.bias"]),
        (["2.bias", "0.w*"], ["0.weight", "2.bias"]),
        (lambda name, tensor: tensor.ndim == 2, ["0.weight", "2.weight"]),
        (None, ["0.weight", "0.bias", "2.bias"]),
    ],
)
def test_selected_parameters(model, x, params, names):
    model[2].weight.requires_grad_(False)  # globs also select what is frozen
    lin = linnet.linearize(model, params)
    assert list(lin.theta) == names
    A = dense_jacobian(model, x, names=names)
    for engine in ("auto", "ghost"):
        check_operator(lin.jacobian(x, 3, engine=engine), A, blocks=C)
    assert not model[2].weight.requires_grad


def test_adapters_of_a_frozen_network():
    case = zoo()["lora"]
    net, data = case.build().requires_grad_(False), case.data(5, 0)
    lin = linnet.linearize(net, ["*.down.*", "*.up.*"])
    names = ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
    assert list(lin.theta) == names
    check_operator(lin.jacobian(data, 2), dense_jacobian(net, data, names=names), blocks=4)


# Dtypes.


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.PReLU(8), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=["bfloat16", "float16"]
)
def test_half_precision_models(dtype, rtol):
    """Products are float32, and the distance to the float32 model is that of the half-precision forward."""
    net, x = convolutional(), normal(5, 2, 5, 5).float()
    half = copy.deepcopy(net).to(dtype)
    A = dense_jacobian(copy.deepcopy(half).float(), x.to(dtype).float())
    lin = linnet.linearize(half)
    V, U = normal(lin.p, 7).float(), normal(15, 7).float()
    for engine in ("auto", "rows", "autodiff"):
        J = lin.jacobian(x.to(dtype), 2, engine=engine)
        assert J.dtype == lin.dtype == torch.float32
        assert J.lin.theta["0.weight"].dtype == dtype
        close(J @ V, A @ V, rtol=rtol)
        close(J @ V[:, 0], A @ V[:, 0], rtol=rtol)
        close(J.T @ U, A.T @ U, rtol=rtol)
        close(J.gram(), A @ A.T, rtol=rtol)
        close(J.column_norms(), (A * A).sum(0), rtol=rtol)
    assert J.outputs().dtype == torch.float32
    assert lin(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("engine", ["auto", "rows", "autodiff"])
def test_bf16_runs_the_network_under_autocast(engine):
    net, x = convolutional(), normal(5, 2, 5, 5).float()
    A = dense_jacobian(net, x)
    lin = linnet.linearize(net)
    J = lin.jacobian(x, 2, precision="bf16", engine=engine)
    V = normal(lin.p, 7).float()
    for value, reference in ((J @ V, A @ V), (J.gram(), A @ A.T), (J.outputs(), net(x).detach())):
        assert value.dtype == torch.float32
        close(value, reference, rtol=3e-2)
    assert (J.outputs() - net(x)).abs().max() > 1e-4  # it was bfloat16
    assert (lin.jacobian(x, 2).outputs() - net(x)).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["highest", "products", "high", "bf16"])
def test_double_precision_models_stay_double_at_full_precision(model, x, precision):
    J = linnet.linearize(model).jacobian(x, 3, precision=precision)
    assert J.dtype == torch.float64
    assert precision in str(J.plan)
    if precision != "bf16":
        check_operator(J, dense_jacobian(model, x), blocks=C)


# Data.


class Examples(Dataset):
    """Examples read one by one, with a target."""

    def __init__(self, x: Tensor, *, keyed: bool = False) -> None:
        self.x, self.keyed = x, keyed

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return {"input": self.x[i], "labels": i} if self.keyed else (self.x[i], i)


class Stream(IterableDataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self):
        yield from self.x


DATA = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "tuple": lambda x: (x, torch.arange(N)),
    "dict": lambda x: {"input": x, "labels": torch.arange(N)},
    "TensorDataset": lambda x: TensorDataset(x, torch.arange(N)),
    "Dataset": Examples,
    "Dataset of dicts": lambda x: Examples(x, keyed=True),
    "list of examples": lambda x: [(row, 0) for row in x],
    "stream": Stream,
    "loader": lambda x: DataLoader(Examples(x), batch_size=4),
    "loader of a stream": lambda x: DataLoader(Stream(x), batch_size=4),
    "loader of arrays": lambda x: DataLoader(Examples(x), 3, collate_fn=lambda items: np.stack([i[0] for i in items])),
}


@pytest.mark.parametrize("kind", list(DATA))
def test_data_of_every_kind(model, x, kind):
    A, lin = dense_jacobian(model, x), linnet.linearize(model)
    J = lin.jacobian(DATA[kind](x), 2)
    check_operator(J, A, blocks=C)
    close(sum(J.layer_grams().values()), A @ A.T)
    close(lin(DATA[kind](x)), model(x).detach())
    close(J.outputs(), model(x).detach())


def test_minibatches_of_a_dataset(model, x):
    A = dense_jacobian(model, x)
    J = linnet.linearize(model).jacobian(Examples(x), 2)
    total = sum(part.gram().trace() for part in J.minibatches(3, seed=0))
    assert float(total) == pytest.approx(float((A * A).sum()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_passes_over_a_loader_can_be_nested(model, x):
    """A Gram matrix that does not fit in memory reads the data again for every block of rows."""
    loader = DataLoader(Examples(x), batch_size=2, num_workers=1, persistent_workers=True)
    A = dense_jacobian(model, x)
    close(linnet.linearize(model).jacobian(loader, memory=1).gram(), A @ A.T)


def test_gram_in_blocks_that_fit(model, x):
    """Blocks of rows of several sizes, against the same and against other data."""
    lin, A = linnet.linearize(model), dense_jacobian(model, x)
    each = lin.jacobian(x).plan.per_example
    for memory in (1, each, 3 * each, 10 * each):
        J = lin.jacobian(x, 2, memory=memory)
        close(J.gram(), A @ A.T)
        close(J.gram(lin.jacobian(x[:3], 2)), A @ A[: 3 * C].T)


def test_the_module_can_be_anything_that_is_copied(x):
    net = double(Net(lambda m, x: m.a(x), a=nn.Linear(D, C)))
    net.cache = (net.a.weight * 2).sum()  # a tensor with a graph
    with pytest.raises(TypeError, match=r"copy of the module's structure, and Net cannot be copied"):
        linnet.linearize(net)
    del net.cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_operator(linnet.linearize(net).jacobian(x), dense_jacobian(net, x))


# Blocks of the Gram matrix.


@pytest.mark.parametrize("engine", ["auto", "rows", "ghost"])
@pytest.mark.parametrize(
    "name",
    ["mlp", "mlp_elu_scalar", "conv2d", "resnet", "attention", "embedding", "tied_weights", "lstm", "unused_layer"],
)
def test_gram_blocks(name, engine):
    case = zoo()[name]
    network, data = case.build(), case.data(5, 0)
    A = case.dense(network, data)
    c = len(A) // 5
    X = A.unflatten(0, (5, c))
    J = linnet.linearize(network, output=case.output).jacobian(data, 2, engine=engine)
    layout = J.lin.layout
    level = layout.flatten({name: torch.full(s, 0.5 + i).double() for i, (name, s) in enumerate(layout.shapes.items())})
    close(J.gram_blocks(), X @ X.mT)
    close(J.gram_blocks().diagonal(dim1=1, dim2=2).flatten(), J.gram_diag())
    for scale in (level, normal(J.shape[1])):
        close(J.gram_blocks(scale), (X * scale) @ X.mT)


def test_gram_blocks_of_compositions(model, x):
    A = dense_jacobian(model, x)
    z, d = normal(A.shape[1]), normal(A.shape[1], seed=2)
    J = linnet.linearize(model).jacobian(x, 3)
    X = ((A - z) * d).unflatten(0, (N, C))
    close(J.centered(z).scaled(d).gram_blocks(), X @ X.mT)
    X = (A * d).unflatten(0, (N, C))
    close(J.scaled(d).gram_blocks(d), (X * d) @ X.mT)


@pytest.mark.parametrize(("T", "dx", "dg"), [(1, 9, 8), (2, 9, 8), (4, 3, 2)])
def test_gram_blocks_of_an_outer_product(T, dx, dg, monkeypatch):
    """Factored where that costs less, expanded where not; the same numbers."""
    n, c, groups = 4, 3, 2
    q = groups * dx * dg
    block = OuterProductBlock(
        normal(n, groups, T, dx), normal(n, c, groups, T, dg, seed=1), weight=(0, q), bias=(q, q + groups * dg)
    )
    scale = torch.cat([torch.full((q,), 0.3), torch.full((groups * dg,), 2.0)]).double()
    X = torch.cat(block.expand().parts, -1)
    expanded = []
    expand = OuterProductBlock.expand
    monkeypatch.setattr(OuterProductBlock, "expand", lambda self: expanded.append(1) or expand(self))
    monkeypatch.setattr(base, "TEMPORARY", 100)
    close(block.gram_blocks(Scale()), X @ X.mT)
    close(block.gram_blocks(Scale(scale)), (X * scale) @ X.mT)
    assert bool(expanded) == (dx == 3)
    ramp = torch.linspace(0.1, 1, len(scale)).double()
    close(block.gram_blocks(Scale(ramp)), (X * ramp) @ X.mT)
    assert bool(expanded) == (T > 1)


def test_stacked_jacobians(model, x):
    A, B = dense_jacobian(model, x), dense_jacobian(mlp(seed=4), x[:2])
    J, other = linnet.linearize(model).jacobian(x, 3), linnet.linearize(mlp(seed=4)).jacobian(x[:2])
    stack, AB, z = Stack([J, other]), torch.cat([A, B]), normal(A.shape[1])
    check_operator(stack, AB, blocks=C, other=(J.centered(z), A - z))
    check_operator(J.centered(z), A - z, blocks=C, other=(stack, AB))
    check_operator(stack.centered(z), AB - z, blocks=C, other=(stack, AB))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_convolutions_in_float32_are_given_to_a_gpu_in_parts(monkeypatch, precision):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    J = linnet.linearize(net).jacobian(torch.randn(7, 1, 4, 4), precision=precision)
    v, before = torch.randn(J.shape[1]), J.passes.chunk_size(columns=True)
    wanted = J.normal(v)
    monkeypatch.setattr("linnet.jacobian.passes.CONVOLVED", 3)
    assert before == J.passes.chunk_size(columns=True) == 7  # a CPU takes what fits
    monkeypatch.setattr(FunctionalModel, "device", torch.device("cuda"))
    assert J.passes.chunk_size(columns=True) == (4 if precision == "highest" else 7) and J.passes.chunk_size() == 7
    monkeypatch.undo()
    monkeypatch.setattr("linnet.jacobian.passes.CONVOLVED", 3)
    monkeypatch.setattr(FunctionalModel, "convolves_exactly", lambda self, precision: True)
    torch.testing.assert_close(J.normal(v), wanted)


@pytest.mark.parametrize(("side", "size"), [(8, 40), (10, 20), (48, 4)])
def test_convolutions_are_given_to_a_cpu_as_its_cache_takes_them(monkeypatch, side, size):
    """Few images at a time, and many small ones."""
    monkeypatch.setattr("linnet.jacobian.passes.NEAR", 2**14)
    monkeypatch.setattr("linnet.jacobian.passes.FEWEST", 3)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 6))
    lin, X = linnet.linearize(net.double()), torch.randn(40, 1, side, side, dtype=torch.float64)
    J, v = lin.jacobian(X), torch.randn(lin.p, dtype=torch.float64)
    assert J.passes.chunk_size() == 40 and J.passes.chunk_size(columns=True) == size  # of about 32, 20 and 3
    torch.testing.assert_close(J.normal(v), lin.jacobian(X, batch_size=40).normal(v), rtol=1e-9, atol=1e-9)
    assert linnet.linearize(nn.Linear(9, 2)).jacobian(torch.randn(40, 9)).passes.chunk_size(columns=True) == 40


def test_making_a_jacobian_runs_nothing(model, x, monkeypatch):
    """The first question for the outputs runs the network, not before."""

    def refuse(self, *args):
        raise AssertionError("the network was run")

    with monkeypatch.context() as patched:
        patched.setattr(FunctionalModel, "forward", refuse)
        patched.setattr(nn.Module, "__call__", refuse)
        lin = linnet.linearize(model)
        J = lin.jacobian((x, torch.zeros(N)))
        made = [J.at({}), J.in_precision("high"), J.subset(torch.arange(2)), J.steady(), lin.to(torch.float64)]
        assert (J.n, J.by_position, J.lin.p) == (N, True, 43) and len(made) == 5
    assert J.shape == (N * C, 43)


def test_the_bytes_of_an_example_are_counted_apart_from_its_label():
    J = linnet.linearize(nn.Linear(5, 2)).jacobian((torch.randn(7, 5), torch.arange(7)))
    first = J.passes.chunks.first
    assert (first.inputs, first.rest) == (5 * 4, 8)


def test_many_outputs_are_counted_from_a_few_of_them(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 100)).double()
    X = torch.randn(7, 1, 4, 4).double()

    def measure():
        J = linnet.linearize(model).jacobian(X)
        return J, J.passes.chunks.first, str(J.plan), J.cache_size

    J, first, plan, size = measure()
    assert {block.c for block in first.blocks} == {chunk_module.FEW_OUTPUTS} and first.c == 100
    monkeypatch.setattr(chunk_module, "ALL_OUTPUTS", 100)
    _, whole, whole_plan, whole_size = measure()
    assert {block.c for block in whole.blocks} == {100}
    assert whole.per_example <= first.per_example < 1.5 * whole.per_example
    assert whole_size <= size < 1.5 * whole_size
    assert plan.splitlines()[2:] == whole_plan.splitlines()[2:]
    dense = dense_jacobian(model, X)
    V = torch.randn(J.shape[1], 3).double()
    close(J @ V, dense @ V)
    close(J.gram(), dense @ dense.T)
    close(J.column_norms(), dense.square().sum(0))
