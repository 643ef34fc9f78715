"""Labels that are to be ignored: a fit with them is the fit without their examples, or without their sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import Laplace, TangentClassifier, attach_head
from linnet.heads import head_of
from linnet.probability import Categorical, Sites
from tests.support.drawn import check_close, double, normal
from tests.support.laplace_cases import CLASSES, NEW, X, net

IGNORED = torch.arange(24) % 5 == 2
GIVEN = torch.where(IGNORED, -100, CLASSES)


# The networks here are drawn, not trained.
pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode:UserWarning")


@pytest.mark.parametrize("inference", ["vi", "map", "laplace"])
@pytest.mark.parametrize("form", ["tensors", "arrays", "dataset", "tuple"])
def test_a_classifier_without_the_examples(inference, form):
    plain = TangentClassifier(net(3), inference=inference).fit(X[~IGNORED], CLASSES[~IGNORED])
    clf = TangentClassifier(net(3), inference=inference)
    if form == "arrays":
        clf.fit(X.numpy(), GIVEN.numpy())
    elif form == "dataset":
        clf.fit(TensorDataset(X, GIVEN))
    else:
        clf.fit(*((X, GIVEN) if form == "tensors" else ((X, GIVEN),)))
    check_close(clf.predict_proba(NEW), plain.predict_proba(NEW))
    assert clf.scales_ == pytest.approx(plain.scales_, rel=1e-9)
    assert clf.classes_.tolist() == [0, 1, 2]
    if inference == "laplace":
        assert clf.log_evidence_ == pytest.approx(plain.log_evidence_, rel=1e-9)
    new, same = clf.refit(X, GIVEN), plain.refit(X[~IGNORED], CLASSES[~IGNORED])
    check_close(new.predict_proba(NEW), same.predict_proba(NEW))


def test_the_default_network_has_no_output_for_them():
    clf = TangentClassifier().fit(X.numpy(), GIVEN.numpy())
    assert clf.classes_.tolist() == [0, 1, 2] and clf.predict_proba(NEW.numpy()).shape == (6, 3)


@pytest.mark.parametrize("structure", ["full", "function", "kron", "diag"])
def test_laplace_without_the_examples(structure, tmp_path: Path):
    plain = Laplace(net(3), structure=structure).fit(X[~IGNORED], CLASSES[~IGNORED])
    la = Laplace(net(3), structure=structure).fit(X, GIVEN)
    check_close(la.predict_proba(NEW), plain.predict_proba(NEW))
    assert la.log_evidence() == pytest.approx(plain.log_evidence(), rel=1e-9)
    assert (la.effective_dimension_, la.narrowed_) == pytest.approx(
        (plain.effective_dimension_, plain.narrowed_), rel=1e-9
    )
    assert la.joint_log_likelihood(X, GIVEN, draws=50) == pytest.approx(
        plain.joint_log_likelihood(X[~IGNORED], CLASSES[~IGNORED], draws=50), rel=1e-9
    )
    la.save(tmp_path / "la")
    check_close(linnet.load(tmp_path / "la", la.model).predict_proba(NEW), la.predict_proba(NEW))
    for one, y in ((la, (X, GIVEN)), (plain, (X[~IGNORED], CLASSES[~IGNORED]))):
        one.tune(validation=y)
    check_close(la.prior_variance_, plain.prior_variance_)


# Sites.


class Tokens(nn.Module):
    """Class scores (n, 3, T) of tokens (n, T, 2), each by its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).movedim(-1, 1)


TOKENS = normal(9, 5, 2, seed=3)
LABELS = torch.randint(3, (9, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(9, 5, generator=torch.Generator().manual_seed(2)) < 0.4
MASK[4] = True


@pytest.mark.parametrize("structure", ["full", "function", "kron", "diag", "lowrank"])
def test_tokens_that_are_ignored_count_for_nothing(structure):
    model = double(Tokens())
    y = LABELS.masked_fill(MASK, -100)
    given: dict[str, Any] = {"structure": structure, "prior": 0.5, "rank": 12}
    la = Laplace(model, **given).fit(TOKENS, y)
    assert la._f.shape[0] == 8  # an example without a label is left out
    lin = linnet.linearize(model, None, lambda out: out.movedim(1, -1).flatten(1))
    J, f = lin.jacobian(TOKENS).dense(), lin.jacobian(TOKENS).outputs().view(-1, 3)
    kept = ~MASK.flatten()
    rows = J.view(45, 3, -1)[kept]
    log_prob = Categorical().log_prob(f[kept], LABELS.flatten()[kept]).sum()
    theta = lin.layout.flatten(lin.theta)
    if structure in ("full", "function"):
        G = torch.einsum("nap,nab,nbq->pq", rows, Categorical().curvature(f[kept]), rows)
        H = G + torch.eye(len(G)).double() / 0.5
        value = log_prob - 0.5 * theta.square().sum() / 0.5 + 0.5 * len(G) * np.log(1 / 0.5) - 0.5 * torch.logdet(H)
        assert la.log_evidence() == pytest.approx(float(value), rel=1e-9)
        check_close(la.predict(TOKENS, return_cov=True)[1], J @ torch.linalg.inv(H) @ J.T)
    if structure == "diag":
        G = torch.einsum("nap,nab,nbp->p", rows, Categorical().curvature(f[kept]), rows)
        check_close(la._structure.values, G)
    residual = Categorical().residual(f[kept], LABELS.flatten()[kept])
    check_close(la.gradient_norm_, ((rows * residual[..., None]).sum((0, 1)) - theta / 0.5).norm())
    assert la.predict_proba(TOKENS).shape == (9, 3, 5)


def test_narrowing_counts_the_labels_that_there_are():
    model = double(Tokens())
    la = Laplace(model, structure="full").fit(TOKENS, LABELS.masked_fill(MASK, -100))
    assert la._count_labels(la._y).tolist() == [int(n) for n in (~MASK).sum(1) if n]
    # The same tokens as examples of their own are the same fit.
    alone = nn.Sequential(model.layers)
    flat = Laplace(alone, structure="full", prior=0.5).fit(TOKENS.flatten(0, 1)[~MASK.flatten()], LABELS[~MASK])
    again = Laplace(model, structure="full", prior=0.5).fit(TOKENS, LABELS.masked_fill(MASK, -100))
    assert flat.log_evidence() == pytest.approx(again.log_evidence(), rel=1e-9)
    check_close(flat.predict_proba(TOKENS.flatten(0, 1)), again.predict_proba(TOKENS).movedim(1, -1).flatten(0, 1))


def test_sites_with_one_logit():
    one = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = one

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).movedim(-1, 1)

    model, on = double(Logits()), LABELS.clamp(max=1)
    la = Laplace(model, structure="full", prior=0.5).fit(TOKENS, on.masked_fill(MASK, -100))
    alone = nn.Sequential(model.layers)
    flat = Laplace(alone, structure="full", prior=0.5).fit(TOKENS.flatten(0, 1)[~MASK.flatten()], on[~MASK])
    assert flat.log_evidence() == pytest.approx(la.log_evidence(), rel=1e-9)


def test_linear_modes_of_ignored_sites_are_refused():
    la = Laplace(double(Tokens()), structure="full").fit(TOKENS, LABELS.masked_fill(MASK, -100))
    with pytest.raises(NotImplementedError, match="label -100 and count for nothing"):
        la.log_evidence(at="linear_mode")
    assert Sites(Categorical(), (3, 5)).is_kept(LABELS) is None


# Heads, names of classes, errors.


@pytest.mark.parametrize("form", ["given", "dataset"])
def test_heads_without_the_examples(form):
    plain = attach_head(net(7), X[~IGNORED], CLASSES[~IGNORED])
    new = attach_head(net(7), X, GIVEN) if form == "given" else attach_head(net(7), TensorDataset(X, GIVEN))
    assert head_of(new).classes_.tolist() == [0, 1, 2]
    check_close(new(NEW), plain(NEW))


def test_a_class_may_have_any_name():
    names = np.array([7, -100, 3])
    clf = TangentClassifier(net(3), inference="map", ignore_index=None, classes=names).fit(X.numpy(), names[CLASSES])
    assert set(clf.predict(X.numpy()).tolist()) <= set(names.tolist()) and clf.classes_.tolist() == names.tolist()
    text = np.array(["-100", "a", "b"])
    assert -100 not in TangentClassifier(net(3), inference="map").fit(X.numpy(), text[CLASSES]).classes_.tolist()
    other = TangentClassifier(net(3), inference="map", ignore_index=9).fit(X, torch.where(IGNORED, 9, CLASSES))
    check_close(other.predict_proba(NEW), TangentClassifier(net(3), inference="map").fit(X, GIVEN).predict_proba(NEW))


class Counting(nn.Module):
    """Says how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = net(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


def test_nothing_but_ignored_labels_is_refused_before_any_pass():
    model, none = Counting(), torch.full((24,), -100)
    for fit in (
        lambda: TangentClassifier(model).fit(X, none),
        lambda: Laplace(model).fit(X, none),
        lambda: attach_head(model, X, none),
        lambda: TangentClassifier().fit(X.numpy(), none.numpy()),
    ):
        with pytest.raises(ValueError, match="All 24 labels are -100"):
            fit()
    assert model.calls == 0


def test_data_that_is_read_in_order_is_refused_by_name():
    loader = DataLoader(TensorDataset(X, GIVEN), batch_size=4)
    with pytest.raises(TypeError, match="can be left out of tensors, arrays and map-style Datasets; got"):
        Laplace(net(3), structure="diag").fit(loader)
