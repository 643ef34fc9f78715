"""Which engine serves which layer, and how many examples make a chunk.

Costs are counted in multiply-adds per example, for c outputs, k columns, and a layer whose weight (dg x dx, P entries)
is used T times per example:

* rows: form the per-example gradient, c T P, then multiply, c P k;
* bilinear: multiply the input by all columns, T P k, then contract with the gradients, c T dg k;
* ghost: per pair of examples, T^2 (dx + c^2 dg) against c^2 P for rows;
* autodiff: a forward-mode pass costs about 2.5 forward passes per column, a reverse-mode pass about 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from linnet._common import format_bytes
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock
from linnet.jacobian.blocks.composite import SumBlock, cut_by_layer
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock

if TYPE_CHECKING:
    from linnet.jacobian.passes import Pass

Request = Literal["matmul", "rmatmul", "fused", "gram", "diag", "squares", "sides"]
Engine = Literal["auto", "rows", "bilinear", "ghost", "autodiff"]

PRODUCTS = ("matmul", "rmatmul", "fused")

MANY, CHEAP = 16, 1e9
"""Outputs for each column, and multiply-adds of all rows of an example, above which estimates from columns replace
exact numbers from rows. Smaller numbers save time, and larger numbers keep exact answers for more networks: an example
whose rows are cheap takes about 0.03 seconds of a CPU core."""

PLAN_COLUMNS = 32
"""Columns for which a printed plan names engines and counts cost."""


def check_engine(engine: str) -> None:
    """Raise unless ``engine`` is one of the names."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {', '.join(map(repr, get_args(Engine)))}; got {engine!r}.")


def choose(block: ColumnBlock, request: Request, *, k: int, engine: Engine = "auto") -> str:
    """The engine for one block: "rows", "bilinear", "ghost" or "autodiff"."""
    if not isinstance(block, OuterProductBlock | EmbeddingBlock | LazyBlock | SumBlock):
        return "rows" if isinstance(block, DenseBlock) else "autodiff"
    factored = "bilinear" if request in PRODUCTS else "ghost"
    if request == "sides" and not isinstance(block, SumBlock):  # the two sides of an outer product, wherever it is one
        return factored
    if engine in ("rows", factored):
        return engine
    if isinstance(block, SumBlock):
        tokens = any(isinstance(part, EmbeddingBlock) for part in block.parts)
        return factored if tokens and request in PRODUCTS else "rows"
    return factored if _factored_wins(block, request, k) else "rows"


def _factored_wins(block: ColumnBlock, request: Request, k: int) -> bool:
    s, c = block.size, block.c
    if isinstance(block, EmbeddingBlock):
        return request != "gram" or block.vocabulary > s.T**2
    if request in PRODUCTS:
        return s.T * k * (s.dx + c) < c * s.dx * (s.T + k)
    if request == "gram":
        return s.T**2 * (s.dx + c**2 * s.dg) < c**2 * s.dx * s.dg
    if request == "diag":
        return s.T * (s.dx + s.dg) < s.dx * s.dg
    return isinstance(block, OuterProductBlock) and s.T == 1


def prepare(block: ColumnBlock, request: Request, *, k: int, engine: Engine = "auto") -> ColumnBlock:
    """The block in the form that its engine works on."""
    chosen = choose(block, request, k=k, engine=engine)
    if chosen == "rows":
        if isinstance(block, LazyBlock) and request in PRODUCTS:
            return block.for_products()
        return block.expand()
    if chosen == "autodiff" and request not in PRODUCTS:
        return block.expand()
    if not isinstance(block, LazyBlock):
        return block.widen()
    return block.for_few() if request in PRODUCTS else block.as_outer_product()


def has_many_outputs(blocks: Sequence[ColumnBlock], c: int, k: int) -> bool:
    """Whether c rows of an example, a backward pass each, cost far more than k columns, a forward pass each.

    Args:
        blocks: Columns of the Jacobian, as the first examples show them.
        c: Outputs.
        k: Columns that answer the same question.
    """
    each = sum(max(f.size.groups * f.size.T * f.size.dx * f.size.dg, f.q) for f in blocks)
    return c > MANY * k and c * each > CHEAP


def autodiff_wins(request: Request, *, k: int, c: int) -> bool:
    """Whether differentiating column by column beats c backward passes with captures."""
    captured = 1 + c + min(c, k)
    if request == "matmul":
        return 2.5 * k < captured
    if request == "rmatmul":
        return 1 + 2 * k <= captured
    return request == "fused" and 1 + 4.5 * k < captured


@dataclass(frozen=True)
class PlanLine:
    """One layer in the plan.

    Attributes:
        layer: Its name.
        rule: The rule that serves it.
        parameters: How many of them are selected.
        uses: How often an example uses its weight.
        products: Engine of products.
        gram: Engine of Gram matrices.
        cost: Multiply-adds per example of ``J^T J V`` with 32 columns, beside the forward and the backward passes; None
            where it is left to autodiff.
    """

    layer: str
    rule: str
    parameters: int
    uses: int
    products: str
    gram: str
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """What a Jacobian will do; print it.

    Attributes:
        lines: One per layer.
        shape: Of the Jacobian.
        n: Examples.
        c: Outputs.
        chunk: Examples per chunk.
        per_example: Bytes that an example takes in a chunk.
        budget: Bytes that a chunk may take.
        data: What the data is.
        note: Where and how it is computed.
    """

    lines: tuple[PlanLine, ...]
    shape: tuple[int, int]
    n: int
    c: int
    chunk: int
    per_example: int
    budget: int
    data: str
    note: str

    def __str__(self) -> str:
        head = [
            f"Jacobian ({self.shape[0]:,} x {self.shape[1]:,}): {self.n:,} examples ({self.data}), {self.c} outputs, "
            f"{self.note}",
            f"chunks of {self.chunk:,} examples, {format_bytes(self.per_example)} each, within "
            f"{format_bytes(self.budget)}",
        ]
        titles = ("layer", "rule", "parameters", "uses", "products", "gram", f"cost (k = {PLAN_COLUMNS})")
        body = [
            (
                line.layer,
                line.rule,
                f"{line.parameters:,}",
                f"{line.uses:,}",
                line.products,
                line.gram,
                "?" if line.cost is None else _count(line.cost),
            )
            for line in self.lines
        ]
        widths = [max(len(row[i]) for row in [titles, *body]) for i in range(len(titles))]
        right = (False, False, True, True, False, False, True)
        table = [
            "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
            for row in [titles, *body]
        ]
        return "\n".join(line.rstrip() for line in head + table)

    __repr__ = __str__


def describe(passes: Pass) -> Plan:
    """The plan of a Jacobian."""
    s, lin, chunks = passes.settings, passes.lin, passes.chunks
    first, assignment = chunks.first, lin.rules.last
    found: dict[str, tuple[int, set[str], set[str]]] = {}
    costs: dict[str, float] = {}
    for block in first.blocks:
        if not isinstance(block, DenseBlock | OuterProductBlock | EmbeddingBlock | LazyBlock | SumBlock):
            continue  # autodiff's
        for layer, cut in cut_by_layer(block, lin.layout):
            part = cut.with_outputs(first.c)
            uses, products, gram = found.get(layer, (0, set(), set()))
            products = products | {choose(part, "fused", k=PLAN_COLUMNS, engine=s.engine)}
            gram = gram | {choose(part, "gram", k=1, engine=s.engine)}
            found[layer] = (max(uses, part.size.T), products, gram)
            costs[layer] = costs.get(layer, 0) + fused_cost(part, k=PLAN_COLUMNS, engine=s.engine)
    lines = []
    for layer, names in lin.layout.layers.items():
        rules = dict.fromkeys(assignment.rules.get(name, "") for name in names)
        unused = all(name in assignment.unused for name in names)
        rest = any(name in assignment.rest for name in names)
        uses, products, gram = found.get(layer, (0, set(), set()))
        if s.engine == "autodiff":
            products, gram = {"autodiff"}, {"autodiff rows"}
        elif rest:
            products, gram = products | {"autodiff"}, gram | {"autodiff rows"}
        lines.append(
            PlanLine(
                layer=layer,
                rule=" + ".join(r for r in rules if r) or ("unused" if unused else "none"),
                parameters=sum(lin.layout.shapes[name].numel() for name in names),
                uses=uses,
                products=", ".join(sorted(products)) or "zero",
                gram=", ".join(sorted(gram)) or "zero",
                cost=None if rest or s.engine == "autodiff" else costs.get(layer, 0),
            )
        )
    world = lin.ranks.world
    network, total = (str(dtype).removeprefix("torch.") for dtype in (lin.network.row_dtype, lin.dtype))
    kinds = network if network == total else f"{network}, products in {total},"
    note = f"{kinds} on {lin.device}, precision {s.precision}"
    note = note if world == 1 else f"{note}, {world} ranks"
    shards = lin.network.shards
    return Plan(
        lines=tuple(lines),
        shape=(chunks.n * first.c, lin.p),
        n=chunks.n,
        c=first.c,
        chunk=passes.chunk_size(),
        per_example=first.per_example,
        budget=passes.chunk_room,
        data=chunks.kind,
        note=note if shards is None else f"{note}, {shards.describe()}",
    )


def fused_cost(block: ColumnBlock, *, k: int, engine: Engine = "auto") -> float:
    """Multiply-adds per example of ``J^T J V`` in one block, with the engine that would be chosen."""
    s, c = block.size, block.c
    if choose(block, "fused", k=k, engine=engine) == "bilinear":
        return 2 * s.groups * s.T * k * s.dg * (s.dx + c)
    return c * (s.groups * s.T * s.dx * s.dg + 2 * s.q * k)


def gram_cost(block: ColumnBlock) -> float:
    """Multiply-adds of the Gram matrix of one block for a pair of examples, with the engine that would be chosen."""
    s, c = block.size, block.c
    if choose(block, "gram", k=1) == "ghost":
        return s.groups * s.T**2 * (s.dx + c**2 * s.dg)
    return c**2 * s.q


def chunk_size(n: int, per_example: int, limit: int) -> int:
    """Examples per chunk within a limit of bytes, all chunks about alike.

    >>> chunk_size(100, 1, 60), chunk_size(100, 1, 1000)
    (50, 100)
    """
    most = max(1, min(n, limit // max(1, per_example)))
    return -(-n // -(-n // most))


def working_size(blocks: Sequence[ColumnBlock], itemsize: int) -> int:
    """Bytes per example of the rows of all blocks, of the largest patches of a convolution, and of what is formed."""
    rows = sum(f.c * f.q for f in blocks if not isinstance(f, EmbeddingBlock))
    patches = max((f.size.groups * f.size.T * f.size.dx for f in blocks if isinstance(f, LazyBlock)), default=0)
    formed = sum(f.formed // f.n for f in blocks if isinstance(f, EmbeddingBlock))
    return itemsize * (rows + patches) + formed


def sides_size(blocks: Sequence[ColumnBlock], itemsize: int) -> int:
    """Bytes per example of the patches of all convolutions, and of copies of the longest block."""
    each = [(f.size.groups * f.size.T * f.size.dx, f.c * f.size.groups * f.size.T * f.size.dg) for f in blocks]
    patches = sum(x for f, (x, _) in zip(blocks, each, strict=True) if isinstance(f, LazyBlock))
    return itemsize * (patches + max((x + 2 * g for x, g in each), default=0))


def _count(number: float) -> str:
    for unit in ("", " k", " M", " G"):
        if number < 1000 or unit == " G":
            return f"{number:.0f}{unit}" if unit == "" or number >= 100 else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError
