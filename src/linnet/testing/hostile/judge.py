"""Hostile networks: right numbers or an error by name, never a wrong number in silence.

`python -m linnet.testing.hostile` prints a table of all cases by class. With names of cases it prints what happened in
each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import linnet
from linnet.network.parameters import select
from linnet.testing.case import call, dense_jacobian, examples, preserved, seeded
from linnet.testing.hostile import batch, energy, frozen, late, operations, order, random, reach, state, structure
from linnet.testing.hostile.case import Hostile
from linnet.testing.products import difference, products

_FILES = (reach, operations, energy, frozen, late, order, batch, random, state, structure)

Answer = Literal["right", "refused", "crashed", "wrong"]
"""What linnet did: right numbers; an error that linnet raised; an error from elsewhere; a wrong number in silence."""

ANSWERS: tuple[Answer, ...] = ("right", "refused", "crashed", "wrong")
"""From the best to the worst."""

SAID = 6
"""Number of findings that a verdict tells."""

ROWS_FIRST = ("J.gram()", "J @ V", "J.normal(v)", "J.outputs()")
COLUMNS_FIRST = ("J.normal(V)", "J @ v", "J.T @ u", "J.gram_diag()")
ABOVE = ("J.gram()", "J @ V", "J.normal(v)")


def cases() -> dict[str, Hostile]:
    """Hostile cases by name, nothing built yet.

    Example:
        >>> cases()["cdist_2"].expects
        'right'
    """
    return {case.name: case for file in _FILES for case in file.CASES}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What linnet did with a case.

    Attributes:
        answer: The worst answer to any product.
        details: Which products were wrong and by how much, or what the error says.
    """

    answer: Answer
    details: str

    def meets(self, case: Hostile) -> bool:
        """Whether the answer is one that the case allows."""
        return self.answer in (("right", "refused") if case.expects == "either" else (case.expects,))


@dataclass(frozen=True, slots=True)
class Reference:
    """The truth about a case: every example alone through the module itself, in plain reverse mode.

    Attributes:
        f: Outputs (n, c).
        J: The dense Jacobian (n c, p).
    """

    f: Tensor
    J: Tensor


def reference(case: Hostile) -> Reference:
    """Outputs and Jacobian of a case, each example alone.

    Example:
        >>> reference(cases()["cdist_2"]).J.shape
        torch.Size([26, 42])
    """
    with seeded(0), torch.no_grad():
        model, data = case.build().eval(), case.data()
        try:
            with preserved(model):
                f = torch.cat([call(model, one, output=case.output) for one in examples(data)])
        except Exception:  # whatever the model raises for one example alone
            with preserved(model):
                f = call(model, pytree.tree_map_only(Tensor, Tensor.clone, data), output=case.output)
    with seeded(0):
        model = case.build().eval()
        names = None if case.params is None else list(select(model, case.params))
        J = dense_jacobian(model, case.data(), output=case.output, names=names)
    return Reference(f.detach(), J)


def verdict(case: Hostile) -> Verdict:
    """Linearize a case, and hold every product against reverse mode, example by example.

    Example:
        >>> verdict(cases()["scatter_add"]).answer
        'right'
    """
    with warnings.catch_warnings(), seeded(1):
        warnings.simplefilter("ignore")
        trial = _Trial(case, reference(case))
        for size, plan in (("auto", tuple(trial.known)), (4, ROWS_FIRST), (7, COLUMNS_FIRST)):
            trial.linearized(size, plan)
        if case.predicts:
            trial.regression()
    worst: Answer = max((answer for answer, _ in trial.found), key=ANSWERS.index)
    said = list(dict.fromkeys(text for answer, text in trial.found if answer == worst and text))
    more = [f"and {len(said) - SAID} more"] if len(said) > SAID else []
    return Verdict(worst, "; ".join([*said[:SAID], *more]))


class _Trial:
    """Asks linnet for products of a case, and notes how each ended.

    Attributes:
        known: Products by name: how to ask for a product, and the truth.
        found: Answers so far, each with a text.
    """

    def __init__(self, case: Hostile, truth: Reference) -> None:
        self.case, self.truth = case, truth
        self.found: list[tuple[Answer, str]] = []
        self.known = products(truth.J, truth.f)

    def linearized(self, size: int | str, plan: Sequence[str]) -> None:
        """Some products of a new linearization, in this order, and those above its frozen layers."""
        case, where = self.case, f"batch_size={size}"
        with self._untouched() as (model, data):
            J = self._made(where, lambda: linnet.linearize(model, case.params, case.output).jacobian(data, size))
            if J is None:
                return
            for name in plan:
                self._asked(where, name, J)
            top = self._made(where, J.above_frozen) if case.frozen else None
            if top is not None:
                for name in ABOVE:
                    self._asked(f"{where}, above_frozen()", name, top)

    def regression(self) -> None:
        """The mean that a regressor predicts, with a known prior and noise."""
        case, f, J = self.case, self.truth.f, self.truth.J
        with seeded(3):
            y = f + torch.randn(f.shape, dtype=f.dtype)
        K, noise = J @ J.T, 0.1
        weights = torch.linalg.solve(K + noise * torch.eye(len(K), dtype=K.dtype), (y - f).flatten())
        with self._untouched() as (model, data):

            def predicted() -> Tensor:
                regressor = linnet.TangentRegressor(
                    model, case.params, prior=1.0, noise=noise, output=case.output, batch_size=4, progress=False
                )
                return torch.as_tensor(regressor.fit(data, y).predict(data))

            self._compared("TangentRegressor.predict", predicted, f + (K @ weights).view_as(f))

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[tuple[nn.Module, Any]]:
        """A model and its data, which must be the same after the block."""
        model, data = self.case.build(), self.case.data()
        before = _state(model, data)
        yield model, data
        for (what, old), new in zip(before.items(), _state(model, data).values(), strict=True):
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(old, new, strict=True)):
                self.found.append(("wrong", f"linnet changed {what} of the user's"))

    def _made(self, where: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, or None if `make` raises."""
        try:
            return make()
        except Exception as error:
            self._raised(where, error)
            return None

    def _asked(self, where: str, name: str, J: Any) -> None:
        ask, truth = self.known[name]
        self._compared(f"{where}, {name}", lambda: ask(J), truth)

    def _compared(self, where: str, product: Callable[[], Tensor], truth: Tensor) -> None:
        try:
            value = product().detach()
        except Exception as error:
            return self._raised(where, error)
        if (off := difference(value, truth)) > self.case.rtol:
            self.found.append(("wrong", f"{where}: off by {off:.1e}"))
        else:
            self.found.append(("right", ""))

    def _raised(self, where: str, error: Exception) -> None:
        kinds = (ValueError, TypeError, RuntimeError, NotImplementedError)
        known = isinstance(error, kinds) and bool(str(error)) and _by_linnet(error)
        first = str(error).partition("\n")[0]
        self.found.append(("refused" if known else "crashed", f"{where}: {type(error).__name__}: {first}"))


def _by_linnet(error: BaseException) -> bool:
    """Whether linnet raised an error itself, or added a note to it."""
    if any("linnet" in note for note in getattr(error, "__notes__", ())):
        return True
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    place = os.path.dirname(trace.tb_frame.f_code.co_filename)
    home = os.path.dirname(linnet.__file__)
    return place.startswith(home) and not place.endswith("testing")


def _state(model: nn.Module, data: Any) -> dict[str, Any]:
    """Everything of the user's that must stay as it is."""
    tensors = [x.detach().clone() for x in pytree.tree_leaves(data) if isinstance(x, Tensor)]
    return {
        "a parameter": [t.detach().clone() for t in model.parameters()],
        "a buffer": [t.detach().clone() for t in model.buffers()],
        "the mode of a module": [torch.tensor(m.training) for m in model.modules()],
        "requires_grad of a parameter": [torch.tensor(t.requires_grad) for t in model.parameters()],
        "the data": tensors,
    }


def table(verdicts: dict[str, Verdict]) -> str:
    """The number of cases and answers by class, as a table in Markdown."""
    every = cases()
    lines = ["| class | cases | right | refused | crashed | wrong |", "| --- | --- | --- | --- | --- | --- |"]
    total: Counter[str] = Counter()
    for kind in dict.fromkeys(every[name].kind for name in verdicts):
        counts: Counter[str] = Counter(found.answer for name, found in verdicts.items() if every[name].kind == kind)
        total.update(counts)
        lines.append(_line(kind, counts))
    return "\n".join([*lines, _line("total", total)])


def _line(kind: str, counts: Counter[str]) -> str:
    row = (counts.total(), *(counts[answer] for answer in ANSWERS))
    return f"| {kind} | {' | '.join(str(number) for number in row)} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table of all cases, or what happened in some of them."""
    parser = argparse.ArgumentParser(prog="python -m linnet.testing.hostile", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of cases, or parts of names; by default all cases")
    names = parser.parse_args(arguments).names
    verdicts = {}
    for name, case in cases().items():
        if (names and not any(part in name for part in names)) or (
            case.needs is not None and importlib.util.find_spec(case.needs) is None
        ):
            continue
        verdicts[name] = found = verdict(case)
        if names or not found.meets(case):
            print(f"{name} ({case.kind}): {found.answer}, expected {case.expects}. {found.details}", flush=True)
    print(table(verdicts))
    return 0 if all(found.meets(cases()[name]) for name, found in verdicts.items()) else 1
