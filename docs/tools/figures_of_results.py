"""Tables of the committed numbers: `benchmarks/results/*.json`, `results/README.md` and `results/*/metrics.json`."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "results"


def passes(device: str) -> str:
    """The fused pass against a training step and the published product."""
    found = _read(f"passes-{device}.json")
    rows = [
        [
            f"{one['network']}, n = {one['n']:,}",
            one["precision"],
            _ms(min(one["step_ms"].values())),
            _ms(min(one["fused_ms"].values())),
            f"{one['fused / step']:.2f}",
            f"{one['published / fused']:.0f}",
            f"{one['vmap rows / fused']:.1f}",
        ]
        for one in found["passes"]
    ]
    titles = ["network", "precision", "training step", "JᵀJV", "ratio", "published / linnet", "vmap(grad) / linnet"]
    return _with_machine(found["machine"], _table(titles, rows))


def passes_figure() -> bytes:
    """The passes in units of a training step, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    found = _read("passes-cuda.json")
    those = [one for one in found["passes"] if one["precision"] == "high"]
    names = ("linnet", "vmap(grad)", "published product")
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "linnet"}):
        figure = Figure((6.4, 2.9), layout="constrained")
        axes = figure.subplots()
        for i, (name, color) in enumerate(zip(names, ("#00796b", "#f9a825", "#e64a19"), strict=True)):
            times = [(min(one["fused_ms"].values()), one["vmap_rows_ms"], one["published_ms"])[i] for one in those]
            steps = [t / min(one["step_ms"].values()) for t, one in zip(times, those, strict=True)]
            bars = axes.bar([j + 0.27 * (i - 1) for j in range(len(those))], steps, 0.25, color=color, label=name)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.axhline(1, color="k", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(those)), [f"{one['network']}, n = {one['n']:,}" for one in those])
        axes.set(yscale="log", ylabel="training steps", title=f"{found['machine']}, precision high")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.2)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def adapt_times() -> str:
    """Whole answers, on both machines."""
    rows = []
    for device in ("cuda", "cpu"):
        found = _read(f"adapt-{device}.json")
        rows += [
            [one["what"], f"{one['n']:,}", f"{one['p']:,}", f"{one['seconds']:.3g}", found["machine"]]
            for one in found["rows"]
        ]
    return _table(["what", "n", "p", "seconds", "machine"], rows)


def laplace_peer() -> str:
    """Agreement with laplace-torch, and the ratio of times."""
    found = _read("laplace-cpu.json")
    structures = sorted({one["structure"] for one in found["agreement"]})
    rows = []
    for structure in structures:
        those = [one for one in found["agreement"] if one["structure"] == structure]
        worst = [max(one.get(key, 0.0) for one in those) for key in ("evidence", "cov", "probit")]
        rows.append([f"`{structure}`", str(len(those)), *(f"{value:.0e}" for value in worst)])
    table = _table(["structure", "cases", "log evidence", "covariances", "probabilities"], rows)
    speed = found["speed"]
    times = f"{speed['linnet']['seconds']:.2f} s against {speed['laplace-torch']['seconds']:.1f} s"
    return _with_machine(found["machine"], f"{table}\n\n{speed['what']}: {times}, a ratio of {speed['ratio']:.0f}.")


def peers() -> str:
    """The same jobs by others and by linnet."""
    found = _read("peers-cpu.json")
    rows = []
    for one in found["rows"]:
        theirs, mine = one[one["peer"]], one["linnet"]
        rows.append(
            [
                f"{one['job']}: {one['network']}, p = {one['p']:,}, n = {one['n']:,}",
                one["peer"],
                f"{theirs['CPU seconds']:.2f} / {mine['CPU seconds']:.2f}",
                f"{one['ratio']:.1f}",
                f"{theirs['MiB']:.0f} / {mine['MiB']:.0f}",
                f"{max(one['differences'].values()):.0e}",
            ]
        )
    titles = ["job", "peer", "seconds, peer / linnet", "ratio", "MiB, peer / linnet", "difference"]
    versions = ", ".join(f"{name} {said}" for name, said in found["versions"].items() if name != "torch")
    return _with_machine(f"{found['machine']}; {versions}", _table(titles, rows))


def heads_times(device: str) -> str:
    """An epoch of the linearized top layers against one of fine-tuning."""
    found = _read(f"heads-{device}.json")
    keys = ["epoch, as read", "epoch, activations kept", "epoch, factors kept", "pass, as read", "pass, factors kept"]
    other = "fine-tuning, channels last"
    both = all(other in one["ratio"] for one in found["epochs"])
    rows = [
        [
            f"{one['top']}, {one['precision']}, {one['minibatch']:,}",
            _ms(one["ms"]["fine-tuning"]) + (f" ({one['ratio'][other]:.2f})" if both else ""),
            *(f"{one['ratio'][k]:.2f}" for k in keys),
        ]
        for one in found["epochs"]
    ]
    titles = ["layers, precision, minibatch", "fine-tuning (channels last)" if both else "fine-tuning", *keys]
    return _with_machine(found["machine"], _table(titles, rows))


def heads_passes(device: str) -> str:
    """Passes over the data to the optimum: random images, and real ones."""
    found = _read(f"heads-{device}.json")
    rows = [
        [f"{one['n']:,} random images, prior scale {row['scale / unit']:g} units", str(row["passes"])]
        for one in found["optimum"]
        for row in one["rows"]
        if row["preconditioner"] == "auto"
    ]
    titles = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
    rows += [[f"{one['n']:,} images of {titles[one['set']]}", str(one["passes"])] for one in found.get("real", [])]
    return _with_machine(found["machine"], _table(["1 block", "passes"], rows))


def convolutions() -> str:
    """A pass of ResNet-18 in float32, with and without linnet's own convolutions and shared outputs."""
    found = _read("convolutions-cuda.json")
    times = found["seconds of a pass"]
    rows = [[name, f"{seconds:.2f}", f"{seconds / times['linnet']:.2f}"] for name, seconds in times.items()]
    return _with_machine(found["machine"], _table(["how", "seconds", "times linnet's"], rows))


def forgetting() -> str:
    """Forgetting examples beside a refit without them."""
    found = _read("forget-cpu.json")
    rows = []
    for one in found["rows"]:
        differences = [f"{one[what]:.0e}" for what in ("mean", "variance", "evidence")]
        times = [_ms(one["forget"]), _ms(one["refit"]), f"{one['share']:.2f}"]
        rows.append([one["case"], str(one["forgotten"]), *differences, *times])
    titles = ["estimator", "forgotten", "mean", "variance", "log evidence", "forget", "refit", "share"]
    return _with_machine(f"{found['machine']}; {found['n']:,} examples", _table(titles, rows))


def padding() -> str:
    """A pass over padded sentences, with and without what pads them."""
    found = _read("padding-cpu.json")
    times = found["ms"]
    rows = [
        [name, _ms(times[name]), _ms(times[f"{name}, all tokens"]), f"{ratio:.2f}"]
        for name, ratio in found["times as long with all tokens"].items()
    ]
    said = f"{found['machine']}; {found['n']:,} sentences, {100 * found['share of tokens']:.0f} % of the tokens theirs"
    return _with_machine(said, _table(["pass", "linnet", "with all tokens", "times linnet's"], rows))


def proofs(device: str) -> str:
    """First passes, which compare every chunk with reverse mode, beside later ones."""
    found = _read(f"proofs-{device}.json")
    rows = []
    for one in found["passes"]:
        product, comma, columns = one["request"].partition(",")
        times = [_ms(1e3 * seconds) for seconds in one["seconds"]]
        rows.append([str(one["outputs"]), f"`{product}`{comma}{columns}", *times, f"{one['first / second']:.2f}"])
    said = f"{found['machine']}; ResNet-20, {found['passes'][0]['n']:,} images"
    return _with_machine(said, _table(["outputs", "pass", "first", "later", "first / later"], rows))


def scale() -> str:
    """Today's models beside a training step: time and memory of passes, and the time of estimators."""
    found = _read("scale-cuda.json")
    rows = []
    for one in found["passes"]:
        ratios = [f"{one['ratios'][key]:.2f}" for key in ("pass", "column", "gram")]
        memory = [f"{one['memory_gib'][key] / one['memory_gib']['step']:.1f}" for key in ("pass", "column", "gram")]
        rows.append([one["network"], _scale_precision(one), _ms(one["ms"]["step"]), *ratios, *memory])
    heads = ["network", "precision", "step, ms", "`J.normal(V)`, k = 16", "k = 1", "`J.gram()`"]
    heads += ["memory, k = 16", "k = 1", "`J.gram()`"]
    parts = []
    cut = [one for one in found["passes"] if "pass in parts" in one]
    for one in cut:
        cells = [f"{one['ratios']['pass']:.2f}, {one['memory_gib']['pass'] / one['memory_gib']['step']:.1f}"]
        cells += [f"{part['time / step']:.2f}, {part['memory / step']:.1f}" for part in one["pass in parts"]]
        theirs = one["curvlinops column"] or {}
        ratio = f"{theirs['ms'] / one['ms']['column']:.1f}" if "ms" in theirs else "does not run"
        parts.append([one["network"], _scale_precision(one), *cells, ratio])
    counts = (f"{part['parts']} parts" for part in cut[0]["pass in parts"])
    titles = ["network", "precision", "whole", *counts, "curvlinops / linnet, k = 1"]
    made = found["adapters"]
    times = {name: t for name, t in made.items() if name not in ("n", "step_s")}
    doors = [[name, f"{t:.1f}", f"{t / made['step_s']:.0f}"] for name, t in times.items()]
    texts = [
        _table(heads, rows),
        "A pass with k = 16 whose chunks hold a part of the examples: time and memory, each beside a training step.",
        _table(titles, parts),
        f"Fit and prediction together, on the adapters of the 1.1 B model, {made['n']} sequences of 64 tokens:",
        _table(["estimator", "seconds", "training steps"], doors),
        "`Laplace` with its defaults on ResNet-20 with ten outputs: fit to 4,096 images, probabilities of 512.",
        _table(
            ["network", "structure", "fit, s", "predict, s", "laplace-torch: fit", "predict"],
            _scale_laplace(found["laplace"]),
        ),
    ]
    return _with_machine(found["machine"], "\n\n".join(texts))


def _scale_laplace(found: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for one in found:
        theirs = ["takes no batch norms", ""]
        if "laplace_torch_fit_s" in one:
            batch = f" (batches of {one['laplace_torch_batch']}; larger ones do not fit memory)"
            theirs = [f"{one['laplace_torch_fit_s']:.1f}{batch}", f"{one['laplace_torch_predict_s']:.2f}"]
        rows.append([one["network"], one["structure"], f"{one['fit_s']:.1f}", f"{one['predict_s']:.2f}", *theirs])
    return rows


def _scale_precision(one: dict[str, Any]) -> str:
    return "bf16" if "llama" in one["network"] else {"high": "tf32", "highest": "float32"}[one["precision"]]


def sampling_times() -> str:
    """Posterior samples of whole networks."""
    found = _read("sampling-cuda.json")
    rows = []
    for one in found["rows"]:
        lowrank = "rank" in one
        what = f"{one['what']}, rank {one['rank']}" if lowrank else f"{one['what']}, {one['samples']} samples"
        residual = "" if lowrank else f"{one['residual, highest precision']:.0e}"
        steps = "" if lowrank else f"{one['space']} space, {one['iterations']}"
        p = "" if lowrank else f"{one['p']:,}"
        rows.append([what, f"{one['n']:,}", p, f"{one['seconds']:.1f}", f"{one['peak GiB']:.0f}", steps, residual])
    titles = ["what", "examples", "parameters", "seconds", "GiB", "iterations", "residual"]
    return _with_machine(found["machine"], _table(titles, rows))


def adapters() -> str:
    """Scores and times of MiniLM with adapters, by precision and method, and the figure."""
    path = ROOT / "results" / "lora" / "metrics.json"
    if not path.exists():
        return "*No numbers yet: `python -m experiments lora --device cuda` writes them.*"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for precision, table in found["results"].items():
        for method, one in table.items():
            scores = [f"{100 * one['accuracy']['mean']:.1f} %", _with_error(one["nll"]), _with_error(one["ece"])]
            rows.append([precision, method, *scores, f"{one['seconds']:.2f}", f"{one['predicting']:.2f}"])
    titles = ["frozen weights", "method", "accuracy", "NLL", "ECE", "seconds to fit", "seconds to predict"]
    settings = found["settings"]
    said = f"{settings['machine']}; {settings['now']}; mean ± standard error over {settings['draws']} draws of labels"
    picture = "![Reliability, NLL and ECE of every method](../assets/results/lora.png)"
    return _with_machine(said, f"{_table(titles, rows)}\n\n{picture}")


def _find_experiments() -> None:
    """Let Python find the experiments, which are no part of the package that is installed."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


def claims() -> str:
    """What the papers claim and what our numbers say of it, judged anew from the metrics."""
    _find_experiments()
    from experiments.claims import judge_all, markdown

    return markdown(judge_all())


def overview() -> str:
    """The verdicts of all papers in one table, and how often the defaults are ahead on the scoreboard."""
    _find_experiments()
    from experiments.claims import count_verdicts, judge_all, overview

    found = judge_all()
    counts = json.loads((ROOT / "results" / "scoreboard" / "metrics.json").read_text(encoding="utf-8"))["counts"]
    cells = []
    for half in ("both halves", "development", "held"):
        one, five, adapt = (counts[half][f"{name} best or level"] for name in ("linnet", "linnet of 5", "linnet.adapt"))
        cells.append([half, *(f"{count['yes']} of {count['cells']}" for count in (one, five, adapt))])
    titles = ["tasks", "default, one network", "default, five networks", "`linnet.adapt`"]
    said = "On the scoreboard no other method is ahead, beyond one standard error, in so many cells:"
    return "\n\n".join([f"{count_verdicts(found)}.", overview(found), said, _table(titles, cells)])


def results() -> str:
    """One section for each experiment of `results/README.md`, with its figure."""
    lines = (ROOT / "results" / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    by_name: dict[str, list[list[str]]] = {}
    for row in cells[2:]:  # below the titles and the rule
        by_name.setdefault(row[0].split(":")[0], []).append(row)
    return "\n\n".join(_experiment(name, rows) for name, rows in by_name.items())


def _experiment(name: str, rows: list[list[str]]) -> str:
    title, source = _title(name)
    parts = [f"## {title}", f"{source}{rows[0][3]}, {rows[0][5]}."]
    if (ROOT / "results" / name / "figure.png").exists():
        parts.append(f"![What {name} found](assets/results/{name}.png)")
    for note in dict.fromkeys(row[4] for row in rows):  # rows that differ from the paper in the same way share a table
        those = [[row[0].split(":", 1)[1].strip(), row[1], row[2]] for row in rows if row[4] == note]
        parts += [_table(["measure", "paper", "linnet"], those), f"*{_capital(note)}.*"]
    return "\n\n".join(parts)


def _title(name: str) -> tuple[str, str]:
    """What an experiment is and the paper it is from: the first line of its module, in parts."""
    path = next((ROOT / "experiments").glob(f"*/{name}.py"), None)
    said = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path else None) or name
    title, _, source = said.splitlines()[0].rstrip(".").partition(" (")
    return title, f"{_capital(source.removesuffix(')'))}. " if source else ""


def _read(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))


def _with_error(value: Any) -> str:
    return f"{value['mean']:.3f}" + ("" if value["error"] is None else f" ± {value['error']:.3f}")


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _with_machine(machine: str, text: str) -> str:
    return f"*{_capital(machine)}.*\n\n{text}"


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
