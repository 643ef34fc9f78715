"""Options of the command line: from text to what the commands take; and the plan that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnet import _estimator as estimators
from linnet._common import format_bytes, listing
from linnet.cli.data_files import Examples, Reading, Standardization, move
from linnet.cli.data_files.scaling import read_scaler
from linnet.cli.network_output import NetworkOutput
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device
from linnet.inference import SolverSettings, choose_likelihood_solver, choose_solver, keeps_kernel_in_parts
from linnet.jacobian import Jacobian, linearize
from linnet.network import Params, top_blocks
from linnet.probability import NAMES, PriorSpec, check_prior, make_prior


@dataclass(frozen=True)
class ParameterChoice:
    """The parameters that are random."""

    params: Params  # the parameters, as `linnet.linearize` takes them
    top: int | str | None  # number of blocks from the top, or "evidence"; None where ``params`` says which parameters

    def resolve(self, model: nn.Module, data: Examples) -> Params:
        """The parameters by name. For "evidence" these are the parameters of the first step."""
        if self.top is None:
            return self.params
        example = move(data.first(2), next(model.parameters()).device)
        with blame_input():
            return top_blocks(model, self.top if isinstance(self.top, int) else 1, example=example)


@dataclass(frozen=True)
class FitOptions:
    """Options of `linnet adapt` and `linnet uncertainty`."""

    model: str  # the value of --model
    weights: tuple[Path, ...]  # files with weights: none, one, or one for each network of an ensemble
    train: Path  # training data
    test: Path | None  # test data, or None
    out: Path  # folder for the results
    force: bool  # whether the results replace an earlier run
    reading: Reading  # how the data files are read
    parameters: ParameterChoice  # the parameters that are random
    prior: PriorSpec  # the prior over the parameters
    standardization: Standardization  # how the columns and the outputs of the network are standardized
    output: NetworkOutput  # which output of the network is read
    seed: int  # seed of everything that is drawn
    device: torch.device  # the device of the network and the data
    inference: str = "auto"  # "auto", "vi", "laplace" or "map", for classes
    mean: str = "auto"  # "auto", "network" or "zero"
    input_features: str = "auto"  # "auto", "yes" or "no", for numbers
    relinearize: int = 0  # how often the network is linearized around adapted weights, at most
    noise: str | float | None = None  # "evidence", "per-output" or a variance, for numbers; None for the default
    head: str = "keep"  # "auto", "new" or "keep"; see `linnet.cli.task.find_task`
    features: str | None = None  # the module that a new head reads; None for the input of the last layer
    structure: str = "auto"  # structure of the posterior of `linnet.Laplace`
    variance: str = "auto"  # "auto", "exact" or "samples"
    source: Path | None = None  # data that the network was trained on, or None
    classes: tuple[str, ...] = ()  # label of each output, in order; none where they are not given
    random_weights: bool = False  # whether the network may be one that is not trained


def parse_fit(options: Mapping[str, Any]) -> FitOptions:
    """The options of `linnet adapt` or `linnet uncertainty`, checked."""
    for name, known in {
        "inference": ("auto", "vi", "laplace", "map"),
        "head": ("auto", "new", "keep"),
        "mean": ("auto", "network", "zero"),
        "input_features": ("auto", "yes", "no"),
        "variance": ("auto", "exact", "samples"),
        "structure": ("auto", "full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"),
    }.items():
        if name in options:
            check_choice(f"--{name.replace('_', '-')}", options[name], known)
    if options.get("source") is not None and options["mean"] == "network":
        raise UsageError(
            "--source needs a mean function of zero: the network has fitted the source data, so that its residuals "
            "there say nothing. Leave --mean or --source out."
        )
    classes = _split_names(options["classes"] or "")
    if len(set(classes)) < len(classes):
        raise UsageError(f"--classes needs a label of its own for each output; got {options['classes']}.")
    if classes and options.get("head") == "new":
        raise UsageError("--classes names the outputs of the network, and --head new makes others. Leave one out.")
    same = {name: options[name] for name in FitOptions.__dataclass_fields__ if name in options}
    return FitOptions(
        **same
        | {
            "weights": tuple(options["weights"] or ()),
            "classes": classes,
            "reading": parse_reading(options),
            "standardization": parse_standardization(options),
            "output": NetworkOutput(options["output"]),
            "parameters": parse_parameters(options, evidence="inference" in options),
            "prior": parse_prior(options["prior"]),
            "noise": parse_noise(options["noise"]),
            "device": choose_device(options["device"]),
        }
    )


def parse_reading(options: Mapping[str, Any]) -> Reading:
    """How data files are read. A Hugging Face model brings its tokenizer."""
    task, target, columns, drop = (options.get(name) for name in ("task", "target", "columns", "drop"))
    model = options["model"] if isinstance(options["model"], str) else options["model"][0]
    check_choice("--task", task or "auto", ("auto", "classification", "regression"))
    if columns and drop:
        raise UsageError("--columns names all columns that are used, so there is nothing to --drop. Give only one.")
    inputs = None if columns is None else _split_names(columns)
    _check_roles(target or (), inputs or (), options.get("row_id"))
    return Reading(
        targets=tuple(target or ()),
        columns=inputs,
        drop=() if drop is None else _split_names(drop),
        task=task or "auto",
        row_id=options.get("row_id"),
        size=None if options["size"] is None else _parse_size(options["size"]),
        channels=1 if options["gray"] else 3,
        pixel_mean=_parse_numbers("--pixel-mean", options["pixel_mean"]),
        pixel_std=_parse_numbers("--pixel-std", options["pixel_std"]),
        strict=options["strict"],
        tokenizer=model.removeprefix("hf:") if model.startswith("hf:") else None,
        max_length=options["max_length"],
    )


def _check_roles(targets: Sequence[str], columns: Sequence[str], row_id: str | None) -> None:
    """Raise where a column is named twice, or for two purposes."""
    for option, names in (("--target", targets), ("--columns", columns)):
        doubled = sorted({name for name in names if list(names).count(name) > 1})
        if doubled:
            raise UsageError(f"{option} names {listing(doubled)} twice. Name each column once.")
    both = [name for name in targets if name in columns]
    if both:
        raise UsageError(f"--columns names the target {listing(both)}, which the network would then see. Leave it out.")
    if row_id is not None and row_id in (*targets, *columns):
        other = "--target" if row_id in targets else "--columns"
        raise UsageError(f"--id and {other} both name {row_id!r}. The network does not take the names of rows.")


def parse_standardization(options: Mapping[str, Any]) -> Standardization:
    """The options --standardize, --scaler and --scale-target. The --source data are measured where they are given."""
    measure, path, targets = (options.get(name) for name in ("standardize", "scaler", "scale_target"))
    if measure and path is not None:
        raise UsageError("--standardize and --scaler both say how columns are standardized. Give one of them.")
    return Standardization(
        bool(measure), options.get("source"), None if path is None else read_scaler(path), targets=bool(targets)
    )


def parse_parameters(options: Mapping[str, Any], *, evidence: bool = False) -> ParameterChoice:
    """The options --params and --top; ``evidence`` says whether the evidence may choose the number of blocks."""
    params, top = options["params"], options["top"]
    if params and top is not None:
        raise UsageError("--params and --top both say which parameters adapt. Give one of them.")
    if top is None or (top == "evidence" and evidence):
        return ParameterChoice(params or None, top)
    if not top.isdigit():
        more = " or 'evidence'" if evidence else ""
        raise UsageError(f"--top must be a number of blocks{more}; got {top!r}.")
    return ParameterChoice(None, int(top))


def parse_prior(text: str) -> PriorSpec:
    """The option --prior: a name, a variance, or ``glob=variance,glob=variance``.

    >>> parse_prior("0.1"), parse_prior("layer4.*=1,fc.*=0.5")
    (0.1, {'layer4.*': 1.0, 'fc.*': 0.5})
    """
    spec: Any = text
    if text not in NAMES:
        try:
            pairs = [part.rpartition("=") for part in text.split(",")]
            spec = {name: float(value) for name, _, value in pairs} if "=" in text else float(text)
        except ValueError as error:
            names = ", ".join(NAMES)
            raise UsageError(
                f"--prior must be one of {names}, a variance, or glob=variance,glob=variance; got {text!r}."
            ) from error
    with blame_input():
        check_prior(spec)
    return spec


def parse_noise(text: str | None) -> str | float | None:
    """The option --noise: a name or a variance.

    >>> parse_noise("0.25"), parse_noise("per-output"), parse_noise(None)
    (0.25, 'per-output', None)
    """
    if text is None or text in ("evidence", "per-output"):
        return text
    try:
        noise = float(text)
    except ValueError:
        noise = 0.0
    if not 0 < noise < float("inf"):
        raise UsageError(f"--noise must be evidence, per-output or a positive variance; got {text!r}.")
    return noise


def check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise unless an option has one of the known values."""
    if value not in known:
        raise UsageError(f"{option} must be one of {', '.join(known)}; got {value!r}.")


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--size must be a number of pixels, or height x width such as 32x48; got {text!r}.")
    return int(parts[0]), int(parts[-1])


def _parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} must be one number for each channel, with commas; got {text!r}.") from error


# The plan.


def check_parameters(model: nn.Module, parameters: ParameterChoice, prior: PriorSpec, data: Examples) -> None:
    """Raise where the parameters or the prior name layers that the network does not have, before any long work."""
    with blame_input():
        lin = linearize(model, parameters.resolve(model, data))
        if isinstance(prior, Mapping):
            make_prior(lin, prior)


def make_jacobian(model: nn.Module, params: Params, data: Examples) -> Jacobian:
    """The Jacobian of the data in the precision of the estimators. Data that do not fit the network raise."""
    with blame_input():
        lin = linearize(model, params)
        return estimators.make_jacobian(
            model, "auto", lambda dtypes: dtypes.apply(lin).jacobian(data.X, progress=False)
        )


def print_plan(printer: Printer, model: nn.Module, J: Jacobian, *, layers: int = 24) -> None:
    """Print the number of parameters, and the plan of at most so many layers."""
    total = sum(p.numel() for p in model.parameters())
    count = len(J.lin.layout.layers)
    printer.say(f"{J.shape[1]:,} of {total:,} parameters, in {count} layers, on {J.device} in {J.dtype}")
    lines = str(J.plan).splitlines()
    for line in lines[: 3 + layers]:
        printer.say(f"  {line}")
    if len(lines) > 3 + layers:
        printer.say(f"  ... and {len(lines) - 3 - layers} more layers; `linnet info` shows all layers")


def print_work(printer: Printer, J: Jacobian) -> None:
    """Print the size of a Jacobian and the memory of its chunks, without its layers."""
    for line in str(J.plan).splitlines()[:2]:
        printer.say(f"  {line}")


def print_solver(
    printer: Printer, J: Jacobian, kind: str, prior: PriorSpec, *, inference: str = "laplace", more: int = 0
) -> None:
    """Print which solver a fit will use, and about how much memory it takes.

    ``kind`` is "regression", "classification" or "laplace"; ``inference`` matters for classification alone; ``more``
    examples are fitted beside those of J.
    """
    rows, p = J.shape[0] + more * J.c, J.shape[1]
    world, memory_of_all = J.ranks.world, J.lin.agree_on_memory("auto")
    kernels = (len(J.lin.layout.layers) if prior == "layerwise" else 1) + (kind == "classification")
    if kind == "classification":
        solver = choose_likelihood_solver(
            rows, p, SolverSettings(memory=memory_of_all), inference=inference, device=J.device, kernels=kernels
        )
    else:
        solver = choose_solver(rows, p, SolverSettings(memory=memory_of_all), device=J.device, kernels=kernels)
    if solver == "function":
        words, memory = f"a dense kernel ({rows:,} x {rows:,})", 8 * (2 + kernels) * rows**2
    elif solver == "weight":
        words, memory = f"a dense matrix of the weights ({p:,} x {p:,})", 8 * 4 * p**2
    else:
        words, memory = "conjugate gradients", 16 * rows * 1000 + 64 * 8 * p
        if solver == "cg-function" and keeps_kernel_in_parts(J, SolverSettings(memory=memory_of_all)):
            words, memory = f"{words} on a kernel in parts ({rows:,} x {rows:,})", memory + 8 * rows**2 // world
    if world > 1:
        words += f", on each of {world} processes"
    printer.say(f"the fit is solved by {words}, with about {format_bytes(memory)} of memory")
