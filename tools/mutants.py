"""Small wrong changes of Python source: signs, bounds, constants, axes, transposes, keywords, checks, whole terms.

Texts for people stay as they are: docstrings, messages, annotations, `__repr__`.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """Bytes start to stop of a file replaced; `lines` are those of its statement."""

    file: str
    line: int
    lines: tuple[int, int]
    start: int
    stop: int
    old: str
    new: str


SWAPPED = {"min": "max", "amin": "amax", "minimum": "maximum", "sum": "mean", "any": "all", "argmin": "argmax"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
DROPPED = {"sqrt", "square", "exp", "log", "abs", "double", "log1p", "expm1", "sigmoid", "tanh", "cumsum", "flip"}
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")}
SHARP = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
ORDER = {ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<")}
EQUAL = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
EQUAL |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
UNSEEN = {"device", "progress", "strict", "desc", "total", "unit", "disable", "stacklevel"}
"""Keywords without an effect on a CPU, on numbers, or on what is right."""
COUNTS = re.compile(r"\blen\(|shape|ndim|numel|size|count|(?<![\w.])\d+(?![\w.])")
"""A comparison of whole numbers, where the bound itself occurs; of two floats the bound is never met."""


class Finder(ast.NodeVisitor):
    """All mutants of one file. Only statements inside functions are changed: the others run on import."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.inside, self.span = False, (0, 0)
        self.visit(ast.parse(source))

    def at(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.at(node))].decode()

    def put(self, start: int, stop: int, new: str) -> None:
        if self.inside and self.source[start:stop] != new.encode():
            line = self.source.count(b"\n", 0, start) + 1
            self.found.append(Mutant(self.file, line, self.span, start, stop, self.source[start:stop].decode(), new))

    def replace(self, node: ast.AST, new: str) -> None:
        self.put(*self.at(node), new)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Another operator between two operands; comments may lie there too."""
        start, stop = self.at(left)[1], self.at(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda m: b"." * len(m[0]), self.source[start:stop])
        found = re.search(re.escape(old).replace("\\ ", r"\s+").encode(), gap)
        if found:
            self.put(start + found.start(), start + found.end(), new)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            self.span = (node.lineno, max(node.lineno, end or 0))
        super().visit(node)

    def visit_FunctionDef(self, node: Any) -> None:
        if node.name in ("__repr__", "__str__", "_repr_html_", "__dir__"):
            return
        before, self.inside = self.inside, True
        for statement in node.body:  # neither decorators, annotations nor defaults
            self.visit(statement)
        self.inside = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def skip(self, node: ast.AST) -> None: ...

    visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Assert = skip

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self.text(node.test):
            return
        if isinstance(node.body[0], ast.Raise):
            self.replace(node.test, "False")
        else:
            self.replace(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if isinstance(node.body, ast.JoinedStr) or isinstance(node.orelse, ast.JoinedStr):
            return  # a message
        self.replace(node.test, f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not re.match(r"warn|print|super|shown|bar\b|tick", self.text(node)):
            self.replace(node, "None")
            self.visit(node.value)
        elif not isinstance(node.value, (ast.Constant, ast.Call)):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if '"' in self.text(node.value):
            return  # a message
        self.replace(node, "pass")
        if type(node.op) in SIGNS:
            self.between(node.target, node.value, *(sign + "=" for sign in SIGNS[type(node.op)]))
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], (ast.Starred, ast.Constant)):
            self.replace(value, f"({self.text(value.args[0])})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SIGNS and not any(isinstance(x, (ast.JoinedStr, ast.List)) for x in ast.walk(node)):
            self.between(node.left, node.right, *SIGNS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between(node.values[0], node.values[1], old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.USub, ast.Not)):
            self.replace(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        table = EQUAL | (SHARP if COUNTS.search(self.text(node)) else ORDER)
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between(left, right, *table[type(op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, (int, float)) and node.value in (0, 1, 2, 0.5):
            self.replace(
                node, {0: "1", 1: "0" if isinstance(node.value, int) else "2.0", 2: "3", 0.5: "1.0"}[node.value]
            )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        stop = self.at(node)[1]
        if node.attr in ("T", "mT"):
            self.put(self.at(node.value)[1], stop, "")
        elif node.attr in SWAPPED:
            self.put(stop - len(node.attr), stop, SWAPPED[node.attr])
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("min", "max", "any", "all"):
            self.replace(node, SWAPPED[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        name = self.text(node.func)
        if re.search(r"warn|cast$|TypeVar|isinstance|range$|add_argument|Option$|Argument$", name):
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED and not node.args:
            self.put(self.at(node.func.value)[1], self.at(node)[1], "")
        for keyword in node.keywords:
            if keyword.arg in UNSEEN:
                continue
            if keyword.arg:
                start, stop = self.at(keyword)
                after = re.match(rb"\s*,\s*", self.source[stop:])
                self.put(start, stop + (after.end() if after else 0), "")
            self.visit(keyword.value)
        for part in (node.func, *node.args):
            self.visit(part)


def sample(sources: Mapping[str, bytes], seed: int, count: int) -> list[Mutant]:
    """Mutants of files: at most one of a line, every line with the same chance."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file, source in sources.items():
        for mutant in Finder(file, source).found:
            lines[file, mutant.line].append(mutant)
    draw, chosen = random.Random(seed), list[Mutant]()
    for file, line in draw.sample(sorted(lines), len(lines)):
        mutant = draw.choice(lines[file, line])
        if len(chosen) < count and parsed(changed(sources[file], mutant)) not in (None, parsed(sources[file])):
            chosen.append(mutant)
    return chosen


def changed(source: bytes, mutant: Mutant) -> bytes:
    """The source with the mutant in place."""
    return source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]


def parsed(source: bytes) -> str | None:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None


class Probes(ast.NodeTransformer):
    """A statement `_hits[start + line] = 1` before each statement of a function: which lines run, at full speed."""

    def __init__(self, start: int) -> None:
        self.start, self.inside = start, False

    def visit_FunctionDef(self, node: Any) -> Any:
        before, self.inside = self.inside, True
        self.generic_visit(node)
        self.inside = before
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if self.inside and isinstance(statements, list):
                probes = [ast.parse(f"_hits[{self.start + s.lineno}] = 1").body[0] for s in statements]
                pairs = [part for pair in zip(probes, statements, strict=True) for part in pair]
                is_text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
                setattr(node, field, pairs[1:] if is_text else pairs)  # a docstring stays first
        return node


def probed(source: bytes, start: int) -> bytes:
    """The source, which writes down in `line_hits.hits` the lines that run; its first line has the number start + 1."""
    tree = Probes(start).visit(ast.parse(source))
    place = next((i for i, s in enumerate(tree.body) if not isinstance(s, (ast.Expr, ast.ImportFrom))), len(tree.body))
    tree.body.insert(place, ast.parse("from line_hits import hits as _hits").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)).encode()
