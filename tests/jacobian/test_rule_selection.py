"""Which rule is trusted with which parameter: wrong ones are caught, and the answer is exact all the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import linnet
from linnet.jacobian import DenseBlock, layers, rule_selection
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.layers.rule import LayerCall, LayoutError, Rule
from linnet.jacobian.recording import ServedCall, gradients
from linnet.jacobian.rule_selection import RuleAssignment
from linnet.testing import dense_jacobian
from linnet.testing.case import Net, parameter
from tests.support.drawn import double, normal

N = 7


def mlp() -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def check(J: linnet.jacobian.jacobian.Jacobian, A: Tensor) -> None:
    V, U = normal(A.shape[1], 4), normal(A.shape[0], 4, seed=1)
    for value, reference in ((J @ V, A @ V), (J.T @ U, A.T @ U), (J.gram(), A @ A.T)):
        assert (value - reference).abs().max() <= 1e-9 * reference.abs().max()


# Wrong rules.


def replace_rule(monkeypatch, function, **methods) -> None:
    """The rule of a function with some of its methods replaced."""
    rule = layers.RULES[function]
    changed = copy.copy(rule)
    changed.__class__ = type(type(rule).__name__, (type(rule),), methods)
    monkeypatch.setitem(layers.RULES, function, changed)


def scaled(block: float):
    def make_blocks(self, call, x, g, slots, layout):
        return [
            OuterProductBlock(f.x, block * f.g, weight=f.weight, bias=f.bias, swapped=f.swapped)
            for f in layers.Linear.make_blocks(layers.RULES[F.linear], call, x, g, slots, layout)
        ]

    return make_blocks


@pytest.mark.parametrize("engine", ["auto", "rows", "bilinear", "ghost"])
def test_a_wrong_rule_is_caught(monkeypatch, engine):
    replace_rule(monkeypatch, F.linear, make_blocks=scaled(1.0 + 1e-6))
    model, x = mlp(), normal(N, 3)
    lin = linnet.linearize(model)
    names = r"0\.bias, 0\.weight, 2\.bias, 2\.weight"
    with pytest.warns(UserWarning, match=rf"do not reproduce autodiff's .* gradients of {names} \(.*by autodiff"):
        check(lin.jacobian(x, 3, engine=engine), dense_jacobian(model, x))
    assert lin.rules.last.rest == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_rounding_is_not_taken_for_a_wrong_rule(monkeypatch):
    replace_rule(monkeypatch, F.linear, make_blocks=scaled(1.0 + 1e-12))
    lin = linnet.linearize(mlp())
    lin.jacobian(normal(N, 3))
    assert lin.rules.last.rest == ()


@pytest.mark.parametrize("error", [LayoutError("not that way"), RuntimeError("shapes do not match")])
def test_a_rule_that_fails_is_not_used(monkeypatch, error):
    def make_blocks(self, call, x, g, slots, layout):
        raise error

    replace_rule(monkeypatch, F.linear, make_blocks=make_blocks)
    model, x = mlp(), normal(N, 3)
    with pytest.warns(UserWarning, match="gradients of 0.bias, 0.weight"):
        check(linnet.linearize(model).jacobian(x, 3), dense_jacobian(model, x))


def test_a_rule_may_refuse_a_call_in_silence(monkeypatch):
    replace_rule(monkeypatch, F.linear, read=lambda self, args, kwargs, known: None)
    model, x = mlp(), normal(N, 3)
    lin = linnet.linearize(model)
    check(lin.jacobian(x, 3), dense_jacobian(model, x))
    assert lin.rules.last.rest == tuple(lin.theta)


def test_a_new_rule_needs_nothing_but_its_entry(monkeypatch):
    """A scale between the data and a constant: read by a rule of four lines."""

    class Addcmul(Rule):
        def read(self, args, kwargs, known):
            return LayerCall(args[1], {"weight": args[2]})

        def make_blocks(self, call, x, g, slots, layout):
            return [DenseBlock([slots["weight"].range], [(g * x[:, None]).sum(2)])]

    model = double(Net(lambda m, x: torch.addcmul(x, x, m.scale), scale=parameter(3)))
    x = normal(N, 3)
    lin = linnet.linearize(model)
    lin.jacobian(x).outputs()
    assert lin.rules.last.rest == ("scale",)
    monkeypatch.setitem(layers.RULES, torch.addcmul, Addcmul())
    lin = linnet.linearize(model)
    check(lin.jacobian(x, 3, engine="rows"), dense_jacobian(model, x))
    assert lin.rules.last.rules == {"scale": "Addcmul"}


# Parameters that rules cannot serve, or not always.


def test_the_warning_names_the_parameter_and_comes_once():
    model = double(Net(lambda m, x: m.b(m.a(x).tanh()) + m.a.weight.sum(), a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    x = normal(N, 3)
    lin = linnet.linearize(model)
    with pytest.warns(UserWarning, match=r"gradients of a\.weight \(") as caught:
        J = lin.jacobian(x, 3)
        check(J, dense_jacobian(model, x))
        lin.jacobian(x)
    assert len(caught) == 1
    assert lin.rules.last.rest == ("a.weight",)
    assert lin.rules.last.rules["a.bias"] == "Linear"


def test_unused_parameters_have_zero_columns():
    model = double(Net(lambda m, x: m.a(x), a=nn.Linear(3, 2), spare=nn.Linear(3, 2), raw=parameter(2)))
    x = normal(N, 3)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 3)
    check(J, dense_jacobian(model, x))
    assert lin.rules.last.unused == ("raw", "spare.weight", "spare.bias")
    assert lin.rules.last.rest == ()
    assert J.layer_grams()["spare"].count_nonzero() == 0
    assert J.column_norms()[lin.layout.slices["raw"]].count_nonzero() == 0


def test_an_output_without_parameters_has_a_zero_jacobian():
    lin = linnet.linearize(double(Net(lambda m, x: x.sin(), spare=nn.Linear(3, 2))))
    for engine in ("auto", "rows", "autodiff"):
        J = lin.jacobian(normal(N, 3), 3, engine=engine)
        assert J.shape == (3 * N, 8)
        assert (J @ normal(8, 4)).count_nonzero() == 0
        assert (J.T @ normal(3 * N, 4)).count_nonzero() == 0
        assert J.gram().count_nonzero() == 0


class Switched(nn.Module):
    """Examples with a large first entry go through another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mine = x[:, 0] > 1
        h = self.near(x)
        if mine.any():
            h = torch.where(mine[:, None], self.far(x), h)
        return self.head(h.tanh())


class Routed(Switched):
    """The same, each layer seeing its own examples only."""

    def forward(self, x: Tensor) -> Tensor:
        mine = x[:, 0] > 1
        h = x.new_zeros(len(x), 4)
        h[mine], h[~mine] = self.far(x[mine]), self.near(x[~mine])
        return self.head(h.tanh())


@pytest.mark.filterwarnings("ignore:linnet's layer rules")
@pytest.mark.parametrize("kind", [Switched, Routed])
@pytest.mark.parametrize("engine", ["auto", "rows", "ghost", "autodiff"])
@pytest.mark.parametrize("far", [[], [0], [5], [3, 5, 6], list(range(N))])
def test_parameters_used_for_some_batches_only(kind, engine, far):
    model, x = double(kind()), normal(N, 3).clamp(max=0.9)
    x[far, 0] = 2.0
    check(linnet.linearize(model).jacobian(x, 3, engine=engine), dense_jacobian(model, x))


@pytest.mark.parametrize("engine", ["auto", "rows"])
def test_a_parameter_that_turns_up_late_is_left_to_autodiff(engine):
    """No rule sees the gate and the first examples do not use it: the calls that rules see never change."""

    def forward(m, x):
        y, mine = m.a(x), (x > 1).any(1)
        return torch.where(mine[:, None], y * m.gate.sigmoid().sum(), y) if mine.any() else y

    model, x = double(Net(forward, a=nn.Linear(3, 2), gate=parameter(4))), normal(N, 3).clamp(max=0.9)
    x[5] = 2.0
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 3, engine=engine)
    assert J.c == 2 and lin.rules.last.unused == ("gate",)
    check(J, dense_jacobian(model, x))
    assert [found.rest for found in lin.rules.assignments.values()] == [("gate",)]
    assert lin.rules.last.unused == ()


def test_other_calls_make_another_structure():
    """Long inputs take a layer more."""

    def forward(m, x):
        h = m.a(x)
        h = m.b(h.tanh()) if x.shape[1] > 2 else h
        return m.head(h.mean(1))

    model = double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    lin = linnet.linearize(model)
    for length in (2, 4, 2, 4):
        x = normal(N, length, 3, seed=length)
        check(lin.jacobian(x, 3, engine="rows"), dense_jacobian(model, x))
    assert len(lin.rules.assignments) == 2


def test_one_structure_serves_all_sizes():
    model = double(Net(lambda m, x: m.a(x).tanh().mean(1), a=nn.Linear(3, 4)))
    lin = linnet.linearize(model)
    for n, length in ((4, 2), (1, 3), (6, 6)):
        x = normal(n, length, 3)
        check(lin.jacobian(x, engine="rows"), dense_jacobian(model, x))
    assert len(lin.rules.assignments) == 1


@pytest.mark.parametrize("d", [1, 3])
def test_a_parameter_that_is_a_bias_here_and_a_weight_there(d):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.v = parameter(d, d).requires_grad_(False), parameter(d)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, self.W, self.v)), self.v[None])

    model, x = double(Both()), normal(N, d)
    lin = linnet.linearize(model)
    check(lin.jacobian(x, 3, engine="rows"), dense_jacobian(model, x))
    assert lin.rules.last.rest == ()


@pytest.mark.parametrize("time_first", [False, True])
def test_where_the_examples_lie_is_found_with_as_many_examples_as_steps(time_first):
    """(5, 5, d) and (25, d) leave both readings open; only the numbers decide."""

    def forward(m, x):
        h = x.transpose(0, 1) if time_first else x
        rows = m.b(m.a(h).tanh().flatten(0, 1)).unflatten(0, h.shape[:2])
        return rows.mean(0) if time_first else rows.mean(1)

    model, x = double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))), normal(5, 5, 3)
    lin = linnet.linearize(model, output=lambda out: out)
    J = lin.jacobian(x, 5, engine="rows") if time_first else lin.jacobian(x, engine="rows")
    check(J, dense_jacobian(model, x))
    assert lin.rules.last.rest == ()


# The order of the examples inside a batch may depend on the data; the first examples do not show it.


class Sorted(nn.Module):
    """Works on the examples in the order of their first entry, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(self.inner(x[order]).tanh()[order.argsort()])


class PackedBlock(nn.Module):
    """Sequences of several lengths, packed: the steps of all examples in one axis, by time."""

    def __init__(self, *, sorted: bool) -> None:
        super().__init__()
        self.inner, self.head, self.sorted = nn.Linear(3, 4), nn.Linear(4, 2), sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=self.sorted)
        packed = packed._replace(data=self.inner(packed.data).tanh())
        return self.head(pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0].sum(1))


def by_hand(model: nn.Module, *x: Tensor) -> Tensor:
    grads = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in model(*x).flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])


@pytest.mark.parametrize("engine", ["auto", "rows", "ghost"])
def test_examples_that_are_sorted(engine):
    model, x = double(Sorted()), normal(8, 3)
    x[:3, 0] = torch.tensor([-3.0, -2.0, -1.0])
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 4, engine=engine)
    assert lin.rules.last.rest == ()
    with pytest.warns(UserWarning, match=r"gradients of inner\.weight, inner\.bias \(.*reorders examples") as caught:
        check(J, by_hand(model, x))
    assert len(caught) == 1
    assert lin.rules.last.rest == ("inner.weight", "inner.bias")


@pytest.mark.parametrize("sorted", [True, False])
def test_examples_that_are_packed(sorted):
    """As many steps in all as if the lengths were equal, so that the shapes say nothing."""
    model, x = double(PackedBlock(sorted=sorted)), normal(8, 4, 3)
    lengths = torch.tensor([3, 3, 3, 3, 4, 4, 2, 2] if sorted else [3, 3, 3, 3, 4, 2, 4, 2])
    lin = linnet.linearize(model)
    J = lin.jacobian((x, lengths), 4, engine="rows")
    assert lin.rules.last.rest == ()
    with pytest.warns(UserWarning, match=r"gradients of inner\.weight, inner\.bias \("):
        check(J, torch.cat([by_hand(model, x[s], lengths[s]) for s in (slice(4), slice(4, 8))]))


def test_examples_that_are_picked_in_their_own_order():
    """Indices that move no example are checked too, and the rules stay."""

    def forward(m, x):
        last = (x[:, :, 0] > 0).long().argmax(1)
        return m.head(m.inner(x)[torch.arange(len(x)), last].tanh())

    model, x = double(Net(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2))), normal(N, 5, 3)
    lin = linnet.linearize(model)
    check(lin.jacobian(x, 3, engine="rows"), by_hand(model, x))
    assert lin.rules.last.rest == ()


def test_layers_that_the_first_examples_do_not_show():
    """Gates that are closed at first leave open where the examples lie: (3, 3, d) is read either way."""

    def forward(m, x):
        gate = (x[:, 0, :1] - 1).relu()
        return m.head(m.inner(x.transpose(0, 1)).tanh().mean(0)) * gate + m.out(x.mean(1))

    model = double(Net(forward, inner=nn.Linear(3, 5), head=nn.Linear(5, 2), out=nn.Linear(3, 2)))
    x = normal(9, 3, 3).clamp(max=0.9)
    x[3:, 0, 0] = torch.linspace(2, 3, 6)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 3, engine="rows")
    with pytest.warns(UserWarning, match=r"gradients of inner\.weight, inner\.bias \("):
        check(J, dense_jacobian(model, x))


# Backward passes.


def chain() -> tuple[Tensor, list]:
    lin = linnet.linearize(mlp())
    source = linnet.data.sources.as_source(normal(N, 3), lin.module.forward)
    recording = lin.rules.record(next(iter(source.batches(N))))
    return recording.out, recording.uses


def test_batched_gradients_are_those_of_the_loop():
    out, uses = chain()
    seeds = normal(4, *out.shape)
    batched, looped = (gradients(out, uses, seeds, batched=b) for b in (True, False))
    assert [g.shape for g in batched] == [(4, N, 4), (4, N, 2)]
    for a, b in zip(batched, looped, strict=True):
        assert (a - b).abs().max() <= 1e-14


def test_uses_that_an_output_does_not_reach_have_no_gradient():
    out, uses = chain()
    other = normal(N, 2).requires_grad_() * 1.0
    assert gradients(other, uses, normal(3, N, 2), batched=False) == [None, None]
    assert gradients(other.detach(), uses, normal(3, N, 2), batched=True) == [None, None]
    assert gradients(out, [], normal(3, N, 2), batched=True) == []


class Unbatchable(torch.autograd.Function):
    """Twice its input; its backward looks at numbers, which a batched pass does not have."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * (1.0 if float(g.sum()) < float("inf") else 0.0)


class Untransformable(torch.autograd.Function):
    """Twice its input; batched it is three times its input, and its forward derivative is three too."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def jvp(ctx, t):
        return 3 * t

    @staticmethod
    def vmap(info, in_dims, x):
        return 3 * x, in_dims[0]


@pytest.mark.parametrize("ability", ["vectorize", "forward_mode"])
def test_abilities_that_give_wrong_numbers_are_not_used(ability):
    nets = [
        double(Net(lambda m, x, f=f: m.b(f(m.a(x)).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
        for f in (Untransformable.apply, lambda x: 2 * x)
    ]
    x = normal(N, 3)
    for model, able in zip(nets, (False, True), strict=True):
        lin = linnet.linearize(model)
        J = lin.jacobian(x, engine="autodiff")
        check(J, dense_jacobian(nets[1], x))
        assert lin.rules.can(ability, J.passes.chunks.first.batch) == able


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_vectorized_rows_must_be_right_for_every_parameter(wrong):
    def forward(m, x):
        sides = {"a": m.a(x), "b": m.b(x)}
        return sum((Untransformable.apply(f) if name == wrong else f).tanh() for name, f in sides.items())

    model = double(Net(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 2)))
    lin = linnet.linearize(model)
    J = lin.jacobian(normal(N, 3), engine="autodiff")
    assert not lin.rules.can("vectorize", J.passes.chunks.first.batch)


def test_outputs_are_taken_one_by_one_where_batching_fails():
    model = double(Net(lambda m, x: m.b(Unbatchable.apply(m.a(x)).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    plain = double(Net(lambda m, x: m.b((2 * m.a(x)).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    x = normal(N, 3)
    lin = linnet.linearize(model)
    check(lin.jacobian(x, 3, engine="rows"), dense_jacobian(plain, x))
    assert not lin.rules.last.batched
    assert lin.rules.last.rest == ()


# Parts.


def test_without_takes_parameters_from_their_rules():
    lin = linnet.linearize(mlp())
    lin.jacobian(normal(N, 3)).outputs()
    less = lin.rules.last.without(["0.weight", "2.weight", "2.bias"])
    assert less.rest == ("0.weight", "2.weight", "2.bias")
    assert [None if k is None else list(k.slots) for k in less.kept] == [["bias"], None]
    assert isinstance(less, RuleAssignment)
    assert isinstance(less.kept[0], ServedCall)


def test_choices_try_one_layout_for_all_first():
    options = [["major", "minor"], ["minor", "second"]]
    found = [tuple(choice) for choice in rule_selection._choices(options)]
    assert found[0] == ("minor", "minor")
    assert set(found) == {(a, b) for a in options[0] for b in options[1]}
    many = list(rule_selection._choices([["major", "minor", "second"]] * 12))
    assert len(many) == 3 + 64


def test_a_transposed_weight_of_a_layer_norm_goes_by_autodiff_and_its_bias_by_the_rule():
    net = Net(
        lambda m, x: m.out(F.layer_norm(x.view(-1, 3, 4), (3, 4), m.weight.T, m.bias).flatten(1).tanh()),
        weight=nn.Parameter(normal(4, 3)),
        bias=nn.Parameter(normal(3, 4, seed=1)),
        out=nn.Linear(12, 2),
    ).double()
    X = normal(6, 12, seed=2)
    with pytest.warns(UserWarning, match=r"per-example gradients of weight \(used"):
        J = linnet.linearize(net).jacobian(X)
        assert J.shape == (12, 50)
    torch.testing.assert_close(J.dense(), dense_jacobian(net, X), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_agree_to_the_tolerance_or_to_rounding_of_the_largest_column(dtype):
    eps, tolerance = torch.finfo(dtype).eps, rule_selection.TOLERANCE[dtype]
    truth = torch.ones(3, dtype=torch.float64)
    for error, biggest, wanted in (
        (0.9 * tolerance, 1.0, True),
        (1.1 * tolerance, 1.0, False),
        (0.9 * tolerance * 1e3, 1e6, True),  # a thousandth of the largest column counts
        (1.9 * eps * 1e20, 1e20, True),
        (2.0 * tolerance * 1e17, 1e20, False),
    ):
        parts = [0.25 * truth, None, 0.75 * truth + error]
        assert rule_selection._agrees(parts, truth, dtype, biggest) == wanted
    assert not rule_selection._agrees([None], truth, dtype, 1.0)
