"""`linnet embed` and `linnet spectrum`: the Fisher kernel of a network on data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import linnet
from linnet import scores
from linnet.cli import model_source, publishing, run_folder, run_report, terminal
from linnet.cli.data_files import Examples, Reading, read_for_network
from linnet.cli.network_output import NetworkOutput
from linnet.cli.options import check_choice, parse_parameters, parse_reading, parse_standardization, print_plan
from linnet.cli.terminal import Printer, UsageError
from linnet.fisher import probes

SCORES = {
    "classifier": scores.classifier,
    "energy": scores.energy,
    "flow": scores.flow,
    "autoregressive": scores.autoregressive,
}


def run(given: Mapping[str, Any]) -> None:
    """Read, plan, find the components, write embedding.npz and the saved embedding."""
    model, out, seed = given["model"], given["out"], given["seed"]
    device, count = _check(given)
    with terminal.join_processes(device), publishing.publish_folder(out, force=given["force"]) as folder:
        printer = Printer()
        embedding, data, reading = _prepare(given, count, device, printer)
        with printer.step("Embed"):
            E = embedding.fit_transform(data.X)
            spectrum = probes.spectrum(embedding)
            _print_spectrum(printer, spectrum)
            unused = f"the kernel does not depend on {embedding.dropped_columns_:,} parameters"
            printer.say(f"{embedding.passes_} passes by {embedding.method_!r}; {unused}")
        page = run_report.report_embedding(
            printer, embedding, E, (model, given["data"]), data, reading, spectrum, seed=seed, device=device
        )
        if not terminal.is_first_process():
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
            "score": given["score"],
            "kernel": given["kernel"],
        }
        run_folder.write_json(folder / "metrics.json", terminal.describe_run(seed, device, **details))
        weights = [] if given["weights"] is None else [given["weights"]]
        made = run_folder.make_run(
            "embed",
            "embedding.safetensors",
            model,
            weights,
            reading,
            seed=seed,
            output=NetworkOutput(given["output"]),
        )
        written = run_report.finish(folder, made, page)
    printer.print_written(out, written)


def show_spectrum(given: Mapping[str, Any]) -> None:
    """Print the eigenvalues of the kernel: all of them, or the leading ones."""
    out = given["out"]
    device, count = _check(given)
    if out is not None and out.suffix != ".npz":
        raise UsageError(f"--out must be a .npz file; got {out}.")
    with terminal.join_processes(device), publishing.publish_file(out, force=given["force"]):
        printer = Printer()
        embedding, data, _ = _prepare(given, count, device, printer)
        with printer.step("Spectrum"):
            if count is None:
                values = torch.as_tensor(embedding.exact_eigenvalues(data.X)).cpu()
                spectrum = probes.spectrum(values.clamp(min=0.0))  # values below zero are rounding errors
            else:
                spectrum = probes.spectrum(embedding.fit(data.X))
            _print_spectrum(printer, spectrum)
        if out is not None and terminal.is_first_process():
            run_folder.write_arrays(out, {"eigenvalues": spectrum.eigenvalues, "explained": spectrum.explained})
            printer.print_written(out.parent, [out.name])


def _check(given: Mapping[str, Any]) -> tuple[torch.device, int | float | None]:
    """The device, and the number of components or the share that they explain; None for all eigenvalues."""
    components, is_spectrum = given["components"], "method" not in given
    check_choice("--method", given.get("method", "auto"), ("auto", "krylov", "power", "nystrom", "exact"))
    check_choice("--score", given["score"], tuple(SCORES))
    check_choice("--kernel", given["kernel"], ("nfk", "ntk"))
    device = terminal.choose_device(given["device"])
    if components == "all" and is_spectrum:
        return device, None
    try:
        count = int(components) if components.isdigit() else float(components)
    except ValueError:
        count = 0
    if not (count >= 1 if isinstance(count, int) else 0 < count < 1):
        raise UsageError(
            f"--components must be a number of components, or a share of the variance below 1; got {components!r}."
        )
    return device, count


def _prepare(
    given: Mapping[str, Any], count: int | float | None, device: torch.device, printer: Printer
) -> tuple[linnet.FisherEmbedding, Examples, Reading]:
    """Read the network and the data, make the embedding, and print the plan."""
    parameters, reading, seed = parse_parameters(given), parse_reading(given), given["seed"]
    standardization, output = parse_standardization(given), NetworkOutput(given["output"])
    with printer.step("Read"):
        how: Any = {"seed": seed, "device": device, "random_weights": given["random_weights"]}
        model = model_source.load_network(given["model"], given["weights"], output=output, **how)
        data, reading = read_for_network(given["data"], reading, model, labeled=False, standardization=standardization)
        printer.say(f"{given['data']}: {data.description}")
        count = count or 1
        if count > data.n:
            raise UsageError(f"--components {count} is more than the number of examples. Ask for at most {data.n}.")
    with terminal.blame_input():
        score, params = SCORES[given["score"]](), parameters.resolve(model, data)
    how = {"kernel": given["kernel"], "method": given.get("method", "auto"), "seed": seed}
    embedding = linnet.FisherEmbedding(model, count, score, params=params, **how)
    with printer.step("Plan"):
        with terminal.blame_input("The network does not take these data: "):
            embedding._attach(scores.as_score(embedding.score))
            J = embedding.lin_.jacobian(data.X, progress=False)
            _ = J.c  # the first examples
        print_plan(printer, model, J)
    return embedding, data, reading


def _print_spectrum(printer: Printer, spectrum: probes.Spectrum) -> None:
    values, explained = spectrum.eigenvalues, spectrum.explained
    rows = [
        [str(i + 1), f"{values[i]:.4g}", f"{explained[i]:.1%}", "█" * round(24 * values[i] / values[0])]
        for i in range(min(10, len(values)))
    ]
    printer.print_table(["eigenvalue", "size", "explained so far", ""], rows)
    reached = [share for share in (0.5, 0.9, 0.95, 0.99) if explained[-1] >= share]
    counts = ", ".join(f"{share:.0%} by {spectrum.components(share):,}" for share in reached)
    rank, last = spectrum.effective_rank, f"{explained[-1]:.1%} by all"
    printer.say(f"effective rank {rank:.1f}; of the trace: {counts or last}")
