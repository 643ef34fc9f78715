"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

SEED = 714_025
"""Not one that a test is likely to give a generator of its own, whose numbers would then come twice."""


@pytest.fixture(autouse=True, scope="session")
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands sign their runs with a key of the tests, not with the key of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers alone, among others and in any order."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
