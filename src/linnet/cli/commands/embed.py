"""`linnet embed` and `linnet spectrum`: the Fisher kernel of a network on data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import linnet
from linnet import scores
from linnet.cli import model_source, publishing, run_folder, run_report
from linnet.cli.data_files import Examples, Reading, read_for_network
from linnet.cli.options import ParameterChoice, check_choice, parse_parameters, parse_reading, print_plan
from linnet.cli.terminal import (
    Printer,
    UsageError,
    blame_input,
    choose_device,
    describe_run,
    is_first_process,
    join_processes,
)
from linnet.fisher import probes

SCORES = {
    "classifier": scores.classifier,
    "energy": scores.energy,
    "flow": scores.flow,
    "autoregressive": scores.autoregressive,
}


@dataclass(frozen=True)
class EmbedOptions:
    """Options of `linnet embed` and `linnet spectrum`; see `linnet.FisherEmbedding`.

    Attributes:
        model: The value of --model.
        weights: A file with weights, or None.
        data: The data.
        reading: How the data are read.
        components: Number of components, or the share of the variance that they explain; None for all eigenvalues.
        score: A key of `SCORES`.
        kernel: "nfk" or "ntk".
        method: How the components are found.
        parameters: The parameters that are used.
        standardize: Whether the columns are standardized.
        seed: Seed of everything that is drawn.
        device: The device of the network and the data.
    """

    model: str
    weights: Path | None
    data: Path
    reading: Reading
    components: int | float | None
    score: str
    kernel: str
    method: str
    parameters: ParameterChoice
    standardize: bool
    seed: int
    device: torch.device


def _parse(given: Mapping[str, Any]) -> EmbedOptions:
    method, components = given.get("method", "auto"), given["components"]
    check_choice("--method", method, ("auto", "krylov", "power", "nystrom", "exact"))
    check_choice("--score", given["score"], tuple(SCORES))
    check_choice("--kernel", given["kernel"], ("nfk", "ntk"))
    if components == "all" and "method" not in given:  # linnet spectrum
        count = None
    else:
        try:
            count = int(components) if components.isdigit() else float(components)
        except ValueError:
            count = 0
        if not (count >= 1 if isinstance(count, int) else 0 < count < 1):
            raise UsageError(
                f"--components must be a number of components, or a share of the variance below 1; got {components!r}."
            )
    same = {name: given[name] for name in ("model", "weights", "data", "score", "kernel", "standardize", "seed")}
    parameters, device = parse_parameters(given), choose_device(given["device"])
    reading = parse_reading(given)
    return EmbedOptions(**same, reading=reading, components=count, method=method, parameters=parameters, device=device)


def run(given: Mapping[str, Any]) -> None:
    """Read, plan, find the components, write embedding.npz and the saved embedding."""
    options, out = _parse(given), given["out"]
    with join_processes(options.device), publishing.publish_folder(out, force=given["force"]) as folder:
        printer = Printer()
        embedding, data, reading = _prepare(options, printer)
        with printer.step("Embed"):
            E = embedding.fit_transform(data.X)
            spectrum = probes.spectrum(embedding)
            _print_spectrum(printer, spectrum)
            unused = f"the kernel does not depend on {embedding.dropped_columns_:,} parameters"
            printer.say(f"{embedding.passes_} passes by {embedding.method_!r}; {unused}")
        files, seed, device = (options.model, options.data), options.seed, options.device
        page = run_report.report_embedding(
            printer, embedding, E, files, data, reading, spectrum, seed=seed, device=device
        )
        if not is_first_process():
            return
        arrays = {"embedding": E.cpu().numpy(), "eigenvalues": spectrum.eigenvalues, "explained": spectrum.explained}
        if data.y is not None:
            arrays["y"] = data.y
        if data.names:
            arrays["names"] = np.array(data.names)
        run_folder.write_arrays(folder / "embedding.npz", arrays)
        embedding.save(folder / "embedding.safetensors")
        details = {
            "examples": data.n,
            "parameters": embedding.lin_.p,
            "components": embedding.n_components_,
            "explained": float(spectrum.explained[-1]),
            "effective_rank": spectrum.effective_rank,
            "passes": embedding.passes_,
            "score": options.score,
            "kernel": options.kernel,
        }
        run_folder.write_json(folder / "metrics.json", describe_run(seed, device, **details))
        run = run_folder.make_run(
            "embed", "embedding.safetensors", options.model, options.weights, reading, seed=options.seed
        )
        written = run_report.finish(folder, run, page)
    printer.print_written(out, written)


def show_spectrum(given: Mapping[str, Any]) -> None:
    """Print the eigenvalues of the kernel: all of them, or the leading ones."""
    options, out = _parse(given), given["out"]
    if out is not None and out.suffix != ".npz":
        raise UsageError(f"--out must be a .npz file; got {out}.")
    with join_processes(options.device), publishing.publish_file(out, force=given["force"]):
        printer = Printer()
        embedding, data, _ = _prepare(options, printer)
        with printer.step("Spectrum"):
            if options.components is None:
                values = torch.as_tensor(embedding.exact_eigenvalues(data.X)).cpu()
                spectrum = probes.spectrum(values.clamp(min=0.0))  # values below zero are rounding errors
            else:
                spectrum = probes.spectrum(embedding.fit(data.X))
            _print_spectrum(printer, spectrum)
        if out is not None and is_first_process():
            run_folder.write_arrays(out, {"eigenvalues": spectrum.eigenvalues, "explained": spectrum.explained})
            printer.print_written(out.parent, [out.name])


def _prepare(options: EmbedOptions, printer: Printer) -> tuple[linnet.FisherEmbedding, Examples, Reading]:
    """Read the network and the data, make the embedding, and print the plan."""
    with printer.step("Read"):
        model = model_source.load_network(options.model, options.weights, seed=options.seed, device=options.device)
        data, reading = read_for_network(
            options.data, options.reading, model, labeled=False, standardize=options.standardize
        )
        printer.say(f"{options.data}: {data.what}")
        count = options.components or 1
        if count > data.n:
            raise UsageError(f"--components {count} is more than the number of examples. Ask for at most {data.n}.")
    embedding = _make_embedding(options, model, data, count)
    with printer.step("Plan"):
        with blame_input("The network does not take these data: "):
            embedding._attach(scores.as_score(embedding.score))
            J = embedding.lin_.jacobian(data.X, progress=False)
        print_plan(printer, model, J)
    return embedding, data, reading


def _make_embedding(
    options: EmbedOptions, model: nn.Module, data: Examples, count: int | float
) -> linnet.FisherEmbedding:
    how: Any = {"kernel": options.kernel, "method": options.method, "seed": options.seed}
    with blame_input():
        score, params = SCORES[options.score](), options.parameters.resolve(model, data)
    return linnet.FisherEmbedding(model, count, score, params=params, **how)


def _print_spectrum(printer: Printer, spectrum: probes.Spectrum) -> None:
    values, explained = spectrum.eigenvalues, spectrum.explained
    rows = [
        [str(i + 1), f"{values[i]:.4g}", f"{explained[i]:.1%}", "█" * round(24 * values[i] / values[0])]
        for i in range(min(10, len(values)))
    ]
    printer.print_table(["eigenvalue", "size", "explained so far", ""], rows)
    reached = [share for share in (0.5, 0.9, 0.95, 0.99) if explained[-1] >= share]
    counts = ", ".join(f"{share:.0%} by {spectrum.components(share):,}" for share in reached)
    printer.say(
        f"effective rank {spectrum.effective_rank:.1f}; of the trace: {counts or f'{explained[-1]:.1%} by all'}"
    )
