"""Every chunk is compared once with reverse mode and with other batches: what falls back, what is refused, by name."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from linnet.jacobian import random_signs
from linnet.jacobian.chunk import Proofs
from linnet.jacobian.proofs import RandomState, Truth
from linnet.jacobian.rule_selection import RuleSelection
from linnet.network import FunctionalModel
from linnet.testing import dense_jacobian
from linnet.testing.case import Net, parameter
from tests.support.drawn import double, normal

N = 24


def late(*shape: int, at: int = 17) -> Tensor:
    """Inputs of which one example, far from the first ones, has a large first entry."""
    x = normal(N, *shape).clamp(max=2.0)
    x[at].view(-1)[0] = 9.0
    return x


def everything(J, A: Tensor, *, rtol: float = 1e-9) -> None:
    V, U = normal(A.shape[1], 3).to(A), normal(A.shape[0], 3, seed=1).to(A)
    products = {
        "J v": (J @ V[:, 0], A @ V[:, 0]),
        "J V": (J @ V, A @ V),
        "J' u": (J.T @ U[:, 0], A.T @ U[:, 0]),
        "J' U": (J.T @ U, A.T @ U),
        "normal v": (J.normal(V[:, 0]), A.T @ (A @ V[:, 0])),
        "normal": (J.normal(V), A.T @ (A @ V)),
        "gram": (J.gram(), A @ A.T),
        "cached": (J.cached().gram(), A @ A.T),
    }
    for name, (value, reference) in products.items():
        assert (value - reference).abs().max() <= rtol * reference.abs().max(), name


def mlp(**more) -> nn.Module:
    return double(Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3), **more))


# What is made again in a slower way.


def scaled_late(m, x):
    """The weight is also used directly, for examples with a large first entry."""
    return m.b(m.a(x).tanh()) + (x[:, :1] > 5) * m.a.weight.sum()


def test_a_parameter_that_is_also_used_directly_by_a_late_example():
    model = double(Net(scaled_late, a=nn.Linear(4, 5), b=nn.Linear(5, 3)))
    x = late(4)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 8)
    assert lin.rules.last.rest == ()
    with pytest.warns(UserWarning, match=r"gradients of a\.weight \("):
        everything(J, dense_jacobian(model, x))
    assert lin.rules.last.rest == ("a.weight",)


def without_gradient_late(m, x):
    """A branch under no_grad, which forward mode goes through all the same."""
    with torch.no_grad():
        off = m.a(x)
    return m.b(torch.where(x[:, :1] > 5, off, m.a(x)).tanh())


def test_forward_mode_that_goes_through_no_grad():
    model, x = double(Net(without_gradient_late, a=nn.Linear(4, 5), b=nn.Linear(5, 9))), late(4)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 8)
    assert lin.rules.can("forward_mode", J.passes.chunks.first.batch)
    v = normal(lin.p)
    A = dense_jacobian(model, x)
    assert (J @ v - A @ v).abs().max() <= 1e-9 * (A @ v).abs().max()
    assert not lin.rules.can("forward_mode", J.passes.chunks.first.batch)


def test_distances_whose_vectorized_derivative_is_wrong():
    model = double(
        Net(lambda m, x: torch.cdist(m.a(x)[:, None], m.c[None])[:, 0], a=nn.Linear(4, 3), c=parameter(5, 3))
    )
    x = normal(N, 4)
    everything(linnet.linearize(model).jacobian(x), dense_jacobian(model, x))


@pytest.mark.filterwarnings("ignore:linnet's layer rules")
def test_forces():
    def forward(m, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = m.b(m.a(x).tanh()).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model, x = double(Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 1))), normal(N, 4)
    everything(linnet.linearize(model).jacobian(x), dense_jacobian(model, x))


def test_a_chunk_is_compared_once(monkeypatch):
    calls, real = [], FunctionalModel.forward
    monkeypatch.setattr(FunctionalModel, "forward", lambda *args: (calls.append(1), real(*args))[1])
    J = linnet.linearize(mlp()).jacobian(normal(N, 4), 12)
    V = normal(J.shape[1], 9)
    counts = []
    for _ in range(3):
        calls.clear()
        J.normal(V)
        counts.append(len(calls))
    assert counts == [counts[0], 2, 2] and counts[0] > 2  # two chunks


def test_other_weights_and_a_broken_pass_are_compared_anew(monkeypatch):
    seen, real = [], RuleSelection.apart
    monkeypatch.setattr(RuleSelection, "apart", lambda *args, **more: (seen.append(1), real(*args, **more))[1])
    lin = linnet.linearize(mlp())
    J, u = lin.jacobian(normal(N, 4)), normal(N * 3)
    J.T @ u
    seen.clear()
    J.T @ u
    assert not seen
    J.at({"a.bias": torch.ones(5, dtype=torch.float64)}).T @ u
    assert len(seen) == 1
    with pytest.raises(ZeroDivisionError):
        J.pullback(lambda batch: 1 / 0)
    J.T @ u
    assert len(seen) == 2


# What is refused.

REFUSED = {
    "closure": "reads the parameter 'a.weight' past the attribute",
    "hook": "reads the parameter 'a.weight' past the attribute",
    "list": "reads the parameter 'a.weight' past the attribute",
    "patched": "reads the parameter 'a.weight' past the attribute",
}


def reaching(kind: str) -> nn.Module:
    model = mlp()
    if kind == "closure":
        model.function = lambda m, x: F.linear(F.linear(x, model.a.weight).tanh(), m.b.weight)
    elif kind == "hook":
        model.b.register_forward_hook(lambda module, given, out: out + model.a.weight.sum())
    elif kind == "list":
        model.weights = [model.a.weight]
        model.function = lambda m, x: m.b(F.linear(x, m.weights[0]).tanh())
    else:
        model.a.forward = lambda x: F.linear(x, model.a.weight, model.a.bias)
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_code_that_reaches_the_original_is_refused_by_name(kind):
    lin = linnet.linearize(reaching(kind))
    with pytest.raises(ValueError, match=REFUSED[kind]):
        lin.jacobian(normal(N, 4)).outputs()
    with pytest.raises((ValueError, RuntimeError)):  # torch may refuse to mix dtypes first
        lin.to(torch.float32).jacobian(normal(N, 4)).outputs()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_closure_over_what_is_not_selected_is_harmless(kind):
    model, x = reaching(kind), normal(N, 4)
    J = linnet.linearize(model, "b.*").jacobian(x)
    everything(J, dense_jacobian(model, x, names=["b.weight", "b.bias"]))


INTERACTING = {
    "time over the batch": lambda: Net(
        lambda m, x: m.b(m.rnn(x[:, None])[0][:, 0]), rnn=nn.LSTM(4, 5), b=nn.Linear(5, 3)
    ),
    "position in the batch": lambda: Net(
        lambda m, x: m.a(x) * torch.arange(len(x)).clamp(min=6)[:, None], a=nn.Linear(4, 3)
    ),
    "capacity": lambda: Net(lambda m, x: m.a(x) * ((x[:, 0] > 0).cumsum(0) <= 5)[:, None], a=nn.Linear(4, 3)),
    "statistics of large batches": lambda: Net(
        lambda m, x: m.a(x - x.mean(0)) if len(x) > 10 else m.a(x), a=nn.Linear(4, 3)
    ),
    "the number of examples": lambda: Net(lambda m, x: m.a(x) / max(4, len(x)), a=nn.Linear(4, 3)),
    "a late neighbor": lambda: Net(lambda m, x: m.a(x) + (x[:, :1] > 5) * m.a(x.roll(1, 0)), a=nn.Linear(4, 3)),
    "gradients": lambda: Net(lambda m, x: m.a(x) + m.a(x).mean() - m.a(x).mean().detach(), a=nn.Linear(4, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", INTERACTING)
@pytest.mark.filterwarnings("ignore:linnet's layer rules")
def test_examples_that_interact_are_refused(name, dtype):
    model, x = double(INTERACTING[name]()).to(dtype), late(4).to(dtype)
    for product in (
        lambda J: J.gram(),
        lambda J: J.T @ normal(J.shape[0]).to(dtype),
        lambda J: J @ normal(J.shape[1]).to(dtype),
    ):
        with pytest.raises(ValueError, match=r"changes with the other examples|is not linear"):
            product(linnet.linearize(model).jacobian(x))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 3, 40])
def test_little_dropout_is_refused(seed, n):
    torch.manual_seed(seed)
    model = double(Net(lambda m, x: m.b(F.dropout(m.a(x).tanh(), 0.01)), a=nn.Linear(4, 50), b=nn.Linear(50, 1)))
    with pytest.raises(ValueError, match=r"different outputs for the same input|changes with the other"):
        linnet.linearize(model).jacobian(normal(n, 4)).gram_diag()


def test_random_numbers_that_change_nothing_are_harmless():
    model = double(Net(lambda m, x: m.a(x) + 0 * torch.rand(len(x), 1, dtype=x.dtype), a=nn.Linear(4, 3)))
    x = normal(N, 4)
    everything(linnet.linearize(model).jacobian(x), dense_jacobian(model, x))


def test_a_decision_that_rounds_with_the_number_of_examples_is_no_interaction():
    """One example sits on a threshold, and the number of examples in its batch rounds it to one side or the other."""
    model = double(Net(lambda m, x: m.a(x) + ((x[:, :1] > 5) & (len(x) != N)), a=nn.Linear(4, 3)))
    x = late(4)
    with pytest.raises(ValueError, match="changes with the other examples"):
        linnet.linearize(model).jacobian(x).gram()
    A = dense_jacobian(model, x)
    K = linnet.linearize(model.float()).jacobian(x.float()).gram()
    assert (K - A @ A.T).abs().max() <= 1e-5 * (A @ A.T).abs().max()


def test_a_network_that_keeps_state_is_refused():
    def forward(m, x):
        m.count = getattr(m, "count", 0) + 1
        return m.a(x) * (1 + (m.count > 20))

    model = double(Net(forward, a=nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"depend on its earlier calls|changes with the other examples"):
        for _ in range(3):
            linnet.linearize(model).jacobian(normal(40, 4), 2).gram()


@pytest.mark.parametrize("kind", ["method", "data", "index", "assigned"])
def test_a_forward_that_writes_into_weights_is_refused_and_the_weights_stay(kind):
    def forward(m, x):
        if kind == "method":
            with torch.no_grad():
                m.a.weight.mul_(0.9)
        elif kind == "data":
            m.a.weight.data.clamp_(-0.1, 0.1)
        elif kind == "index":
            m.a.weight.data[0] = 0.0
        else:
            m.a.weight.data = m.a.weight.data * 0.9
        return m.a(x)

    model = double(Net(forward, a=nn.Linear(4, 3)))
    before = model.a.weight.detach().clone()
    with pytest.raises(ValueError, match=r"writes into the parameter 'a\.weight'"):
        linnet.linearize(model).jacobian(normal(N, 4)).outputs()
    assert torch.equal(model.a.weight, before)


def test_embeddings_with_max_norm():
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 2)).double()
    tokens, before = torch.arange(14).view(7, 2) % 7, model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="The embedding '0' has rows longer than its max_norm"):
        linnet.linearize(model)
    assert torch.equal(model[0].weight, before)
    with torch.no_grad():
        model[0].weight.mul_(0.4 / model[0].weight.norm(dim=1, keepdim=True))
    exact = dense_jacobian(model, tokens)  # which counts as a change of the weights
    everything(linnet.linearize(model).jacobian(tokens), exact)

    functional = double(
        Net(lambda m, x: m.b(F.embedding(x, m.w, max_norm=0.5).flatten(1)), w=parameter(7, 4), b=nn.Linear(8, 2))
    )
    before = functional.w.detach().clone()
    with pytest.raises(ValueError, match="longer than its max_norm"):
        linnet.linearize(functional).jacobian(tokens).outputs()
    assert torch.equal(functional.w, before)


def test_gradients_scaled_by_frequency_are_refused():
    model = nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 2)).double()
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        linnet.linearize(model).jacobian(torch.zeros(5, 2, dtype=torch.long)).outputs()


def test_a_backward_pass_that_clips_is_refused():
    def forward(m, x):
        h = m.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h

    with pytest.raises(ValueError, match="backward pass of the model is not linear"):
        linnet.linearize(double(Net(forward, a=nn.Linear(4, 3)))).jacobian(normal(N, 4)).outputs()


def test_a_module_that_copies_as_itself_is_refused_and_stays_in_training():
    class Single(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    model = nn.Sequential(Single(4, 3), nn.Dropout()).train()
    with pytest.raises(TypeError, match=r"copy\.deepcopy returns the module '0' itself"):
        linnet.linearize(model)
    assert model.training and model[0].training


def test_inputs_are_not_written_into():
    model = double(Net(lambda m, x: m.a(x.mul_(2)), a=nn.Linear(4, 3)))
    x = normal(N, 4)
    before = x.clone()
    J = linnet.linearize(model).jacobian(x)
    J.gram(), J @ normal(J.shape[1]), J.outputs(), linnet.linearize(model)(x)
    assert torch.equal(x, before)


# Rounding is not taken for a fault.


def test_a_hard_decision_in_float32_is_accepted():
    """Experts chosen by a maximum: rounding may choose another one with another number of examples."""
    torch.manual_seed(0)

    def forward(m, x):
        scores = m.gate(x)
        chosen = F.one_hot(scores.argmax(1), 4).to(x)
        return m.b((m.a(x).unflatten(1, (4, 5)) * chosen[..., None]).sum(1))

    model = Net(forward, gate=nn.Linear(300, 4), a=nn.Linear(300, 20), b=nn.Linear(5, 3))
    with torch.no_grad():
        model.gate.weight[1:] = model.gate.weight[0] + 1e-7 * torch.randn(3, 300)
        model.gate.bias.zero_()
    x = torch.randn(400, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linnet.linearize(model).jacobian(x).gram_diag()


def test_parts_in_float32_loosen_what_is_rounding():
    """A normalization in float32 inside a float64 network, as T5 has it."""

    def forward(m, x):
        h = m.a(x)
        return m.b(h * h.float().pow(2).mean(1, keepdim=True).rsqrt().double())

    model, x = double(Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3))), normal(40, 4)
    lin = linnet.linearize(model)
    everything(lin.jacobian(x), dense_jacobian(model, x), rtol=1e-5)
    assert lin.rules.coarsest == torch.float32


def test_gradients_that_are_zero_but_for_rounding():
    """A bias before a centered normalization."""
    model = double(
        Net(lambda m, x: m.b(m.n(m.a(x))), a=nn.Linear(4, 5), n=nn.LayerNorm(5, eps=1e-9), b=nn.Linear(5, 3))
    )
    with torch.no_grad():
        model.a.weight.zero_()
        model.a.bias.copy_(torch.arange(5.0))
    x = normal(N, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everything(linnet.linearize(model, "a.bias").jacobian(x), dense_jacobian(model, x, names=["a.bias"]), rtol=1e-7)


# Parts.


def truth(A: Tensor, U: Tensor) -> Truth:
    lin = linnet.linearize(mlp())
    return Truth(U, A.T @ U.flatten(0, 1), lin.layout, (1e-8,) * U.shape[2], 1e-16, 1.0)


def test_a_truth_tells_right_products_and_rows_from_wrong_ones():
    A, U, V = normal(7 * 3, 43), normal(7, 3, 2, seed=1), normal(43, 4, seed=2)
    judge, ranges = truth(A, U), [(0, 43)]
    product = (A @ V).unflatten(0, (7, 3))
    assert judge.has_product(ranges, V, product) == [True, True]
    wrong = product.clone()
    wrong[5, 1, 2] += 1e-5 * product.norm()
    assert judge.has_product(ranges, V, wrong) == [False, False]
    rows = A.unflatten(0, (7, 3))
    assert judge.has_rows(ranges, [rows]) == [True, True]
    assert judge.has_rows(ranges, [rows.flip(0)]) == [False, False]
    found = judge.G.clone()
    found[0, 1] += 1.0
    assert judge.different(found) == [set(), {"a.weight"}]
    both = judge.beside(judge)
    assert both.U.shape == (7, 3, 4) and len(both.tolerances) == 4


class NotANumberForward(torch.autograd.Function):
    """The identity, whose forward-mode derivative is not a number."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def jvp(ctx, t: Tensor) -> Tensor:
        return t * torch.nan


def test_a_forward_mode_that_gives_no_number_is_not_used():
    def forward(m, x):  # the first examples are not large
        h = m.a(x)
        return m.b(NotANumberForward.apply(h) if float(x.max()) > 10 else h)

    model = double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    x = normal(9, 3) / 10
    x[-1] = 20.0
    v = normal(26)
    found = linnet.linearize(model).jacobian(x, 9) @ v
    torch.testing.assert_close(found, dense_jacobian(model, x) @ v, rtol=1e-9, atol=1e-12)


def test_a_column_that_is_not_finite_is_no_disproof():
    J = linnet.linearize(double(nn.Linear(3, 2))).jacobian(normal(4, 3), engine="autodiff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not (J @ torch.full((8,), torch.inf, dtype=torch.float64)).isfinite().any()


def test_random_signs_have_no_small_entry():
    found = random_signs(1000, seed=0, like=torch.zeros((), dtype=torch.float64))
    assert found.abs().min() >= 0.5 and found.abs().max() <= 1.5 and 400 < (found > 0).sum() < 600


def test_claims_are_by_composition():
    proofs, batch = (
        Proofs(),
        next(iter(linnet.data.sources.as_source(normal(9, 4), nn.Linear(4, 1).forward).batches(9))),
    )
    assert proofs.claim("rules", batch) and not proofs.claim("rules", batch)
    assert proofs.claim("forward", batch) and proofs.claim("rules", batch.part(0, 5))
    index = torch.tensor([3, 1])
    assert proofs.claim("rules", batch.take(index)) and not proofs.claim("rules", batch.take(index))
    assert proofs.claim("rules", batch.take(index.flip(0)))
    proofs.forget()
    assert proofs.claim("rules", batch)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_draw_from_any_global_generator_is_seen(draw):
    state = RandomState(torch.device("cpu"))
    assert not state.moved()
    draw()
    assert state.moved()
