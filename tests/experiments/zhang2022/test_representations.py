"""Networks that learn without labels, and small versions of the experiments on them; no real results here."""

import json
import tempfile

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.models import WideResNet
from experiments import common
from experiments.__main__ import main
from experiments.common import data, networks
from experiments.common.data import rotate
from experiments.common.networks import load, store
from experiments.common.training import train_pair
from experiments.mu2020 import table1_mu
from experiments.zhang2022 import encoders, inversion, nfk_distill, nfk_probe
from linnet.fisher import EmbeddingHead, WithEmbedding, distill
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick

# Networks.


def test_weights_come_back_as_they_were_but_for_rounding(tmp_path):
    net = networks.ColorDiscriminator(2)
    path = store(net, tmp_path, "net")
    again = load(networks.ColorDiscriminator(2), tmp_path, "net")
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    assert path.name == "net.safetensors" and not again.training and next(again.parameters()).dtype == torch.float32


def test_the_bound_of_the_vae_is_the_score_that_is_embedded():
    import linnet

    net, x = networks.ColorVAE(2).eval(), normal(3, 3, 32, 32).float().tanh()
    module, output = linnet.scores.vae(likelihood="gaussian", noise=networks.NOISE).bind(net)
    with torch.no_grad():
        torch.testing.assert_close(output(module(x)).flatten(), net.bound(x))
        assert not torch.equal(net.bound(x), net.bound(x, seed=1))


def test_all_training_images_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for i, part in enumerate(data.TRAINING):
        residual = np.zeros((3, 2, 32, 32), np.uint8)
        residual[:, :, 0, 0] = [[10 * i, 10 * i + 1], [5, 5], [0, 0]]  # red and blue are stored less green
        np.savez(tmp_path / f"cifar10_{part}.npz", residual=residual, y=np.array([i, 9], np.uint8))
    x, y = data.color_bytes(tmp_path)
    assert x.shape == (10, 3, 32, 32) and x.dtype == torch.uint8 and y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert x[:, 0, 31, 31].tolist() == [5 + 10 * (i // 2) + i % 2 for i in range(10)]
    assert bool((x[:, 1:] == 5).all())
    monkeypatch.setattr(data, "decode", None)  # the copy is read
    data._cifar10_file.cache_clear()
    again, _ = data.cifar10(tmp_path, "all", count=3)
    torch.testing.assert_close(again, (x[:3].float() / 255 - data.MEAN) / data.STD)


def test_all_rotations_of_all_images():
    x = normal(2, 3, 4, 4)
    turned, angle = rotate(x)
    assert angle.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(turned[:2], x)
    torch.testing.assert_close(turned[4:6], x.flip(2, 3))


def test_both_networks_see_changed_images():
    seen = []

    class D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            seen.append(float(x.detach().min()))
            return self.weight * x.flatten(1).sum(1)

    G = nn.Linear(100, 4)
    path = train_pair(
        D(), G, torch.ones(8, 4), steps=3, seed=0, batch=2, rates=(1e-3, 1e-3), change=lambda x, _: x + 100
    )
    assert len(path) == 3 and len(seen) == 9 and min(seen) > 50 and not G.training


def test_redrawn_layers_are_new_and_the_others_are_not():
    blocks, x = list(networks.ImageEncoder(2).blocks), normal(8, 3, 32, 32).float()
    new = table1_mu.redraw(blocks, [False, False, True, False, False], x, 0)
    same = [torch.equal(old[0].weight, block[0].weight) for old, block in zip(blocks, new, strict=True)]
    assert same == [True, True, False, True, True]
    # From the new one upwards, batch norm has seen the images.
    means = [float(block[1].running_mean.abs().sum()) for block in new[1:]]
    assert means[0] == 0 and min(means[1:]) > 0


# What a GAN is worth.


def test_a_discriminator_that_does_not_tell_images_apart_is_refused():
    told = {"output, training images": 1.0, "output, test images": 0.5, "output, generated images": -1.0}
    encoders.check(told)
    with pytest.raises(ArithmeticError, match=r"0\.500 for test and 0\.600 for generated"):
        encoders.check(told | {"output, generated images": 0.6})


class Mean(nn.Module):
    """Calls bright images real."""

    def forward(self, x):
        return x.mean((1, 2, 3))


def test_what_is_said_of_real_and_generated_images(tmp_path):
    import argparse

    level = torch.linspace(0.1, 0.9, 20)[:, None, None, None].expand(-1, 3, 32, 32)
    G = nn.Linear(100, 3 * 32 * 32)
    nn.init.zeros_(G.weight), nn.init.constant_(G.bias, -0.5)
    made = nn.Sequential(G, nn.Unflatten(1, (3, 32, 32)))
    options = argparse.Namespace(data=tmp_path)
    found = encoders.judge(Mean(), made, ((level + 1) * 127.5).to(torch.uint8), level, options)
    assert found["test images called real"] == found["generated images called generated"] == 1
    assert found["test above generated"] == 1 and found["spread of generated images"] == 0  # collapsed
    assert found["output, generated images"] == pytest.approx(-0.5)


# Kernels of whole Fisher vectors.


def test_the_kernel_in_blocks_is_the_whole_one(monkeypatch):
    import linnet

    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    emb = linnet.FisherEmbedding(net, 2, score=linnet.scores.energy(), progress=False)
    x, new = normal(7, 4), normal(5, 4, seed=1)
    emb.fit(x)
    monkeypatch.setattr(nfk_probe, "BLOCK", 4), monkeypatch.setattr(nfk_probe, "CHUNK", 2)
    K, away = nfk_probe.whole_kernel(emb, x, new)
    torch.testing.assert_close(K, emb.gram(x))
    torch.testing.assert_close(away, emb.gram(new, x))


def test_shares_of_components_beyond_the_embedding(monkeypatch):
    E = normal(60, 40) * torch.logspace(0, -1, 40, dtype=torch.float64)
    K = E @ E.T
    monkeypatch.setattr(nfk_probe, "FURTHER", (5, 10, 100))
    found = nfk_probe.explain(K, nfk_probe.Sizes(60, 60, dimensions=(4,)))
    values = torch.linalg.eigvalsh(K).flip(0)
    assert list(found) == ["5", "10"]
    assert found["10"] == pytest.approx(float(values[:10].sum() / values.sum()), rel=1e-6)


# Distillation with an embedding of the student's own.


def test_attention_maps_have_length_one_each():
    net, x = WideResNet(10, 1).eval(), normal(2, 3, 32, 32).float()
    with torch.no_grad():
        logits, maps = nfk_distill.Attention(net)(x)
        torch.testing.assert_close(logits, net(x))
    torch.testing.assert_close(torch.stack([m.norm(dim=1) for m in maps.split([1024, 256, 64], 1)]), torch.ones(3, 2))
    distance = nfk_distill.attention_distance(10.0, (2, 1))
    a, b = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.0, 0.0, 5.0]])
    assert float(distance(a, b)) == pytest.approx(10 * (0.5 + 9))


class Doubled(WithEmbedding):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)

    def forward(self, x):
        logits = self.student(x)
        return logits, 2 * logits


def test_a_student_may_give_its_embedding_itself():
    X, y = normal(40, 3).float(), (normal(40, 3)[:, 0] > 0).long()
    target = 5 + torch.zeros(40, 2)
    model = Doubled()
    found = distill(model, X, y, target=target, alpha=0.0, standardize=False, epochs=40, lr=0.1, weight_decay=0.0)
    assert found.model is model and found.scale is None
    with torch.no_grad():
        torch.testing.assert_close(model.student(X), target / 2, rtol=0, atol=0.5)
    with pytest.raises(ValueError, match="gives an embedding itself"):
        distill(model, X, y, target=target, layer="student")
    assert issubclass(EmbeddingHead, WithEmbedding)


# Results in parts.


def test_parts_of_several_runs_are_kept(tmp_path):
    import argparse

    options = argparse.Namespace(name="some", out=tmp_path, quick=False)
    common.keep(options, {"a": {"x": 1.0}})
    assert common.keep(options, {"a": {"y": float("nan")}, "b": 2}) == {"a": {"x": 1.0, "y": None}, "b": 2}
    record = json.loads((tmp_path / "some" / "metrics.json").read_text())
    assert record["parts"]["a"] == {"x": 1.0, "y": None}


# Small versions.


@pytest.mark.slow
def test_encoders_run(tmp_path):
    needs("cifar10_test.npz", "mnist.npz", "weights/dcgan_discriminator_mnist.safetensors")
    found = run_quick(tmp_path, "encoders")["parts"]
    assert list(found) == list(encoders.PARTS)
    assert found["bigan"]["latents explained, generated images"] < 1 and found["gan"]["steps"] == 2
    assert 0 <= found["rotation"]["accuracy of angles, test"] <= 1
    assert (tmp_path / "encoders" / "vae_cifar10.safetensors").stat().st_size < 5_000_000
    again = run_quick(tmp_path, "encoders", "--parts")["parts"]
    assert again.keys() == found.keys()


def test_probes_run(tmp_path):
    needs("cifar10_test.npz")
    found = run_quick(tmp_path, "nfk_probe", "--parts", nfk_probe.GAN)["parts"][nfk_probe.GAN]
    assert set(found["probes"]) == {"4", "8", "activations, last layer", "activations, all layers", "whole"}
    assert found["probes"]["whole"]["numbers"] > 5000
    assert found["explained variance"]["4"] < found["explained variance"]["8"] <= 1
    gap = found["8 components less the others"]["whole"]
    assert gap["mean"] == pytest.approx(
        found["probes"]["8"]["accuracy"] - found["probes"]["whole"]["accuracy"], abs=1e-4
    )


def test_distillation_runs(tmp_path):
    needs("cifar10_test.npz")
    main(["nfk_distill", "--tune", "--methods", "KD", "--quick", "--out", str(tmp_path)])
    found = run_quick(tmp_path, "nfk_distill")
    assert list(found["test accuracy, %"]) == list(nfk_distill.PAPER)
    tried = found["parts"]["tuning"]["KD"]
    best = max(tried.values(), key=lambda row: row["held-out accuracy"])
    assert found["parts"]["students"]["KD"]["0"]["settings"]["alpha"] == best["alpha"]


def test_inversion_runs(tmp_path):
    needs("mnist.npz", "weights/lenet5_mnist.safetensors")
    found = run_quick(tmp_path, "inversion", "--parts", "mnist")["parts"]["mnist"]
    assert found["images as they are"]["digits read right"] > 0.9
    for way in (inversion.NFK, inversion.MAPPED, inversion.PIXELS):
        assert found[way]["squared error of a pixel"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The evidence of these 20 labels")  # which are too few
def test_table_1_runs(tmp_path):
    needs("cifar10_test.npz")
    found = run_quick(tmp_path, "table1_mu", "--tops", "1")
    assert set(found["accuracy, %"]["bigan"]["1"]) == set(table1_mu.SAID)
    rotation = run_quick(tmp_path, "table1_mu", "--parts", "rotation", "--tops", "2")
    assert set(rotation["accuracy, %"]) == {"bigan", "rotation"}
    anew = run_quick(tmp_path, "table1_mu", "--parts", "rotation", "--tops", "1", "--anew")
    assert set(anew["accuracy, %"]["rotation"]) == {"1"} and "bigan" in anew["accuracy, %"]
