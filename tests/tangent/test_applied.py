"""The network with the adapted weights of a classifier, measured on its training labels."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import TangentClassifier
from tests.support.drawn import double, normal

X = normal(24, 3)
LABELS = torch.randint(3, (24,), generator=torch.Generator().manual_seed(0))  # the inputs say nothing about them


class Square(nn.Module):
    """Outputs grow with the square of a step of the first layer, and the linear model with the step."""

    def forward(self, x: Tensor) -> Tensor:
        return x**2


def net(outputs: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), Square(), nn.Linear(5, outputs)), 0)


@pytest.mark.parametrize("how", ["laplace", "vi", "adam", "ordinal", "weights"])
def test_apply_warns_of_weights_that_move_too_far(how: str, tmp_path: Path) -> None:
    """The first layer alone, and labels far from the outputs: the copy is measured on the training labels."""
    model = net(1 if how == "ordinal" else 3)
    w = torch.arange(1.0, len(X) + 1) if how == "weights" else None
    kind = {"vi": {"inference": "vi"}, "adam": {"inference": "map", "solver": "adam", "epochs": 200}}
    given = {"likelihood": "ordinal"} if how == "ordinal" else {}
    clf = TangentClassifier(model, params=["0.*"], prior=1e4, **given, **kind.get(how, {"inference": "laplace"})).fit(
        X, LABELS, w
    )
    with pytest.warns(UserWarning, match="worse than the network that was given: on the training data") as found:
        changed = clf.apply()
    assert found[0].filename == __file__
    likelihood, w = clf.likelihood_, torch.ones(len(X)) if w is None else w
    losses = []
    for one in (changed, model):
        each = likelihood.log_prob(one(X).detach(), likelihood.targets(LABELS, len(X), 1 if how == "ordinal" else 3))
        losses.append(-float((w * each).sum() / w.sum()))
    stated = re.search(r"is (\S+), and was (\S+)\. The", str(found[0].message))
    assert stated is not None
    assert [float(x) for x in stated.groups()] == pytest.approx(losses, rel=1e-2) and losses[0] > losses[1]
    clf.save(tmp_path / "one")
    again = linnet.load(tmp_path / "one", model)
    with pytest.warns(UserWarning, match="worse than the network that was given"):
        again.apply()


def test_apply_says_nothing_where_the_copy_is_better() -> None:
    clf = TangentClassifier(net(3), params=["2.*"], inference="laplace", prior=1.0).fit(X, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.apply()
