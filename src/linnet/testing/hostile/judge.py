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
from linnet.network import select
from linnet.testing.case import call, dense_jacobian, fix_seed, preserve_values, split_examples
from linnet.testing.hostile import batch, energy, frozen, late, operations, order, random, reach, state, structure
from linnet.testing.hostile.case import Hostile
from linnet.testing.products import make_products, measure_difference

Answer = Literal["right", "refused", "crashed", "wrong"]
"""What linnet did: right numbers; an error that linnet raised; an error from elsewhere; a wrong number in silence."""

ANSWERS: tuple[Answer, ...] = ("right", "refused", "crashed", "wrong")
"""Answers from the best to the worst."""


def list_cases() -> dict[str, Hostile]:
    """Hostile cases by name, nothing built yet.

    Example:
        >>> list_cases()["cdist_2"].expects
        'right'
    """
    files = (reach, operations, energy, frozen, late, order, batch, random, state, structure)
    return {case.name: case for file in files for case in file.CASES}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What linnet did with a case."""

    answer: Answer  # the worst answer to any product
    details: str  # which products were wrong and by how much, or what the error says

    def meets(self, case: Hostile) -> bool:
        """Whether the case allows the answer."""
        return self.answer in (("right", "refused") if case.expects == "either" else (case.expects,))


def compute_reference(case: Hostile) -> tuple[Tensor, Tensor]:
    """Outputs (n, c) and Jacobian (n c, p): every example alone through the module itself, in plain reverse mode.

    Example:
        >>> compute_reference(list_cases()["cdist_2"])[1].shape
        torch.Size([26, 42])
    """
    with fix_seed(0), torch.no_grad():
        model, data = case.build().eval(), case.data()
        try:
            with preserve_values(model):
                f = torch.cat([call(model, one, output=case.output) for one in split_examples(data)])
        except Exception:  # a model may raise anything for one example alone
            with preserve_values(model):
                f = call(model, pytree.tree_map_only(Tensor, Tensor.clone, data), output=case.output)
    with fix_seed(0):
        model = case.build().eval()
        names = None if case.params is None else list(select(model, case.params))
        return f.detach(), dense_jacobian(model, case.data(), output=case.output, names=names)


def judge(case: Hostile) -> Verdict:
    """Linearize a case, and hold every product against reverse mode, example by example.

    Example:
        >>> judge(list_cases()["scatter_add"]).answer
        'right'
    """
    rows_first = ("J.gram()", "J @ V", "J.normal(v)", "J.outputs()")
    columns_first = ("J.normal(V)", "J @ v", "J.T @ u", "J.gram_diag()")
    with warnings.catch_warnings(), fix_seed(1):
        warnings.simplefilter("ignore")
        trial = _Trial(case, *compute_reference(case))
        for size, plan in (("auto", tuple(trial.known)), (4, rows_first), (7, columns_first)):
            trial.linearize(size, plan)
        if case.predicts:
            trial.predict()
    worst: Answer = max((answer for answer, _ in trial.found), key=ANSWERS.index)
    said, most = list(dict.fromkeys(text for answer, text in trial.found if answer == worst and text)), 6
    more = [f"and {len(said) - most} more"] if len(said) > most else []
    return Verdict(worst, "; ".join([*said[:most], *more]))


class _Trial:
    """Asks linnet for products of a case, and notes the answers.

    Attributes:
        known: Products by name: how to ask for a product, and the truth.
        found: Answers so far, each with a text.
    """

    def __init__(self, case: Hostile, f: Tensor, J: Tensor) -> None:
        self.case, self.f, self.J = case, f, J
        self.found: list[tuple[Answer, str]] = []
        self.known = make_products(J, f)

    def linearize(self, size: int | str, plan: Sequence[str]) -> None:
        """Ask a new linearization for some products, in this order, and for products above its frozen layers."""
        case, where = self.case, f"batch_size={size}"
        with self._check_unchanged() as (model, data), self._note_errors(where):
            J = linnet.linearize(model, case.params, case.output).jacobian(data, size)
            for name in plan:
                self._ask(where, name, J)
            if case.frozen:
                top = J.above_frozen()
                for name in ("J.gram()", "J @ V", "J.normal(v)"):
                    self._ask(f"{where}, above_frozen()", name, top)

    def predict(self) -> None:
        """Ask a regressor with a known prior and noise for the mean of its predictions."""
        case, f, J, noise = self.case, self.f, self.J, 0.1
        with fix_seed(3):
            y = f + torch.randn(f.shape, dtype=f.dtype)
        K = J @ J.T
        weights = torch.linalg.solve(K + noise * torch.eye(len(K), dtype=K.dtype), (y - f).flatten())
        options: Any = {"prior": 1.0, "noise": noise, "output": case.output, "batch_size": 4, "progress": False}
        options["mean"] = "network"
        with self._check_unchanged() as (model, data):
            self._compare(
                "TangentRegressor.predict",
                lambda: torch.as_tensor(
                    linnet.TangentRegressor(model, case.params, **options).fit(data, y).predict(data)
                ),
                f + (K @ weights).view_as(f),
            )

    @contextlib.contextmanager
    def _check_unchanged(self) -> Iterator[tuple[nn.Module, Any]]:
        """A model and its data, which must be the same after the block."""
        model, data = self.case.build(), self.case.data()
        before = _record_state(model, data)
        yield model, data
        for (what, old), new in zip(before.items(), _record_state(model, data).values(), strict=True):
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(old, new, strict=True)):
                self.found.append(("wrong", f"linnet changed {what} of the user's"))

    @contextlib.contextmanager
    def _note_errors(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kinds = (ValueError, TypeError, RuntimeError, NotImplementedError)
            known = isinstance(error, kinds) and bool(str(error)) and _is_raised_by_linnet(error)
            first = str(error).partition("\n")[0]
            self.found.append(("refused" if known else "crashed", f"{where}: {type(error).__name__}: {first}"))

    def _ask(self, where: str, name: str, J: Any) -> None:
        ask, truth = self.known[name]
        self._compare(f"{where}, {name}", lambda: ask(J), truth)

    def _compare(self, where: str, product: Callable[[], Tensor], truth: Tensor) -> None:
        with self._note_errors(where):
            off = measure_difference(product().detach(), truth)
            self.found.append(("wrong", f"{where}: off by {off:.1e}") if off > self.case.rtol else ("right", ""))


def _is_raised_by_linnet(error: BaseException) -> bool:
    """Whether linnet raised an error itself, or added a note to it."""
    if any("linnet" in note for note in getattr(error, "__notes__", ())):
        return True
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    place = os.path.dirname(trace.tb_frame.f_code.co_filename)
    home = os.path.dirname(linnet.__file__)
    return place.startswith(home) and not place.startswith(os.path.join(home, "testing"))


def _record_state(model: nn.Module, data: Any) -> dict[str, Any]:
    """Everything of the user's that must stay as it is."""
    return {
        "a parameter": [t.detach().clone() for t in model.parameters()],
        "a buffer": [t.detach().clone() for t in model.buffers()],
        "the mode of a module": [torch.tensor(m.training) for m in model.modules()],
        "requires_grad of a parameter": [torch.tensor(t.requires_grad) for t in model.parameters()],
        "the data": [x.detach().clone() for x in pytree.tree_leaves(data) if isinstance(x, Tensor)],
    }


def tabulate(verdicts: dict[str, Verdict]) -> str:
    """The number of cases and answers by class, as a table in Markdown."""
    every = list_cases()
    lines = ["| class | cases | right | refused | crashed | wrong |", "| --- | --- | --- | --- | --- | --- |"]
    for kind in (*dict.fromkeys(every[name].kind for name in verdicts), "total"):
        found = Counter(v.answer for name, v in verdicts.items() if kind in (every[name].kind, "total"))
        numbers = found.total(), *(found[answer] for answer in ANSWERS)
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of all cases, or what happened in some of them."""
    parser = argparse.ArgumentParser(prog="python -m linnet.testing.hostile", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of cases, or parts of names; by default all cases")
    names, verdicts, met = parser.parse_args(arguments).names, {}, True
    for name, case in list_cases().items():
        missing = case.needs is not None and importlib.util.find_spec(case.needs) is None
        if missing or (names and not any(part in name for part in names)):
            continue
        verdicts[name] = found = judge(case)
        met = met and found.meets(case)
        if names or not found.meets(case):
            print(f"{name} ({case.kind}): {found.answer}, expected {case.expects}. {found.details}", flush=True)
    print(tabulate(verdicts))
    return 0 if met else 1
