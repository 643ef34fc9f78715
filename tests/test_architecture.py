"""The rooms of src/linnet: what a room re-exports is all that other rooms import from it.

The order of the rooms is the contract of import-linter in pyproject.toml, which `make lint` checks.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import linnet

SOURCE = Path(linnet.__file__).resolve().parent
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def module(file: Path) -> str:
    """`linnet.data.batch` for its file."""
    parts = ("linnet", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """`data` for `linnet.data.batch`."""
    return name.split(".")[1] if "." in name else ""


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Modules of linnet and the names that a file imports from them, imports inside functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("linnet."):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("linnet."))


def packages() -> set[str]:
    """Names of rooms and of the packages inside them."""
    return {module(file) for file in FILES if file.name == "__init__.py"}


def test_rooms_import_from_the_front_of_other_rooms() -> None:
    fronts = packages() | {module(file) for file in SOURCE.glob("*.py")}
    reaching = [
        f"{module(file)} imports {name or '...'} from {source}"
        for file in FILES
        for source, name in imports(file)
        if room(source) != room(module(file)) and source not in fronts
    ]
    assert not reaching, "\n".join(reaching)


def test_every_room_says_its_purpose_in_one_line() -> None:
    for name in packages():
        doc = ast.get_docstring(ast.parse((SOURCE.parent / name.replace(".", "/") / "__init__.py").read_text("utf-8")))
        assert doc and doc.splitlines()[0].endswith("."), f"{name} has no purpose in its first line"


def test_no_module_is_shadowed_by_a_name_of_its_package() -> None:
    for name in packages():
        folder = SOURCE.parent / name.replace(".", "/")
        modules = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
        taken = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module != name
            for alias in node.names
        }
        assert not taken & modules, f"{name} has modules and names that are both called {sorted(taken & modules)}"


def test_chains_of_imports_are_short() -> None:
    """A module that needs another for its types alone imports it under TYPE_CHECKING; see CONTRIBUTING.md."""
    file = SOURCE.parent.parent / "tools" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", file)
    assert spec is not None and spec.loader is not None
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    chain = measured.longest_chain()
    assert len(chain) <= 14, " > ".join(chain)


def test_folders_are_small() -> None:
    entries = [p for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    assert len(entries) <= 26
    for name in packages():
        assert len(list((SOURCE.parent / name.replace(".", "/")).glob("*.py"))) <= 16, name
