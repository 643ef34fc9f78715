"""The timings of Fisher embeddings measure what they claim; small versions run, and no time is looked at."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.rivals import algorithm4, gram_svd
from experiments import common
from experiments.common.data import augment
from experiments.common.networks import WRN, load_encoder, wide_resnet
from experiments.zhang2022 import embedding_time
from experiments.zhang2022.embedding_time import LINNET, PUBLISHED
from tests.support.quick_runs import run_quick

needs_data = pytest.mark.skipif(
    not (common.DATA / "cifar10_train_1.npz").exists(), reason=f"the experiment's data are not in {common.DATA}"
)


def test_rivals_find_the_eigenvalues() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    X = torch.randn(40, 4, dtype=torch.float64)
    theta = {name: t.detach() for name, t in net.named_parameters()}
    J = torch.func.jacrev(lambda theta: embedding_time.output(torch.func.functional_call(net, theta, (X,))))(theta)
    J = torch.cat([J[name].flatten(1) for name in theta], 1)
    center, scale = J.mean(0), torch.rand(J.shape[1], dtype=torch.float64) + 0.5
    exact = torch.linalg.svdvals((J - center) * scale).square()[:5]
    given = {"center": center, "scale": scale}
    power = algorithm4(net, embedding_time.output, X, 5, **given, batch=16, iterations=60)
    torch.testing.assert_close(power, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gram_svd(net, embedding_time.output, X, 5, **given, chunk=16), exact, rtol=1e-9, atol=0)


def test_augmented_images_are_shifts_and_mirrors() -> None:
    x = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    new = augment(x, torch.Generator().manual_seed(1))
    assert new.shape == x.shape
    padded = nn.functional.pad(x, (4,) * 4, mode="reflect")
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # (n, 3, 9, 9, 8, 8)
    for image, choices in zip(new, windows, strict=True):
        both = torch.cat([choices.flatten(1, 2), choices.flip(4).flatten(1, 2)], 1)
        assert bool((both == image[:, None]).all((0, 2, 3)).any())


@needs_data
@pytest.mark.skipif(
    not (common.RESULTS / "wrn" / f"{WRN}.safetensors").exists(), reason="python -m experiments wrn makes the weights"
)
def test_the_trained_wide_resnet_recognizes_images() -> None:
    from experiments.common.data import cifar10
    from experiments.common.training import accuracy

    x, y = cifar10(common.DATA, "test", count=100)
    assert accuracy(wide_resnet(), x, y) > 0.8


@pytest.mark.slow
@needs_data
def test_small_timings_and_errors(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "embedding_time", "--panels", "time", "accuracy")["parts"]
    rows = {(row["n"], row["contender"]): row for row in found["time"]["rows"]}
    assert rows[8, LINNET]["largest relative error"] < 1e-4
    assert rows[8, PUBLISHED]["iterations"] == 10 and rows[10, PUBLISHED]["iterations"] == 1
    assert found["accuracy"]["error"] < 1e-7
    assert found["accuracy"]["embedding against transform"] < 1e-8
    assert "embedding_time: " in (tmp_path / "README.md").read_text()


@pytest.mark.slow
@needs_data
def test_ranks_agree(tmp_path: Path) -> None:
    rows = run_quick(tmp_path, "embedding_time", "--panels", "ranks")["parts"]["ranks"]["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["difference"] <= 1e-10 for row in rows)


def test_weights_that_nobody_has_trained_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`python -m experiments wrn --device cuda` makes them"):
        wide_resnet(tmp_path / "wrn")
    options = argparse.Namespace(quick=False, out=tmp_path)
    found = common.RESULTS / "encoders" / "vae_cifar10.safetensors"
    if not found.exists():
        with pytest.raises(FileNotFoundError, match=r"`python -m experiments encoders --device cuda` makes them"):
            load_encoder(options, "vae")


@needs_data
def test_a_small_training(tmp_path: Path) -> None:
    found = run_quick(tmp_path, "wrn")
    assert found["network"] == "WRN-10-1" and 0 <= found["test accuracy in float16"] <= 1
    assert len(found["path"]) == 1
