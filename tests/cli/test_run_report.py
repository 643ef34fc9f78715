"""Reports of commands: examples as they were in their files, and the ends of an embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linnet.cli.data_files import Examples, Reading
from linnet.cli.run_report import _find_extremes, _show_inputs
from linnet.report import Inputs
from tests.support.drawn import normal


@pytest.mark.parametrize("mean", [None, (0.2, 0.3, 0.4)])
@pytest.mark.parametrize("std", [None, (0.5, 0.6, 0.7)])
def test_pictures_have_their_own_colors(mean, std):
    pixels = torch.rand(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    shift, scale = (torch.tensor(part or (other,)).view(-1, 1, 1) for part, other in ((mean, 0.0), (std, 1.0)))
    data = Examples((pixels - shift) / scale, None, "images", names=list("abcd"))
    shown = _show_inputs(data, Reading(pixel_mean=mean, pixel_std=std))
    np.testing.assert_allclose(shown.pictures, pixels.numpy(), rtol=1e-5, atol=1e-6)
    assert shown.names == list("abcd")


def test_rows_have_their_own_units():
    cells, center, spread = normal(5, 2), (3.0, -1.0), (10.0, 0.1)
    data = Examples((cells - torch.tensor(center)) / torch.tensor(spread), None, "rows", columns=("a", "b"))
    np.testing.assert_allclose(_show_inputs(data, Reading(center=center, spread=spread)).cells, cells, rtol=1e-6)
    np.testing.assert_allclose(_show_inputs(data, Reading()).cells, data.X)
    assert _show_inputs(None, Reading()).cells is None


def test_a_zero_of_the_file_is_a_zero():
    """Scaling and its inverse leave a rounding error of float32, which is not shown."""
    cells = torch.tensor([[0.0, 7.0], [180.0, 0.0], [1e-3, -7.0]])
    center, spread = (73.9, -1.1), (86.3, 63.7)
    scaled = ((cells - torch.tensor(center)) / torch.tensor(spread)).float()
    shown = _show_inputs(Examples(scaled, None, "rows"), Reading(center=center, spread=spread)).cells
    np.testing.assert_allclose(shown, cells, rtol=1e-5, atol=1e-4)
    assert shown[0, 0] == 0 and shown[1, 1] == 0
    np.testing.assert_allclose(shown, cells, rtol=0, atol=3e-5)
    assert shown[2, 0] > 0


@pytest.mark.parametrize("labels", [None, ["no", "yes", "no", "yes", "no", "yes", "no", "yes"]])
def test_the_ends_of_components(labels):
    Z = torch.stack([torch.arange(8.0), -torch.arange(8.0), torch.zeros(8), torch.ones(8)], 1)
    found = _find_extremes(Z, Inputs([f"no. {i}" for i in range(8)]), labels)
    assert [group.title for group in found] == ["Component 1", "Component 2", "Component 3"]
    first = found[0].items
    assert len(first) == 6 and {dict(item.said)["at"] for item in first} >= {"7"}
    for item in first:
        assert dict(item.said).get("label") == (None if labels is None else labels[int(dict(item.said)["at"])])


def test_rows_in_float64_are_shown_to_their_last_digits():
    cells = torch.tensor([[0.0, 7.0], [180.0, 0.0], [1e-3, -7.0]], dtype=torch.float64)
    center, spread = (73.9, -1.1), (86.3, 63.7)
    scaled = (cells - torch.tensor(center, dtype=torch.float64)) / torch.tensor(spread, dtype=torch.float64)
    shown = _show_inputs(Examples(scaled, None, "rows"), Reading(center=center, spread=spread)).cells
    sizes = np.abs(cells.numpy()) + 2 * np.abs(center)
    assert shown[0, 0] == 0 and shown[1, 1] == 0
    assert (np.abs(shown - cells.numpy()) <= 4 * np.finfo(float).eps * sizes).all()
