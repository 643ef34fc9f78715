"""`check_operator`: what every linear operator of linnet promises, product by product."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from linnet.linalg import LinearOperator

OPTIONAL = ("normal", "fused", "gram", "gram_diag", "gram_blocks", "column_norms")


def check_operator(
    op: LinearOperator,
    dense: Tensor,
    *,
    rtol: float = 1e-9,
    blocks: int | None = None,
    other: tuple[LinearOperator, Tensor] | None = None,
    allow: Collection[str] = (),
    seed: int = 0,
) -> None:
    r"""Hold an operator against the dense matrix it stands for.

    Checked, with random operands: shape, dtype, `A @ v`, `A @ V` (V strided), `A.T @ u`, `A.T @ U`, `A.T.T`,
    the adjoint identity, `normal` without weight, with a diagonal and with a block-diagonal one, `fused` with
    a nonlinear function, `gram`, `gram_diag`, `gram_blocks` (where the operator has a `block`) and
    `column_norms` with their scales and weights; that no operand is changed in place; and that operands of a
    wrong shape or dtype are refused by a text that names what was needed. References are computed in float64.
    The relative error of a product is

    .. math:: \max |\mathrm{got} - \mathrm{reference}| \; / \; \max |\mathrm{reference}|.

    Args:
        op: The operator, shape (rows, cols).
        dense: The matrix, (rows, cols).
        rtol: The largest relative error accepted.
        blocks: c, to check weights of shape (rows / c, c, c) too; they are not symmetric.
        other: Another operator with the same number of columns, and its matrix, for `gram(other)`.
        allow: Methods that may raise NotImplementedError, among "normal", "fused", "gram", "gram_diag",
            "gram_blocks" and "column_norms".
        seed: Seeds the operands.

    Raises:
        AssertionError: Naming the first product that disagrees, its relative error and its worst entry.

    Example:
        >>> from linnet.linalg.matrices import Matrix
        >>> check_operator(Matrix(torch.eye(3)), torch.eye(3), rtol=1e-6)
        >>> check_operator(Matrix(2 * torch.eye(3)), torch.eye(3), rtol=1e-6)
        Traceback (most recent call last):
        AssertionError: A @ v disagrees with the dense matrix: relative error 1.0e+00, above rtol 1.0e-06...
    """
    unknown = sorted(set(allow) - set(OPTIONAL))
    if unknown:
        raise ValueError(f"allow takes names among {', '.join(OPTIONAL)}; got {', '.join(unknown)}.")
    rows, cols = dense.shape
    if blocks is not None and rows % blocks:
        raise ValueError(f"blocks must divide the {rows} rows of the matrix; got {blocks}.")
    _require(tuple(op.shape) == (rows, cols), f"A.shape is {tuple(op.shape)}, needed {(rows, cols)}")
    _require(tuple(op.T.shape) == (cols, rows), f"A.T.shape is {tuple(op.T.shape)}, needed {(cols, rows)}")
    _require(op.T.T is op, "A.T.T is not A itself")
    _require(op.dtype == dense.dtype, f"A.dtype is {op.dtype}, needed {dense.dtype}")

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return x.to(op.device, op.dtype)

    # Operands by name, and the same numbers in float64 for the references.
    x = {"v": draw(cols), "V": draw(3, cols).T, "u": draw(rows), "U": draw(rows, 3), "w": draw(rows), "s": draw(cols)}
    if blocks is not None:
        x["W"] = draw(rows // blocks, blocks, blocks)
    exact = {name: tensor.to("cpu", torch.float64, copy=True) for name, tensor in x.items()}
    check = _Check(rtol, allow, x, exact)
    _products(op, dense.detach().to("cpu", torch.float64), check)
    if other is not None:
        _cross_grams(op, dense.detach().to("cpu", torch.float64), other, check)
    _refusals(op, check)


def _products(op: LinearOperator, A: Tensor, check: _Check) -> None:
    x = check.operands
    v, V, u, U, w, s = (check.exact[name] for name in ("v", "V", "u", "U", "w", "s"))

    def tanh(out: Tensor, _: object) -> Tensor:
        return out.tanh()

    Av = check("A @ v", lambda: op @ x["v"], A @ v)
    check("A @ V", lambda: op @ x["V"], A @ V)
    check("A @ V with one column", lambda: op @ x["V"][:, :1], A @ V[:, :1])
    Atu = check("A.T @ u", lambda: op.T @ x["u"], A.T @ u)
    check("A.T @ U", lambda: op.T @ x["U"], A.T @ U)
    # Each side from its own product, relative to the size of the vectors: the inner product may be near zero.
    size = float(u.norm() * (A @ v).norm()) or 1.0
    assert Av is not None and Atu is not None
    check("<u, A v> - <A.T u, v>", lambda: (Av @ x["u"] - x["v"] @ Atu) / size, torch.zeros((), dtype=torch.float64))
    check("normal(v)", lambda: op.normal(x["v"]), A.T @ (A @ v))
    check("normal(V)", lambda: op.normal(x["V"]), A.T @ (A @ V))
    check("normal(V, w) with w (rows,)", lambda: op.normal(x["V"], x["w"]), A.T @ (w[:, None] * (A @ V)))
    check("fused(tanh, v)", lambda: op.fused(tanh, x["v"]), A.T @ (A @ v).tanh())
    check("fused(tanh, V)", lambda: op.fused(tanh, x["V"]), A.T @ (A @ V).tanh())
    check("gram()", lambda: op.gram(), A @ A.T)
    check("gram(scale)", lambda: op.gram(scale=x["s"]), (A * s) @ A.T)
    check("gram_diag()", lambda: op.gram_diag(), (A * A).sum(1))
    check("gram_diag(scale)", lambda: op.gram_diag(scale=x["s"]), (A * A) @ s)
    check("column_norms()", lambda: op.column_norms(), (A * A).sum(0))
    check("column_norms(w) with w (rows,)", lambda: op.column_norms(x["w"]), w @ (A * A))
    if op.block is not None:
        X = A.unflatten(0, (-1, op.block))
        check("gram_blocks()", lambda: op.gram_blocks(), X @ X.mT)
        check("gram_blocks(scale)", lambda: op.gram_blocks(scale=x["s"]), (X * s) @ X.mT)
    if "W" in x:
        WA = torch.block_diag(*check.exact["W"]) @ A
        check("normal(V, W) with W (n, c, c)", lambda: op.normal(x["V"], x["W"]), A.T @ (WA @ V))
        check("column_norms(W) with W (n, c, c)", lambda: op.column_norms(x["W"]), (A * WA).sum(0))


def _cross_grams(op: LinearOperator, A: Tensor, other: tuple[LinearOperator, Tensor], check: _Check) -> None:
    B = other[1].detach().to("cpu", torch.float64)
    check("gram(other)", lambda: op.gram(other[0]), A @ B.T)
    check("gram(other, scale)", lambda: op.gram(other[0], check.operands["s"]), (A * check.exact["s"]) @ B.T)


def _refusals(op: LinearOperator, check: _Check) -> None:
    (rows, cols), v = op.shape, check.operands["v"]
    wide, tall = v.new_zeros(cols + 1), v.new_zeros(rows + 1)
    wrong = torch.float32 if op.dtype == torch.float64 else torch.float64
    check.refused(f"A @ V with V ({cols + 1},)", lambda: op @ wide, cols)
    check.refused(f"A @ V with V ({cols}, 1, 1)", lambda: op @ v[:, None, None], cols)
    check.refused(f"A @ V with V in {wrong}", lambda: op @ v.to(wrong), op.dtype)
    check.refused(f"A.T @ U with U ({rows + 1},)", lambda: op.T @ tall, rows)
    check.refused(f"normal(V) with V ({cols + 1},)", lambda: op.normal(wide), cols)
    check.refused(f"normal(V, w) with w ({rows + 1},)", lambda: op.normal(v, tall), rows)
    check.refused(f"gram(scale) with scale ({cols + 1},)", lambda: op.gram(scale=wide), cols)
    check.refused(f"gram_diag(scale) with scale ({cols + 1},)", lambda: op.gram_diag(scale=wide), cols)
    if op.block is not None:
        check.refused(f"gram_blocks(scale) with scale ({cols + 1},)", lambda: op.gram_blocks(scale=wide), cols)
    check.refused(f"column_norms(w) with w ({rows + 1},)", lambda: op.column_norms(tall), rows)


@dataclass(slots=True)
class _Check:
    """Compares one product after the other; `operands` are what the products are given."""

    rtol: float
    allow: Collection[str]
    operands: dict[str, Tensor]
    exact: dict[str, Tensor]
    skipped: set[str] = field(default_factory=set)

    def __call__(self, what: str, product: Callable[[], Tensor], reference: Tensor) -> Tensor | None:
        """Compare a product with its reference. Returns the product, or None if the product may be missing and is."""
        method = what.partition("(")[0]
        try:
            got = product()
        except NotImplementedError as error:
            if method in self.allow:
                self.skipped.add(method)
                return None
            raise AssertionError(f"{what} is not implemented ({error}); allow=({method!r},) accepts that") from error
        for name, operand in self.operands.items():
            same = torch.equal(operand.to("cpu", torch.float64), self.exact[name])
            _require(same, f"{what} changed an operand of shape {tuple(operand.shape)} in place")
        dtype = self.operands["v"].dtype
        _require(got.dtype == dtype, f"{what} has dtype {got.dtype}, needed {dtype}")
        _require(got.shape == reference.shape, f"{what} has shape {tuple(got.shape)}, needed {tuple(reference.shape)}")
        found = got.detach().to("cpu", torch.float64)
        # A reference of zeros has no scale of its own; one is then as good as any.
        distance = (found - reference).abs() / (float(reference.abs().max()) or 1.0)
        distance = distance.nan_to_num(nan=torch.inf)
        largest = float(distance.max())
        if largest > self.rtol:
            worst = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
            raise AssertionError(
                f"{what} disagrees with the dense matrix: relative error {largest:.1e}, "
                f"above rtol {self.rtol:.1e}; worst at entry {worst}: got {found[worst]:.9g}, "
                f"needed {reference[worst]:.9g}"
            )
        return got

    def refused(self, what: str, product: Callable[[], Tensor], needed: object) -> None:
        """The product must raise ValueError or TypeError with `needed` in its text."""
        if what.partition("(")[0] in self.skipped:
            return
        try:
            product()
        except (ValueError, TypeError) as error:
            _require(str(needed) in str(error), f"{what} is refused by a text without {needed}: {error}")
        except Exception as error:
            raise AssertionError(f"{what} must raise ValueError or TypeError; it raised {error!r}") from error
        else:
            raise AssertionError(f"{what} must raise ValueError or TypeError; it returned a result")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
