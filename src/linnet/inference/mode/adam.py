r"""The mode by Adam on minibatches, for data that is not the same in every epoch (augmentation).

The objective is the objective of `linnet.inference.mode.newton`, :math:`\psi(u) = -\sum_i \log p(y_i \mid f_i) +
\tfrac12 u^\top u` with :math:`f = m + \Phi u`. It has one optimum. A minibatch gives the gradient
:math:`u - \tfrac{n}{b} \Phi_b^\top r_b` by one Jacobian-vector product and one vector-Jacobian product, both from one
forward pass (Mu, Liang and Li 2020, equations 4 to 7). In the whitened weights u every prior standard deviation is one,
so that one step length serves all weights. The best length of Adam's first step is known exactly, because f is linear
in u. The length falls from there to zero along a half-cosine and needs no tuning: over twelve small problems with weak
and strong priors, a third or twice of this length does no better after thirty epochs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from linnet._common import Deferred, show_progress
from linnet.data import Batch, move
from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.newton import FLOOR, Mode
from linnet.inference.mode.spaces import check_concave
from linnet.jacobian import Jacobian
from linnet.probability import Likelihood, row_root


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        epochs: Times that every example is seen.
        size: Examples of a minibatch.
        rate: Adam's learning rate at the start, in prior standard deviations; "auto" is the best first step.
    """

    epochs: int = 30
    size: int = 128
    rate: float | str = "auto"

    def __post_init__(self) -> None:
        for name, given in (("epochs", self.epochs), ("minibatch", self.size)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ValueError(f"{name} must be a positive number; got {given!r}.")
        known = isinstance(self.rate, int | float) and not isinstance(self.rate, bool) and 0 < self.rate < math.inf
        if self.rate != "auto" and not known:
            raise ValueError(f"learning_rate must be 'auto' or a positive number; got {self.rate!r}.")


@dataclass(frozen=True)
class TrainedMode:
    """The mode that training has found.

    Attributes:
        mode: Where it ended, measured in one more pass over the data; ``converged`` says that the objective fell.
        path: An estimate of the objective in every epoch, from its minibatches.
        rate: The learning rate at the start.
    """

    mode: Mode
    path: tuple[float, ...]
    rate: float


def train_by_adam(
    J: Jacobian,
    y: Tensor,
    *,
    variance: Tensor,
    likelihood: Likelihood,
    network: bool = True,
    training: Training | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> TrainedMode:
    """The mode by Adam on minibatches.

    Args:
        J: (n c, p), of data that can be read by position.
        y: Targets, as ``likelihood.targets`` takes them.
        variance: S, (p,).
        likelihood: Of the targets given f.
        network: Whether the mean function is the network's output, else zero.
        training: How.
        seed: Of the order of the examples.
        progress: As in `Linearization.jacobian`.

    Example:
        >>> import linnet
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> X = torch.linspace(-2, 2, 40).double()[:, None]
        >>> J = linnet.linearize(torch.nn.Linear(1, 1).double()).jacobian(X)
        >>> found = train_by_adam(J, (X[:, 0] > 0).double(), variance=torch.ones(2).double(), likelihood=Bernoulli())
        >>> found.mode.u.shape, found.mode.objective < found.path[0]
        (torch.Size([2]), True)
    """
    training = Training() if training is None else training
    check_concave(likelihood)
    y = likelihood.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)
    task = _Objective(J, y, variance.sqrt(), likelihood, network)
    try:
        rate = task.first_step(training.size, seed) if training.rate == "auto" else float(training.rate)
        u, path = _train(task, training, rate, seed, progress)
    finally:
        J.forget_minibatches()
    mode, before = task.measure(u, training.epochs * math.ceil(J.n / training.size), training.epochs + 1)
    if not mode.objective < before:
        raise _diverged(f"the objective is {mode.objective:.4g} at the end and was {before:.4g} at the start", rate)
    return TrainedMode(mode, tuple(path), rate)


def _train(
    task: _Objective, training: Training, rate: float, seed: int, progress: bool | None
) -> tuple[Tensor, list[float]]:
    """The whitened weights after all epochs, and an estimate of the objective in each."""
    J = task.J
    u = torch.nn.Parameter(torch.zeros(J.shape[1], dtype=J.dtype, device=J.device))
    optimizer = torch.optim.Adam([u], lr=rate, fused=True)
    steps, step = training.epochs * math.ceil(J.n / training.size), 0
    path: list[float] = []
    with show_progress(training.epochs * J.n, "Adam", progress=progress) as tick:
        for epoch in range(training.epochs):
            lost = torch.zeros((), dtype=torch.float64, device=J.device)
            later = Deferred(lambda f, y, lost=lost: lost.sub_(task.likelihood.log_prob(f, y).double().sum()))
            for part in J.minibatches(training.size, seed + epoch, late=True):
                y = task.targets(part)
                u.grad, f = task.gradient(part, u.detach(), y)
                own = slice(*J.ranks.own(part.n))
                later.add(f[own], y[own])
                optimizer.param_groups[0]["lr"] = 0.5 * rate * (1 + math.cos(math.pi * step / steps))
                optimizer.step()
                step += 1
                tick(part.n)
            later.finish()
            J.ranks.add_up(lost)
            path.append(float(lost + 0.5 * u.detach().square().sum()))
            if not math.isfinite(path[-1]):
                raise _diverged(f"the objective is {path[-1]} after epoch {epoch + 1}", rate)
    return u.detach(), path


@dataclass(frozen=True)
class _Objective:
    """The objective in whitened weights; ``d`` (p,) are the prior standard deviations."""

    J: Jacobian
    y: Tensor
    d: Tensor
    likelihood: Likelihood
    network: bool

    def targets(self, part: Jacobian) -> Tensor:
        """Those of a minibatch, (m, ...)."""
        return self.y.index_select(0, move(part.index, self.y.device))

    def outputs(self, shift: Tensor, batch: Batch) -> Tensor:
        """f (m, c) of a batch, for ``J delta`` (m c,)."""
        assert batch.f is not None
        f = shift.view(batch.f.shape)
        return f + batch.f if self.network else f

    def gradient(self, part: Jacobian, u: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of the objective at u over n, estimated from a minibatch with targets y, (p,); and its outputs (m, c).

        Outputs of other ranks' examples are zero.
        """
        seen: list[tuple[int, Tensor]] = []

        def pull(shift: Tensor, batch: Batch) -> Tensor:
            if seen and batch.start <= seen[-1][0]:  # out of memory, it has started again
                seen.clear()
            f = self.outputs(shift, batch)
            seen.append((batch.start, f))
            return self.likelihood.residual(f, y[batch.start : batch.start + batch.n]).flatten()

        pulled = part.fused(pull, self.d * u)
        g = torch.addcmul(u / self.J.n, self.d, pulled, value=-1 / part.n)
        if len(seen) == 1 and len(seen[0][1]) == part.n:
            return g, seen[0][1]
        f = torch.zeros(part.n, part.c, dtype=part.dtype, device=part.device)
        for start, some in seen:
            f[start : start + len(some)] = some
        return g, f

    def first_step(self, size: int, seed: int) -> float:
        """The best length of Adam's first step, along the sign of the gradient: the median over four minibatches."""
        zero = torch.zeros_like(self.d)
        lengths = []
        for part in islice(self.J.minibatches(size, seed), 4):
            part = part.cached()
            y = self.targets(part)
            direction = -self.gradient(part, zero, y)[0].sign()
            f = part.outputs() if self.network else torch.zeros(part.n, part.c, dtype=zero.dtype, device=zero.device)
            df = (part @ (self.d * direction)).view(part.n, part.c)
            weight = self.J.n / part.n

            def terms(f: Tensor, y: Tensor = y, weight: float = weight) -> tuple[Tensor, Tensor, Tensor]:
                known = self.likelihood
                return (
                    weight * known.log_prob(f, y),
                    weight * known.residual(f, y),
                    weight * known.observed_curvature(f, y),
                )

            line = LineSearch(terms, f, df=df, products=(0.0, 0.0, float(direction @ direction)))
            lengths.append(line.find_length())
        found = sorted(t for t in lengths if t > 0)
        if not found:
            raise ValueError(
                "No first step makes the objective smaller: the selected parameters do not move the outputs of these "
                "examples, or the network already fits them. Select others with params=, or give learning_rate=."
            )
        return found[len(found) // 2]

    def measure(self, u: Tensor, steps: int, passes: int) -> tuple[Mode, float]:
        """The mode as one pass over the data sees it, and the objective of u = 0 in the same pass."""
        J = self.J
        found = torch.zeros(J.n, J.c, dtype=J.dtype, device=J.device)
        rest = torch.zeros_like(found)
        sums = torch.zeros(2, dtype=torch.float64, device=J.device)

        def pull(shift: Tensor, batch: Batch) -> Tensor:
            columns, y = [], self.y.index_select(0, move(batch.index, self.y.device))
            for i, column in enumerate(shift.unbind(1)):
                f = self.outputs(column, batch)
                sums[i] += self.likelihood.log_prob(f, y).double().sum()
                columns.append(self.likelihood.residual(f, y))
                if i == 0:
                    at = slice(batch.start, batch.start + batch.n)
                    found[at], rest[at] = f, columns[0]
            return torch.stack([r.flatten() for r in columns], 1)

        pulled = J.fused(pull, torch.stack([self.d * u, torch.zeros_like(u)], 1))
        J.ranks.add_up(sums)
        J.ranks.share_rows(found, J.n)
        J.ranks.share_rows(rest, J.n)
        at_end, at_start = (u - self.d * pulled[:, 0]).norm(), (self.d * pulled[:, 1]).norm()
        mode = Mode(
            f=found,
            alpha=rest.flatten(),
            u=u,
            log_likelihood=float(sums[0]),
            penalty=0.5 * float(u @ u),
            log_det=None,
            gradient=float(at_end) / max(float(at_start), FLOOR),
            iterations=steps,
            passes=passes,
            converged=True,
            root=row_root(self.likelihood, found, self.y),
            factor=None,
        )
        return mode, -float(sums[1])


def _diverged(what: str, rate: float) -> ArithmeticError:
    return ArithmeticError(
        f"Adam diverges: {what}, with a learning rate of {rate:.3g} at the start. Pass a smaller learning_rate=, a "
        "larger minibatch=, or more epochs=."
    )


def check_only_map(inference: str) -> None:
    """Raise unless the mode alone is asked for."""
    if inference != "map":
        raise ValueError(
            f"solver='adam' finds the mode alone, so it needs inference='map'; got {inference!r}. Error bars come from "
            "the other solvers, on data that stays the same."
        )
