"""What is to be solved, and how: observations with noise, settings of the solvers, and which solver serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from linnet._common import check_fits, find_dense_budget, format_bytes, free_memory, messages

if TYPE_CHECKING:
    from linnet.inference.evidence.gaussian import Choice
    from linnet.linalg import Solution
    from linnet.probability import Posterior

Solver = Literal["auto", "function", "weight", "cg-function", "cg-weight"]
Precondition = Literal["auto", "nystrom", "pivoted-cholesky", "none"]


SEARCHED = 30
"""Decompositions that a choice of scales and a fit may take: more of them leave fewer problems to a dense solver."""


@dataclass(frozen=True)
class SolverSettings:
    """How to solve.

    Attributes:
        solver: "function" or "weight" for a dense matrix, "cg-function" or "cg-weight" for products alone; "auto" goes
            by size.
        memory: Bytes that dense matrices may take, or "auto".
        tolerance: Largest relative residual of the iterative solvers.
        iterations: Largest number of iterations of the iterative solvers.
        preconditioner: "nystrom" or "none"; "auto" is Nystrom where examples can be chosen. "pivoted-cholesky", a
            preconditioner of earlier versions, means "auto".
        rank: Rows of the kernel that the preconditioner is made from, or "auto".
        samples: Posterior samples of the iterative solvers.
        probes: Probe vectors of the log determinant.
        seed: Seed of samples, probes and landmarks.
        progress: As in `Linearization.jacobian`.
        average: Whether to average over a scale and a noise by their evidence, where a dense solver decomposes the
            kernel; else the largest evidence chooses them.
    """

    solver: Solver = "auto"
    memory: float | str = "auto"
    tolerance: float = 1e-6
    iterations: int = 1000
    preconditioner: Precondition = "auto"
    rank: int | str = "auto"
    samples: int = 64
    probes: int = 16
    seed: int = 0
    progress: bool | None = None
    average: bool = False

    def __post_init__(self) -> None:
        for name, known in (("solver", Solver), ("preconditioner", Precondition)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, get_args(known)))}; got {getattr(self, name)!r}."
                )
        messages.check_memory(self.memory)
        messages.check_seed(self.seed)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {self.tolerance!r}.")
        for name in ("iterations", "samples", "probes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive number; got {getattr(self, name)!r}.")
        if self.rank != "auto" and (not isinstance(self.rank, int) or self.rank < 1):
            raise ValueError(f"rank must be a positive number or 'auto'; got {self.rank!r}.")

    def generator(self, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1_000_003 * step)


@dataclass(frozen=True)
class Noise:
    """Variances of the observations: a known one for each row, times a scale for each group of rows.

    A row of weight w counts as w rows that are the same: its variance is one over w of the known one, and the evidence
    is that of all w rows.

    Attributes:
        base: (n c,), over the weights.
        group: (n c,), the number of a row's scale.
        count: How many scales there are.
        value: The scales where they are given; None where the evidence chooses them.
        floor: Where it does, the share of one observation's mean energy that is assumed to be noise.
        weight: (n c,), how many times each row counts; None for once.
    """

    base: Tensor
    group: Tensor
    count: int = 1
    value: tuple[float, ...] | None = None
    floor: float = 0.0
    weight: Tensor | None = None

    def rows(self, scales: Sequence[float]) -> Tensor:
        """The variance of each row, (n c,), over its weight."""
        s = torch.tensor(list(scales), dtype=self.base.dtype, device=self.base.device)
        return self.base * s[self.group]

    def count_rows(self) -> Tensor:
        """How many rows each scale has, by their weights, (count,) in float64."""
        ones = torch.ones_like(self.base) if self.weight is None else self.weight
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.group.cpu(), ones.double().cpu())

    def count_repeats(self) -> list[float]:
        """How many rows each scale has beside the first of equal ones; less than zero for weights below one."""
        if self.weight is None:
            return [0.0] * self.count
        return (self.count_rows() - torch.bincount(self.group, minlength=self.count).cpu()).tolist()

    def repeat_evidence(self, scales: Sequence[float]) -> float:
        r"""What the log evidence of all rows is above that of each row once, with its variance over its weight.

        .. math:: w \log N(r \mid f, v) - \log N(r \mid f, v / w) = -\tfrac{w - 1}{2} \log(2 \pi v) - \tfrac12 \log w
        """
        if self.weight is None:
            return 0.0
        w = self.weight.double()
        v = self.rows(scales).double() * w
        return -0.5 * float(((w - 1) * (2 * math.pi * v).log() + w.log()).sum())


@dataclass(frozen=True)
class Task:
    """Observations of one task.

    Attributes:
        J: The Jacobian of its inputs.
        r: (n c,), targets less the mean function.
        noise: Of the observations.
        base: (n, c), the mean function.
    """

    J: Any
    r: Tensor
    noise: Noise
    base: Tensor


@dataclass(frozen=True)
class Average:
    """What an average over scale and noise was before later observations came.

    Attributes:
        rows: Rows of the task that the average is over, which come first.
        delta: Its mean, (p,).
        alpha: As that of a `Fit`, (rows,).
        log_evidence: As that of a `Fit`.
    """

    rows: int
    delta: Tensor
    alpha: Tensor
    log_evidence: float


@dataclass(frozen=True)
class Fit:
    """A posterior and how it was found.

    Attributes:
        posterior: Of the displacement.
        choice: Hyperparameters.
        variance: S, (p,).
        noise_rows: (n c,), the noise variance of each observation.
        alpha: (n c,), ``(K + noise)^-1 r``; for an average its mean over all points, of which ``delta = S J^T alpha``.
        log_evidence: ``log N(r | 0, K + noise)``; for an average, that of the scale and noise of largest evidence.
        error: Its standard error; 0 where exact.
        solver: The one that was used.
        solution: Convergence of an iterative solver; None for a dense one.
        average: For an average, what it was before later observations; else None.
    """

    posterior: Posterior
    choice: Choice
    variance: Tensor
    noise_rows: Tensor
    alpha: Tensor
    log_evidence: float
    error: float
    solver: str
    solution: Solution | None = field(default=None, repr=False)
    average: Average | None = field(default=None, repr=False)


def assumed_noise(tasks: Sequence[Task]) -> tuple[float, ...]:
    """The energies of the prior on each scale of the noise, for `linnet.inference.evidence.gaussian`; zero where it is
    given.

    The share ``floor`` of the mean square of all residuals with that scale, in units of their known variances.
    """
    noise = tasks[0].noise
    if noise.value is not None:
        return (0.0,) * noise.count
    energies, counts = torch.zeros(2, noise.count, dtype=torch.float64)  # both by the weights of the rows
    for task in tasks:
        squares = task.r.double().square() / task.noise.base.double()
        energies.index_add_(0, task.noise.group.cpu(), squares.cpu())
        counts += task.noise.count_rows()
    return tuple((noise.floor * energies / counts).tolist())


def work_of_a_minute(device: torch.device) -> float:
    """Multiply-adds that a machine does in about a minute: few cores, or a large GPU."""
    return 5e14 if device.type == "cuda" else 2e12


def choose_solver(
    rows: int,
    p: int,
    settings: SolverSettings,
    *,
    device: torch.device,
    kernels: int = 1,
    steps: int = 1,
    features: int = 0,
) -> Solver:
    """The solver for a problem of this size: the cheaper dense one that fits memory and patience, else iterative.

    The iterative one works in function space, where the Nystrom preconditioner is better by far (10 iterations against
    54, 5 against 22, 3 against 10 for a small network with 300, 600 and 1,000 landmarks), unless there are so many rows
    that it would not fit memory.

    Args:
        rows: n c.
        p: Parameters.
        settings: Its ``solver``, unless that is "auto"; its memory.
        device: Where it runs.
        kernels: Dense kernels that are held at once.
        steps: Decompositions that are made.
        features: Rows of dense features, p numbers each, that the solver in weight space holds beside its matrix.

    Raises:
        MemoryError: If the solver that the settings name is a dense one that does not fit.

    >>> choose_solver(500, 10_000, SolverSettings(), device=torch.device("cpu"))
    'function'
    >>> choose_solver(10_000, 500, SolverSettings(), device=torch.device("cpu"))
    'weight'
    """
    function = (8 * (2 + kernels) * rows**2 if rows < 20_000 else 8.4 * kernels * rows**2, rows**3 / 3)
    weight = (8 * (4 * p**2 + 2 * features * p), p**3 + rows * p**2)
    dense: dict[Solver, tuple[float, float]] = {"function": function, "weight": weight}
    if settings.solver != "auto":
        if settings.solver in dense:
            check_fits(
                dense[settings.solver][0],
                settings.memory,
                device,
                what=f"solver={settings.solver!r} with {rows:,} rows and {p:,} parameters",
                instead="Use solver='auto', 'cg-function' or 'cg-weight', fewer parameters (params=) or fewer examples",
            )
        return settings.solver
    memory = find_dense_budget(settings.memory, device)
    patience = work_of_a_minute(device) / steps
    fitting = {name: cost for name, (size, cost) in dense.items() if size <= memory and cost <= patience}
    if fitting:
        return min(fitting, key=fitting.__getitem__)
    return "cg-function" if 16 * rows * 1000 <= 0.5 * memory else "cg-weight"


def choose_likelihood_solver(
    rows: int, p: int, settings: SolverSettings, *, device: torch.device, kernels: int, inference: str
) -> str:
    """As `choose_solver`, for likelihoods without a closed form: a choice of scales takes several decompositions.

    Where these are too many, "laplace" still takes two in weight space, with the scale chosen on a part of the data:
    samples by conjugate gradients would take thousands of products. The arguments are those of `choose_solver`.

    >>> given = {"device": torch.device("cpu"), "kernels": 2}
    >>> choose_likelihood_solver(30_000, 3_000, SolverSettings(), inference="laplace", **given)
    'weight'
    >>> choose_likelihood_solver(30_000, 3_000, SolverSettings(), inference="map", **given)
    'cg-weight'
    """
    if settings.solver == "cg-function":
        raise ValueError("A classifier is solved by 'function', 'weight' or 'cg-weight'; got solver='cg-function'.")
    features = rows if searches_all_features(rows, p, device) else 0
    solver = choose_solver(rows, p, settings, device=device, kernels=kernels, steps=SEARCHED, features=features)
    if solver.startswith("cg") and settings.solver == "auto" and inference == "laplace":
        once = choose_solver(rows, p, settings, device=device, kernels=kernels, steps=2)
        solver = once if once == "weight" else solver
    return "cg-weight" if solver.startswith("cg") else solver


def searches_all_features(rows: int, p: int, device: torch.device) -> bool:
    """Whether the scale is chosen on all of the data in weight space, and not on a part."""
    return p**3 + rows * p**2 <= work_of_a_minute(device) / SEARCHED


def check_outputs_fit(J: Any) -> None:
    """Raise where the outputs of all examples do not fit into free memory: a fit holds them about four times."""
    needed, free = 4 * J.shape[0] * J.dtype.itemsize, free_memory(J.device)
    if needed > free:
        raise MemoryError(
            f"The outputs of {J.n:,} examples, {J.c:,} numbers each, take {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free. Pick the outputs that have targets with output=, such as the scores of "
            "the answer tokens of a language model, or give fewer examples."
        )


def check_covariance_fits(J: Any, memory: float | str) -> None:
    """Raise where the joint covariance of all outputs of all examples does not fit memory."""
    check_fits(
        3 * J.shape[0] ** 2 * J.dtype.itemsize,
        memory,
        J.device,
        what=f"return_cov=True for {J.n:,} inputs with {J.c:,} outputs",
        instead="Ask for return_std=True, for fewer inputs at once, or draw outputs with sample(X, k)",
    )
