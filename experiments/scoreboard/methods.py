"""Methods of the scoreboard by name, and the scores of a method on a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments import common
from experiments.common.statistics import scores
from experiments.scoreboard import classes, numbers
from experiments.scoreboard.tasks import MEMBERS, Task
from linnet import metrics

AS_IS, TEMPERATURE, LAST, FINE = "as it stands", "temperature", "last layer", "fine-tuning"
PROCESS, RESIDUALS = "RBF process", "RBF on residuals"
LINNET, ADAPT = "linnet", "linnet.adapt"
ENSEMBLE, FINE_ENSEMBLE, LINNET_ENSEMBLE = "5 networks", "5 fine-tuned", "linnet of 5"

METHODS = {
    AS_IS: "the network; for numbers, with the noise that is likeliest on the adaptation rows",
    TEMPERATURE: "classes: the network's logits over one number, likeliest on held-out labels",
    LAST: "the last layer alone: Bayesian linear regression, or logistic regression",
    FINE: "Adam on all weights; rate, steps and noise or temperature by held-out labels",
    PROCESS: "numbers: a Gaussian process of the adaptation rows, RBF kernel",
    RESIDUALS: "numbers: the same of what the network leaves",
    LINNET: "TangentRegressor(model), TangentClassifier(model), or Laplace(model) on the network's own data",
    ADAPT: "linnet.adapt(model, X, y)",
    ENSEMBLE: "five networks as they stand, averaged",
    FINE_ENSEMBLE: "five fine-tuned networks, averaged",
    LINNET_ENSEMBLE: "linnet's default with a list of five networks",
}
OURS = (LINNET, ADAPT, LINNET_ENSEMBLE)
FIVE = (ENSEMBLE, FINE_ENSEMBLE, LINNET_ENSEMBLE)
NUMBERS: Mapping[str, Callable[[Task], Any]] = {
    AS_IS: lambda task: numbers.keep_networks(task, 1),
    LAST: numbers.fit_last_layer,
    FINE: lambda task: numbers.fine_tune(task, 1),
    PROCESS: lambda task: numbers.fit_process(task, residuals=False),
    RESIDUALS: lambda task: numbers.fit_process(task, residuals=True),
    LINNET: lambda task: numbers.fit_tangent(task, task.networks[0]),
    ADAPT: numbers.adapt,
    ENSEMBLE: lambda task: numbers.keep_networks(task, MEMBERS),
    FINE_ENSEMBLE: lambda task: numbers.fine_tune(task, MEMBERS),
    LINNET_ENSEMBLE: lambda task: numbers.fit_tangent(task, list(task.networks)),
}
"""From a task to Gaussian predictions."""

CLASSES: Mapping[str, Callable[[Task], Any]] = {
    AS_IS: lambda task: classes.keep_networks(task, 1),
    TEMPERATURE: classes.fit_temperature,
    LAST: classes.fit_last_layer,
    FINE: lambda task: classes.tune_networks(task, 1),
    LINNET: lambda task: classes.fit_linnet(task, task.networks[0]),
    ADAPT: classes.adapt,
    ENSEMBLE: lambda task: classes.keep_networks(task, MEMBERS),
    FINE_ENSEMBLE: lambda task: classes.tune_networks(task, MEMBERS),
    LINNET_ENSEMBLE: lambda task: classes.fit_linnet(task, list(task.networks)),
}
"""From a task to class probabilities."""


def takes_part(name: str, task: Task) -> bool:
    """Whether a method is for such a task.

    A head that is as new as the labels is the last layer already. On their own data networks are not trained further.
    Fine-tuning of one network five times is an ensemble; the network five times is none.
    """
    several = len(task.networks) == MEMBERS
    left_out = (
        (task.start is not None and name == LAST)
        or (task.own and name in (LAST, FINE, FINE_ENSEMBLE, ADAPT))
        or (not several and name in (ENSEMBLE, LINNET_ENSEMBLE))
    )
    return name in (CLASSES if task.classes else NUMBERS) and not left_out


def measure(task: Task, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Scores and seconds of methods on a task; a method that raises an error of its solver is kept with its message."""
    out: dict[str, dict[str, Any]] = {}
    for name in names:
        clock = common.Clock("cpu")
        try:
            with common.expect(common.OWN, common.FAR), clock("seconds"):
                found = (CLASSES if task.classes else NUMBERS)[name](task)
            out[name] = {**score(task, found), **clock.seconds}
        except (RuntimeError, ArithmeticError) as error:
            out[name] = {"failed": f"{type(error).__name__}: {error}"}
    return out


def score(task: Task, found: Any) -> dict[str, float]:
    """NLL, RMSE and coverage of Gaussian predictions; NLL, accuracy and calibration error of probabilities."""
    if task.classes:
        return metrics.classification(found, task.test.y)
    return scores(found.mean, found.variance, task.test.y, unit=task.unit)
