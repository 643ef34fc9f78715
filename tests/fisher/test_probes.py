"""What embeddings are used for, against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
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
