"""Settings of the solvers: what is refused, by name and before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from linnet.inference.problem import SolverSettings, choose_solver


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"solver": "qr"}, "solver must be one of 'auto', .*; got 'qr'"),
        ({"preconditioner": "ilu"}, "preconditioner must be one of 'auto', .*; got 'ilu'"),
        ({"tolerance": 0.0}, r"tolerance must be positive; got 0\.0"),
        ({"tolerance": float("nan")}, "tolerance must be positive; got nan"),
        ({"iterations": 0}, "iterations must be a positive number; got 0"),
        ({"samples": 0}, "samples must be a positive number; got 0"),
        ({"probes": 1.5}, r"probes must be a positive number; got 1\.5"),
        ({"rank": 0}, "rank must be a positive number or 'auto'; got 0"),
        ({"rank": "all"}, "rank must be a positive number or 'auto'; got 'all'"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SolverSettings(**given)


@pytest.mark.parametrize(
    ("solver", "taken"), [("function", 8 * 4 * 30**2), ("weight", 8 * (4 * 20**2 + 2 * 7 * 20))], ids=["K", "G"]
)
def test_the_bytes_of_a_dense_solver(solver: Any, taken: int) -> None:
    given = {"device": torch.device("cpu"), "kernels": 2, "features": 7}
    assert choose_solver(30, 20, SolverSettings(solver, memory=taken), **given) == solver
    with pytest.raises(MemoryError, match=f"solver='{solver}' with 30 rows and 20 parameters takes"):
        choose_solver(30, 20, SolverSettings(solver, memory=taken - 1), **given)


def test_steps_and_seeds_have_numbers_of_their_own() -> None:
    def draw(seed: int, step: int) -> list[float]:
        return torch.randn(3, generator=SolverSettings(seed=seed).generator(step)).tolist()

    drawn = [tuple(draw(seed, step)) for seed in range(4) for step in range(7)]
    assert len(set(drawn)) == len(drawn) and list(drawn[0]) == draw(0, 0)
    assert SolverSettings(iterations=1, samples=1, probes=1, rank=1).rank == 1
