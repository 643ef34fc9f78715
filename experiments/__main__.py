"""python -m experiments NAME [--data PATH] [--device cpu] [--quick] [--seed 0]"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from experiments import common
from experiments.common import plots

PAPERS = {
    "maddox2021": "figure2 figure3 figure4 figure5 malaria olivetti sinusoids uci ensembles",
    "zhang2022": "wrn embedding_time encoders nfk_probe nfk_distill inversion spectra",
    "mu2020": "table1_mu sst2 transfer",
    "allingham2023": "evidence laplace_uci laplace_digits laplace_cifar snelson not_linearized joint",
    "damianou2020": "deep_gp",
    "yang2024": "lora",
    "calibration": "coverage unknown long_chain",
    "scoreboard": "scoreboard relinearized",
    "kirsch2019": "labels",
    "park2023": "attribution",
    "ritter2018": "onward merged",
}
"""Folder of a paper, or of a subject without one, to its experiments."""

EXPERIMENTS = {name: paper for paper, names in PAPERS.items() for name in names.split()}


def load(name: str) -> ModuleType:
    """Import the module of an experiment."""
    return importlib.import_module(f"experiments.{EXPERIMENTS[name]}.{name}")


def describe(name: str) -> str:
    """The description of an experiment, from the first line of its module."""
    return (load(name).__doc__ or "").partition("\n")[0].removesuffix(".")


def parser() -> argparse.ArgumentParser:
    """One subcommand per experiment; the options that all share, then its own."""
    result = argparse.ArgumentParser(prog="python -m experiments", description="The papers' experiments with linnet.")
    commands = result.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in EXPERIMENTS:
        one = commands.add_parser(name, help=describe(name), description=describe(name))
        one.add_argument("--data", type=Path, default=common.DATA, help="folder of data sets (default: %(default)s)")
        one.add_argument("--device", default="cpu")
        one.add_argument("--share", type=float, default=1.0, help="of the GPU's memory, for runs side by side")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--quick", action="store_true", help="a small version, to see that it runs; nothing to report")
        one.add_argument("--out", type=Path, default=None, help="default: results, with --quick results/quick")
        for flag, how in load(name).ARGUMENTS.items():  # text alone: of an option that takes a whole number
            one.add_argument(flag, **({"type": int, "help": how} if isinstance(how, str) else how))
    return result


def without_places(words: Sequence[str]) -> list[str]:
    """The arguments without the folders and the memory of this machine.

    >>> without_places(["uci", "--data", "somewhere", "--quick", "--out=elsewhere", "--peer", "/some/python"])
    ['uci', '--quick', '--peer', 'PYTHON']
    """
    kept: list[str] = []
    skip = False
    for word in words:
        name = word.split("=")[0]
        place = name in ("--data", "--out", "--peer", "--share")
        if not skip and not place:
            kept.append(word)
        if name == "--peer":
            kept += ["--peer", "PYTHON"]
        skip = place and "=" not in word
    return kept


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run one experiment; returns the folder that it wrote."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.share != 1:
        if not options.device.startswith("cuda"):
            raise ValueError(f"--share is of a GPU's memory: it goes with --device cuda; got {options.device}.")
        torch.cuda.set_per_process_memory_fraction(options.share, torch.device(options.device).index)
    start, cpu = time.perf_counter(), time.process_time()
    options.command = "python -m experiments " + " ".join(shlex.quote(word) for word in without_places(given))
    folder = common.results_folder(options.out, quick=options.quick)
    with plots.style():
        outcome = load(options.name).run(options)
        spent = common.Spent(time.perf_counter() - start, time.process_time() - cpu)
        how = {"name": options.name, "command": options.command, "device": options.device}
        where = common.save(outcome, folder, spent=spent, **how)
    print(f"wrote {where}")
    return where


if __name__ == "__main__":
    main()
