"""`linnet embed` and `linnet spectrum`: the Fisher kernel of a network on data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import linnet
from linnet import scores
from linnet.cli import model_source, outputs, planning, publishing, run_folder, run_report
from linnet.cli.commands.fitting import finish
from linnet.cli.data_files.examples import Examples, Reading, settled
from linnet.cli.planning import Chosen
from linnet.cli.terminal import Printer, UsageError, as_usage, is_first, processes, record
from linnet.fisher import probes

SCORES = {
    "classifier": scores.classifier,
    "energy": scores.energy,
    "flow": scores.flow,
    "autoregressive": scores.autoregressive,
}
SHARES = (0.5, 0.9, 0.95, 0.99)
SHOWN = 10
"""Eigenvalues that are printed."""


@dataclass(frozen=True)
class Settings:
    """Which kernel; see `linnet.FisherEmbedding`.

    Attributes:
        components: How many, or the share of the variance that they explain.
        score: A key of `SCORES`.
        kernel: "nfk" or "ntk".
        method: How the components are found.
        chosen: Which parameters.
        standardize: Whether the columns are standardized.
        seed: Of the start.
        device: Where.
    """

    components: str
    score: str
    kernel: str
    method: str
    chosen: Chosen
    standardize: bool
    seed: int
    device: torch.device


def run(
    model: str, weights: Path | None, data: Path, out: Path, reading: Reading, settings: Settings, *, force: bool
) -> None:
    """Read, plan, find the components, write embedding.npz and the saved embedding."""
    with processes(settings.device), publishing.folder(out, force=force) as folder:
        printer = Printer()
        network, found, reading = _read(model, weights, data, reading, settings, printer)
        embedding = _embedding(network, found, settings)
        with printer.step("Plan"):
            _show(printer, network, found, embedding)
        with printer.step("Embed"):
            E = embedding.fit_transform(found.X)
            spectrum = probes.spectrum(embedding)
            _tell(printer, spectrum)
            dropped = f"{embedding.dropped_columns_:,} parameters play no part"
            printer.say(f"{embedding.passes_} passes by {embedding.method_!r}; {dropped}")
        page = run_report.of_embedding(
            printer,
            embedding,
            E,
            (model, data),
            found,
            reading,
            spectrum,
            seed=settings.seed,
            device=settings.device,
        )
        if not is_first():
            return
        arrays = {"embedding": E.cpu().numpy(), "eigenvalues": spectrum.eigenvalues, "explained": spectrum.explained}
        if found.y is not None:
            arrays["y"] = found.y
        if found.names:
            arrays["names"] = np.array(found.names)
        outputs.write_arrays(folder / "embedding.npz", arrays)
        embedding.save(folder / "embedding.safetensors")
        details = {
            "examples": found.n,
            "parameters": embedding.lin_.p,
            "components": embedding.n_components_,
            "explained": float(spectrum.explained[-1]),
            "effective_rank": spectrum.effective_rank,
            "passes": embedding.passes_,
            "score": settings.score,
            "kernel": settings.kernel,
        }
        outputs.write_json(folder / "metrics.json", record(settings.seed, settings.device, **details))
        kept = run_folder.make_run("embed", "embedding.safetensors", model, weights, reading, seed=settings.seed)
        written = finish(folder, kept, page)
    printer.written(out, written)


def show_spectrum(
    model: str, weights: Path | None, data: Path, out: Path | None, reading: Reading, settings: Settings, *, force: bool
) -> None:
    """The eigenvalues of the kernel: all of them, or the leading ones where ``components`` says how many."""
    if out is not None and out.suffix != ".npz":
        raise UsageError(f"--out must be a .npz file; got {out}.")
    with processes(settings.device), publishing.file(out, force=force):
        printer = Printer()
        network, found, reading = _read(model, weights, data, reading, settings, printer)
        embedding = _embedding(network, found, settings)
        with printer.step("Plan"):
            _show(printer, network, found, embedding)
        with printer.step("Spectrum"):
            if settings.components == "all":
                values = torch.as_tensor(embedding.exact_eigenvalues(found.X)).cpu()
                spectrum = probes.spectrum(values.clamp(min=0.0))  # what is below zero is rounding
            else:
                spectrum = probes.spectrum(embedding.fit(found.X))
            _tell(printer, spectrum)
        if out is not None and is_first():
            outputs.write_arrays(out, {"eigenvalues": spectrum.eigenvalues, "explained": spectrum.explained})
            printer.written(out.parent, [out.name])


def _read(
    model: str, weights: Path | None, data: Path, reading: Reading, settings: Settings, printer: Printer
) -> tuple[nn.Module, Examples, Reading]:
    with printer.step("Read"):
        network = model_source.network(model, weights, seed=settings.seed, device=settings.device)
        found, reading = settled(data, reading, network, labeled=False, standardize=settings.standardize)
        printer.say(f"{data}: {found.what}")
        return network, found, reading


def _embedding(network: nn.Module, found: Examples, settings: Settings) -> linnet.FisherEmbedding:
    if settings.score not in SCORES:
        raise UsageError(f"--score must be one of {', '.join(SCORES)}; got {settings.score!r}.")
    if settings.kernel not in ("nfk", "ntk"):
        raise UsageError(f"--kernel must be nfk or ntk; got {settings.kernel!r}.")
    count: Any = 1 if settings.components == "all" else _number(settings.components)
    if count >= 1 and count > found.n:
        raise UsageError(f"--components {count} is more than the {found.n} examples have; ask for at most {found.n}.")
    with as_usage():
        params = settings.chosen.globs(network, found)
        score = SCORES[settings.score]()
    return linnet.FisherEmbedding(network, count, score, settings.kernel, params, settings.method, seed=settings.seed)


def _number(text: str) -> int | float:
    try:
        found: int | float = int(text) if text.isdigit() else float(text)
    except ValueError:
        found = 0
    if not (found >= 1 if isinstance(found, int) else 0 < found < 1):
        raise UsageError(f"--components is a number of components, or a share of the variance below 1; got {text!r}.")
    return found


def _show(printer: Printer, network: nn.Module, found: Examples, embedding: linnet.FisherEmbedding) -> None:
    with as_usage("The network does not take these data: "):
        embedding._attach(scores.as_score(embedding.score))
        J = embedding.lin_.jacobian(found.X, progress=False)
    planning.show(printer, network, J)
    once = planning.seconds_of_pass(J)
    printer.say(f"a pass over the data takes {planning.duration(once)}; usually there are 5 to 10")


def _tell(printer: Printer, spectrum: probes.Spectrum) -> None:
    values, explained = spectrum.eigenvalues, spectrum.explained
    rows = [
        [str(i + 1), f"{values[i]:.4g}", f"{explained[i]:.1%}", "█" * round(24 * values[i] / values[0])]
        for i in range(min(SHOWN, len(values)))
    ]
    printer.table(["eigenvalue", "size", "explained so far", ""], rows)
    reached = [share for share in SHARES if explained[-1] >= share]
    counts = ", ".join(f"{share:.0%} by {spectrum.components(share):,}" for share in reached)
    printer.say(
        f"effective rank {spectrum.effective_rank:.1f}; of the trace: {counts or f'{explained[-1]:.1%} by all'}"
    )
