"""What embeddings are used for, against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import nn

from linnet.fisher import FisherEmbedding, probes
from tests.support.drawn import double, normal

E = normal(40, 5)
LABELS = (E[:, 0] + 0.1 * E[:, 1] > 0).long()


def test_a_linear_probe_separates_what_is_linear() -> None:
    probe = probes.linear_probe(E, LABELS, C=100.0)
    assert probe.score(E.numpy(), LABELS.numpy()) == 1.0
    names = np.where(LABELS.numpy() == 1, "right", "left")
    named = probes.linear_probe(E.numpy() * 1000, names, C=100.0)  # the scale of the embedding does not matter
    assert (named.predict(E.numpy() * 1000) == names).all()
    with pytest.raises(ValueError, match=r"got \(40, 5\) and \(39,\)"):
        probes.linear_probe(E, LABELS[1:])


# Components.


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), sign=st.sampled_from(["both", "positive", "negative"]))
def test_top_projections_are_the_largest(count: int, sign: str) -> None:
    value = {"both": E.abs(), "positive": E, "negative": -E}[sign]
    index = probes.top_projections(E, count, sign=sign)
    assert index.shape == (5, count)
    picked = value.gather(0, index.T)
    torch.testing.assert_close(picked, value.sort(0, descending=True).values[:count])
    assert isinstance(probes.top_projections(E.numpy(), count, sign=sign), np.ndarray)


def test_projections_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="40 examples, so count"):
        probes.top_projections(E, 41)
    with pytest.raises(ValueError, match="sign must be"):
        probes.top_projections(E, 4, sign="up")


def test_spectra_say_what_they_explain() -> None:
    found = probes.spectrum(torch.tensor([1.0, 6.0, 3.0]))
    np.testing.assert_allclose(found.eigenvalues, [6, 3, 1])
    np.testing.assert_allclose(found.explained, [0.6, 0.9, 1.0])
    assert [found.components(share) for share in (0.5, 0.6, 0.61, 0.95)] == [1, 1, 2, 3]
    assert found.effective_rank == pytest.approx(100 / 46)
    part = probes.spectrum([6.0, 3.0], trace=10.0)
    with pytest.raises(ValueError, match=r"make up 0.9000 of the trace, less than 0.95. Fit more"):
        part.components(0.95)


def test_the_spectrum_of_an_embedding_is_its_own() -> None:
    model = double(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)))
    embedding = FisherEmbedding(model, n_components=6).fit(E)
    found = probes.spectrum(embedding)
    np.testing.assert_allclose(found.eigenvalues, embedding.eigenvalues_)
    np.testing.assert_allclose(found.explained, embedding.explained_variance_ratio_.cumsum(0))


def test_a_probe_says_when_its_iterations_do_not_suffice() -> None:
    E, y = normal(60, 5), (normal(60, seed=1) > 0).long()
    with pytest.warns(ConvergenceWarning):
        probes.linear_probe(E, y, iterations=1)
    probes.linear_probe(E, y)  # silent


@pytest.mark.parametrize("count", [0, 4])
def test_numbers_of_projections_that_cannot_be(count: int) -> None:
    with pytest.raises(ValueError, match=f"count needs to be 1 to 3; got {count}"):
        probes.top_projections(normal(3, 2), count)
    assert probes.top_projections(normal(3, 2), 3).shape == (2, 3)


def test_features_of_a_kernel_have_its_inner_products() -> None:
    X, Z = normal(9, 4), normal(5, 4, seed=1)
    E, F = probes.kernel_features(X @ X.T, Z @ X.T)
    assert E.shape == (9, 4) and F.shape == (5, 4)
    torch.testing.assert_close(E @ E.T, X @ X.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(F @ E.T, Z @ X.T, rtol=1e-9, atol=1e-9)
    assert bool((E.square().sum(0).diff() <= 0).all())
    for wrong in ((normal(3, 4),), (normal(3, 3), normal(2, 4))):
        with pytest.raises(ValueError, match=r"needs a kernel \(n, n\), and others \(m, n\)"):
            probes.kernel_features(*wrong)


# The kernel as features.


def test_a_probe_on_the_kernel_is_one_on_all_fisher_scores() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, new = normal(30, 3), normal(7, 3, seed=2)
    emb = FisherEmbedding(model, 5, progress=False).fit(X)
    V, W = (emb.statistics_.vectors(emb.lin_.jacobian(x, progress=False)).dense() for x in (X, new))
    torch.testing.assert_close(emb.gram(X), V @ V.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(emb.gram(new, X), W @ V.T, rtol=1e-9, atol=1e-9)
    assert emb.gram(new.numpy(), X.numpy()).shape == (7, 30)
    E, F = probes.kernel_features(emb.gram(X), emb.gram(new, X))
    torch.testing.assert_close(E @ E.T, V @ V.T, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(F @ E.T, W @ V.T, rtol=1e-8, atol=1e-8)
    # The embedding is the first of its columns, up to sign.
    torch.testing.assert_close(E[:, :5].abs(), emb.transform(X).abs(), rtol=1e-6, atol=1e-6)
    y = np.arange(30) % 2
    a, b = (LogisticRegression(tol=1e-8).fit(features.numpy(), y) for features in (E, V))
    np.testing.assert_allclose(a.decision_function(F.numpy()), b.decision_function(W.numpy()), rtol=1e-4)


def test_kernels_of_other_shapes() -> None:
    K = torch.eye(3)
    assert probes.kernel_features(torch.zeros(3, 3) + 1.0)[0].shape == (3, 1)
    with pytest.raises(ValueError, match=r"others \(m, n\); got \[\(3, 3\), \(2, 4\)\]"):
        probes.kernel_features(K, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"kernel \(n, n\)"):
        probes.kernel_features(torch.zeros(3, 2))
