"""`linnet similarity`: how similar networks are on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import linnet
from linnet.cli import model_source, publishing, terminal
from linnet.cli.data_files import cast_for_network, read_for_network
from linnet.cli.network_output import NetworkOutput
from linnet.cli.options import check_choice, parse_parameters, parse_reading
from linnet.cli.run_folder import write_json
from linnet.cli.terminal import Printer, UsageError


def run(given: Mapping[str, Any]) -> None:
    """Compare every two networks. One network with several files of weights counts as several networks."""
    check_choice("--space", given["space"], ("function", "parameters"))
    pairs = _pair_weights(given["model"], given["weights"] or [])
    parameters, reading, device = parse_parameters(given), parse_reading(given), terminal.choose_device(given["device"])
    seed, out, space = given["seed"], given["out"], given["space"]
    with terminal.join_processes(device), publishing.publish_file(out, force=given["force"]):
        printer = Printer()
        with printer.step("Read"):
            how: Any = {"seed": seed, "device": device, "random_weights": given["random_weights"]}
            how["output"] = NetworkOutput(given["output"])
            networks = [model_source.load_network(spec, path, **how) for spec, path in pairs]
            data, _ = read_for_network(given["data"], reading, networks[0], labeled=False)
            printer.say(f"{given['data']}: {data.description}")
        names = [f"{i + 1}: {spec}{'' if path is None else f' {path.name}'}" for i, (spec, path) in enumerate(pairs)]
        with printer.step("Compare"):
            n = len(networks)
            values = torch.eye(n, dtype=torch.float64)
            with terminal.blame_input():
                inputs = [cast_for_network(data, network) for network in networks]
                lins = [linnet.linearize(m, parameters.resolve(m, x)) for m, x in zip(networks, inputs, strict=True)]
                for i in range(n):
                    for j in range(i):
                        value = linnet.similarity(lins[i], lins[j], inputs[0].X, space=space)
                        values[i, j] = values[j, i] = value
            rows = [[name, *(f"{x:.4f}" for x in row)] for name, row in zip(names, values.tolist(), strict=True)]
            printer.print_table(["", *(str(i + 1) for i in range(n))], rows)
            printer.say("1: the same; 0: orthogonal")
        if out is not None and terminal.is_first_process():
            more = {"models": names, "space": space, "examples": data.n, "similarity": values.tolist()}
            write_json(out, terminal.describe_run(seed, device, **more))
            printer.print_written(out.parent, [out.name])


def _pair_weights(models: Sequence[str], weights: Sequence[Path]) -> list[tuple[str, Path | None]]:
    if len(models) == 1 and len(weights) > 1:
        return [(models[0], path) for path in weights]
    if weights and len(weights) != len(models):
        raise UsageError(
            f"Give --weights once for each --model, or not at all; got {len(weights)} weights for {len(models)} models."
        )
    if len(models) < 2:
        raise UsageError("similarity compares networks: give --model twice, or one --model with --weights twice.")
    paths: list[Path | None] = [*weights] or [None] * len(models)
    return list(zip(models, paths, strict=True))
