"""Measures of the architecture: ``python tools/architecture.py`` prints them.

The measures count entries of the package, modules of a folder, the longest chain of imports, lines, numeric constants,
and the modules and forward passes that a user's call goes through. Each measure is one function, and `MEASURES` lists
them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "linnet"
EXAMPLES = 2000
"""Examples on which calls are counted. The checks of a first pass run a sixteenth of many examples again."""


# The tree.


def entries() -> int:
    """Modules and packages directly in src/linnet."""
    return sum(path.suffix == ".py" or (path / "__init__.py").exists() for path in PACKAGE.iterdir())


def most_modules() -> str:
    """The largest number of modules in one folder, and the folder."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    count, folder = max((sum(1 for _ in folder.glob("*.py")), str(folder.relative_to(ROOT))) for folder in folders)
    return f"{count} in {folder}"


def lines(folder: str) -> int:
    """Lines of the Python files in a folder of the repository."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def constants() -> int:
    """Numbers, and tuples or dicts of numbers, that modules of src/linnet assign to names."""
    return sum(
        len(target.elts) if isinstance(target, ast.Tuple) else 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_numeric(node.value)
        for target in (node.targets[:1] if isinstance(node, ast.Assign) else [node.target])
    )


def _is_numeric(value: ast.expr | None) -> bool:
    match value:
        case ast.Constant():
            return isinstance(value.value, int | float) and not isinstance(value.value, bool)
        case ast.UnaryOp():
            return _is_numeric(value.operand)
        case ast.BinOp():
            return _is_numeric(value.left) and _is_numeric(value.right)
        case ast.Tuple() | ast.List() | ast.Set():
            return bool(value.elts) and all(map(_is_numeric, value.elts))
        case ast.Dict():
            return bool(value.values) and all(map(_is_numeric, value.values))
    return False


# Imports.


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of linnet by its full name, parsed."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def imports(name: str, *, types: bool = False) -> frozenset[str]:
    """Modules whose names a module imports at its top level; a name of a package stands for its defining module.

    Args:
        name: The module.
        types: Whether imports for type checkers and imports inside functions count too.
    """
    found = set()
    for node in ast.walk(modules()[name]) if types else modules()[name].body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {_defining(node.module, alias.name) for alias in node.names if node.module in modules()}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
    return frozenset(found - {name})


def _defining(module: str, name: str) -> str:
    """The module that defines a name which is imported from another module."""
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    for node in modules()[module].body:
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _defining(node.module, alias.name)
    return module


def longest_chain(*, types: bool = False) -> list[str]:
    """The longest chain of modules of which each imports the next; modules in a cycle count once, as one link."""
    reached = {name: _reached(name, types) for name in modules()}
    cycles = {name: frozenset({o for o in reached[name] if name in reached[o]} | {name}) for name in modules()}

    @cache
    def chain(cycle: frozenset[str]) -> list[str]:
        below = {cycles[other] for name in cycle for other in imports(name, types=types)} - {cycle}
        longest = max((chain(other) for other in sorted(below, key=sorted)), key=len, default=[])
        return [" = ".join(name.removeprefix("linnet.") for name in sorted(cycle)), *longest]

    return max((chain(cycle) for cycle in sorted(set(cycles.values()), key=sorted)), key=len)


def _reached(name: str, types: bool) -> set[str]:
    """Modules that a module imports, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports(waiting.pop(), types=types) - found
        found |= new
        waiting += new
    return found


# Calls.


def modules_called(call: Callable[[], object]) -> list[str]:
    """Modules of linnet whose functions a call goes through."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_globals.get("__name__", "") if event == "call" else ""
        if name.split(".")[0] == "linnet":
            seen.add(name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(seen)


class Counted(nn.Sequential):
    """A network that counts the examples which it is given."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.seen += len(x)
        return super().forward(x)


def network(c: int) -> Counted:
    """A small network with c outputs."""
    torch.manual_seed(0)
    return Counted(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, c)).double()


def inputs() -> Tensor:
    return torch.randn(EXAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def product_modules(columns: int) -> list[str]:
    """Modules that a second ``J @ V`` goes through."""
    import linnet

    J = linnet.linearize(network(3)).jacobian(inputs())
    V = torch.ones(J.shape[1], columns, dtype=torch.float64)
    return modules_called(lambda: J @ V) and modules_called(lambda: J @ V)


def laplace_modules() -> list[str]:
    """Modules that ``Laplace(structure="kron").fit`` goes through."""
    import linnet

    estimator = linnet.Laplace(network(3), "classification", structure="kron")
    y = torch.arange(EXAMPLES) % 3
    return modules_called(lambda: estimator.fit(inputs(), y))


def forwards(call: Callable[[], object]) -> float:
    """Full forward passes of a call: examples that the network is given, for each example of the data."""
    before = Counted.seen
    call()
    return (Counted.seen - before) / EXAMPLES


def door_forwards() -> Iterator[tuple[str, float]]:
    """Full forward passes of a door's call: the first call, and a second call of the same kind."""
    import linnet

    X, y = inputs(), inputs()[:, 0]
    regressor = linnet.TangentRegressor(network(1)).fit(X, y)
    classifier = linnet.TangentClassifier(network(3)).fit(X, torch.arange(EXAMPLES) % 3)
    new = X + 1
    calls: list[tuple[str, Callable[[], object]]] = [
        ("TangentRegressor.predict(return_std=True)", lambda: regressor.predict(new, return_std=True)),
        ("TangentClassifier.predict_proba", lambda: classifier.predict_proba(new)),
        ("FisherEmbedding.fit_transform", lambda: linnet.FisherEmbedding(network(1), 4).fit_transform(X)),
    ]
    for name, call in calls:
        yield f"{name}, first call", forwards(call)
        yield f"{name}, second call", forwards(call)


def measures() -> Iterator[tuple[str, object]]:
    """Every measure, with what it measures."""
    yield "entries in src/linnet", entries()
    yield "most modules in one folder", most_modules()
    for what, types in (("", False), (", types and functions included", True)):
        chain = longest_chain(types=types)
        yield f"longest chain of imports{what}", f"{len(chain)}: {' > '.join(chain)}"
    for folder in ("src", "tests", "experiments"):
        yield f"lines of {folder}", lines(folder)
    yield "module-level numeric constants", constants()
    for columns in (1, 8):
        found = product_modules(columns)
        yield f"modules of J @ V with k = {columns}", f"{len(found)}: {' '.join(found)}"
    found = laplace_modules()
    yield 'modules of Laplace(structure="kron").fit', f"{len(found)}: {' '.join(found)}"
    for name, count in door_forwards():
        yield f"full forwards of {name}", f"{count:g}"


if __name__ == "__main__":
    for what, value in measures():
        print(f"{what}: {value}")
