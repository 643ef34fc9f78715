"""Every Python block of the documentation runs, in order, one namespace per file, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import docstrings, pages
from docs.tools.pages import ASSETS, ROOT, Ran, agree, blocks, figures, run, written

PAGES = [
    ROOT / "README.md",
    *(page for page in [ROOT / "CONTRIBUTING.md"] if page.exists()),
    *sorted((ROOT / "docs").glob("**/*.md")),
]
LARGEST = 150_000
"""Bytes of a figure."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path) -> None:
    with pages.drawing(tmp_path):
        ran = run(page, {"__name__": "__main__"})
    assert ran or page.name != "README.md", "README.md has no Python block"
    for one in ran:
        if one.stated is not None and one.stated.title == "output":
            assert agree(one.stated.code, one.printed), (
                f"{page.name}, line {one.stated.line}: the block above prints\n{one.printed}\nWrite it with "
                f"`make figures`, or `python -m docs.tools.pages {page.relative_to(ROOT)}`."
            )
    text = page.read_text(encoding="utf-8")
    for figure in figures(tmp_path):
        assert f"assets/{figure.name}" in text, f"{page.name} draws {figure.name} and does not show it"
        assert (ASSETS / figure.name).exists(), f"docs/assets/{figure.name} is missing: `make figures` writes it"


def test_figures_belong_to_pages_and_are_small() -> None:
    code = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for figure in figures(ASSETS):
        assert f'savefig("{figure.name}")' in code, f"no page draws docs/assets/{figure.name}"
        assert figure.stat().st_size < LARGEST, f"{figure.name} has {figure.stat().st_size:,} bytes"


def test_blocks_are_found_wherever_they_stand() -> None:
    text = """
```python
a = 1
```
1. a list
   ~~~python title="x"
   if a:
       b = 2
   ~~~
````text
```python
not code
```
````
`inline` ```also inline```
```
untagged
```
"""
    found = blocks(text)
    assert [(block.language, block.title, block.line) for block in found] == [
        ("python", "", 3),
        ("python", "x", 7),
        ("text", "", 11),
        ("", "", 17),
    ]
    assert found[1].code == "if a:\n    b = 2\n"


def test_pages_fail_where_they_should(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as error:
        run(page, {})
    assert error.traceback[-1].lineno + 1 == 7 and str(error.traceback[-1].path) == str(page)
    page.write_text("```py\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="a fence tagged 'py'"):
        run(page, {})
    with pytest.raises(ValueError, match="above line 2 is never closed"):
        blocks("```python\nx = 1\n")
    page.write_text('```python title="theirs, not run"\nx = (\n```\n')
    with pytest.raises(SyntaxError):
        run(page, {})
    page.write_text("```console\n$ rm -r x\n```\n")
    with pytest.raises(AssertionError, match=r"`\$ linnet ...` alone; got '\$ rm -r x'"):
        run(page, {})
    page.write_text("```console\n$ linnet info nowhere\n```\n")
    with pytest.raises(AssertionError, match="nowhere"):
        run(page, {})


def test_outputs_are_compared_and_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = '```python\nprint("n =", 3)\n```\n\n```text title="output"\n```\n\n```python\nprint(0.5)\n```\n\nend\n'
    page.write_text(text)
    ran = run(page, {})
    assert [(one.printed, one.stated is not None) for one in ran] == [("n = 3\n", True), ("0.5\n", False)]
    now = written(text, ran)
    assert now == text.replace('title="output"\n', 'title="output"\nn = 3\n')
    page.write_text(now)
    assert written(now, run(page, {})) == now
    assert written(now, [Ran("a\nb\n", blocks(now)[1])]) == now.replace("n = 3\n", "a\nb\n")


@pytest.mark.parametrize(
    ("stated", "printed", "same"),
    [
        ("accuracy 0.912", "accuracy 0.914", True),
        ("accuracy 0.912", "accuracy 0.80", False),
        ("10 labels", "11 labels", False),
        ("1,000 labels", "1,000  labels\n", True),
        ("log evidence -54.1", "log evidence -55.0", True),
        ("log evidence -54.1", "log evidence 54.1", False),
        ("4.578e+05", "4.6e+05", True),
        ("[1.    0.895]", "[1.   0.9]", True),
        ("a 1.0", "b 1.0", False),
        ("1.0 2.0", "1.0", False),
    ],
)
def test_outputs_agree_up_to_rounding(stated: str, printed: str, same: bool) -> None:
    assert agree(stated, printed) is same


def test_docstrings_become_markdown() -> None:
    text = "A.\n\n.. math:: a\n          + b\n\nWith :math:`a`.\n\n>>> 1\n1\n\nExample:\n    >>> 2\n    2"
    assert docstrings.markdown(text) == (
        "A.\n\n$$\na\n+ b\n$$\n\nWith $a$.\n\n```pycon\n>>> 1\n1\n```\n\nExamples:\n    >>> 2\n    2\n"
    )
    assert docstrings.markdown("    Args:\n        a: See :math:`b`.") == "    Args:\n        a: See $b$.\n"
    left = re.compile(r"\.\. math|:math:")
    assert not left.search(docstrings.markdown("A.\n\n    .. math:: a \\\\\n\n        b\n"))
