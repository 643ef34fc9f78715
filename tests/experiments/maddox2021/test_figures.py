"""Figures 3 to 5 of Maddox et al. 2021: their parts are what they claim, and small versions run."""

import math

import pytest
import torch
from torch import nn

import linnet
from experiments.__main__ import main
from experiments.common.networks import lenet, perceptron
from experiments.common.training import Labeled, in_parts
from experiments.maddox2021 import figure3, figure4, figure5
from linnet.fisher import probes
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick

# Figure 3.


def test_observations_lie_where_they_should():
    data = figure3.WAVE.observed(0)
    x = data.X[0][:, 0]
    assert len(data) == figure3.WAVE.n and bool(figure3.WAVE.within(x).all())
    assert not bool(figure3.WAVE.within(torch.tensor([0.0, 3.0])).any())
    error = data.y - figure3.WAVE.truth(x)
    assert float(error.std()) == pytest.approx(figure3.NOISE, rel=0.4)


def test_the_architectures_have_as_many_parameters():
    counts = [sum(p.numel() for p in perceptron((1, *shape, 1)).parameters()) for shape in figure3.SHAPES.values()]
    assert all(20_000 < count < 21_500 for count in counts)


def test_the_posterior_of_figure_3_is_the_finite_ntk():
    net, data = perceptron((1, 7, 1), activation=nn.ReLU), figure3.WAVE.observed(0)
    x = torch.linspace(-3.5, 3.5, 9)
    found = figure3.condition(net, data, figure3.WAVE, x)
    J = linnet.linearize(net).to(torch.float64)
    A, B = J.jacobian(data.X[0].double()), J.jacobian(x[:, None].double())
    K = A.gram() + found["noise"] * torch.eye(len(data), dtype=torch.float64)
    weights = torch.linalg.solve(K, torch.cat([data.y.double()[:, None], A.gram(B)], 1))
    torch.testing.assert_close(found["mean"], B.gram(A) @ weights[:, 0], rtol=1e-6, atol=1e-8)
    variance = B.gram_diag() - (A.gram(B) * weights[:, 1:]).sum(0)
    torch.testing.assert_close(found["std"], variance.sqrt(), rtol=1e-4, atol=1e-6)


def test_figure3_runs(tmp_path):
    record = run_quick(tmp_path, "figure3")
    assert list(record["results"]) == [figure3.UNTRAINED, figure3.TRAINED, figure3.ARCHITECTURES]
    assert list(record["parts"][figure3.TRAINED]) == ["seed 0", "seed 1"]
    for one in record["results"][figure3.UNTRAINED].values():
        assert one["std away from the data"]["mean"] > one["std near the data"]["mean"]
    with pytest.raises(ValueError, match="on the CPU only; got 'cuda'"):
        main(["figure3", "--quick", "--device", "cuda"])


# Figure 4.


def test_scores_are_paired_with_the_network():
    f = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([0, 0, 0, 1])
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]], dtype=torch.float64)
    found = figure4.score(p, f, y)
    assert found["accuracy"] == 1.0 and found["less the network"] == 0.25
    assert found["its standard error"] == pytest.approx(0.25)


def test_failed_fits_are_said_and_left_out():
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no memory")

    X, y = normal(6, 3).float(), torch.arange(6) % 2
    f = torch.zeros(6, 2)
    how = {"mean": "network", "inference": "map"}
    found = figure4.adapt(Broken(3, 2), (X, y), (X, y), f, how, "cpu")
    assert "no memory" in found["failed"]
    score = figure4.score(f.double().softmax(1), f, y)
    parts = {"ResNet-20": {"6 images, all layers, 6 test images": {"a": {"seed 0": found}, "b": {"seed 0": score}}}}
    assert list(figure4.summary(parts)["ResNet-20"]["6 images, all layers, 6 test images"]) == ["b"]


@pytest.mark.slow
def test_figure4_runs(tmp_path):
    needs("cifar10_test.npz", "cifar10_train_1.npz", "weights/resnet20_cifar10.safetensors")
    some = ["--means", "network", "zero", "--inference", "map", "vi", "--test", "10"]
    record = run_quick(tmp_path, "figure4", *some)
    (table,) = record["results"]["ResNet-20"].values()
    assert set(table) == {"network", *(f"{m}, {i}" for m in figure4.MEANS.values() for i in ("map", "vi"))}
    assert table["linearized network, map"]["less the network"]["mean"] >= -0.1
    # A second run puts its part beside the first.
    again = run_quick(tmp_path, "figure4", "--means", "zero", "--inference", "laplace", "--test", "10")
    (table,) = again["results"]["ResNet-20"].values()
    assert {"finite NTK, laplace", "linearized network, vi"} <= set(table)


# Figure 5.


def test_a_unit_set_to_zero_is_a_unit_removed():
    net, X = lenet(28, 3, channels=(2, 3), hidden=6), normal(4, 1, 28, 28).float()
    unit = int((net[:9](X) > 0).sum(0).argmax())  # one that does something
    zero = figure5.remove_unit(net, unit)
    smaller = lenet(28, 3, channels=(2, 3), hidden=5)
    kept = [i for i in range(6) if i != unit]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    state["7.weight"], state["7.bias"], state["9.weight"] = (
        state["7.weight"][kept],
        state["7.bias"][kept],
        state["9.weight"][:, kept],
    )
    smaller.load_state_dict(state)
    torch.testing.assert_close(zero(X), smaller(X), rtol=1e-5, atol=1e-6)
    assert linnet.similarity(zero, smaller, X) == pytest.approx(1.0, abs=1e-6)
    assert linnet.similarity(net, smaller, X) < 1 - 1e-6


def test_only_the_last_layer_is_trained_again():
    net, x = lenet(28, 10, channels=(2, 3), hidden=6), normal(30, 1, 28, 28).float()
    data = Labeled((x,), torch.arange(30) % 10)
    new = figure5.with_last_layer_of(net, data, epochs=2, seed=0)
    changed = [key for key, value in new.state_dict().items() if not torch.equal(value, net.state_dict()[key])]
    assert changed == ["9.weight", "9.bias"]
    assert in_parts(new, (x,)).shape == (30, 10)


def test_what_is_kept_of_a_spectrum():
    found = figure5.describe(probes.spectrum([8.0, 1.0, 1.0, 0.0]))
    assert found["components for 99 %"] == 3 and found["shares"]["1"] == 0.8
    assert found["effective rank"] == pytest.approx(100 / 66)
    assert math.isclose(sum(found["shares"].values()), 1.0)


@pytest.mark.slow
def test_figure5_runs(tmp_path):
    needs("mnist.npz", "fashion_mnist.npz")
    record = run_quick(tmp_path, "figure5")
    for start in (figure5.SAME, figure5.DIFFERENT):
        for one in record["similarity"][start].values():
            assert all(0 <= one[space]["mean"] <= 1 for space in figure5.SPACES)
    assert record["epochs, against 2"]["2"]["parameters"]["mean"] == pytest.approx(1.0, abs=1e-5)
