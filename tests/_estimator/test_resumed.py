"""Fits that were interrupted go on from their checkpoints, with another number of ranks, to the same result."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import linnet
from linnet._common import Checkpoint
from linnet._common import checkpoint as checkpoints
from linnet.probability import Categorical
from tests.support.drawn import normal
from tests.support.sharded import start

N = 24
STRUCTURES = ("kron", "ekfac", "diag", "lowrank", "samples")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 3)).double()


def embedding(folder: Path | None) -> Tensor:
    options: dict[str, Any] = {"method": "krylov", "block": 2, "passes": 6, "tolerance": 0.0, "checkpoint": folder}
    return linnet.FisherEmbedding(net(), 2, **options).fit(normal(N, 4)).eigenvalues_


def laplace(structure: str, folder: Path | None, *, labels: Tensor | None = None, **options: Any) -> Tensor:
    labels = torch.arange(N) % 3 if labels is None else labels
    options = {"samples": 4, "tolerance": 1e-12, "batch_size": 2} | options
    la = linnet.Laplace(net(), structure=structure, rank=3, checkpoint=folder, **options)  # type: ignore[arg-type]
    with (
        mock.patch("linnet.linalg.svd.truncated.choose_method", return_value="krylov"),
        mock.patch("linnet.inference.samples.choose_space", return_value="weight"),
    ):
        la.fit(normal(N, 4), labels)
    new = torch.cat([torch.as_tensor(la.predict_proba(normal(5, 4, seed=1))).flatten(), la.prior_variance_[:1]])
    return torch.cat([new, torch.tensor([la.log_evidence()])])


def samples(folder: Path | None, *, scale: float = 1.0, k: int = 3, data: Tensor | None = None) -> Tensor:
    J = linnet.linearize(net()).jacobian(normal(N, 4) if data is None else data, 2)
    S, L = torch.full((J.shape[1],), 0.5, dtype=torch.float64), scale * Categorical().root(J.outputs())
    options: dict[str, Any] = {"space": "weight", "preconditioner": "none", "tolerance": 1e-12}
    return linnet.sampling.posterior_samples(J, S, L, k, checkpoint=folder, **options).Z


DOORS: dict[str, Callable[..., Tensor]] = {
    "embedding": embedding,
    "samples of a posterior": samples,
    **{f"Laplace {structure}": partial(laplace, structure) for structure in STRUCTURES},
}
SAVES = {"Laplace ekfac": 8, "Laplace lowrank": 1, "Laplace samples": 14}
"""Saves after which a fit is interrupted: in the second pass, and in a later solve."""


class Interrupted(Exception):
    pass


def interrupt(fit: Callable[..., Tensor], folder: Path, saves: int, *, kill: bool = False) -> None:
    """Let a fit end in the middle of its next save after so many saves."""
    done, save, write = [0], Checkpoint.save, checkpoints._write

    def count(self: Checkpoint, *args: Any) -> None:
        save(self, *args)
        done[0] += 1

    def stop(*args: Any) -> None:
        write(*args)
        if done[0] == saves:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted

    with mock.patch.object(Checkpoint, "save", count), mock.patch.object(checkpoints, "_write", stop):
        try:
            fit(folder)
        except Interrupted:
            return
    raise AssertionError(f"The fit ended after {done[0]} saves.")


def resume(name: str, folder: Path) -> tuple[Tensor, int]:
    """The result of a fit that goes on, and how often it saves."""
    with mock.patch.object(Checkpoint, "save", autospec=True, side_effect=Checkpoint.save) as save:
        found = DOORS[name](folder)
    assert not folder.exists() or dist.is_initialized()
    return found, save.call_count


def copied(folder: Path, name: str, world: int) -> Path:
    return shutil.copytree(folder / name, folder / f"{name} for {world}")


def write(rank: int, folder: str) -> None:
    """Two ranks, all of whose fits end early; they are killed in the last fit."""
    for name, fit in DOORS.items():
        last = name == list(DOORS)[-1]
        interrupt(fit, Path(folder) / name, SAVES.get(name, 3), kill=last)


def go_on(rank: int, folder: str) -> None:
    torch.save({name: resume(name, Path(folder) / f"{name} for 4") for name in DOORS}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks were killed."""
    folder = tmp_path_factory.mktemp("resumed")
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        start(write, 2, folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return {name: fit(None) for name, fit in DOORS.items()}


def check(name: str, found: Tensor, undisturbed: dict[str, Tensor]) -> None:
    expected = undisturbed[name]
    assert float((found - expected).abs().max()) <= 1e-9 * float(expected.abs().max()), name


needs_gloo = pytest.mark.skipif(not dist.is_gloo_available() or os.name != "posix", reason="needs gloo and signals")


@needs_gloo
@pytest.mark.parametrize("name", DOORS)
def test_one_process_goes_on_where_two_ranks_were_killed(folder, undisturbed, name, tmp_path):
    found, saves = resume(name, copied(folder, name, 1))
    check(name, found, undisturbed)
    again, all_saves = resume(name, tmp_path / "new")
    check(name, again, undisturbed)
    assert saves < all_saves  # what was there is not computed again


@needs_gloo
@pytest.mark.slow
def test_four_ranks_go_on_where_two_ranks_were_killed(folder, undisturbed):
    for name in DOORS:
        copied(folder, name, 4)
    start(go_on, 4, folder)
    for rank in range(4):
        for name, (found, _) in torch.load(folder / f"{rank}.pt").items():
            check(name, found, undisturbed)
    assert not any((folder / f"{name} for 4").exists() for name in DOORS)


OTHERS: dict[str, tuple[Callable[[Path], Tensor], str]] = {
    "labels": (lambda folder: laplace("kron", folder, labels=torch.arange(N) % 2), "the targets have changed"),
    "options": (lambda folder: laplace("kron", folder, seed=1), "the options have changed"),
}


def test_another_fit_is_refused_by_name(tmp_path):
    folder = tmp_path / "state"
    interrupt(partial(laplace, "kron"), folder, 3)
    for fit, message in OTHERS.values():
        with pytest.raises(ValueError, match=f"belongs to another computation: {message}"):
            fit(folder)
    other = normal(N, 4)
    other[7, 2] += 1e-9
    with (
        mock.patch(f"{__name__}.normal", lambda *args, **kwargs: other),
        pytest.raises(ValueError, match="computation: the data have changed"),
    ):
        laplace("kron", folder)
    with (
        mock.patch(f"{__name__}.net", lambda: nn.Linear(4, 3).double()),
        pytest.raises(ValueError, match="computation: the weights have changed"),
    ):
        laplace("kron", folder)
    assert torch.isfinite(laplace("kron", folder, batch_size=5)).all() and not folder.exists()


def test_another_system_is_refused_by_name(tmp_path):
    folder = tmp_path / "state"
    interrupt(samples, folder, 3)
    with pytest.raises(ValueError, match="belongs to another computation: its right-hand sides have other norms"):
        samples(folder, scale=1.001)
    with pytest.raises(ValueError, match="belongs to another computation: the settings have changed"):
        samples(folder, k=4)
    with pytest.raises(ValueError, match="the settings, the data have changed"):
        samples(folder, data=normal(N + 1, 4))
    torch.testing.assert_close(samples(folder), samples(None), rtol=1e-9, atol=1e-12)


def test_what_takes_one_pass_has_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint= serves the structures 'kron'.*got 'full', whose dense matrices"):
        laplace("full", tmp_path / "state")
    assert torch.isfinite(laplace("auto", tmp_path / "state")).all() and not (tmp_path / "state").exists()
