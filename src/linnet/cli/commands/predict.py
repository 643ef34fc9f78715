"""`linnet predict`: predictions of a run for new data; and predictions of an estimator as a table, with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import linnet
from linnet import metrics
from linnet._common import listing
from linnet._estimator import is_ensemble, members_of
from linnet.cli import publishing, run_folder
from linnet.cli.data_files import Examples, cast_for_network, read
from linnet.cli.data_files.tables import write_csv
from linnet.cli.options import print_work
from linnet.cli.task import index_labels
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device, is_first_process, join_processes
from linnet.metrics import Z95
from linnet.report import softmax, to_array


def run(options: Mapping[str, Any]) -> None:
    """Load a run, read new data as the run did, and write predictions with error bars, or vectors of an embedding."""
    folder, data, out = (options[name] for name in ("run", "data", "out"))
    bars = not options["no_error_bars"]
    device, kept = choose_device(options["device"]), run_folder.read(folder)
    ending = ".npz" if kept.command == "embed" else ".csv"
    if out.suffix != ending:
        raise UsageError(f"The run was made by linnet {kept.command}, so --out must be a {ending} file; got {out}.")
    if kept.command == "embed" and not bars:
        raise UsageError("--no-error-bars is for predictions, and the run is an embedding. Leave the option out.")
    with join_processes(device), publishing.publish_file(out, force=options["force"]):
        printer = Printer()
        estimator, found = load_run(options, kept, device, printer)
        print_work(printer, members_of(estimator)[0].lin_.jacobian(found.X, progress=False))
        if kept.command == "embed":
            E = torch.as_tensor(estimator.transform(found.X)).cpu().numpy()
            named = {"names": np.array(found.names)} if found.names else {}
            if is_first_process():
                run_folder.write_arrays(out, {"embedding": E, **named})
        else:
            told = predict(estimator, found, classes=kept.classes, targets=kept.targets, error_bars=bars)
            if found.y is not None and _can_score(found.y, kept):
                printer.print_scores({"data": told.score(found.y, list(kept.classes), str(data))})
            if is_first_process():
                write_csv(out, told.columns)
        printer.print_written(out.parent, [out.name])


def load_run(
    options: Mapping[str, Any], kept: run_folder.Run, device: torch.device, printer: Printer
) -> tuple[Any, Examples]:
    """The estimator of the run in --run, and the examples of --data, read as the run read its own."""
    return load_estimator_and_network(options, kept, device, printer, labeled=False)[:2]


def load_estimator_and_network(
    options: Mapping[str, Any], kept: run_folder.Run, device: torch.device, printer: Printer, *, labeled: bool
) -> tuple[Any, Examples, Any]:
    """As `load_run`, with the network, or the networks of an ensemble; ``labeled`` data have targets."""
    folder, data, model = (options[name] for name in ("run", "data", "model"))
    if model is None:
        run_folder.check_trusted(folder, kept, trusted=options["trust"])
        printer.say(f"the network is {kept.model}, as {folder / run_folder.RUN} says; its code is imported")
    found = read_as_run(data, kept, labeled=labeled)
    weights = options["weights"] or ()
    network = run_folder.load_network(folder, kept, found, model=model, weights=weights, device=device)
    found = cast_for_network(found, network[0] if isinstance(network, list) else network)
    estimator = run_folder.load_estimator(folder, kept, network)
    printer.say(f"{data}: {found.description}; {type(estimator).__name__} of {folder}")
    with blame_input("The network does not take these data: ", found.hint):
        _ = members_of(estimator)[0].lin_.jacobian(found.X, progress=False).c  # the first examples
    return estimator, found, network


def read_as_run(path: Path, kept: run_folder.Run, *, labeled: bool) -> Examples:
    """Read data as the run has read its own. Data of another kind raise."""
    columns = kept.reading.columns
    if columns is not None and path.exists() and path.suffix not in (".csv", ".tsv", ".parquet"):
        raise UsageError(
            f"The run has read a table with the columns {listing(columns, limit=12)}, so it needs a .csv, .tsv or "
            f".parquet file with these columns; got {path}."
        )
    return read(path, kept.reading, labeled=labeled)


def _can_score(y: np.ndarray, kept: run_folder.Run) -> bool:
    """Whether the targets in the file are of the kind that the run has seen."""
    columns = y.reshape(len(y), -1).shape[1]
    if kept.task == "classification":
        return columns == 1 and set(y.reshape(-1).tolist()) <= set(kept.classes)
    return columns == len(kept.targets) and y.dtype.kind in "biuf"


@dataclass(frozen=True)
class Predictions:
    """Predictions for a file."""

    columns: dict[str, np.ndarray]  # columns of the table that is written
    probabilities: np.ndarray | None = None  # class probabilities (n, classes), for classes
    mean: np.ndarray | None = None  # predicted numbers (n,) or (n, c), for numbers
    std: np.ndarray | None = None  # standard deviations of an observation, in the shape of ``mean``

    def score(self, y: np.ndarray, classes: list[Any], what: str) -> dict[str, float]:
        """Metrics against the targets of ``what``."""
        if self.probabilities is not None:
            return metrics.classification(self.probabilities, index_labels(y.reshape(-1), classes, what))
        assert self.mean is not None
        y = y.reshape(self.mean.shape).astype(float)
        if self.std is None:
            return {"rmse": float(np.sqrt(np.square(self.mean - y).mean()))}
        return metrics.regression(self.mean, self.std, y)


def predict(
    estimator: Any, data: Examples, *, classes: Sequence[Any], targets: Sequence[str], error_bars: bool = True
) -> Predictions:
    """Predictions of a fitted TangentClassifier, TangentRegressor or Laplace, with error bars.

    Without error bars, predictions are those of the mean of the outputs: one forward pass, and no Jacobian.

    Args:
        estimator: The fitted estimator.
        data: The inputs.
        classes: Label of each class; none for regression.
        targets: Names of the numbers that are predicted.
        error_bars: Whether predictions have error bars.
    """
    columns = {"example": np.array(data.names) if data.names else np.arange(data.n)} | _list_targets(data, targets)
    if classes:
        return _predict_classes(estimator, data, list(classes), columns, error_bars=error_bars)
    if not error_bars:
        mean = to_array(estimator.predict(data.X))
        columns |= {f"mean_{name}": mean[:, j] for j, name in enumerate(targets)} if mean.ndim == 2 else {"mean": mean}
        return Predictions(columns, mean=mean)
    mean, std = (to_array(part) for part in estimator.predict(data.X, return_std=True))
    total = np.sqrt(std**2 + np.asarray(estimator.noise_, dtype=float))
    several = mean.ndim == 2
    for j, name in enumerate(targets if several else [""]):
        m, s, t = (part[:, j] if several else part for part in (mean, std, total))
        named = {"mean": m, "std": s, "std_observed": t, "low95": m - Z95 * t, "high95": m + Z95 * t}
        columns |= {f"{key}_{name}" if several else key: value for key, value in named.items()}
    return Predictions(columns, mean=mean, std=total)


def _list_targets(data: Examples, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns of the targets in the file, if there are any."""
    if data.y is None:
        return {}
    y = data.y.reshape(data.n, -1)
    if y.shape[1] == 1:
        return {"target": y[:, 0]}
    return {f"target_{name}": y[:, j] for j, name in enumerate(names)} if y.shape[1] == len(names) else {}


def _predict_classes(
    estimator: Any, data: Examples, classes: list[Any], columns: dict[str, np.ndarray], *, error_bars: bool
) -> Predictions:
    p, std = _compute_probabilities(estimator, data.X, error_bars=error_bars)
    best = p.argmax(1)
    columns |= {"prediction": np.array(classes)[best], "probability": p[np.arange(len(p)), best]}
    if std is not None:
        # A single output is the logit of the second class, and stands for both classes.
        columns["logit_std"] = std[np.arange(len(std)), best if std.shape[1] > 1 else np.zeros_like(best)]
    columns |= {f"p_{label}": p[:, j] for j, label in enumerate(classes)}
    return Predictions(columns, probabilities=p)


def _compute_probabilities(estimator: Any, X: Any, *, error_bars: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Class probabilities (n, classes), and standard deviations of the logits (n, c), from one pass of each network.

    Without error bars the probabilities are those of the mean of the logits. A mode has no standard deviations.
    """
    if not error_bars:
        found = [softmax(member._outputs_and_spread(X, "none")[0]) for member in members_of(estimator)]
        return np.average(found, axis=0, weights=getattr(estimator, "weights_", None) if len(found) > 1 else None), None
    if not is_ensemble(estimator):
        p, std = estimator._probabilities_and_std(X)
        return to_array(p), None if std is None else to_array(std)
    p = to_array(estimator.predict_proba(X))
    if isinstance(estimator, linnet.Laplace):
        std = to_array(estimator.predict(X, return_std=True)[1])
        return p, std if std.ndim == 2 else std[:, None]
    return p, None if estimator.inference == "map" else to_array(estimator.predict_logits(X, return_std=True)[1])
