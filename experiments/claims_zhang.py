"""Claims of Zhang et al. 2022 on spectra (figure 2) and on the time and errors of embeddings (figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.figure2 import exponent, series
from experiments.verdicts import Finding, Metrics, Paper, ahead, plainly, said, unpaired

ZHANG = Paper("Zhang et al. 2022", "Learning Representation from Neural Fisher Kernel with Low-rank Approximation")
SMALL = "small discriminator"


# Figure 2.


def count_of(metrics: Metrics, of: str, state: str, kernel: str, share: str = "99.5 %") -> Mapping[str, Any]:
    """How many components explain a share of the variance."""
    return metrics["spectra"][of][state][kernel]["components"][share]


@ZHANG.claim("figure 2", "spectra", "The NFK of a CNN concentrates on fewer components than that of an MLP.")
def cnn_concentrates(metrics: Metrics) -> Finding:
    names = ("MLP, trained", "LeNet-5, trained")
    ranks = [metrics["spectra"]["classifiers"][name]["nfk"]["effective rank"] for name in names]
    counts = [count_of(metrics, "classifiers", name, "nfk", "90 %")["mean"] for name in names]
    gap = unpaired(ranks[0], ranks[1], metrics["settings"]["seeds"])
    numbers = f"effective rank {ranks[1]['mean']:.0f} against {ranks[0]['mean']:.0f}, for 90 % "
    return Finding(numbers + f"{counts[1]:.0f} components against {counts[0]:.0f}", ahead(gap))


@ZHANG.claim("figure 2", "spectra", "100 components explain 99.5 % of the NFK of a trained DCGAN's discriminator.")
def hundred_components(metrics: Metrics) -> Finding:
    nfk, ntk = (count_of(metrics, SMALL, "trained", kernel) for kernel in ("nfk", "ntk"))
    own = metrics["spectra"][SMALL]["trained"]["nfk"]
    squared = own["components for 99.5 % of the squared eigenvalues"]["mean"]
    why = (
        "The kernel divides the gradient of each parameter by its root mean square, which lifts the small ones. "
        f"Without that, as NTK, the same network needs {ntk['mean']:.0f} components, and {squared:.0f} if it is the "
        "squared eigenvalues that are counted: the paper may mean either. Its GAN is not given."
    )
    return Finding(f"{nfk['mean']:.0f} of {own['n']:,}, p = {own['p']:,}", plainly(nfk["mean"] <= 150), why)


@ZHANG.claim("figure 2", "spectra", "An untrained discriminator needs many more components than a trained one.")
def untrained_more(metrics: Metrics) -> Finding:
    states = ("untrained", "trained")
    nfk, ntk = ([count_of(metrics, SMALL, state, kernel) for state in states] for kernel in ("nfk", "ntk"))
    gap = unpaired(nfk[0], nfk[1], metrics["settings"]["seeds"])
    why = (
        "For the same reason: the division by the root mean square flattens the spectrum of either network. Without "
        f"it, as NTK, the untrained one needs {ntk[0]['mean']:.0f} and the trained one {ntk[1]['mean']:.0f}."
    )
    numbers = f"{nfk[0]['mean']:.0f} untrained, {nfk[1]['mean']:.0f} trained; difference {said(gap, 0)}"
    return Finding(numbers, ahead(gap), why)


# Figure 3.


@ZHANG.claim("figure 3", "embedding_time", "Embedding takes nearly linear time, also where the kernel matrix ends.")
def linear_time(metrics: Metrics) -> Finding:
    points = series(metrics["parts"]["time"]["rows"], "n")
    ours, gram = points["linnet"], points["Gram matrix and truncated SVD"]
    (n, seconds), end, power = ours[-1], gram[-1][0], exponent(ours)
    numbers = f"{seconds:.0f} s at n = {n:,}, as n^{power:.1f}; the matrix ends at {end:,} (the paper: 2^14)"
    return Finding(numbers, plainly(power <= 1.2 and end <= 2**14 < n))


@ZHANG.claim("figure 3", "embedding_time", "More devices speed the embedding up almost linearly.")
def ranks_help(metrics: Metrics) -> Finding:
    last = metrics["parts"]["ranks"]["rows"][-1]
    numbers = f"{last['speedup']:.2f} times as fast with {last['ranks']} processes of one thread (the paper: GPUs)"
    return Finding(numbers, plainly(last["speedup"] > 0.85 * last["ranks"]))


@ZHANG.claim("figure 3", "embedding_time", "Relative errors of leading eigenvalues are below 1e-7.")
def small_errors(metrics: Metrics) -> Finding:
    part = metrics["parts"]["accuracy"]
    theirs = [row["error"] for row in part["rows"] if row["contender"] == "published algorithm"][-1]
    numbers = f"largest of {part['components']}: {part['error']:.0e} (the published algorithm: {theirs:.0e})"
    return Finding(numbers, plainly(part["error"] < 1e-7))
