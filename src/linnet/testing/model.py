"""`check_model`: every proof that linnet makes of a network, on the user's own network and data, in words."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import listing
from linnet.jacobian import TOLERANCE, Jacobian, linearize, random_signs
from linnet.network import Output, Params
from linnet.testing.case import dense_jacobian

COMPARED = 4
"""Examples whose rows are compared entry by entry: each takes a backward pass for each output."""


@dataclass(frozen=True)
class Findings:
    """What `check_model` found out about a network; print it.

    Attributes:
        network: The network and the data, in words.
        refused: Why linnet cannot linearize the network; None if it can.
        wrong: Products that do not agree with reverse mode, which is a fault of linnet.
        rules: Parameters that layer rules serve.
        autodiff: Parameters that are left to torch's autodiff, exactly but more slowly.
        unused: Parameters that the outputs do not depend on.
        forward_mode: Whether torch's forward mode serves few columns.
        vectorized: Whether torch's vectorized rows serve parameters without a rule.
        error: Largest relative error of the rows that were compared entry by entry.
        warnings: What linnet warned of.
    """

    network: str
    refused: str | None = None
    wrong: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    autodiff: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    forward_mode: bool = False
    vectorized: bool = False
    error: float = 0.0
    warnings: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether linnet takes the network and all products agree with reverse mode."""
        return self.refused is None and not self.wrong

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.network}\nrefused: {self.refused}"
        lines = [
            ("examples", "independent of each other, and outputs repeatable, in every chunk"),
            ("layer rules", f"{len(self.rules)} parameters"),
            ("autodiff", listing(self.autodiff) if self.autodiff else "no parameter"),
            ("unused", listing(self.unused) if self.unused else "no parameter"),
            ("forward mode", "agrees with reverse mode" if self.forward_mode else "not used"),
            ("vectorized rows", "agree with reverse mode" if self.vectorized else "not used"),
            ("rows", f"largest relative error {self.error:.1e} against reverse mode, example by example"),
            *(("warned", text) for text in self.warnings),
            ("verdict", f"WRONG: {', '.join(self.wrong)}" if self.wrong else "all products agree with reverse mode"),
        ]
        return "\n".join([self.network, *(f"  {name + ':':17}{text}" for name, text in lines)])


def check_model(
    model: nn.Module,
    data: Any,
    params: Params = None,
    output: Output | None = None,
    *,
    batch_size: int | str = "auto",
    seed: int = 0,
    quiet: bool = False,
) -> Findings:
    """Run every proof of a network over a data set, and print what they found.

    Each chunk of the data goes through every way to the Jacobian that linnet would take: layer rules, forward mode,
    reverse mode. Each way is compared with one random backward pass and with the same examples in other batches. The
    rows of a few examples are compared entry by entry with reverse mode, one example at a time. All of it takes about
    ten passes over the data.

    Args:
        model: The network. It is not changed.
        data: The data, as `linnet.Linearization.jacobian` takes it.
        params: Which parameters, as for `linnet.linearize`.
        output: From what the model returns to (n, c), as for `linnet.linearize`.
        batch_size: Examples per chunk.
        seed: Seed of the random products, and of the examples whose rows are compared.
        quiet: Print nothing.

    Example:
        >>> found = check_model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.eye(3), quiet=True)
        >>> found.ok, len(found.rules), found.autodiff
        (True, 4, ())
        >>> drops = check_model(nn.Sequential(nn.Linear(3, 2), nn.Softmax(0)), torch.eye(3), quiet=True)
        >>> drops.ok, drops.refused[:40]
        (False, 'The output of an example changes with th')
    """
    kind = type(model).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lin = linearize(model, params, output)
            J = lin.jacobian(data, batch_size, progress=False)
            where = f"{str(J.dtype).removeprefix('torch.')} on {J.device}"
            kind = f"{kind}: {J.n:,} examples, {J.c} outputs, {lin.p:,} parameters, {where}"
            wrong, error = _compare(J, copy.deepcopy(model).eval(), output, seed)
            found = Findings(
                kind,
                wrong=tuple(wrong),
                rules=tuple(lin.rules.last.rules),
                autodiff=lin.rules.last.rest,
                unused=lin.rules.last.unused,
                forward_mode=lin.rules.can("forward_mode", J.passes.chunks.first.batch),
                vectorized=bool(lin.rules.last.rest) and lin.rules.can("vectorize", J.passes.chunks.first.batch),
                error=error,
            )
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as refusal:
            found = Findings(kind, refused=str(refusal))
    texts = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    found = Findings(**{**vars(found), "warnings": tuple(texts)})
    if not quiet:
        print(found)
    return found


def _compare(J: Jacobian, model: nn.Module, output: Output | None, seed: int) -> tuple[list[str], float]:
    """Names of the products that are wrong at a few examples, and the largest relative error of the rows there."""
    V = random_signs(J.shape[1], 3, seed=seed, like=torch.zeros((), dtype=J.dtype, device=J.device))
    U = random_signs(J.shape[0], 3, seed=seed + 1, like=V)
    order = torch.randperm(J.n, generator=torch.Generator().manual_seed(seed))
    index = order[:COMPARED].sort().values
    rows = (index[:, None] * J.c + torch.arange(J.c)).flatten().to(J.device)
    exact = _exact(J, model, output, index)
    tolerance, wrong, worst = TOLERANCE[J.lin.rules.coarsest], [], 0.0

    def check(name: str, value: Tensor, reference: Tensor) -> float:
        scale = float(reference.abs().max()) or 1.0
        error = float((value.to(reference) - reference).abs().max()) / scale
        if not error <= tolerance:
            wrong.append(name)
        return error

    # Products over all data compare every chunk; those of single rows are also held against the exact rows.
    check("J @ v", (J @ V[:, 0])[rows], exact @ V[:, 0])
    check("J @ V", (J @ V)[rows], exact @ V)
    check("diag J J^T", J.gram_diag()[rows], exact.square().sum(1))
    for name, left in (("J^T u", J.T @ U[:, 0]), ("J^T U", J.T @ U)):
        right = U[:, 0] if left.ndim == 1 else U
        along = J @ V
        size = float(along.norm() * right.norm()) or 1.0
        if float((V.T @ left - along.T @ right).abs().max()) > tolerance * size:
            wrong.append(name)
    J.normal(V)
    J.normal(V[:, 0])
    if J.by_position:
        few = J.subset(index)
        worst = check("rows", few.dense(), exact)
        check("gram", few.gram(), exact @ exact.T)
    return wrong, worst


def _exact(J: Jacobian, model: nn.Module, output: Output | None, index: Tensor) -> Tensor:
    """The rows of some examples by plain reverse mode, (m c, p)."""
    found = []
    wanted = set(index.tolist())
    source = J.subset(index)._source if J.by_position else J._source
    for batch in source.batches(1):
        if J.by_position or batch.start in wanted:
            batch = batch.to(J.device)
            found.append(dense_jacobian(model, batch.kwargs or batch.args, output=output, names=list(J.lin.theta)))
    return torch.cat(found).to(J.dtype)
