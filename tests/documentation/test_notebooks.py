"""Pages as notebooks: the cells are the blocks that the tests of the pages run, and nothing of the page is lost."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from docs.tools import notebooks
from docs.tools.pages import blocks

PAGES = notebooks.find_pages()


def test_there_is_one_for_each_tutorial_and_for_users_of_other_libraries():
    names = {page.stem for page in PAGES}
    assert names >= {"adapt", "uncertainty", "represent", "compare", "language", "optimize", "coming"}
    assert len(names) == len(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_cells_are_the_blocks_of_the_page(page: Path):
    found = json.loads(notebooks.write(page))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    cells = found["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    run = [block.code.rstrip("\n") for block in blocks(page.read_text()) if notebooks.runs(block)]
    assert code == [notebooks.INSTALL, *run]
    for one in run:
        ast.parse(one)
    stated = [block.code for block in blocks(page.read_text()) if block.title == "output"]
    printed = ["".join(out["text"]) for cell in cells for out in cell.get("outputs", [])]
    assert printed == stated


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_words_are_kept_and_links_lead_to_the_site(page: Path):
    cells = notebooks.make_notebook(page)["cells"]
    words = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert "<div" not in words and "![" not in words and not words.startswith("---")
    headings = re.findall(r"^##+ .+$", page.read_text(), re.MULTILINE)
    assert headings and all(heading in words for heading in headings)
    for target in re.findall(r"\]\(([^)]+)\)", words):
        assert target.startswith(("https://", "#"))


def test_a_page_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    page = tmp_path / "docs" / "tutorials" / "x.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "# Title\n\nWords and [a link](../labels.md#methods).\n\n```python\na = 1\nprint(a)\n```\n\n"
        '```text title="output"\n1\n```\n\n![A figure\nof two lines](../assets/x.svg)\n\n<div class="sides" markdown>\n'
        '\n```python title="theirs, not run"\nimport theirs\n```\n\n</div>\n\n```bash\nls\n```\n'
    )
    title, install, code, rest = notebooks.make_notebook(page)["cells"]
    assert "".join(title["source"]) == (
        "# Title\n\nWords and [a link](https://linnet-project.github.io/linnet/labels.html#methods)."
    )
    assert "".join(install["source"]).startswith("%pip install")
    assert "".join(code["source"]) == "a = 1\nprint(a)" and code["outputs"][0]["text"] == ["1\n"]
    kept = "".join(rest["source"])
    assert (
        "import theirs" in kept and kept.endswith("```bash\nls\n```") and "x.svg" not in kept and "</div>" not in kept
    )
