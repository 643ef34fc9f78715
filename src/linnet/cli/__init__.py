"""The `linnet` command and its options."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linnet import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)


def _option(kind: Any, text: str, default: Any = Parameter.empty, flag: str = "", **more: Any) -> tuple[Any, Any]:
    """The annotation and the default of an option. Without a default the option is required."""
    return Annotated[kind, Option(*([flag] if flag else []), help=text, **more)], default


# Options that several commands have.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": _option(str, "module:function, file.py:function, timm:NAME or hf:PATH."),
    "weights": _option(Path | None, "State dict: .safetensors, .pt or .pth. No code of the file is run.", None),
    "random_weights": _option(bool, "Use a network that is not trained.", False, "--random-weights"),
    "train": _option(Path, "Training data: .csv, .parquet, .npz (x, y), .tsv or .csv of texts, or a folder of images."),
    "test": _option(Path | None, "Test data of the same kind.", None),
    "source": _option(Path | None, "Data that the network was trained on, of the same kind: all of it.", None),
    "data": _option(Path, "Data: .csv, .parquet, .npz (x), .txt or .tsv of texts, or a folder of images."),
    "target": _option(list[str] | None, "Column to predict; may be repeated. For .npz: array to predict.", None),
    "columns": _option(str | None, "Columns that the network takes, with commas; by default all other columns.", None),
    "drop": _option(str | None, "Columns to leave out, with commas.", None),
    "row_id": _option(str | None, "Column with names of the rows; the network does not take it.", None, "--id"),
    "standardize": _option(
        bool,
        "Standardize the columns by their means and spreads in the --source data, or else in the training data.",
        False,
        "--standardize",
    ),
    "scaler": _option(Path | None, "Means and stds of columns and targets, by the network's owner: .json.", None),
    "scale_target": _option(
        bool,
        "The network gives standardized targets: scale them back, by the data of --standardize.",
        False,
        "--scale-target",
    ),
    "output": _option(str | None, "Output to read, if the network returns several: its position or name.", None),
    "task": _option(str, "auto, classification or regression.", "auto"),
    "classes": _option(str | None, "Label of each output of the network, in order, with commas.", None),
    "size": _option(str | None, "Resize images: 32 or 32x48 (height x width).", None),
    "gray": _option(bool, "Read images with one channel instead of three.", False, "--gray"),
    "pixel_mean": _option(str | None, "Numbers to subtract from pixels in 0..1, with commas: 0.5,0.5,0.5.", None),
    "pixel_std": _option(str | None, "Numbers to divide the pixels by after that.", None),
    "strict": _option(bool, "Stop at an image that cannot be read, instead of skipping it.", False, "--strict"),
    "max_length": _option(int | None, "Largest number of tokens of a text; by default 128.", None, min=1),
    "params": _option(list[str] | None, 'Parameters to use, by name: "layer4.*"; may be repeated.', None),
    "top": _option(str | None, "Instead of --params: number of blocks from the top.", None),
    "prior": _option(str, "balanced, shared, ntk, layerwise, unit, a variance, or glob=variance,...", "shared"),
    "noise": _option(str | None, "Of numbers: evidence, per-output, or the variance of an observation.", None),
    "device": _option(str, "auto, cpu, cuda or cuda:N.", "auto"),
    "variance": _option(str, "Error bars: auto, exact, or samples (for many outputs).", "auto"),
    "seed": _option(int, "Seed of everything that is drawn, including weights that --model draws.", 0, min=0),
    "out": _option(Path, "Folder for the results."),
    "force": _option(bool, "Replace the files of an earlier run.", False, "--force"),
    "score": _option(str, "classifier, energy, flow or autoregressive.", "classifier"),
    "kernel": _option(str, "nfk (Fisher kernel) or ntk (tangent kernel).", "nfk"),
    "method": _option(str, "auto, krylov, power, nystrom or exact.", "auto"),
}
SEVERAL = _option(list[Path] | None, "State dict, as in embed; several make an ensemble of networks.", None)
FILE = _option(Path | None, "File for the numbers.", None, "--out")
# Options of commands that read a run.
RUN = {
    "run": _option(Path, "Folder that adapt or uncertainty has written."),
    "model": _option(str | None, "The network, if it has moved.", None),
    "weights": _option(list[Path] | None, "The weights, if they have moved; of an ensemble all, in order.", None),
    "trust": _option(bool, "Import the code that the run names, although another user made the run.", False, "--trust"),
}
TABLE = "target columns drop row_id standardize scaler"
FIT = f"model train out weights random_weights test task classes {TABLE} scale_target output params top"
EMBED = f"weights random_weights output components score kernel {TABLE} params top"
INPUTS = "size gray pixel_mean pixel_std strict max_length device seed"


def _command(run: str, names: str, /, **own: tuple[Any, Any]) -> Callable[[Callable[[], None]], None]:
    """Add a command with these options, of which `own` has those that differ from `OPTIONS`.

    The decorated function gives the name and the help. The command runs a function of `linnet.cli.commands`. Its
    module is imported only then, so that the command starts fast.
    """

    def call(context: typer.Context, **options: Any) -> None:
        from linnet.cli.terminal import report_errors

        module, _, function = run.partition(".")
        with report_errors(traceback=context.obj):
            getattr(import_module(f"linnet.cli.commands.{module}"), function)(options)

    def add(described: Callable[[], None]) -> None:
        known = {"context": (typer.Context, Parameter.empty), **OPTIONS, **own}
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=known[name][0], default=known[name][1])
            for name in ("context", *names.split())
        ]
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        app.command(described.__name__, help=described.__doc__)(call)

    return add


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"linnet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, Option("--traceback", help="Show where an error happened.")] = False,
) -> None:
    """Treat a trained PyTorch network as the linear model that it is, to first order, around its weights.

    Exit code 2: change the command or its files. Exit code 1: the command failed while it ran. Exit code 130: it was
    interrupted.
    """
    context.obj = traceback


@_command(
    "demo.run",
    "out seed quick",
    out=_option(Path, "Folder for demo.png and metrics.json.", Path("linnet-demo")),
    seed=_option(int, "Seed of the splits and the networks.", 0, min=0),
    quick=_option(bool, "Use one split, and fewer labels, digits and epochs.", False, "--quick"),
)
def demo() -> None:
    """Adapt a network of upright digits to turned digits with 50 labels, and a network of a curve to 16 points.

    The demo compares five ways to adapt, and draws one picture. It needs no download and takes half a minute.
    """


@_command(
    "fit.adapt",
    f"{FIT} source prior noise inference mean input_features relinearize head features variance {INPUTS} force",
    weights=SEVERAL,
    top=_option(str | None, "Instead of --params: number of blocks from the top, or evidence.", None),
    prior=(OPTIONS["prior"][0], "balanced"),
    inference=_option(str, "For classes: auto, vi, laplace or map.", "auto"),
    mean=_option(str, "auto (by evidence and leave-one-out, for numbers), network, or zero.", "auto"),
    input_features=_option(str, "For numbers: features of the columns beside the network: auto, yes or no.", "auto"),
    relinearize=_option(int, "Linearize again around the adapted weights, up to so many times.", 0, min=0),
    head=_option(str, "auto (a new head if the outputs do not match the targets), new, or keep.", "auto"),
    features=_option(str | None, "Module that a new head reads, by name; or output.", None),
)
def adapt() -> None:
    """Adapt a trained network to new data, with error bars, without a learning rate and without epochs.

    The command writes report.html, adapter.safetensors, metrics.json, run.json, and predictions.csv for the test data.
    """


@_command(
    "fit.add_error_bars",
    f"{FIT} structure prior noise variance {INPUTS} force",
    weights=SEVERAL,
    structure=_option(str, "auto, full, function, lowrank, kron, ekfac, diag, subnetwork or samples.", "auto"),
)
def uncertainty() -> None:
    """Add error bars to a trained network (Laplace), from the data that it was trained on.

    The command writes report.html, laplace.safetensors, metrics.json, run.json, and predictions.csv for the test data.
    """


@_command(
    "predict.run",
    "run data out no_error_bars model weights trust device force",
    **RUN
    | {
        "run": _option(Path, "Folder that adapt, uncertainty or embed has written."),
        "no_error_bars": _option(bool, "Predict in one forward pass, without error bars.", False, "--no-error-bars"),
        "out": _option(Path, "File for the predictions: .csv, or .npz for an embedding."),
    },
)
def predict() -> None:
    """Predict new data with a run of adapt or uncertainty, with error bars; or compute vectors with a run of embed.

    The command imports the code that run.json names. A run that this user did not make needs --trust.
    """


@_command(
    "select.run",
    "run data out count method overlap model weights trust device seed force",
    **RUN,
    data=_option(Path, "Pool of examples without labels, of the kind that the run has seen."),
    out=_option(Path, "File for the chosen examples and their scores: .csv."),
    count=_option(int, "Number of examples to choose.", 20, min=1),
    method=_option(str, "batchbald, bald, variance, bait or epig.", "batchbald"),
    overlap=_option(str, "Training examples in the pool: raise, exclude or allow.", "raise"),
    seed=_option(int, "Seed of what is drawn.", 0, min=0),
)
def select() -> None:
    """Choose the examples of a pool whose labels say most, with a run of adapt or uncertainty.

    Examples are chosen jointly, from the covariances of the run. The command imports the code that run.json names.
    """


@_command(
    "forget.run",
    "run rows out model weights trust device seed force",
    **RUN,
    rows=_option(Path, "Examples to forget with their targets, as the run read its training data."),
    out=_option(Path, "Folder for the run without the examples."),
)
def forget() -> None:
    """Remove examples from a run of adapt or uncertainty, as if it had not seen them. Prior and noise stay.

    A new run is written: report.html, the estimator, metrics.json with a certificate, and run.json. Delete the old run.
    The network's own weights stay: the error bars of uncertainty forget, and its predictions do not.
    """


@_command(
    "merge.run",
    "run out model weights trust device seed force",
    **RUN
    | {
        "run": _option(list[Path], "Folder that adapt or uncertainty has written; repeat for each site."),
        "out": _option(Path, "Folder for the merged run."),
        "weights": _option(list[Path] | None, "The weights, if they have moved: one for all runs, or one each.", None),
    },
)
def merge() -> None:
    """Merge runs of several sites into one, as if one run had seen all data. No data are needed.

    The runs need the same network, columns and prior: a number as --prior, and for numbers --mean network or zero and a
    number as --noise. A merged run holds no examples. One run alone is written again without its examples.
    """


@_command(
    "attribute.run",
    "run train data out top of rank model weights trust device force",
    **RUN,
    train=_option(Path, "The training data of the run."),
    data=_option(Path, "Examples to explain, of the kind that the run has seen."),
    out=_option(Path, "File for the training examples and the changes that they make: .csv."),
    top=_option(int, "Number of training examples for each output or loss.", 10, min=1),
    of=_option(str, "What changes: output, loss, or auto (the loss where the data have targets).", "auto"),
    rank=_option(str, "Which come first: absolute, highest or lowest changes.", "absolute"),
)
def attribute() -> None:
    """Find the training examples that change each prediction most, with a run of adapt or uncertainty.

    A change is that of the output, or of the loss, when the training example is left out. The command imports the code
    that run.json names.
    """


@_command(
    "export.run",
    "run data out model weights trust device force",
    **RUN,
    data=_option(Path, "A few examples of the kind that the run has seen."),
    out=_option(Path, "File for the network with error bars: .pt2 (torch.export) or .onnx."),
)
def export() -> None:
    """Write a run as a file that gives predictions with error bars without linnet and without the network's code.

    A run of the last layer (--params last_layer) gives a small and fast file. The file of other parameters makes one
    number for each example, output and parameter. The command imports the code that run.json names.
    """


@_command(
    "embed.run",
    f"model data out {EMBED} method {INPUTS} force",
    components=_option(str, "Number of components, or the share of the variance to explain: 0.9.", "128"),
)
def embed() -> None:
    """Compute a vector for every example: the leading components of the network's Fisher kernel.

    The command writes report.html, embedding.npz, embedding.safetensors, metrics.json and run.json.
    `torchrun --nproc-per-node N -m linnet embed ...` shares the work among N processes.
    """


@_command(
    "embed.show_spectrum",
    f"model data out {EMBED} {INPUTS} force",
    out=FILE,
    components=_option(str, "all, number of leading eigenvalues, or a share of the trace.", "all"),
)
def spectrum() -> None:
    """Compute the eigenvalues of the network's Fisher kernel on data: how many directions matter."""


@_command(
    "similarity.run",
    f"model data weights random_weights output out space target columns drop params top {INPUTS} force",
    model=_option(list[str], "A network, as in adapt. Give two or more."),
    weights=_option(list[Path] | None, "Weights, one for each --model, or several for one --model.", None),
    out=FILE,
    space=_option(str, "function (any networks), or parameters (one architecture).", "function"),
)
def similarity() -> None:
    """Compare networks on the same data, to first order: 1 for the same, 0 for orthogonal."""


@_command(
    "info.run",
    f"path model weights output data target columns drop params top {INPUTS}",
    path=(Annotated[Path | None, typer.Argument(help="A file that linnet saved, or a run folder.")], None),
    model=_option(str | None, "A network, as in adapt.", None),
    data=_option(Path | None, "Data, to show the plan.", None),
)
def info() -> None:
    """Show the parameters of a network by layer, and the plan for data; or the content of a saved file or a run."""
