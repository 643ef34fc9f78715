"""Claims of Ritter et al. 2018, online structured Laplace approximations."""

from __future__ import annotations

from experiments.common.statistics import interval
from experiments.judge import Claim, Interval, Metrics, Paper
from experiments.ritter2018.onward import DIAG, EWC, FINE, KRON, average


def compare(metrics: Metrics, name: str, first: str, second: str) -> Interval:
    """The average accuracy of one method less that of another, in percent, paired over seeds."""
    seeds = metrics["parts"][name]["seeds"].values()
    return Interval.parse(interval([100 * (average(one[first]) - average(one[second])) for one in seeds]))


PAPER = Paper(
    "Ritter et al. 2018",
    "Online Structured Laplace Approximations for Overcoming Catastrophic Forgetting",
    [
        Claim(
            "onward",
            "permuted MNIST: Over tasks of permuted pixels, Kronecker factors are ahead of the diagonal.",
            lambda m: {other: compare(m, "permuted MNIST", KRON, other) for other in (DIAG, EWC)},
            "average accuracy in %, Kronecker factors less {each:+.1f}",
        ),
        Claim(
            "onward",
            "disjoint MNIST: On tasks of other digits, Kronecker factors are ahead of the diagonal.",
            lambda m: {other: compare(m, "split MNIST", KRON, other) for other in (DIAG, EWC)},
            "five tasks of two digits with one head, average accuracy in %, Kronecker factors less {each:+.1f}",
        ),
        Claim(
            "onward",
            "vision data sets: A convolutional network forgets less with Kronecker factors.",
            lambda m: {other: compare(m, "split CIFAR-10", KRON, other) for other in (FINE, EWC)},
            "split CIFAR-10 in place of five data sets, average accuracy in %, Kronecker factors less {each:+.1f}",
            "Five seeds do not tell Kronecker factors from the diagonal. EWC is "
            "level with fine-tuning here, and images that are kept are ahead of both.",
        ),
    ],
    picture="onward",
)
