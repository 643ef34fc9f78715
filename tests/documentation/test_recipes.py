"""The recipes that need timm or torchvision, where these are installed; `test_docs.py` runs all others."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import linnet
from docs.tools.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "recipes.md"
NEEDS = re.compile(r"^needs (\w+), not run$")


def optional() -> dict[str, Block]:
    """The blocks that need a package which is not among linnet's, by its name."""
    found = [(NEEDS.match(block.title), block) for block in blocks(PAGE.read_text(encoding="utf-8"))]
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
