"""The code in the pages: runs it, compares what it prints with what the page says, and draws the figures.

A ``python`` fence runs, in order, in one namespace per page. A ``text`` fence with ``title="output"`` right below one
is what it prints. A ``python`` fence whose title ends with "not run" is only read. Lines ``$ linnet ...`` of a
``console`` fence run too; the ``text`` fence below, with ``title="printed"``, has times in it and is written but not
compared. Figures that a page saves belong to ``docs/assets``. ``python -m docs.tools.pages [PAGE ...]`` writes all of
it anew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
OTHERS = {"bash", "console", "diff", "ini", "json", "make", "math", "text", "toml", "yaml"}
"""What a fence may be tagged with besides "python"; an unknown tag is an error, so no block is skipped by accident."""

RELATIVE = 0.05
"""Numbers of an output may differ by this share, or by three units of their last digit, as other machines round."""

STYLE = {
    "figure.figsize": (6.4, 3.2),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 140,
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": "cycler('color', ['#00796b', '#e64a19', '#5e35b1', '#f9a825', '#546e7a'])",
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "linnet",
}
"""How matplotlib draws in the pages."""

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its title, its text, and the line its text starts on (from 1)."""

    language: str
    title: str
    code: str
    line: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What a block printed, and the block that says what it prints, if there is one."""

    printed: str
    stated: Block | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text; those inside a longer fence or an indented list count too."""
    found, opened, head, lines, start = [], "", "", [], 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"^(\s*)(`{3,}|~{3,})\s*([^`]*)$", line)
        if not opened and fence:
            opened, head, lines, start = fence[2], fence[3], [], number + 1
            indent = fence[1]
        elif opened and fence and fence[2].startswith(opened) and not fence[3]:
            title = re.search(r'title="([^"]*)"', head)
            language = (head.split() or [""])[0]
            found.append(Block(language, title[1] if title else "", "\n".join(lines) + "\n", start))
            opened = ""
        elif opened:
            lines.append(line.removeprefix(indent))
    if opened:
        raise ValueError(f"the fence above line {start} is never closed")
    return found


def run(page: Path, namespace: dict[str, object]) -> list[Ran]:
    """Run the Python blocks of a page; what each of them printed."""
    found = blocks(page.read_text(encoding="utf-8"))
    ran = []
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block.language == "console":
            ran.append(Ran(_commands(block.code), after if after is not None and after.title == "printed" else None))
            continue
        if block.language != "python":
            assert block.language in OTHERS, (
                f"{page.name}, line {block.line}: a fence tagged {block.language!r}; use python for code "
                f"that runs, or one of {sorted(OTHERS)}"
            )
            continue
        if block.title.endswith("not run"):
            ast.parse(block.code)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The blank lines make a traceback point at the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        stated = after if after is not None and after.title == "output" else None
        ran.append(Ran(printed.getvalue(), stated))
    return ran


def _commands(code: str) -> str:
    """Run the `linnet` commands of a console block, in this process."""
    from typer.testing import CliRunner

    from linnet.cli import app

    printed = ""
    for line in code.replace("\\\n", " ").splitlines():
        _, *words = shlex.split(line.removeprefix("$ "))
        assert line.startswith("$ linnet "), f"a console block has `$ linnet ...` alone; got {line!r}"
        result = CliRunner().invoke(app, words, env={"COLUMNS": "96", "TERM": "dumb"})
        assert result.exit_code == 0, f"{line}\n{result.output}"
        printed += result.output
    return printed.strip("\n") + "\n"


def agree(stated: str, printed: str) -> bool:
    """Whether two outputs have the same words and, up to rounding, the same numbers.

    >>> agree("accuracy 0.912, 30 labels", "accuracy 0.914, 30  labels"), agree("accuracy 0.912", "accuracy 0.7")
    (True, False)
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (stated, printed)]
    numbers = [NUMBER.findall(text) for text in (stated, printed)]
    return words[0] == words[1] and all(_near(*pair) for pair in zip(*numbers, strict=True))


def _near(stated: str, printed: str) -> bool:
    a, b = (float(text.replace(",", "")) for text in (stated, printed))
    decimals = re.search(r"\.(\d+)", stated)
    exponent = re.search(r"e([-+]?\d+)", stated)
    last = 10.0 ** (int(exponent[1]) if exponent else 0) / 10 ** len(decimals[1] if decimals else "")
    # Counts are exact: what has neither a decimal point nor an exponent has no last digit that rounding could change.
    slack = 3 * last if decimals or exponent else 0.0
    return math.isclose(a, b, rel_tol=RELATIVE if slack else 1e-12, abs_tol=slack * 1.0001)


@contextlib.contextmanager
def drawing(folder: Path) -> Iterator[None]:
    """Work in a folder, with matplotlib drawing as in the pages, into files that do not change from day to day."""
    import matplotlib

    here, before = os.getcwd(), os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    os.chdir(folder)
    try:
        with matplotlib.rc_context(), warnings.catch_warnings():
            matplotlib.use("Agg")
            matplotlib.rcParams.update(STYLE)
            yield
    finally:
        import matplotlib.pyplot as plt

        plt.close("all")
        os.chdir(here)
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before


def figures(folder: Path) -> list[Path]:
    """The figures that a page has drawn in its folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".png", ".svg"))


def written(text: str, ran: list[Ran]) -> str:
    """The page's text with the outputs as they were printed."""
    lines = text.splitlines(keepends=True)
    for one in reversed([one for one in ran if one.stated is not None]):
        assert one.stated is not None
        start, count = one.stated.line - 1, one.stated.code.count("\n")
        count = 0 if one.stated.code == "\n" else count
        lines[start : start + count] = [line.rstrip() + "\n" for line in one.printed.rstrip().splitlines()]
    return "".join(lines)


def update(page: Path) -> None:
    """Write a page's outputs and figures anew."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        with drawing(Path(name)):
            ran = run(page, {"__name__": "__main__"})
        drawn = figures(Path(name))
        for path in drawn:
            shutil.copy(path, ASSETS / path.name)
    text = page.read_text(encoding="utf-8")
    page.write_text(written(text, ran), encoding="utf-8")
    print(f"{page.relative_to(ROOT)}: {len(ran)} blocks, {len(drawn)} figures, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    for path in [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "docs").glob("**/*.md")):
        update(path)
