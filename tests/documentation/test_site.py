"""The documentation site: builds without a warning, says what the command says, and opens without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from docs.tools.pages import ROOT, blocks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
LOADED = re.compile(r"""(?:<script[^>]+src|<img[^>]+src|<link[^>]+href|<iframe[^>]+src)=["']?(?:https?:)?//[^"'\s>]+""")
COMMAND = ROOT / "docs" / "command.md"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; processes of one test run share it."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed; it comes with the extra `docs`, and with `dev`")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "index.html").exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
            env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
            built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            if built.returncode:
                shutil.rmtree(folder, ignore_errors=True)
            assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_ask_for_nothing_from_outside(site: Path) -> None:
    found = sorted(site.glob("**/*.html"))
    assert len(found) > 20
    for page in found:
        assert not LOADED.findall(page.read_text(encoding="utf-8")), page.name
    for sheet in site.glob("**/*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_nothing_is_left_unwritten(site: Path) -> None:
    for page in site.glob("**/*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<!-- write:" not in text and "--8<--" not in text, page.name
        assert ".. math::" not in text and ":math:`" not in text, page.name
    assert "How many components explain a Fisher kernel" in (site / "results.html").read_text(encoding="utf-8")
    assert "wrn-40-2" in (site / "benchmarks.html").read_text(encoding="utf-8")
    assert "## Unreleased" not in (site / "changelog.html").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import linnet

    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    for name in set(linnet.__all__) - {"__version__"}:
        assert re.search(rf'id="linnet\.[\w.]*\b{name}"', pages), f"linnet.{name} is on no page of docs/reference"


def test_the_command_page_has_every_command_and_no_other() -> None:
    from typer.main import get_command

    from linnet.cli import app

    group: Any = get_command(app)
    text = COMMAND.read_text(encoding="utf-8")
    assert set(re.findall(r"^## linnet (\w+)$", text, re.MULTILINE)) == set(group.commands)
    assert set(re.findall(r"^<!-- write: options (\w+) -->$", text, re.MULTILINE)) == set(group.commands)


def test_commands_in_the_pages_have_the_options_they_use() -> None:
    from typer.main import get_command

    from linnet.cli import app

    group: Any = get_command(app)
    seen = set()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language not in ("bash", "console"):
                continue
            for line in block.code.replace("\\\n", " ").splitlines():
                used = re.search(r"(?:^|-m |\$ )linnet (\w+)(.*)", line.split("#")[0])
                if used is None:
                    continue
                assert used[1] in group.commands, f"{page.name}: {line}"
                known = {name for param in group.commands[used[1]].params for name in param.opts}
                options = set(re.findall(r"(?<!\S)--[\w-]+", used[2]))
                assert options <= known, f"{page.name}: {sorted(options - known)} in {line}"
                seen.add(used[1])
    assert seen >= {"adapt", "predict", "uncertainty", "embed", "spectrum", "similarity", "info"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it is in `dev`")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_open_as_files(site: Path, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    errors, outside = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: outside.append(request.url) if request.url.startswith("http") else None)
    for name in ("index", "maths", "tutorials/adapt", "coming", "results", "reference/jacobian"):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_function("document.querySelectorAll('.arithmatex:not(.rendered)').length === 0")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels wider than the window"
        broken = "[...document.images].filter(i => !i.naturalWidth && i.loading !== 'lazy').map(i => i.src)"
        assert page.evaluate(broken) == []
    page.goto((site / "maths.html").as_uri())
    assert page.locator(".katex").count() > 20
    shown = page.evaluate("getComputedStyle(document.body).getPropertyValue('color-scheme') || 'none'")
    assert ("dark" in shown) == (scheme == "dark")
    assert not errors and not outside
    context.close()


def test_search_works_without_a_server(site: Path, browser: Any) -> None:
    assert len(json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]) > 50
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.wait_for_timeout(2000)  # what is typed before the page listens is lost
    page.locator("input.md-search__input").fill("leave-one-out")
    page.wait_for_selector(".md-search-result__item a", timeout=60_000)
    assert page.locator(".md-search-result__item a").count() > 0
    page.close()
