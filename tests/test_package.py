"""What a package index, a citation and a conda channel say about linnet agrees."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_everywhere():
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert citation and citation[1] == PROJECT["version"]
    recipe = ROOT / "conda" / "recipe.yaml"
    if not recipe.exists():
        pytest.skip("the sdist has no conda recipe")
    version = re.search(r'^  version: "(\S+)"$', recipe.read_text(), re.M)
    assert version and version[1] == PROJECT["version"]


def test_the_conda_recipe_has_the_requirements_of_the_package():
    recipe = ROOT / "conda" / "recipe.yaml"
    if not recipe.exists():
        pytest.skip("the sdist has no conda recipe")
    run = recipe.read_text().partition("  run:\n")[2].partition("tests:")[0]
    given = {line.strip("- \n") for line in run.splitlines()} - {""}
    wanted = {
        re.sub(r"([a-z-]+)(>=)", r"\1 \2", need).replace("torch ", "pytorch ") for need in PROJECT["dependencies"]
    }
    assert given == wanted | {f"python {PROJECT['requires-python']}"}


def test_third_party_imports_are_declared():
    # Imports of linnet that are neither in the standard library nor required must come with an extra.
    declared = {re.split(r"[><=\[]", need)[0].lower().replace("-", "_") for need in PROJECT["dependencies"]}
    extras = {
        re.split(r"[><=\[]", need)[0].lower().replace("-", "_")
        for name, needs in PROJECT["optional-dependencies"].items()
        for need in needs
        if name not in ("dev", "docs")
    }
    names = {"sklearn": "scikit_learn", "PIL": "pillow"}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"linnet"}:
                found.setdefault(names.get(name, name).lower(), set()).add(path.name)
    optional = {"timm", "transformers", "peft", "triton", "ray"}  # what users bring: networks, launchers, a GPU
    undeclared = {name: files for name, files in found.items() if name not in declared | extras | optional}
    assert undeclared == {}
