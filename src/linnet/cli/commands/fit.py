"""`linnet adapt` and `linnet uncertainty`: a trained network and a file of data give a model with error bars."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

import linnet
from linnet._common import Ranks
from linnet._estimator import is_ensemble, members_of
from linnet.cli import publishing, run_folder, run_report, terminal
from linnet.cli.commands.predict import Predictions, predict
from linnet.cli.data_files.tables import write_csv
from linnet.cli.options import (
    FitOptions,
    check_parameters,
    make_jacobian,
    parse_fit,
    print_plan,
    print_solver,
    print_work,
)
from linnet.cli.run_report import Evaluation
from linnet.cli.task import FitData, index_labels, load
from linnet.cli.terminal import Printer, UsageError
from linnet.heads import head_of
from linnet.report import (
    Classes,
    Numbers,
    add_guess,
    compute_outputs,
    is_clearly_worse,
    make_classes,
    make_numbers,
    score_outcome,
    softmax,
    to_array,
)

Networks = nn.Module | list[nn.Module]

MANY = 2000
"""Rows (examples times outputs) up to which "auto" means variational inference. Above, "auto" means Laplace, which is
faster (1 s against 4 s of one core at 1,200 rows). The limit is a choice: the predictions of both were not compared."""


CHECKED = 1000
"""Training examples on which the network is compared with a guess, where there are no test data."""

STILL = 1e-6
"""Scale of a prior below which nothing moves, in the units of the prior named `balanced`."""


def adapt(given: Mapping[str, Any]) -> None:
    """Adapt a network to new data."""
    _run("adapt", parse_fit(given))


def add_error_bars(given: Mapping[str, Any]) -> None:
    """Give a network error bars from its training data."""
    _run("uncertainty", parse_fit(given))


def _run(command: str, options: FitOptions) -> None:
    """Read, plan, fit, test, write."""
    adapts = command == "adapt"
    with terminal.join_processes(options.device), publishing.publish_folder(options.out, force=options.force) as folder:
        printer = Printer()
        with printer.step("Read"), terminal.collect_notes() as notes:
            data = load(options, printer)
            measures = options.standardization.measure or options.standardization.measures_targets
            if adapts and measures and options.source is None:
                option = "--standardize" if options.standardization.measure else "--scale-target"
                warnings.warn(
                    f"{option} measures {options.train}. A network that was trained on other data expects their "
                    "means and spreads: give these data as --source, or the means and spreads as --scaler.",
                    stacklevel=2,
                )
            if options.noise is not None and data.task.kind == "classification":
                raise UsageError("--noise is the variance of numbers, and classes have none. Leave --noise out.")
            if data.train.n < 2:
                raise UsageError(f"{options.train} has one example, which cannot tell signal from noise. Give more.")
            _check_head(options, data, adapts=adapts)
        with printer.step("Plan"):
            options = _resolve_auto(options, data, printer) if adapts else options
            check_parameters(_outline(options, data), options.parameters, options.prior, data.train)
            model, classes = _attach_head(options, data, printer)
            y = data.y if adapts or not classes else index_labels(data.y, classes, "The training data")
            J = make_jacobian(model, options.parameters.resolve(model, data.train), data.train)
            print_plan(printer, model, J)
            if not adapts:
                printer.say(f"structure: {options.structure}; prior: {options.prior}")
            if adapts or options.structure in ("auto", "full", "function"):
                kind = data.task.kind if adapts else "laplace"
                print_solver(printer, J, kind, options.prior, inference=options.inference, more=data.source_count)
        with printer.step("Adapt" if adapts else "Error bars"), terminal.collect_notes(notes):
            fit = _fit_tangent if adapts else _fit_laplace
            estimator = fit(options, model if len(data.models) == 1 else data.models, data, classes, y)
            tell = _print_adaptation if adapts else _print_error_bars
            tell = _print_ensemble if len(data.models) > 1 else tell
            tell(printer, estimator)
            if adapts and len(data.models) == 1:
                _warn_of_nothing_learned(estimator, new_head=data.task.new_head)
        before = "network alone" if not adapts else "new head alone" if data.task.new_head else "network as it was"
        names = (before, "adapted" if adapts else "with error bars")
        told, result, page, interrupted = None, Evaluation(), None, False
        try:
            told, result = _evaluate(printer, estimator, data, classes, y, names=names, what=str(options.test))
            page = run_report.report_fit(
                printer, command, estimator, options, data, result, J.plan, (data.train.X, y), notes=notes
            )
        except KeyboardInterrupt:
            if Ranks().world > 1:  # the other processes may have gone on
                raise
            interrupted = True
            printer.say("interrupted: the fit is written, without what was not finished")
        if not terminal.is_first_process():
            return
        run = run_folder.make_run(
            command,
            "adapter.safetensors" if adapts else "laplace.safetensors",
            options.model,
            options.weights,
            data.reading,
            seed=options.seed,
            task=data.task.kind,
            classes=classes,
            targets=data.targets,
            new_head=data.task.new_head,
            features=options.features,
            output=data.output,
        )
        estimator.save(folder / run.file)
        if told is not None:
            write_csv(folder / "predictions.csv", told.columns)
        run_folder.save_head(folder, run, model)
        details = {"test": result.scores, "examples": data.train.n, **_describe(estimator)}
        details |= {"source_examples": data.source_count} if data.source_count else {}
        run_folder.write_json(folder / "metrics.json", terminal.describe_run(options.seed, options.device, **details))
        written = run_report.finish(folder, run, page)
    printer.print_written(options.out, written)
    if interrupted:
        raise KeyboardInterrupt


def _check_head(options: FitOptions, data: FitData, *, adapts: bool) -> None:
    outputs = data.task.outputs
    if options.head == "keep" and data.task.new_head:
        raise UsageError(
            f"--head keep: the network's {outputs} outputs cannot be {data.what}. Leave --head out, and a new head is "
            "fitted."
            if adapts
            else f"The network has {outputs} outputs, but the targets are {data.what}. Error bars are for a network "
            "that was trained on these targets. Use linnet adapt, which fits a new head."
        )
    if len(data.models) > 1 and data.task.new_head:
        raise UsageError(
            f"An ensemble needs networks whose outputs fit: they have {outputs} outputs, but the targets are "
            f"{data.what}. Give networks that were trained on these targets, or one --weights."
        )
    if options.features is not None and not data.task.new_head:
        raise UsageError("--features is for a new head, but the outputs of the network fit. Pass --head new too.")


def _resolve_auto(options: FitOptions, data: FitData, printer: Printer) -> FitOptions:
    """Replace "auto" by its meaning for these data."""
    task, inference = data.task, options.inference
    if task.kind == "regression":
        if inference != "auto":
            raise UsageError(f"--inference {inference} is for classes. Regression is exact: leave --inference out.")
        printer.say(f"mean function: {options.mean}; prior: {options.prior}")
        return options
    if inference == "auto":
        count = len(task.classes)
        outputs = (count if count > 2 else 1) if task.new_head else task.outputs
        inference = "vi" if (data.train.n + data.source_count) * outputs <= MANY else "laplace"
    printer.say(f"inference: {inference}; mean function: {options.mean}; prior: {options.prior}")
    return replace(options, inference=inference)


def _outline(options: FitOptions, data: FitData) -> nn.Module:
    """The network with the layers that it will have. A new head is fitted to two examples, which is fast."""
    if not data.task.new_head:
        return data.model
    y, kind = data.y, data.task.kind
    index = np.array([0, np.flatnonzero(y != y[0])[0]]) if data.task.classes else np.arange(min(2, data.train.n))
    how: Any = {"features": options.features, "task": kind, "penalty": 1.0, "ignore_index": None}
    with terminal.blame_input():
        return linnet.attach_head(data.model, data.train.take(index), y[index], **how)


def _attach_head(options: FitOptions, data: FitData, printer: Printer) -> tuple[nn.Module, list[Any]]:
    """The network, with a new head where its outputs do not fit; and the label of each class."""
    task = data.task
    if not task.new_head:
        classes = task.output_labels
        if classes:
            shown = ", ".join(map(str, classes[:12])) + (", ..." if len(classes) > 12 else "")
            order = f"as {task.named_by} says" if task.named_by else "in this order; --classes can say otherwise"
            printer.say(f"the network's outputs are the classes {shown}, {order}")
        return data.model, classes
    needed = f"{len(task.classes)} classes" if task.classes else "these numbers"
    forced = options.head == "new"
    has = f"has {task.outputs} outputs, for {needed}" if task.outputs else "returns no tensor of outputs"
    why = "--head new asks for it" if forced else f"the network {has}"
    printer.say(f"a new head is fitted on the network's features (linnet.attach_head), because {why}")
    how: Any = {"features": options.features, "task": task.kind, "seed": options.seed, "ignore_index": None}
    model = linnet.attach_head(data.model, data.train.X, data.y, **how)
    found = head_of(model).classes_
    return model, [] if found is None else found.tolist()


def _fit_tangent(options: FitOptions, model: Networks, data: FitData, classes: list[Any], y: np.ndarray) -> Any:
    chosen = options.parameters
    how: Any = {"params": chosen.params, "top": chosen.top, "mean": options.mean, "prior": options.prior}
    how |= {"variance": options.variance, "relinearize": options.relinearize}
    if data.task.kind == "regression":
        how |= {} if options.noise is None else {"noise": options.noise}
        how |= {} if options.input_features == "auto" else {"inputs": options.input_features == "yes"}
        return linnet.TangentRegressor(model, seed=options.seed, **how).fit(data.train.X, y, source=data.fitted_source)
    # Every label of a file is the name of a class.
    how |= {"inference": options.inference, "classes": classes, "ignore_index": None}
    return linnet.TangentClassifier(model, seed=options.seed, **how).fit(data.train.X, y, source=data.fitted_source)


def _fit_laplace(options: FitOptions, model: Networks, data: FitData, classes: list[Any], y: np.ndarray) -> Any:
    how: Any = {"structure": options.structure, "prior": options.prior, "seed": options.seed}
    how |= {"variance": options.variance, "noise": options.noise}
    params = options.parameters.resolve(data.model if isinstance(model, list) else model, data.train)
    return linnet.Laplace(model, data.task.kind, params=params, **how).fit(data.train.X, y)


def _print_ensemble(printer: Printer, found: Any) -> None:
    if found.log_evidence_ is not None:
        printer.say(f"log evidence {found.log_evidence_:.1f} of {len(found.members_)} networks together")
    _print_noise(printer, found)
    if not isinstance(found, linnet.Laplace):
        printer.say(f"mean functions: {', '.join(member.mean_ for member in found.members_)}")
    printer.say(f"weights of the networks: {', '.join(f'{w:.3g}' for w in found.weights_)}")


def _print_adaptation(printer: Printer, found: Any) -> None:
    if found.log_evidence_ is not None:
        printer.say(f"log evidence {found.log_evidence_:.1f}, by solver {found.solver_!r}")
    printer.say(f"mean function: {found.mean_}")
    if getattr(found, "inputs_", None) is not None:
        printer.say(f"features of the inputs: length scale {found.inputs_:g}")
    for step in found.relinearized_:
        taken = "taken" if step.accepted else "not taken"
        printer.say(f"linearized again: log evidence {step.log_evidence:.1f}, {taken}")
    if found.top_path_:
        path = ", ".join(f"{k}: {value:.1f}" for k, value in found.top_path_.items())
        printer.say(f"blocks from the top: {found.top_} (log evidence {path})")
    _print_noise(printer, found)
    _print_samples(printer, found)
    shares = sorted(found.layer_relevance_.items(), key=lambda item: -item[1])[:6]
    printer.say("layers that adapt most: " + ", ".join(f"{layer} {share:.0%}" for layer, share in shares))


def _print_error_bars(printer: Printer, found: linnet.Laplace) -> None:
    printer.say(f"structure {found.structure_!r}; log evidence {found.largest_evidence_:.1f}")
    if found.narrowed_ < 1:
        printer.say(
            f"for the error bars, the variances of this prior are narrowed to {found.narrowed_:.2g} of their sum"
        )
    printer.say(f"{found.effective_dimension_:.1f} of {found.lin_.p:,} parameters are determined by the data")
    _print_noise(printer, found)
    _print_samples(printer, found)


def _print_samples(printer: Printer, found: Any) -> None:
    if found.variance_ == "samples":
        printer.say(f"error bars from posterior samples, with a relative standard error of {found.std_error_:.0%}")


def _print_noise(printer: Printer, found: Any) -> None:
    noise = getattr(found, "noise_", None)
    if noise is not None:
        printer.say(f"noise standard deviation {np.sqrt(np.asarray(noise, dtype=float)).round(6).tolist()}")


def _describe(found: Any) -> dict[str, Any]:
    """What metrics.json says about a fitted estimator."""
    noise = getattr(found, "noise_", None)
    noise = None if noise is None else np.asarray(noise, dtype=float).tolist()
    if is_ensemble(found):
        members = [_describe(member) for member in found.members_]
        known = {"weights": found.weights_.tolist(), "log_evidence": found.log_evidence_, "noise": noise}
        return known | {"members": members}
    details = {
        "parameters": found.lin_.p,
        "prior_scales": {name: float(value) for name, value in found.scales_.items()},
        "variance": found.variance_,
    }
    if isinstance(found, linnet.Laplace):
        more = {"structure": found.structure_, "effective_dimension": found.effective_dimension_, "noise": noise}
        more |= {"narrowed": found.narrowed_}
        return details | {"log_evidence": found.largest_evidence_} | more
    details |= {"log_evidence": found.log_evidence_, "solver": found.solver_, "layer_relevance": found.layer_relevance_}
    if isinstance(found, linnet.TangentRegressor):
        return details | {"noise": noise}
    return details | {"inference": found.inference, "elbo": found.elbo_}


def _evaluate(
    printer: Printer,
    estimator: Any,
    data: FitData,
    classes: list[Any],
    y: np.ndarray,
    *,
    names: Sequence[str],
    what: str,
) -> tuple[Predictions | None, Evaluation]:
    """Predictions for the test data, and the metrics of a guess, of the network alone and of the estimator.

    The network and the estimator have ``names``. The guess knows the training targets y alone.
    """
    test = data.test
    if test is None or test.y is None:
        _check_network(estimator, data, classes, y, names[0])
        return None, Evaluation()
    with printer.step(f"Test on {test.n:,} examples"):
        print_work(printer, members_of(estimator)[0].lin_.jacobian(test.X, progress=False))
        told = predict(estimator, test, classes=classes, targets=data.targets)
        alone = compute_outputs(estimator, test.X)
        outcome: Classes | Numbers
        if classes:
            labels = index_labels(test.y.reshape(-1), classes, what)
            outcome = make_classes(told.probabilities, labels, [str(label) for label in classes], alone)
            outcome = add_guess(outcome, index_labels(data.y, classes, "The training data"))
        else:
            outcome = add_guess(make_numbers(told.mean, told.std, test.y, data.targets, alone), y)
        found = score_outcome(outcome)
        scores = dict(zip([*list(found)[:-2], *names], found.values(), strict=True))
        if not data.task.new_head:
            _warn_of_poor_network(scores, names[0], "the test data", test.n)
        if names[1] == "adapted":
            _warn_of_loss(scores, outcome, names[0])
        printer.print_scores(scores)
    return told, Evaluation(scores, outcome)


def _check_network(estimator: Any, data: FitData, classes: list[Any], y: np.ndarray, name: str) -> None:
    """Say so where the network that was given is worse than a guess, on training data for want of test data."""
    if data.task.new_head:
        return
    index = np.linspace(0, data.train.n - 1, min(CHECKED, data.train.n)).astype(int)
    alone, targets = compute_outputs(estimator, data.train.take(index)), data.y[index]
    outcome: Classes | Numbers
    if classes:
        labels = index_labels(targets, classes, "The training data")
        outcome = make_classes(softmax(alone), labels, [str(label) for label in classes], None)
        outcome = add_guess(outcome, labels)
    else:
        shown = to_array(alone).reshape(len(targets), -1)
        outcome = add_guess(make_numbers(shown, np.ones_like(shown), targets, data.targets, None), targets)
    found = score_outcome(outcome)
    if len(found) > 1:
        guess, own = found.items()
        _warn_of_poor_network({guess[0]: guess[1], name: own[1]}, name, "the training data", len(index))


def _warn_of_nothing_learned(estimator: Any, *, new_head: bool) -> None:
    """Say so where the prior that the evidence chose lets no parameter move."""
    scales = [float(scale) for scale in estimator.scales_.values()]
    if scales and max(scales) < STILL:
        warnings.warn(
            f"The evidence lets nothing move: the largest scale of the prior is {max(scales):.2g}, and the predictions "
            "are those of the network. The network knows these data, or the labels say nothing about its features."
            + ("" if new_head else " For another task than the network's, try --head new."),
            stacklevel=2,
        )


def _warn_of_loss(scores: Mapping[str, Mapping[str, float]], outcome: Classes | Numbers, before: str) -> None:
    """Say so where the adapted model is worse than what it was made from."""
    metric = "nll" if isinstance(outcome, Classes) else "rmse"
    if is_clearly_worse(outcome):
        warnings.warn(
            f"The adapted model is worse than the {before} on the test data: {metric} {scores['adapted'][metric]:.4g} "
            f"against {scores[before][metric]:.4g}. In Python, linnet.adapt chooses among several models.",
            stacklevel=2,
        )


def _warn_of_poor_network(scores: Mapping[str, Mapping[str, float]], name: str, where: str, count: int) -> None:
    """Say so where the network that was given is no better than a guess that knows no inputs.

    Accuracies count ``count`` examples, and differ by chance.
    """
    guess = next(iter(scores))
    if guess == name:
        return
    metric = next(m for m in ("accuracy", "rmse") if m in scores[name])
    own, other = scores[name][metric], scores[guess][metric]
    chance = 2 * (other * (1 - other) / count) ** 0.5 if metric == "accuracy" else 0.0
    if own <= other + chance if metric == "accuracy" else own > other:
        warnings.warn(
            f"The {name} is no better than to {guess}: {metric} {own:.4g} against {other:.4g} on {where}. Are these "
            "its weights, its columns, the order of its classes, and the scales of inputs and targets that it was "
            "trained with?"
            + (" For other classes, linnet adapt fits a new head with --head new." if metric == "accuracy" else ""),
            stacklevel=2,
        )
