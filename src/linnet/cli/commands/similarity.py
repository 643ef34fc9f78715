"""`linnet similarity`: how alike networks are on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import linnet
from linnet.cli import model_source, outputs, publishing
from linnet.cli.data_files.examples import Reading, for_network, settled
from linnet.cli.planning import Chosen
from linnet.cli.terminal import Printer, UsageError, as_usage, is_first, processes, record


def run(
    models: Sequence[str],
    weights: Sequence[Path],
    data: Path,
    out: Path | None,
    reading: Reading,
    *,
    space: str,
    chosen: Chosen,
    seed: int,
    device: torch.device,
    force: bool,
) -> None:
    """Compare every two of the networks; one network with several files of weights is as many networks."""
    if space not in ("function", "parameters"):
        raise UsageError(f"--space must be function or parameters; got {space!r}.")
    pairs = _pairs(models, weights)
    with processes(device), publishing.file(out, force=force):
        printer = Printer()
        with printer.step("Read"):
            networks = [model_source.network(spec, path, seed=seed, device=device) for spec, path in pairs]
            found, _ = settled(data, reading, networks[0], labeled=False)
            printer.say(f"{data}: {found.what}")
        names = [f"{i + 1}: {spec}{'' if path is None else f' {path.name}'}" for i, (spec, path) in enumerate(pairs)]
        with printer.step("Compare"):
            n = len(networks)
            alike = torch.eye(n, dtype=torch.float64)
            with as_usage():
                inputs = [for_network(found, network) for network in networks]
                params = [chosen.globs(network, x) for network, x in zip(networks, inputs, strict=True)]
                lins = [linnet.linearize(network, p) for network, p in zip(networks, params, strict=True)]
                for i in range(n):
                    for j in range(i):
                        value = linnet.similarity(lins[i], lins[j], inputs[0].X, space=space)
                        alike[i, j] = alike[j, i] = value
            printer.table(
                ["", *(str(i + 1) for i in range(n))],
                [[name, *(f"{value:.4f}" for value in row)] for name, row in zip(names, alike.tolist(), strict=True)],
            )
            printer.say("1: alike; 0: orthogonal")
        if out is not None and is_first():
            result = record(seed, device, models=names, space=space, examples=found.n, similarity=alike.tolist())
            outputs.write_json(out, result)
            printer.written(out.parent, [out.name])


def _pairs(models: Sequence[str], weights: Sequence[Path]) -> list[tuple[str, Path | None]]:
    if len(models) == 1 and len(weights) > 1:
        return [(models[0], path) for path in weights]
    if weights and len(weights) != len(models):
        raise UsageError(
            f"--weights is given once for each --model, or not at all; got {len(weights)} for {len(models)}."
        )
    if len(models) < 2:
        raise UsageError("similarity compares networks: give --model twice, or one --model with --weights twice.")
    paths: list[Path | None] = [*weights] or [None] * len(models)
    return list(zip(models, paths, strict=True))
