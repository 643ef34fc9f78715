"""What holds for every test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

SEED = 714_025
"""Not one that a test is likely to give a generator of its own, whose numbers would then come twice."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone, among others and in any order."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
