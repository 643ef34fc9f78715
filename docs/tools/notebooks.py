"""Pages as Jupyter notebooks: the blocks that run become cells, with the outputs that the page states.

The site holds a notebook of each tutorial and of the page for users of other libraries. The tests run the blocks of the
pages, and compare them with the cells. ``python -m docs.tools.notebooks FOLDER`` writes the notebooks into a folder.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from docs.tools.pages import ROOT, Block, blocks

SITE = "https://linnet-project.github.io/linnet/"
INSTALL = "%pip install 'linnet[demo,botorch,transformers]' peft"
MARKUP = re.compile(r"^(</?div.*>|---|hide:|  - toc|!\[.*)$")


def find_pages() -> list[Path]:
    """The pages that are notebooks too."""
    return [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "coming.md"]


def runs(block: Block) -> bool:
    """Whether a block is a cell."""
    return block.language == "python" and not block.title.endswith("not run")


def make_notebook(page: Path) -> dict[str, Any]:
    """The page as a notebook, in format 4.5.

    Args:
        page: A Markdown page below ``docs``.
    """
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    cells: list[dict[str, Any]] = []
    last = 0  # line, from 0, after the blocks so far
    for block in blocks(text):
        output = block.language == "text" and block.title == "output"
        if not runs(block) and not output:
            continue
        start, count = block.line - 1, block.code.count("\n") if block.code != "\n" else 0
        _add_words(cells, lines[last : start - 1], page)
        if output:
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": _split(block.code)}]
        else:
            cells.append(_make_cell("code", block.code.rstrip("\n"), len(cells)))
        last = start + count + 1
    _add_words(cells, lines[last:], page)
    cells.insert(1, _make_cell("code", INSTALL, len(cells)))
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}


def _add_words(cells: list[dict[str, Any]], lines: list[str], page: Path) -> None:
    kept: list[str] = []
    hidden = False  # inside an image, whose description may take several lines
    for line in lines:
        hidden = hidden or line.startswith("![")
        if not hidden and not MARKUP.match(line) and not line.startswith("<!-- write:"):
            kept.append(line)
        hidden = hidden and not line.rstrip().endswith(")")
    words = re.sub(r"\]\((?!https?:|#)([^)#]+?)(?:\.md)?(#[^)]*)?\)", lambda found: _link(found, page), "\n".join(kept))
    if words.strip():
        cells.append(_make_cell("markdown", words.strip(), len(cells)))


def _link(found: re.Match[str], page: Path) -> str:
    """A link to the page on the site, from the folder of this page."""
    target = (page.parent / found[1]).resolve().relative_to(ROOT / "docs")
    return f"]({SITE}{target.as_posix()}.html{found[2] or ''})"


def _make_cell(kind: str, source: str, number: int) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _split(source)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _split(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def write(page: Path) -> str:
    """The text of a notebook file."""
    return json.dumps(make_notebook(page), indent=1) + "\n"


if __name__ == "__main__":
    (folder,) = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for one in find_pages():
        (folder / f"{one.stem}.ipynb").write_text(write(one), encoding="utf-8")
