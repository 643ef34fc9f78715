"""Every Python block of the documentation runs, in order, one namespace per file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in [ROOT / "CONTRIBUTING.md"] if page.exists()),
    *sorted((ROOT / "docs").glob("**/*.md")),
]
# What a fence may be tagged with besides "python"; an unknown tag fails, so no block is skipped by accident.
OTHERS = {"bash", "console", "diff", "ini", "json", "make", "math", "mermaid", "text", "toml", "yaml"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, and the line its text starts on (from 1)."""

    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text; those inside a longer fence or an indented list count too."""
    found, opened, language, lines, start = [], "", "", [], 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"^(\s*)(`{3,}|~{3,})\s*([^`]*)$", line)
        if not opened and fence:
            opened, language, lines, start = fence[2], (fence[3].split() or [""])[0], [], number + 1
            indent = fence[1]
        elif opened and fence and fence[2].startswith(opened) and not fence[3]:
            found.append(Block(language, "\n".join(lines) + "\n", start))
            opened = ""
        elif opened:
            lines.append(line.removeprefix(indent))
    if opened:
        raise ValueError(f"the fence above line {start} is never closed")
    return found


def run(page: Path, namespace: dict[str, object]) -> int:
    """Run the Python blocks of a page and return their number."""
    count = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python":
            assert block.language in OTHERS, (
                f"{page.name}, line {block.line}: a fence tagged {block.language!r}; use python for code "
                f"that runs, or one of {sorted(OTHERS)}"
            )
            continue
        # The blank lines make a traceback point at the line of the page.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # files that examples write
    monkeypatch.setenv("MPLBACKEND", "Agg")
    count = run(page, {"__name__": "__main__"})
    assert count > 0 or page.name != "README.md", "README.md has no Python block"


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
    assert [(block.language, block.line) for block in found] == [
        ("python", 3),
        ("python", 7),
        ("text", 11),
        ("", 17),
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
