r"""One set of Kronecker coordinates for a sum of matrices that are each diagonal in coordinates of their own.

Two Kronecker approximations :math:`Q_1 \Lambda_1 Q_1^\top` and :math:`Q_2 \Lambda_2 Q_2^\top` have a sum that is
diagonal in neither of the two rotations. The sum is approximated twice:

- The coordinates of a parameter with a side of output gradients and a side of inputs are the eigenvectors of the two
  partial traces of the sum. Of a single Kronecker product these are its own eigenvectors.
- In these coordinates the diagonal of each term is kept: the nearest diagonal matrix, with the same trace.

Parameters without two sides (norms, biases without a weight) keep the sum as it is. Terms with equal eigenvectors do as
well, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linnet.jacobian import Basis, Rotation, Turn, other_form

Range = tuple[int, int]

Term = tuple[Rotation | None, Tensor]
"""The rotation of a matrix, None for the parameters' own coordinates, and its diagonal there, (p,)."""


def join_coordinates(terms: Sequence[Term]) -> Rotation:
    """Coordinates for the sum of all terms, of which one at least has a rotation."""
    rotations = [rotation for rotation, _ in terms if rotation is not None]
    first = rotations[0]
    if all(rotation is first for rotation in rotations) and len(rotations) == len(terms):
        return first
    forms: dict[Range, Turn] = {}
    for rotation in rotations:
        for r, turn in rotation.turns.items():
            _check_whole(rotation, turn)
            known = forms.setdefault(r, turn)
            if (known.Qx is None, known.swapped, known.Qg.V.shape) != (turn.Qx is None, turn.swapped, turn.Qg.V.shape):
                raise other_form(rotation.layout, r)
    owners = {r: _owner(r, rotations) for r, turn in forms.items() if turn.Qx is None}
    gradients: dict[Range, Tensor] = {}
    inputs: dict[Range, Tensor] = {}
    for r, form in forms.items():
        for coordinates, values in terms:
            own = None if coordinates is None else coordinates.turns.get(r)
            V = _unflatten(values, r, form)
            place = r if form.Qx is not None else owners[r] or r
            side = _rebuild(None if own is None else own.Qg, V if form.Qx is None else V.sum(-1))
            gradients[place] = gradients[place] + side if place in gradients else side
            if form.Qx is not None:
                side = _rebuild(None if own is None else own.Qx, V.sum(-2))
                inputs[r] = inputs[r] + side if r in inputs else side
    Qg = {r: Basis(torch.linalg.eigh(side)[1]) for r, side in gradients.items()}
    Qx = {r: Basis(torch.linalg.eigh(side)[1]) for r, side in inputs.items()}
    turns = {r: Turn(Qg[owners.get(r) or r], Qx.get(r), form.swapped) for r, form in forms.items()}
    return Rotation(turns, first.layout)


def project_diagonal(values: Tensor, rotation: Rotation | None, onto: Rotation | None) -> Tensor:
    """The diagonal in the coordinates ``onto`` of the matrix that is diagonal in those of ``rotation``, (p,)."""
    if rotation is onto:
        return values
    out = values.clone()
    turns = dict(() if rotation is None else rotation.turns.items())
    others = dict(() if onto is None else onto.turns.items())
    for r in {**turns, **others}:
        turn, other = turns.get(r), others.get(r)
        form = other or turn
        assert form is not None
        for one, owner in ((turn, rotation), (other, onto)):
            if one is not None and owner is not None:
                _check_whole(owner, one)
        V = _unflatten(values, r, form)
        squares = _squares(None if turn is None else turn.Qg, None if other is None else other.Qg)
        if form.Qx is None:
            out[slice(*r)] = (squares @ V[..., None])[..., 0].flatten()
            continue
        V = squares @ V @ _squares(None if turn is None else turn.Qx, None if other is None else other.Qx).mT
        out[slice(*r)] = (V.mT if form.swapped else V).flatten()
    return out


def _unflatten(values: Tensor, r: Range, form: Turn) -> Tensor:
    """The diagonal of one parameter as (groups, dg, dx), or (groups, dg) without a side of inputs."""
    groups, dg = form.Qg.groups, form.Qg.d
    part = values[slice(*r)]
    if form.Qx is None:
        return part.view(groups, dg)
    dx = form.Qx.d
    return part.view(groups, dx, dg).mT if form.swapped else part.view(groups, dg, dx)


def _rebuild(basis: Basis | None, values: Tensor) -> Tensor:
    """``Q diag(values) Q^T`` for values (groups, d)."""
    return torch.diag_embed(values) if basis is None else (basis.V * values[:, None, :]) @ basis.V.mT


def _squares(basis: Basis | None, onto: Basis | None) -> Tensor:
    """The squares of ``onto^T basis``, (groups, d, d); None stands for the identity."""
    if basis is None:
        assert onto is not None
        return onto.V.mT.square()
    return basis.V.square() if onto is None else (onto.V.mT @ basis.V).square()


def _owner(r: Range, rotations: Sequence[Rotation]) -> Range | None:
    """The weight with the same directions of output gradients as a vector in all rotations: a bias turns with it."""
    holders = [rotation.turns for rotation in rotations if r in rotation.turns]

    def weights() -> Iterator[Range]:
        yield from (key for key, turn in holders[0].items() if turn.Qx is not None)

    for key in weights():
        if all(key in turns and _same(turns[key].Qg, turns[r].Qg) for turns in holders):
            return key
    return None


def _same(a: Basis, b: Basis) -> bool:
    return a is b or (a.V.shape == b.V.shape and torch.equal(a.V, b.V))


def _check_whole(rotation: Rotation, turn: Turn) -> None:
    if turn.Qg.T is not None or (turn.Qx is not None and turn.Qx.T is not None):
        raise NotImplementedError(
            "A layer has Kronecker factors that are too long to be decomposed whole: its leading directions alone are "
            "known, and a sum with other factors is not. Use structure='diag' or 'lowrank', or leave the layer out "
            f"with params=. The layers are {', '.join(rotation.layout.layers)}."
        )
