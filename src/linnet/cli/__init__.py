"""The `linnet` command and its options."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linnet import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)

# Options that several commands have.
Model = Annotated[str, Option("--model", help="module:function, file.py:function, timm:NAME or hf:PATH.")]
Weights = Annotated[Path | None, Option(help="State dict: .safetensors, .pt or .pth. No code of the file is run.")]
Train = Annotated[
    Path, Option(help="Training data: .csv, .parquet, .npz (x, y), .tsv of texts, or a folder of images.")
]
Test = Annotated[Path | None, Option(help="Test data of the same kind.")]
Data = Annotated[Path, Option(help="Data: .csv, .parquet, .npz (x), .txt or .tsv of texts, or a folder of images.")]
Target = Annotated[list[str] | None, Option(help="Column to predict; may be repeated. For .npz: array to predict.")]
Columns = Annotated[
    str | None, Option(help="Columns that the network takes, with commas; by default all other columns.")
]
Drop = Annotated[str | None, Option(help="Columns to leave out, with commas.")]
Standardize = Annotated[
    bool, Option("--standardize", help="Standardize the columns by their means and spreads in the training data.")
]
Task = Annotated[str, Option(help="auto, classification or regression.")]
Size = Annotated[str | None, Option(help="Resize images: 32 or 32x48 (height x width).")]
Gray = Annotated[bool, Option("--gray", help="Read images with one channel instead of three.")]
PixelMean = Annotated[str | None, Option(help="Numbers to subtract from pixels in 0..1, with commas: 0.5,0.5,0.5.")]
PixelStd = Annotated[str | None, Option(help="Numbers to divide the pixels by after that.")]
Strict = Annotated[bool, Option("--strict", help="Stop at an image that cannot be read, instead of skipping it.")]
MaxLength = Annotated[int | None, Option(min=1, help="Largest number of tokens of a text; by default 128.")]
Params = Annotated[list[str] | None, Option(help='Parameters to use, by name: "layer4.*"; may be repeated.')]
Top = Annotated[str | None, Option(help="Instead of --params: number of blocks from the top.")]
Prior = Annotated[str, Option(help="balanced, shared, ntk, layerwise, unit, a variance, or glob=variance,...")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Variance = Annotated[str, Option(help="Error bars: auto, exact, or samples (for many outputs).")]
Seed = Annotated[int, Option(min=0, help="Seed of everything that is drawn, including weights that --model draws.")]
Out = Annotated[Path, Option(help="Folder for the results.")]
File = Annotated[Path | None, Option("--out", help="File for the numbers.")]
Force = Annotated[bool, Option("--force", help="Replace the files of an earlier run.")]
Score = Annotated[str, Option(help="classifier, energy, flow or autoregressive.")]
Kernel = Annotated[str, Option(help="nfk (Fisher kernel) or ntk (tangent kernel).")]
Method = Annotated[str, Option(help="auto, krylov, power, nystrom or exact.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"linnet {__version__}")
        raise typer.Exit


def _run(command: str, options: dict[str, Any]) -> None:
    """Run a function of `linnet.cli.commands`. Its module is imported only now, so that the command starts fast."""
    from linnet.cli.terminal import report_errors

    module, _, function = command.partition(".")
    with report_errors(traceback=options.pop("context").obj):
        getattr(import_module(f"linnet.cli.commands.{module}"), function)(options)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, Option("--traceback", help="Show where an error happened.")] = False,
) -> None:
    """Treat a trained PyTorch network as the linear model that it is, to first order, around its weights.

    Exit code 2: change the command or its files. Exit code 1: the command failed while it ran.
    """
    context.obj = traceback


@app.command()
def demo(
    context: typer.Context,
    out: Annotated[Path, Option(help="Folder for two figures and metrics.json.")] = Path("linnet-demo"),
    seed: Annotated[int, Option(min=0, help="Seed of the splits and the networks.")] = 0,
    quick: Annotated[bool, Option("--quick", help="Use one split, and fewer labels, digits and epochs.")] = False,
) -> None:
    """Adapt a network of upright digits to turned digits with 50 labels, and compare six ways to do so.

    The demo needs no download and takes less than a minute on two CPU cores.
    """
    _run("demo.run", locals())


@app.command()
def adapt(
    context: typer.Context,
    model: Model,
    train: Train,
    out: Out,
    weights: Weights = None,
    test: Test = None,
    target: Target = None,
    task: Task = "auto",
    columns: Columns = None,
    drop: Drop = None,
    standardize: Standardize = False,
    params: Params = None,
    top: Annotated[str | None, Option(help="Instead of --params: number of blocks from the top, or evidence.")] = None,
    prior: Prior = "balanced",
    inference: Annotated[str, Option(help="For classes: auto, vi, laplace or map.")] = "auto",
    mean: Annotated[str, Option(help="auto, network, or zero (for the network's own training data).")] = "auto",
    head: Annotated[
        str, Option(help="auto (a new head if the outputs do not match the targets), new, or keep.")
    ] = "auto",
    features: Annotated[str | None, Option(help="Module that a new head reads, by name; or output.")] = None,
    variance: Variance = "auto",
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Adapt a trained network to new data, with error bars, without a learning rate and without epochs.

    The command writes report.html, adapter.safetensors, metrics.json, run.json, and predictions.csv for the test data.
    """
    _run("fit.adapt", locals())


@app.command()
def uncertainty(
    context: typer.Context,
    model: Model,
    train: Train,
    out: Out,
    weights: Weights = None,
    test: Test = None,
    target: Target = None,
    task: Task = "auto",
    columns: Columns = None,
    drop: Drop = None,
    standardize: Standardize = False,
    params: Params = None,
    top: Top = None,
    structure: Annotated[
        str, Option(help="auto, full, function, lowrank, kron, ekfac, diag, subnetwork or samples.")
    ] = "auto",
    prior: Prior = "shared",
    variance: Variance = "auto",
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Add error bars to a trained network (Laplace), from the data that it was trained on.

    The command writes report.html, laplace.safetensors, metrics.json, run.json, and predictions.csv for the test data.
    """
    _run("fit.add_error_bars", locals())


@app.command()
def predict(
    context: typer.Context,
    run: Annotated[Path, Option(help="Folder that adapt, uncertainty or embed has written.")],
    data: Data,
    out: Annotated[Path, Option(help="File for the predictions: .csv, or .npz for an embedding.")],
    model: Annotated[str | None, Option(help="The network, if it has moved.")] = None,
    weights: Annotated[Path | None, Option(help="The weights, if they have moved.")] = None,
    trust: Annotated[
        bool, Option("--trust", help="Import the code that the run names, although another user made the run.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Predict new data with a run of adapt or uncertainty, with error bars; or compute vectors with a run of embed.

    The command imports the code that run.json names. A run that this user did not make needs --trust.
    """
    _run("predict.run", locals())


@app.command()
def embed(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    weights: Weights = None,
    components: Annotated[
        str, Option(help="Number of components, or the share of the variance to explain: 0.9.")
    ] = "128",
    score: Score = "classifier",
    kernel: Kernel = "nfk",
    method: Method = "auto",
    target: Target = None,
    columns: Columns = None,
    drop: Drop = None,
    standardize: Standardize = False,
    params: Params = None,
    top: Top = None,
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Compute a vector for every example: the leading components of the network's Fisher kernel.

    The command writes report.html, embedding.npz, embedding.safetensors, metrics.json and run.json.
    `torchrun --nproc-per-node N -m linnet embed ...` shares the work among N processes.
    """
    _run("embed.run", locals())


@app.command()
def spectrum(
    context: typer.Context,
    model: Model,
    data: Data,
    out: File = None,
    weights: Weights = None,
    components: Annotated[str, Option(help="all, number of leading eigenvalues, or a share of the trace.")] = "all",
    score: Score = "classifier",
    kernel: Kernel = "nfk",
    target: Target = None,
    columns: Columns = None,
    drop: Drop = None,
    standardize: Standardize = False,
    params: Params = None,
    top: Top = None,
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Compute the eigenvalues of the network's Fisher kernel on data: how many directions matter."""
    _run("embed.show_spectrum", locals())


@app.command()
def similarity(
    context: typer.Context,
    model: Annotated[list[str], Option(help="A network, as in adapt. Give two or more.")],
    data: Data,
    weights: Annotated[
        list[Path] | None, Option(help="Weights, one for each --model, or several for one --model.")
    ] = None,
    out: File = None,
    space: Annotated[str, Option(help="function (any networks), or parameters (one architecture).")] = "function",
    target: Target = None,
    columns: Columns = None,
    drop: Drop = None,
    params: Params = None,
    top: Top = None,
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Compare networks on the same data, to first order: 1 for the same, 0 for orthogonal."""
    _run("similarity.run", locals())


@app.command()
def info(
    context: typer.Context,
    path: Annotated[Path | None, typer.Argument(help="A file that linnet saved, or a run folder.")] = None,
    model: Annotated[str | None, Option(help="A network, as in adapt.")] = None,
    weights: Weights = None,
    data: Annotated[Path | None, Option(help="Data, to show the plan.")] = None,
    target: Target = None,
    columns: Columns = None,
    drop: Drop = None,
    params: Params = None,
    top: Top = None,
    size: Size = None,
    gray: Gray = False,
    pixel_mean: PixelMean = None,
    pixel_std: PixelStd = None,
    strict: Strict = False,
    max_length: MaxLength = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Show the parameters of a network by layer, and the plan for data; or the content of a saved file or a run."""
    _run("info.run", locals())
