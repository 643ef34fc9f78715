"""Data of the experiments: tests that read the real files skip without them, others make their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments import common
from tests.support.drawn import normal


def needs(*names: str) -> None:
    """Skip the test unless the data folder has these files."""
    missing = [name for name in names if not (common.DATA / name).exists()]
    if missing:
        pytest.skip(f"no {missing[0]} under {common.DATA}")


def make_uci(folder: Path, sizes: dict[str, int]) -> Path:
    """Write sets in the layout of the data folder: a smooth function of three inputs, two splits."""
    (folder / "uci").mkdir()
    masks = {}
    for i, (name, n) in enumerate(sizes.items()):
        X = normal(n, 3, seed=i).numpy()
        y = 20 + 5 * np.sin(X.sum(1)) + 0.3 * normal(n, seed=i + 10).numpy()
        np.savetxt(folder / "uci" / f"{name}.csv", np.column_stack([X, y]), delimiter=",", header="a,b,c,y")
        test = np.zeros((2, n), dtype=bool)
        test[0, : n // 5] = test[1, -(n // 5) :] = True
        masks[name] = np.packbits(test, axis=1)
    np.savez(folder / "uci" / "splits.npz", **masks)
    return folder
