"""What mkdocs writes into pages when it builds them: options of the command, and committed results.

A line ``<!-- write: NAME ARGUMENT ... -->`` of a page is replaced by what the function ``NAME`` returns, so nothing
that comes from code or from a file of numbers is copied by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures_of_results import (
    adapt_times,
    adapters,
    claims,
    convolutions,
    forgetting,
    heads_passes,
    heads_times,
    laplace_peer,
    overview,
    padding,
    passes,
    passes_figure,
    peers,
    proofs,
    results,
    sampling_times,
    scale,
)
from mkdocs.structure.files import File
from options_of_command import commands, options

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # mkdocs puts the folder of this file there alone

from docs.tools import notebooks  # noqa: E402

WRITE = re.compile(r"^<!-- write: (.+?) -->$", re.MULTILINE)
WRITERS: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        adapt_times,
        adapters,
        claims,
        commands,
        convolutions,
        forgetting,
        heads_passes,
        heads_times,
        laplace_peer,
        options,
        overview,
        padding,
        proofs,
        passes,
        peers,
        results,
        sampling_times,
        scale,
    )
}


def on_files(files: Any, config: Any) -> Any:
    """The figures of the experiments, which lie beside their numbers, that of the passes, and pages as notebooks."""
    files.append(File.generated(config, "assets/benchmarks/passes.svg", content=passes_figure()))
    for path in sorted((ROOT / "results").glob("*/figure.png")):
        uri = f"assets/results/{path.parent.name}.png"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for page in notebooks.find_pages():
        files.append(File.generated(config, f"notebooks/{page.stem}.ipynb", content=notebooks.write(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """The page with everything written that it asks for, and with a link to its notebook."""

    def written(found: re.Match[str]) -> str:
        name, *arguments = found[1].split()
        return WRITERS[name](*arguments)

    path = ROOT / "docs" / page.file.src_uri
    if path in notebooks.find_pages():
        place = "../" * page.file.src_uri.count("/") + f"notebooks/{path.stem}.ipynb"
        link = f"[This page as a notebook]({place}){{ .notebook download={path.stem}.ipynb }}"
        markdown = re.sub(r"^(# .+)$", rf"\1\n\n{link}", markdown, count=1, flags=re.MULTILINE)
    return WRITE.sub(written, markdown)
