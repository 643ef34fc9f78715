"""The `linnet` command. Each command imports what it needs when it runs, so that the others start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linnet import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"linnet {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Treat any trained PyTorch network as the linear model it is, to first order, around its own weights."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for two figures and metrics.json.")] = Path("linnet-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the splits and the networks.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="One split; fewer labels, digits and epochs.")] = False,
) -> None:
    """Adapt a network of upright digits to turned ones with 50 labels: six ways, compared.

    Needs no download and takes less than a minute on two CPU cores.
    """
    from linnet import demo as job

    try:
        job.run(out, seed=seed, quick=quick)
    except OSError as error:
        typer.secho(f"Error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from error
