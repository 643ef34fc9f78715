"""The mode by Adam on minibatches: its steps against dense rows, and data that changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import linnet
from linnet.inference.mode import adam, newton
from linnet.probability import Bernoulli, Categorical
from tests.support.drawn import double, normal
from tests.support.residual import RESIDUAL, Residual, close, images


def test_adam_reaches_the_optimum_without_tuning():
    x, y = images(200)
    model = linnet.attach_head(double(Residual()), x, y, penalty=1.0)
    given = {"params": RESIDUAL, "inference": "map", "prior": 0.05}
    for mean in ("network", "zero"):
        exact = linnet.TangentClassifier(model, **given, mean=mean).fit(x, y)
        clf = linnet.TangentClassifier(model, **given, mean=mean, solver="adam", minibatch=32).fit(x, y)
        assert clf.mode_.objective == pytest.approx(exact.mode_.objective, rel=1e-2)
        assert clf.mode_.objective >= exact.mode_.objective * (1 - 1e-9)
        assert clf.solver_ == "adam" and clf.passes_ == 31 and len(clf.objective_path_) == 30
        assert clf.objective_path_[-1] < clf.objective_path_[0]


@pytest.mark.parametrize("scale", [1e-2, 1e2])
def test_adams_step_follows_the_prior(scale):
    x, w = normal(200, 5), normal(5, seed=2)
    y = (x @ w + 0.5 * normal(200, seed=3) > 0).double()
    J = linnet.linearize(double(nn.Linear(5, 1))).jacobian(x).cached()
    given = {"variance": torch.full((6,), scale).double(), "likelihood": Bernoulli()}
    exact = newton.pass_space(J, y, mean=J.outputs(), **given)
    found = adam.train_by_adam(J, y, **given, training=adam.Training(epochs=40, size=50))
    assert found.mode.objective == pytest.approx(exact.objective, rel=1e-2)
    close(found.mode.alpha, Bernoulli().residual(found.mode.f, y[:, None]).flatten())
    assert adam.train_by_adam(J, y, **given, training=adam.Training(40, 50)).mode.u.equal(found.mode.u)


class Augmented(Dataset):
    """Images with noise that is new every time they are read."""

    def __init__(self, x: Tensor, y: Tensor, noise: float = 0.05) -> None:
        self.x, self.y, self.noise = x, y, noise
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(self.x[i].shape, generator=self.generator, dtype=self.x.dtype)
        return self.x[i] + self.noise * noise, self.y[i]


@pytest.mark.parametrize("form", ["dataset", "loader", "collated"])
def test_adam_takes_data_that_changes(form):
    model, (x, y) = double(Residual()), images(30)
    data = Augmented(x, y)
    collate = None if form != "collated" else torch.utils.data.default_collate
    given = data if form == "dataset" else DataLoader(data, batch_size=8, collate_fn=collate)
    settings = {"params": RESIDUAL, "inference": "map"}
    clf = linnet.TangentClassifier(model, **settings, prior=0.05, solver="adam", epochs=30, minibatch=10).fit(given)
    exact = linnet.TangentClassifier(model, **settings, prior=0.05).fit(x, y)
    assert clf.mode_.objective == pytest.approx(exact.mode_.objective, rel=0.05)
    assert clf.predict(x).shape == (30,)
    chosen = linnet.TangentClassifier(model, **settings, prior="ntk", solver="adam", epochs=1).fit(given)
    assert chosen.scale_examples_ == 30 and chosen.scales_["all"] > 0
    with pytest.raises(RuntimeError, match="Example 0 changed between two passes"):
        linnet.TangentClassifier(model, RESIDUAL, inference="map", solver="cg-weight").fit(Augmented(x, y))


def test_minibatches_of_changing_data_are_read_once():
    x, y = images(12)
    data = Augmented(x, y, noise=1.0)
    source = linnet.data.sources.as_source(data, nn.Linear(1, 1)).changing()
    J = linnet.linearize(double(Residual()), RESIDUAL).jacobian(source)
    V = normal(J.shape[1])
    for part in J.minibatches(5, seed=0):
        close(part @ V, part @ V)
        close(part.cached() @ V, part @ V)
        assert part.targets().equal(y[part.index])
    with pytest.raises(AssertionError):
        close(J.subset(torch.arange(3)) @ V, J.subset(torch.arange(3)) @ V)


RATE, SIZE, EPOCHS = 0.01, 8, 3


def orders(n: int, seed: int) -> list[list[Tensor]]:
    """The examples of each minibatch, by epoch: drawn once, in another order every time."""
    chunks = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tensor_split(-(-n // SIZE))
    turns = [torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed + e)) for e in range(EPOCHS)]
    return [[chunks[i] for i in turn] for turn in turns]


def by_hand(parts, y: Tensor, d: Tensor, n: int) -> tuple[Tensor, list[float]]:
    """The whitened weights by torch's own Adam on dense rows, from (rows, outputs, index) by epoch and minibatch."""
    u = nn.Parameter(torch.zeros_like(d))
    optimizer = torch.optim.Adam([u], lr=RATE, foreach=False, fused=False)
    steps, step, path = sum(len(epoch) for epoch in parts), 0, []
    for epoch in parts:
        lost = 0.0
        for A, f, index in epoch:
            f = f + (A @ (d * u.detach())).view(f.shape)
            lost -= float(Categorical().log_prob(f, y[index]).sum())
            u.grad = u.detach() / n - d * (A.T @ Categorical().residual(f, y[index]).flatten()) / len(index)
            optimizer.param_groups[0]["lr"] = 0.5 * RATE * (1 + np.cos(np.pi * step / steps))
            optimizer.step()
            step += 1
        path.append(lost + 0.5 * float(u.detach().square().sum()))
    return u.detach(), path


@pytest.mark.parametrize("form", ["as read", "activations", "factors", "a few at a time", "in pieces"])
def test_adam_takes_the_steps_of_dense_rows(form):
    x, y = images(30)
    lin = linnet.linearize(double(Residual()), RESIDUAL)
    J = lin.jacobian(x, **{"a few at a time": {"batch_size": 17}, "in pieces": {"batch_size": 3}}.get(form, {}))
    A, f = lin.jacobian(x).dense().view(30, 10, -1), J.outputs()
    J = {"as read": lambda: J, "activations": J.above_frozen}.get(form, J.cached)()
    d = torch.linspace(0.1, 0.5, A.shape[2]).double()
    parts = [[(A[i].flatten(0, 1), f[i], i) for i in order] for order in orders(30, seed=4)]
    task = adam._Objective(J, y, d, Categorical(), True)
    u, path = adam._train(task, adam.Training(EPOCHS, SIZE), RATE, 4, False)
    expected, losses = by_hand(parts, y, d, 30)
    close(u, expected)
    assert path == pytest.approx(losses, rel=1e-9)


def test_every_epoch_looks_at_the_outputs_of_data_that_changes():
    x, y = images(32)

    class Turns(Augmented):
        reads = 0

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            image, label = super().__getitem__(i)
            return (image.clamp(0.1, 0.9) * 1.7e308 if i == 7 and self.reads > 4 * 32 else image), label

    J = linnet.linearize(double(Residual()), RESIDUAL).jacobian(
        linnet.data.sources.as_source(Turns(x, y, noise=0.5), nn.Linear(1, 1)).changing()
    )
    task = adam._Objective(J, y, torch.full((J.shape[1],), 0.2).double(), Categorical(), True)
    with pytest.raises(ValueError, match="output is not finite for example 7"):
        adam._train(task, adam.Training(8, SIZE), RATE, 4, False)


def test_adam_takes_the_same_steps_without_room_for_copies(monkeypatch):
    x, y = images(30)
    J = linnet.linearize(double(Residual()), RESIDUAL).jacobian(x).cached()
    task = adam._Objective(J, y, torch.linspace(0.1, 0.5, J.shape[1]).double(), Categorical(), True)
    u, path = adam._train(task, adam.Training(EPOCHS, SIZE), RATE, 4, False)
    assert J._copies[1]
    J.forget_minibatches()
    monkeypatch.setattr("linnet.jacobian.jacobian.cache_limit", lambda memory, device: 0)
    same, again = adam._train(task, adam.Training(EPOCHS, SIZE), RATE, 4, False)
    assert not J._copies[1]
    assert (same - u).norm() <= 1e-12 * u.norm()
    assert again == pytest.approx(path, rel=1e-12)


def test_adam_takes_the_steps_of_dense_rows_of_data_that_changes():
    (x, y), read = images(30), []

    class Noted(Augmented):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            item = super().__getitem__(i)
            read.append((i, item[0]))
            return item

    lin = linnet.linearize(double(Residual()), RESIDUAL)
    J = lin.jacobian(linnet.data.sources.as_source(Noted(x, y, noise=0.5), nn.Linear(1, 1)).changing())
    d = torch.linspace(0.1, 0.5, J.shape[1]).double()
    read.clear()
    task = adam._Objective(J, y, d, Categorical(), True)
    u, path = adam._train(task, adam.Training(EPOCHS, SIZE), RATE, 4, False)
    assert len(read) == 30 * EPOCHS
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    for e, order in enumerate(orders(30, seed=4)):
        parts.append([])
        start = 30 * e
        for index in order:
            part, start = read[start : start + len(index)], start + len(index)
            assert [i for i, _ in part] == index.tolist()
            own = lin.jacobian(torch.stack([image for _, image in part]))
            parts[-1].append((own.dense(), own.outputs(), torch.tensor([i for i, _ in part])))
    expected, losses = by_hand(parts, y, d, 30)
    close(u, expected)
    assert path == pytest.approx(losses, rel=1e-9)


class HostReads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["as read", "activations", "factors"])
def test_steps_wait_for_no_number(form):
    x, y = images(24)
    J = linnet.linearize(double(Residual()), RESIDUAL).jacobian(x)
    J = {"as read": lambda: J, "activations": J.above_frozen, "factors": J.cached}[form]()
    task = adam._Objective(J, y, torch.full((J.shape[1],), 0.1).double(), Categorical(), True)
    reads = []
    for size in (12, 12, 2, 2):  # factors are copied for the first epoch with a size
        with HostReads() as mode:
            adam._train(task, adam.Training(1, size), RATE, 0, False)
        reads.append(mode.count)
    assert reads[1] == reads[3] < 12


def test_outputs_are_looked_at_when_the_epoch_ends():
    x, _ = images(12)
    model = double(Residual())
    J = linnet.linearize(model, RESIDUAL).jacobian(x)
    V = torch.zeros(J.shape[1]).double()
    x[7] = torch.inf  # after it was checked
    parts, taken = J.minibatches(5, seed=0, late=True), []
    with pytest.raises(ValueError, match="output is not finite for example 7"):
        for part in parts:
            part.fused(lambda JV, batch: JV, V)
            taken.append(part)
    assert len(taken) == 3
    bad = next(part for part in taken if 7 in part.index.tolist())
    with pytest.raises(ValueError, match="output is not finite for example 7"):
        bad.fused(lambda JV, batch: JV, V)  # the epoch is over
    with pytest.raises(ValueError, match="output is not finite for example 7"):
        for part in J.minibatches(5, seed=0):
            part.fused(lambda JV, batch: JV, V)
            assert 7 not in part.index.tolist()


def test_adam_says_when_it_diverges():
    model, (x, y) = double(Residual()), images(60)
    given = {"params": RESIDUAL, "inference": "map", "prior": 1.0, "solver": "adam", "epochs": 2, "minibatch": 20}
    with pytest.raises(ArithmeticError, match=r"Adam diverges: the objective is .* with a learning rate of 1e\+03"):
        linnet.TangentClassifier(model, **given, learning_rate=1e3).fit(x, y)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inference": "laplace"}, "solver='adam' finds the mode alone, so it needs inference='map'; got 'laplace'"),
        ({"epochs": 0}, "epochs must be a positive number; got 0"),
        ({"minibatch": 1.5}, "minibatch must be a positive number; got 1.5"),
        ({"learning_rate": "fast"}, "learning_rate must be 'auto' or a positive number; got 'fast'"),
        ({"learning_rate": -1.0}, "learning_rate must be 'auto' or a positive number; got -1.0"),
        ({"top": "evidence", "params": None}, "goes neither with fit_tasks nor with solver='adam'"),
    ],
)
def test_adam_refuses(changed, message):
    x, y = images(20)
    settings = {"params": RESIDUAL, "inference": "map", "solver": "adam"} | changed
    with pytest.raises(ValueError, match=message):
        linnet.TangentClassifier(double(Residual()), **settings).fit(x, y)


def test_adam_without_a_first_step():
    x = normal(20, 3)
    J = linnet.linearize(double(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))), "1.bias").jacobian(x)
    with pytest.raises(ValueError, match="No first step makes the objective smaller"):
        adam.train_by_adam(J, torch.ones(20), variance=torch.zeros(1).double(), likelihood=Bernoulli())


@pytest.mark.parametrize(
    "given",
    [{"rate": rate} for rate in (0, 0.0, -1.0, math.inf, math.nan, True, "fast")]
    + [{name: value} for name in ("epochs", "size") for value in (0, -1, 1.5, True)],
    ids=str,
)
def test_settings_at_and_beyond_their_bounds(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be .*positive number; got"):
        adam.Training(**given)
    assert adam.Training(1, 1, 1e-300).rate == 1e-300 and adam.Training(rate=2).rate == 2


def test_where_adam_ends_is_measured_in_full():
    """Outputs, log likelihood, penalty and the gradient relative to that of zero, from the dense Jacobian."""
    x, w = normal(60, 5), normal(5, seed=2)
    y = (x @ w + 0.5 * normal(60, seed=3) > 0).double()
    J = linnet.linearize(double(nn.Linear(5, 1))).jacobian(x).cached()
    S, likelihood = torch.linspace(0.5, 2, 6).double(), Bernoulli()
    mode = adam.train_by_adam(J, y, variance=S, likelihood=likelihood, training=adam.Training(3, 16)).mode
    Phi, f0 = J.dense() * S.sqrt(), J.outputs()
    f = f0 + (Phi @ mode.u)[:, None]
    close(mode.f, f)
    close(mode.alpha, likelihood.residual(f, y[:, None]).flatten())
    assert mode.log_likelihood == pytest.approx(float(likelihood.log_prob(f, y[:, None]).sum()), rel=1e-9)
    assert mode.penalty == pytest.approx(0.5 * float(mode.u @ mode.u), rel=1e-9)
    at_end = (mode.u - Phi.T @ mode.alpha).norm()
    at_start = (Phi.T @ likelihood.residual(f0, y[:, None]).flatten()).norm()
    assert mode.gradient == pytest.approx(float(at_end / at_start), rel=1e-8)
    assert mode.converged and mode.log_det is None
