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
    "maddox2021": {
        "figure2": "timings against n and p, and Fisher-vector products (Maddox et al. 2021, figure 2)",
        "figure3": "posteriors of networks by width, training and architecture (Maddox et al. 2021, figure 3)",
        "figure4": "linearized ResNets on CIFAR-10: accuracy, NLL, ECE (Maddox et al. 2021, figure 4)",
        "figure5": "similarity of the Jacobians of networks trained on alike and other data (Maddox et al. 2021, "
        "figure 5)",
        "malaria": "prevalence of one year adapted to another (Maddox et al. 2021, figure 7a)",
        "olivetti": "rotation of new faces (Maddox et al. 2021, figure 7b)",
        "sinusoids": "few-shot sinusoids (Maddox et al. 2021, figure 6)",
        "uci": "seven UCI regression sets, adapted on new and on the same data",
    },
    "zhang2022": {
        "wrn": "trains the WRN-40-2 for CIFAR-10 that others embed",
        "embedding_time": "seconds and errors of Fisher embeddings (Zhang et al. 2022, figure 3)",
        "encoders": "trains the DCGAN, the VAE and the rotation network that others embed and adapt",
        "nfk_probe": "linear probes on Fisher embeddings of GANs and VAEs (Zhang et al. 2022, tables 1, 2, figure 7)",
        "nfk_distill": "a small WRN taught by the Fisher embedding of a large one (Zhang et al. 2022, table 3)",
        "inversion": "GAN inversion by a linear map, and images of components (Zhang et al. 2022, figures 4 and 6)",
        "spectra": "how many components explain a Fisher kernel (Zhang et al. 2022, figure 2)",
    },
    "mu2020": {
        "table1_mu": "gradient features of random and pretrained layers (Mu et al. 2020, tables 1 to 3)",
        "sst2": "MiniLM on SST-2 with few labels: gradient features of a transformer (Mu et al. 2020 have none)",
        "transfer": "ResNets of CIFAR-10 to Fashion-MNIST and MNIST (Mu et al. 2020, the form of table 4)",
    },
    "allingham2023": {
        "evidence": "the lambda that each evidence of a batch-norm network picks (slides on linearized Laplace)",
        "laplace_uci": "error bars of networks as they stand on UCI regression sets: structures, ensembles",
        "laplace_digits": "probabilities of digit networks: MAP, structures and links, ensembles, a temperature",
        "laplace_cifar": "ResNet-20 on CIFAR-10 with error bars: NLL, ECE, joint log likelihoods, unknown images",
        "snelson": "networks of finite width next to their Gaussian process, kernels by width (slides, Laplace)",
        "not_linearized": "posterior weights in the network itself and in its linear model (slides, Laplace)",
        "joint": "joint log likelihoods, turned and unknown images: MAP, an ensemble, error bars (slides, Laplace)",
    },
    "damianou2020": {
        "deep_gp": "a deep Gaussian process and a linearized network on a step (talk on function space)",
    },
}
"""Folder of a paper to its experiments, each with what it is."""

EXPERIMENTS = {name: text for names in PAPERS.values() for name, text in names.items()}


def load(name: str) -> ModuleType:
    """Import the module of an experiment."""
    (paper,) = (paper for paper, names in PAPERS.items() if name in names)
    return importlib.import_module(f"experiments.{paper}.{name}")


def parser() -> argparse.ArgumentParser:
    """One subcommand per experiment; the options that all share, then its own."""
    result = argparse.ArgumentParser(prog="python -m experiments", description="The papers' experiments with linnet.")
    commands = result.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, text in EXPERIMENTS.items():
        one = commands.add_parser(name, help=text, description=text)
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
    command = "python -m experiments " + " ".join(shlex.quote(word) for word in without_places(given))
    folder = common.results_folder(options.out, quick=options.quick)
    with plots.style():
        outcome = load(options.name).run(options)
        spent = common.Spent(time.perf_counter() - start, time.process_time() - cpu)
        where = common.save(outcome, folder, name=options.name, command=command, spent=spent, device=options.device)
    print(f"wrote {where}")
    return where


if __name__ == "__main__":
    main()
