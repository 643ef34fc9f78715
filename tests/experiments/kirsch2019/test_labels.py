"""Labels that a curve needs, and a small version of the experiment on data of scikit-learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.kirsch2019 import labels
from tests.support.quick_runs import count_rows, run_quick


def test_a_curve_that_reaches_the_goal_at_once_or_never() -> None:
    assert labels.labels_needed([10, 20], [0.5, 0.7], 0.4) == 10
    assert labels.labels_needed([10, 20], [0.5, 0.7], 0.7) == 20
    assert labels.labels_needed([10, 20, 30], [0.5, 0.4, 0.3], 0.6) is None


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "labels", "--sets", "digits", "--seeds", "1")
    found = record["summary"]["digits"]
    assert set(found) == set(labels.METHODS) - {"epig"}
    assert found["random"]["labels"] == pytest.approx(40)
    assert count_rows(tmp_path, "labels") == len(found)
