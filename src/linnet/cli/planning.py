"""What a command is going to do: parameters, the plan of the Jacobian, memory, and about how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from linnet.cli.data_files.examples import Examples
from linnet.cli.terminal import Printer, UsageError, as_usage
from linnet.inference.problem import SolverSettings, choose_likelihood_solver, choose_solver, searches_all_features
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import linearize
from linnet.jacobian.plan import _bytes
from linnet.network.parameters import Params
from linnet.network.top_blocks import top_blocks
from linnet.probability.priors import NAMES, PriorSpec, check_prior, make_prior
from linnet.tangent.base import fast_float64

LAYERS = 24
"""Lines of a plan that are printed; `linnet info` prints all."""

SAMPLES = (32, 512)
"""Examples that are timed: more only where the first are fast."""

STEPS = {
    "regression": (20.0, 5.0, 60.0),
    "classification": (70.0, 15.0, 200.0),
    "vi": (270.0, 15.0, 200.0),
    "laplace": (20.0, 5.0, 100.0),
}
"""How much longer than one decomposition in function space, or in weight space, a fit takes, and how many passes an
iterative one makes. Rough: the first two of regression, classification and "vi" (classes by variational inference) are
from a few fits of small networks, where the factor falls with size (regression 23 to 3, classification 80 to 50); all
others are guesses."""


@dataclass(frozen=True)
class Chosen:
    """Which parameters are random.

    Attributes:
        params: As `linnet.linearize` takes them.
        top: How many blocks from the top, or "evidence"; None where parameters are named.
    """

    params: Params
    top: int | str | None

    def globs(self, model: nn.Module, data: Examples) -> Params:
        """The parameters by name; of "evidence" those that it begins with."""
        if self.top is None:
            return self.params
        example = data.first(2)
        device = next(model.parameters()).device
        moved = {k: x.to(device) for k, x in example.items()} if isinstance(example, dict) else example.to(device)
        with as_usage():
            return top_blocks(model, self.top if isinstance(self.top, int) else 1, example=moved)


def chosen(params: list[str] | None, top: str | None, *, evidence: bool = False) -> Chosen:
    """From the options --params and --top; ``evidence`` where that may choose the number of blocks."""
    if params and top is not None:
        raise UsageError("--params and --top both say which parameters adapt; give one of them.")
    if top is None or (top == "evidence" and evidence):
        return Chosen(params or None, top)
    if not top.isdigit():
        more = " or 'evidence'" if evidence else ""
        raise UsageError(f"--top is a number of blocks{more}; got {top!r}.")
    return Chosen(None, int(top))


def prior_of(text: str) -> PriorSpec:
    """From the option --prior: a name, a variance, or ``glob=variance,glob=variance``.

    >>> prior_of("0.1"), prior_of("layer4.*=1,fc.*=0.5")
    (0.1, {'layer4.*': 1.0, 'fc.*': 0.5})
    """
    spec: Any = text
    if text not in NAMES:
        try:
            pairs = [part.rpartition("=") for part in text.split(",")]
            spec = {name: float(value) for name, _, value in pairs} if "=" in text else float(text)
        except ValueError as error:
            raise UsageError(
                f"--prior is one of {', '.join(NAMES)}, a variance, or glob=variance,glob=variance; got {text!r}."
            ) from error
    with as_usage():
        check_prior(spec)
    return spec


def check(model: nn.Module, chosen: Chosen, prior: PriorSpec, data: Examples) -> None:
    """Raise where the parameters or the prior name layers that the network does not have, before any long work."""
    with as_usage():
        lin = linearize(model, chosen.globs(model, data))
        if isinstance(prior, Mapping):
            make_prior(lin, prior)


def jacobian_of(model: nn.Module, params: Params, data: Examples, *, output: Any = None) -> Jacobian:
    """The Jacobian of the data in the precision of the estimators; its first look at them finds what does not fit."""
    with as_usage():
        lin = linearize(model, params, output)
        dtype = torch.float64 if fast_float64(lin.device) else torch.float32
        return lin.to(dtype).jacobian(data.X, progress=False)


def show(printer: Printer, model: nn.Module, J: Jacobian) -> None:
    """Parameters and plan."""
    total = sum(p.numel() for p in model.parameters())
    layers = len(J.lin.layout.layers)
    printer.say(f"{J.shape[1]:,} of {total:,} parameters, in {layers} layers, on {J.device} in {J.dtype}")
    lines = str(J.plan).splitlines()
    for line in lines[: 3 + LAYERS]:
        printer.say(f"  {line}")
    if len(lines) > 3 + LAYERS:
        printer.say(f"  ... and {len(lines) - 3 - LAYERS} more layers; `linnet info` shows all")


def announce(printer: Printer, J: Jacobian, kind: str, prior: PriorSpec, *, inference: str = "laplace") -> float:
    """Say which solver, its memory, and about how long it will take; the seconds are returned.

    Args:
        printer: Where to.
        J: Of the training data.
        kind: "regression", "classification" or "laplace".
        prior: Of the fit.
        inference: Of classification.
    """
    rows, p = J.shape
    kernels = (len(J.lin.layout.layers) if prior == "layerwise" else 1) + (kind == "classification")
    given: dict[str, Any] = {"device": J.device, "kernels": kernels}
    function, weight, passes = STEPS["vi" if inference == "vi" else kind]
    if kind == "classification":
        solver = choose_likelihood_solver(rows, p, SolverSettings(), inference=inference, **given)
        weight = weight if searches_all_features(rows, p, J.device) else 2.0
    else:
        solver = choose_solver(rows, p, SolverSettings(), **given)
    rate, seconds = _rate(J), 0.0
    once = seconds_of_pass(J)
    if solver == "function":
        memory, seconds = 8 * (2 + kernels) * rows**2, function * rows**3 / 3 / rate
    elif solver == "weight":
        memory, seconds = 8 * 4 * p**2, weight * (p**3 + rows * p**2) / rate
    else:
        memory, seconds = 16 * rows * 1000 + 64 * 8 * p, passes * once
    words = {"function": f"a dense kernel ({rows:,} x {rows:,})", "weight": f"dense weight space ({p:,} x {p:,})"}
    about = 1 + 2 * once + seconds
    printer.say(
        f"solved by {words.get(solver, 'conjugate gradients')}: about {_bytes(memory)} of memory and about "
        f"{duration(about)}, estimated from a few examples"
    )
    return about


def duration(seconds: float) -> str:
    """In words.

    >>> duration(0.2), duration(3.2), duration(90), duration(20000)
    ('less than 1 s', '3 s', '1.5 minutes', '5.6 hours')
    """
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _rate(J: Jacobian) -> float:
    """Multiply-adds in a second, from the fastest of the products of matrices that a tenth of a second allows."""
    A = torch.ones(384, 384, dtype=J.dtype, device=J.device)
    best, end = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, _timed(lambda: A @ A))
    return 384**3 / best


def seconds_of_pass(J: Jacobian) -> float:
    """Seconds of a pass over all data, from one over a few examples, and over more where these are fast."""
    if not J.by_position:
        return 0.0
    v = torch.zeros(J.shape[1], dtype=J.dtype, device=J.device)
    seconds = 0.0
    for count in SAMPLES:
        few = J.subset(torch.arange(min(J.n, count)))
        few.normal(v)  # the first one also finds out which rules serve
        seconds = min(_timed(partial(few.normal, v)) for _ in range(2)) * J.n / few.n
        if few.n == J.n or seconds * few.n / J.n > 0.1:
            break
    return seconds


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
