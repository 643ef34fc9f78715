"""Areas under the ROC curve with bootstrap weights, and a small version of the experiment on the real images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

from experiments import common
from experiments.calibration import unknown
from tests.support.needed import needs
from tests.support.quick_runs import count_rows, run_quick


def test_areas_are_those_of_scikit_learn_with_ties_and_weights() -> None:
    scores = {"": torch.tensor([0.0, 1.0, 2.0, 2.0]), "other": torch.tensor([1.0, 2.0, 3.0])}
    draws = unknown.Draws({"": 4, "other": 3}, 5, seed=0)
    areas = draws.area(scores, "other")
    labels, both = [0] * 4 + [1] * 3, torch.cat([scores[""], scores["other"]])
    for i, area in enumerate(areas.tolist()):
        w = torch.cat([draws.weights[""][i], draws.weights["other"][i]])
        assert area == pytest.approx(roc_auc_score(labels, both, sample_weight=w))
    found = unknown.summarize(areas)
    assert found["low"] <= found["high"] and found["mean"] == pytest.approx(roc_auc_score(labels, both))


def test_shuffled_images_keep_their_patches() -> None:
    x = torch.arange(2 * 16.0).view(2, 1, 4, 4)
    y = unknown.shuffle(x, 2, torch.Generator().manual_seed(0))
    assert y.shape == x.shape and not torch.equal(x, y)
    parts = [{tuple(p.flatten().tolist()) for p in z.unfold(2, 2, 2).unfold(3, 2, 2).reshape(-1, 2, 2)} for z in (x, y)]
    assert parts[0] == parts[1]


def test_no_kind_of_images_is_in_two_groups() -> None:
    for name in unknown.DEVELOPMENT:
        kinds = [*unknown.DEVELOPMENT[name], *unknown.HELD[name], *unknown.FRESH[name]]
        assert len(kinds) == len(set(kinds))


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    needs("cifar10_test.npz", "mnist.npz", "fashion_mnist.npz", "olivetti.npz", "malaria_africa_pfpr.npz")
    record = run_quick(tmp_path, "unknown", "--families", "Fashion-MNIST", "--data", str(common.DATA))
    assert set(record["chosen"]) == set(unknown.SCORES)
    assert count_rows(tmp_path, "unknown") == 2 * len(unknown.SCORES)
