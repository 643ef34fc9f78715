"""Fine-tuning by Adam: a race of learning rates, which examples that are held out judge."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from linnet._common import Tick
from linnet._estimator import epoch, shuffle
from linnet.adaptation.network import call, divide_outputs, evaluate, find_temperature
from linnet.data import Batch, Source
from linnet.probability import Gaussian, Likelihood

RATES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
"""Learning rates of Adam: convolutions like the larger ones, transformers the smaller ones."""

ROUNDS = 50
"""Rounds of the winner, at most."""

PATIENCE = 5
"""Rounds without a better loss after which the winner stops: time against late gains."""

STEPS = 16, 64
"""Fewest and most steps of a round: few examples are seen several times in a round, and many examples in large
batches."""

BATCH = 32
"""Examples of a step, at least."""


@dataclass(frozen=True)
class Tuning:
    """What fine-tuning is given.

    Attributes:
        source: All examples, in order.
        targets: Their targets, (n, ...), as the likelihood takes them.
        likelihood: Of the targets. For numbers the noise is found anew whenever a loss is measured.
        part: Positions of the examples to train on.
        held: Positions of the examples that judge.
        seed: Seed of the order of the examples, and of dropout.
    """

    source: Source
    targets: Tensor
    likelihood: Likelihood
    part: Tensor
    held: Tensor
    seed: int

    def losses(self, network: nn.Module) -> Tensor:
        """Negative log probabilities (m,) of the targets that are held out, at the best temperature or noise."""
        f = evaluate(network, self.source.subset(self.held))
        return measure_losses(self.likelihood, f, self.targets[self.held].to(f.device))

    def calibrate(self, network: nn.Module) -> nn.Module:
        """The network of a classifier with the best temperature for the examples that are held out."""
        if isinstance(self.likelihood, Gaussian):
            return network
        f = evaluate(network, self.source.subset(self.held))
        y = self.targets[self.held].to(f.device)
        return divide_outputs(network, find_temperature(self.likelihood, f, y, least=1.0))


def measure_losses(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Negative log probabilities (m,) of targets for outputs (m, c); temperature or noise come from the other half.

    Each half of the examples gets the temperature, or the noise, that is best for the other half, so that no example
    judges itself.
    """
    out = f.new_zeros(len(f))
    even = torch.arange(len(f), device=f.device) % 2 == 0
    for mine in (even, ~even):
        others = ~mine
        if isinstance(likelihood, Gaussian):
            noise = (y[others] - f[others]).square().mean(0).clamp_min(torch.finfo(f.dtype).tiny)
            out[mine] = -Gaussian(noise).log_prob(f[mine], y[mine])
        else:
            T = find_temperature(likelihood, f[others], y[others], least=1.0)
            out[mine] = -likelihood.log_prob(f[mine] / T, y[mine])
    return out


@dataclass
class Runner:
    """A network that is trained with one learning rate."""

    network: nn.Module
    rate: float
    seed: int
    rounds: int = 0
    loss: float = math.inf  # the least so far, on what is held out
    at: int = 0  # the round of the least loss
    weights: dict[str, Tensor] = field(default_factory=dict)  # of that round
    path: list[Tensor] = field(default_factory=list)  # losses (m,) of all rounds

    def __post_init__(self) -> None:
        learned = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(learned, self.rate)
        self.generator = torch.Generator().manual_seed(self.seed)

    def run(self, tuning: Tuning) -> bool:
        """One round; False where the steps are so long that the loss is no number."""
        network, likelihood = self.network, tuning.likelihood
        first = next(network.parameters())
        source = tuning.source.subset(tuning.part)
        size = min(source.n, max(BATCH, math.ceil(source.n / STEPS[1])))

        def loss(batch: Batch) -> Tensor:
            f = call(network, batch, first)
            y = tuning.targets[batch.index].to(f.device)
            return -likelihood.log_prob(f, y.to(f.dtype) if y.is_floating_point() else y).mean()

        network.train()
        for _ in range(max(1, math.ceil(STEPS[0] * size / source.n))):
            batches = ((b, n) for b, n in shuffle(source, size, self.generator) if n > 1)  # batch norm needs two
            if not math.isfinite(epoch(loss, batches, self.optimizer)):
                return False
        network.eval()
        self.rounds += 1
        found = tuning.losses(network)
        if not bool(found.isfinite().all()):
            return False
        if float(found.mean()) < self.loss:
            self.loss, self.at = float(found.mean()), self.rounds
            self.weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
        self.path.append(found)
        return True


@dataclass(frozen=True)
class Tuned:
    """A network after fine-tuning.

    Attributes:
        network: The network, in eval mode.
        rate: The learning rate that was chosen.
        rounds: The round that was chosen.
        losses: (m,), of the examples that are held out. The round of each half of them is that of least loss on the
            other half: the examples that choose a round are too easy for the network of that round to judge it.
    """

    network: nn.Module
    rate: float
    rounds: int
    losses: Tensor


def fine_tune(
    start: nn.Module, tuning: Tuning, *, rates: Sequence[float], deadline: float = math.inf, tick: Tick | None = None
) -> Tuned | None:
    """Train copies of a network with several learning rates; the better half goes on, for twice as many rounds.

    The last one trains on until its loss on what is held out has not fallen for `PATIENCE` rounds.

    Args:
        start: The network. It stays as it is.
        tuning: Data.
        rates: Learning rates.
        deadline: Time of `time.perf_counter` after which no round begins.
        tick: Called after each round.

    Returns:
        The weights of the round with the least loss; None where no rate lowers the loss of the start.
    """
    devices = sorted({p.device.index for p in start.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(tuning.seed)
        least = float(tuning.losses(copy.deepcopy(start).eval()).mean())
        entered = runners = [Runner(copy.deepcopy(start), rate, tuning.seed) for rate in rates]
        count = 1
        while runners:
            goal = ROUNDS if len(runners) == 1 else count
            runners = [runner for runner in runners if _advance(runner, tuning, goal, deadline, tick)]
            if len(runners) <= 1 or time.perf_counter() > deadline:
                break
            runners = sorted(runners, key=lambda runner: runner.loss)[: len(runners) // 2]
            count *= 2
        if len(runners) == 1 and runners[0].rounds < ROUNDS:
            _advance(runners[0], tuning, ROUNDS, deadline, tick)
    best = min(runners, key=lambda runner: runner.loss, default=None)
    if best is None or not best.loss < least:
        return None
    best.network.load_state_dict(best.weights)
    every = torch.stack([losses for runner in entered for losses in runner.path])
    return Tuned(best.network.eval(), best.rate, best.at, _judge(every))


def _judge(every: Tensor) -> Tensor:
    """Losses (m,) of the round that the other half of the examples chooses, from those of all rounds (rounds, m)."""
    out = torch.empty_like(every[0])
    even = torch.arange(every.shape[1], device=every.device) % 2 == 0
    for mine in (even, ~even):
        out[mine] = every[every[:, ~mine].mean(1).argmin(), mine]
    return out


def _advance(runner: Runner, tuning: Tuning, rounds: int, deadline: float, tick: Tick | None) -> bool:
    """Rounds up to a number of them, or to the end of patience; False where the loss is no number."""
    while runner.rounds < rounds and time.perf_counter() < deadline:
        if rounds == ROUNDS and runner.rounds - runner.at >= PATIENCE:
            break
        if not runner.run(tuning):
            return False
        if tick is not None:
            tick(1, lambda: f"rate {runner.rate:g}, loss {runner.loss:.3g}")
    return True
