"""The `linnet` command: its options. Each command imports what it needs when it runs, so that the others start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linnet import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)

# Options that several commands have.
Model = Annotated[str, Option("--model", help="module:function or file.py:function, timm:NAME, or hf:PATH.")]
Weights = Annotated[Path | None, Option(help="State dict to load: .safetensors, .pt or .pth (no code is run).")]
Train = Annotated[
    Path, Option(help="Training data: .csv, .parquet, .npz (x, y), .tsv of texts, or a folder of images.")
]
Test = Annotated[Path | None, Option(help="Test data of the same kind.")]
Data = Annotated[Path, Option(help="Data: .csv, .parquet, .npz (x), .txt or .tsv of texts, or a folder of images.")]
Target = Annotated[list[str] | None, Option(help="Column to predict, several times for several; array of .npz.")]
Columns = Annotated[str | None, Option(help="Columns the network takes, with commas; by default all others.")]
Drop = Annotated[str | None, Option(help="Columns to leave out, with commas.")]
Standardize = Annotated[bool, Option("--standardize", help="Standardize the columns as in the training data.")]
Task = Annotated[str, Option(help="auto, classification or regression.")]
Size = Annotated[str | None, Option(help="Resize images: 32 or 32x48 (height x width).")]
Gray = Annotated[bool, Option("--gray", help="One channel for images, not three.")]
PixelMean = Annotated[str | None, Option(help="Subtracted from pixels in 0..1, with commas: 0.5,0.5,0.5.")]
PixelStd = Annotated[str | None, Option(help="What pixels are divided by after that.")]
Strict = Annotated[bool, Option("--strict", help="Stop at an image that cannot be read.")]
MaxLength = Annotated[int | None, Option(min=1, help="Tokens of a text; 128 where nothing is said.")]
Params = Annotated[list[str] | None, Option(help='Parameters by name, such as "layer4.*"; may be repeated.')]
Top = Annotated[str | None, Option(help="Instead: how many blocks from the top.")]
Prior = Annotated[str, Option(help="balanced, shared, ntk, layerwise, unit, a variance, or glob=variance,...")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, Option(min=0, help="Of everything that is drawn, also weights that --model draws.")]
Out = Annotated[Path, Option(help="Folder for the results.")]
File = Annotated[Path | None, Option("--out", help="File for the numbers.")]
Force = Annotated[bool, Option("--force", help="Replace what an earlier run has written there.")]
Score = Annotated[str, Option(help="classifier, energy, flow or autoregressive.")]
Kernel = Annotated[str, Option(help="nfk (Fisher kernel) or ntk (tangent kernel).")]
Method = Annotated[str, Option(help="auto, krylov, power, nystrom or exact.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"linnet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, Option("--traceback", help="Show where an error happened.")] = False,
) -> None:
    """Treat any trained PyTorch network as the linear model it is, to first order, around its own weights.

    Exit codes: 2 where the command or its files have to change, 1 where it failed on the way.
    """
    context.obj = traceback


@app.command()
def demo(
    context: typer.Context,
    out: Annotated[Path, Option(help="Folder for two figures and metrics.json.")] = Path("linnet-demo"),
    seed: Annotated[int, Option(min=0, help="Seed of the splits and the networks.")] = 0,
    quick: Annotated[bool, Option("--quick", help="One split; fewer labels, digits and epochs.")] = False,
) -> None:
    """Adapt a network of upright digits to turned ones with 50 labels: six ways, compared.

    Needs no download and takes less than a minute on two CPU cores.
    """
    from linnet.cli import demo as job
    from linnet.cli.terminal import reported

    with reported(traceback=context.obj):
        job.run(out, seed=seed, quick=quick)


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
    top: Annotated[str | None, Option(help="Instead: how many blocks from the top, or evidence.")] = None,
    prior: Prior = "balanced",
    inference: Annotated[str, Option(help="For classes: auto, vi, laplace or map.")] = "auto",
    mean: Annotated[str, Option(help="auto, network, or zero (for the network's own training data).")] = "auto",
    head: Annotated[str, Option(help="auto (new where outputs and classes differ in number), new, or keep.")] = "auto",
    features: Annotated[str | None, Option(help="What a new head reads: a module's name, or output.")] = None,
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
    """Adapt a trained network to new data, with error bars: no learning rate, no epochs.

    Writes report.html, adapter.safetensors, predictions.csv of the test data, metrics.json and run.json, which predict
    reads.
    """
    from linnet.cli.commands import adapt as job
    from linnet.cli.commands.fitting import Files, Settings
    from linnet.cli.options import about_data, one_of, reading_of
    from linnet.cli.planning import chosen, prior_of
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        one_of("--inference", inference, ("auto", "vi", "laplace", "map"))
        one_of("--head", head, ("auto", "new", "keep"))
        one_of("--mean", mean, ("auto", "network", "zero"))
        files = Files(model, weights, train, test, out, force)
        reading = reading_of(model, **about_data(locals()))
        where = device_of(device)
        settings = Settings(
            chosen(params, top, evidence=True),
            prior_of(prior),
            inference,
            mean,
            head,
            features,
            standardize,
            seed,
            where,
        )
        job.run(files, reading, settings)


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
    """Error bars for a network as it stands (Laplace), from the data that it was trained on.

    Writes report.html, laplace.safetensors, predictions.csv of the test data, metrics.json and run.json, which predict
    reads.
    """
    from linnet.cli.commands import uncertainty as job
    from linnet.cli.commands.fitting import Files, Settings
    from linnet.cli.options import about_data, one_of, reading_of
    from linnet.cli.planning import chosen, prior_of
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        known = ("auto", "full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples")
        one_of("--structure", structure, known)
        files = Files(model, weights, train, test, out, force)
        reading = reading_of(model, **about_data(locals()))
        settings = Settings(
            chosen(params, top), prior_of(prior), standardize=standardize, seed=seed, device=device_of(device)
        )
        job.run(files, reading, settings, structure=structure)


@app.command()
def predict(
    context: typer.Context,
    run: Annotated[Path, Option(help="Folder that adapt, uncertainty or embed has written.")],
    data: Data,
    out: Annotated[Path, Option(help="File for the predictions: .csv; .npz for an embedding.")],
    model: Annotated[str | None, Option(help="The network, where it has moved.")] = None,
    weights: Annotated[Path | None, Option(help="Its weights, where they have moved.")] = None,
    trust: Annotated[
        bool, Option("--trust", help="Import the code that the run names, though the run was not made here.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Predictions with error bars for new data, from a run of adapt or uncertainty; vectors from one of embed.

    Imports the code that run.json names, as --model was given. A run that this user did not make needs --trust.
    """
    from linnet.cli.commands import predict as job
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        where = device_of(device)
        job.run(run, data, out, model=model, weights=weights, force=force, trusted=trust, device=where)


@app.command()
def embed(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    weights: Weights = None,
    components: Annotated[str, Option(help="How many, or the share of the variance to explain, such as 0.9.")] = "128",
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
    """Compact vectors for every example: the leading components of the network's Fisher kernel.

    Writes report.html, embedding.npz, embedding.safetensors (which predict applies to new data), metrics.json and
    run.json.
    `torchrun --nproc-per-node N -m linnet embed ...` shares the work among N processes.
    """
    from linnet.cli.commands import embed as job
    from linnet.cli.options import about_data, one_of, reading_of
    from linnet.cli.planning import chosen
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        one_of("--method", method, ("auto", "krylov", "power", "nystrom", "exact"))
        reading = reading_of(model, **about_data(locals()))
        where = device_of(device)
        settings = job.Settings(components, score, kernel, method, chosen(params, top), standardize, seed, where)
        job.run(model, weights, data, out, reading, settings, force=force)


@app.command()
def spectrum(
    context: typer.Context,
    model: Model,
    data: Data,
    out: File = None,
    weights: Weights = None,
    components: Annotated[str, Option(help="all, how many of the leading ones, or a share of the trace.")] = "all",
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
    """The eigenvalues of the network's Fisher kernel on data: how many directions matter."""
    from linnet.cli.commands import embed as job
    from linnet.cli.options import about_data, reading_of
    from linnet.cli.planning import chosen
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        reading = reading_of(model, **about_data(locals()))
        where = device_of(device)
        settings = job.Settings(components, score, kernel, "auto", chosen(params, top), standardize, seed, where)
        job.show_spectrum(model, weights, data, out, reading, settings, force=force)


@app.command()
def similarity(
    context: typer.Context,
    model: Annotated[list[str], Option(help="A network, as in adapt; give two or more.")],
    data: Data,
    weights: Annotated[list[Path] | None, Option(help="Weights, one for each --model, or several for one.")] = None,
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
    """How alike networks are on the same data, to first order: 1 for alike, 0 for orthogonal."""
    from linnet.cli.commands import similarity as job
    from linnet.cli.options import about_data, reading_of
    from linnet.cli.planning import chosen
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        reading = reading_of(model[0], **about_data(locals()))
        job.run(
            model,
            weights or [],
            data,
            out,
            reading,
            space=space,
            chosen=chosen(params, top),
            seed=seed,
            device=device_of(device),
            force=force,
        )


@app.command()
def info(
    context: typer.Context,
    path: Annotated[Path | None, typer.Argument(help="A file that linnet saved, or a run folder.")] = None,
    model: Annotated[str | None, Option(help="A network, as in adapt.")] = None,
    weights: Weights = None,
    data: Annotated[Path | None, Option(help="Data, to show the plan for.")] = None,
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
    """A network's parameters by layer, and the plan for data; or what a saved file or a run folder holds."""
    from linnet.cli.commands import info as job
    from linnet.cli.options import about_data, reading_of
    from linnet.cli.planning import chosen
    from linnet.cli.terminal import device_of, reported

    with reported(traceback=context.obj):
        if (path is None) == (model is None):
            raise job.nothing()
        if path is not None:
            if weights or data or params or top:
                raise job.too_much()
            job.of_file(path)
        elif model is not None:
            reading = reading_of(model, **about_data(locals()))
            where = device_of(device)
            job.of_network(model, weights, data, reading, chosen=chosen(params, top), seed=seed, device=where)
