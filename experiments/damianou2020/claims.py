"""Claims of the talk on deep learning in function space."""

from __future__ import annotations

from experiments.judge import Claim, Interval, Metrics, Paper, behind, less, widen


def count_seeds(metrics: Metrics) -> int:
    return len(next(iter(metrics["parts"].values()))["epochs"])


def read_early(metrics: Metrics) -> dict[str, Interval]:
    """How much less alike networks of 5 and of 90 epochs are than a network with a unit removed and the network."""
    found = metrics["epochs, against 90"]["5"]["function"]
    early = widen(found["mean"], found["error"], count_seeds(metrics))
    removed = metrics["a hidden unit removed"]["function"]["mean"]
    return {"gap": removed - early, "early": f"{early:.3f}", "removed": removed}


def read_depth(metrics: Metrics) -> dict[str, Interval]:
    """One layer less two, of the runs that are shown."""
    runs = metrics["parts"][metrics["settings"]["now"]]
    methods = ("RBF process", "deep GP, 2 layers")
    keys = {"NLL": "nll", "RMSE": "RMSE to the step"}
    return {name: less(*(f"* > {method} > {key}" for method in methods))(runs) for name, key in keys.items()}


PAPER = Paper(
    "Damianou 2020",
    "Deep Learning in the Function Space (talk)",
    [
        Claim(
            "snelson",
            "initialization: With width, the kernel of a network as drawn tends to the process's.",
            lambda m: {name: Interval.parse(slope) for name, slope in m["summary"]["slopes"].items()},
            "distance by width, slope of the logarithms: {each:+.2f}",
            holds=behind,
        ),
        Claim(
            "figure5",
            "5 or 90 epochs: The same structure trained for 5 and for 90 epochs is not the same function.",
            read_early,
            "similarity in function space {early}; with a hidden unit removed {removed:.4f}",
            "{seeds} seeds: networks of 5 and of 90 epochs are no further apart than a network and the same network "
            "with a hidden unit removed.",
            facts={"seeds": count_seeds},
        ),
        Claim(
            "deep_gp",
            "step function: Two layers of processes learn a step better than one.",
            read_depth,
            "one less two layers: {each:+.3f}",
            "Fresh seeds: the settings of the deep process are the last of four that were tried on others.",
            limits="One data set. The settings of the deep process are the last of four that were tried on others.",
        ),
    ],
    picture="deep_gp",
)
