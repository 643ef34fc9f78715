"""Blocks of pages that need other libraries, where these are installed; `test_docs.py` runs all others."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from docs.tools.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "recipes.md"
COMING = ROOT / "docs" / "coming.md"
NEEDS = re.compile(r"^needs (\w+), not run$")


def optional(page: Path = PAGE) -> dict[str, Block]:
    """The blocks that need a package which is not among linnet's, by its name."""
    found = [(NEEDS.match(block.title), block) for block in blocks(page.read_text(encoding="utf-8"))]
    return {name[1]: block for name, block in found if name}


def test_which_recipes_there_are() -> None:
    titles = {line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")}
    assert len(titles) == 9 and set(optional()) == {"timm", "torchvision"}
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        assert NEEDS.match(block.title) or block.title in ("", "output"), f"line {block.line} is never run"


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_recipes_with_other_packages(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    block = optional()[package]
    namespace = {"torch": torch, "nn": nn, "linnet": linnet}
    exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), namespace)
    clf, images = namespace["clf"], namespace["images"]
    again = linnet.load(tmp_path / f"{package}.safetensors", clf.model)
    torch.testing.assert_close(again.predict_proba(images), clf.predict_proba(images), rtol=1e-6, atol=1e-6)


def test_which_libraries_around_laplace_torch_there_are() -> None:
    assert set(optional(COMING)) == {"torch_uncertainty", "lightning_uq_box", "probly"}


@pytest.mark.parametrize("package", ["torch_uncertainty", "lightning_uq_box", "probly"])
def test_libraries_around_laplace_torch(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks run after those of the page that they read names from."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    found = blocks(COMING.read_text(encoding="utf-8"))
    block = optional(COMING)[package]
    first = [b for b in found if b.language == "python" and b.line < block.line and b.title in ("", "linnet")]
    namespace: dict[str, object] = {}
    for part in [*first, block]:
        exec(compile("\n" * (part.line - 1) + part.code, str(COMING), "exec"), namespace)
    if package == "probly":
        total, of_weights = (np.asarray(namespace[name]) for name in ("total", "of_weights"))
        assert total.shape == (369,) and bool((total >= of_weights).all())
    else:
        p = namespace["p"]
        assert isinstance(p, torch.Tensor) and p.shape == (369, 2)
        torch.testing.assert_close(p.sum(1), torch.ones(369, dtype=p.dtype))
