"""Priors: what each name means, held against kernels that are built by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linnet import linearize
from linnet.linalg import Stack
from linnet.probability import NAMES, Prior, check_prior, layer_sums, make_prior, ntk_variances
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal


class ScaledLinear(nn.Module):
    """A linear layer in NTK parametrization: standard normal weights, divided by the root of the fan-in."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.root = layer.weight.shape[1] ** 0.5
        self.weight, self.bias = nn.Parameter(layer.weight.detach() * self.root), nn.Parameter(layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.root, self.bias)


class ScaledConv(nn.Module):
    """A convolution in NTK parametrization."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.groups, self.root = layer.groups, layer.weight[0].numel() ** 0.5
        assert layer.bias is not None
        self.weight, self.bias = nn.Parameter(layer.weight.detach() * self.root), nn.Parameter(layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / self.root, self.bias, groups=self.groups)


def mlp() -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))


def conv() -> nn.Sequential:
    body = (nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    return double(nn.Sequential(*body))


def reparametrized(model: nn.Sequential) -> nn.Sequential:
    made = {nn.Linear: ScaledLinear, nn.Conv2d: ScaledConv}
    return nn.Sequential(*(made[type(m)](m) if type(m) in made else m for m in model))


@pytest.mark.parametrize(("build", "shape"), [(mlp, (4,)), (conv, (2, 5, 5))])
def test_ntk_is_the_kernel_of_the_same_network_in_ntk_parametrization(build, shape: tuple[int, ...]) -> None:
    model, X = build(), normal(6, *shape)
    other = reparametrized(model)
    torch.testing.assert_close(other(X), model(X), rtol=1e-12, atol=1e-12)
    prior = make_prior(linearize(model), "ntk")
    assert prior.scales == ("all",)
    K = linearize(model).jacobian(X).gram(scale=prior.variance([1.0]))
    J = dense_jacobian(other, X)
    torch.testing.assert_close(K, J @ J.T, rtol=1e-10, atol=1e-12)


FAN_IN = {
    "linear": (nn.Linear(7, 3), {"weight": 7, "bias": 1}),
    "conv1d": (nn.Conv1d(4, 6, 5, groups=2), {"weight": 10, "bias": 1}),
    "conv3d": (nn.Conv3d(2, 3, 2), {"weight": 16, "bias": 1}),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": 18, "bias": 1}),
    "embedding": (nn.Embedding(5, 3), {"weight": 1}),
    "layer_norm": (nn.LayerNorm([3, 4]), {"weight": 1, "bias": 1}),
    "group_norm": (nn.GroupNorm(2, 4), {"weight": 1, "bias": 1}),
    "bilinear": (nn.Bilinear(3, 4, 2), {"weight": 12, "bias": 1}),
    "lstm": (nn.LSTM(3, 5), {"weight_ih_l0": 3, "weight_hh_l0": 5, "bias_ih_l0": 1, "bias_hh_l0": 1}),
    "attention": (nn.MultiheadAttention(4, 2), {"in_proj_weight": 4, "in_proj_bias": 1, "out_proj.weight": 4}),
}


@pytest.mark.parametrize("name", FAN_IN)
def test_fan_in(name: str) -> None:
    layer, known = FAN_IN[name]
    lin = linearize(nn.ModuleDict({"layer": layer}))
    found = ntk_variances(lin)
    for leaf, fan_in in known.items():
        part = found[lin.layout.slices[f"layer.{leaf}"]]
        torch.testing.assert_close(part, torch.full_like(part, 1 / fan_in))


def test_fan_in_of_raw_parameters() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.vector = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(4))
            self.token = nn.Parameter(torch.ones(1, 1, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.matrix.T).sum(1) + self.vector.sum() + self.token.sum()

    lin = linearize(Raw())
    found, slices = ntk_variances(lin), lin.layout.slices
    assert found[slices["matrix"]].tolist() == pytest.approx([0.2] * 15)
    assert found[slices["vector"]].tolist() == [1.0] * 4
    assert found[slices["token"]].tolist() == [1.0] * 6


def test_balanced_layers_contribute_alike() -> None:
    model, X = mlp(), normal(9, 4)
    lin = linearize(model)
    J = lin.jacobian(X)
    prior = make_prior(lin, "balanced", J=J)
    variance = prior.variance([3.0])
    for names in lin.layout.layers.values():
        S = torch.zeros(lin.p, dtype=torch.float64)
        for name in names:
            S[lin.layout.slices[name]] = variance[lin.layout.slices[name]]
        assert float(J.gram_diag(scale=S).mean()) == pytest.approx(3.0, rel=1e-10)
    assert float(J.gram_diag(scale=variance).mean()) == pytest.approx(9.0, rel=1e-10)


def test_balanced_over_several_tasks() -> None:
    lin = linearize(mlp())
    parts = [lin.jacobian(normal(n, 4, seed=n)) for n in (3, 8)]
    whole = lin.jacobian(torch.cat([normal(n, 4, seed=n) for n in (3, 8)]))
    together, wanted = make_prior(lin, "balanced", J=Stack(parts)), make_prior(lin, "balanced", J=whole)
    torch.testing.assert_close(together.base, wanted.base, rtol=1e-10, atol=0)


def test_balanced_leaves_layers_alone_that_no_example_reaches() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    lin = linearize(double(Spare()))
    prior = make_prior(lin, "balanced", J=lin.jacobian(normal(5, 4)))
    assert bool((prior.base[lin.layout.slices["spare.weight"]] == 0).all())
    assert bool((prior.base[lin.layout.slices["used.weight"]] > 0).all())


def test_fixed_and_shared_priors() -> None:
    lin = linearize(mlp())
    for spec, value in [("unit", 1.0), (0.25, 0.25), (2, 2.0)]:
        prior = make_prior(lin, spec)
        assert prior.scales == () and prior.base.dtype == torch.float64
        torch.testing.assert_close(prior.variance(), torch.full((lin.p,), value, dtype=torch.float64), rtol=0, atol=0)
    shared = make_prior(lin, "shared")
    torch.testing.assert_close(shared.variance([0.3]), torch.full((lin.p,), 0.3, dtype=torch.float64), rtol=0, atol=0)


def test_layerwise_has_a_scale_for_each_layer() -> None:
    lin = linearize(mlp())
    prior = make_prior(lin, "layerwise")
    assert prior.scales == ("0", "2", "4")
    variance = prior.variance(torch.tensor([1.0, 2.0, 3.0]))
    assert variance[lin.layout.slices["2.bias"]].tolist() == [2.0] * 5
    assert layer_sums(lin.layout, variance) == {"0": 30.0, "2": 70.0, "4": 36.0}


def test_a_dict_of_globs() -> None:
    lin = linearize(mlp())
    prior = make_prior(lin, {"*.bias": 5.0, "0*": 0.5, "*": 2.0})  # the first that matches counts
    assert prior.name == "given" and prior.scales == ()
    slices = lin.layout.slices
    assert prior.base[slices["0.bias"]].tolist() == [5.0] * 6
    assert prior.base[slices["0.weight"]].tolist() == [0.5] * 24
    assert prior.base[slices["4.weight"]].tolist() == [2.0] * 10
    by_layer = make_prior(lin, {"0": 1.0, "[24]": 3.0})
    assert by_layer.base[slices["0.bias"]].tolist() == [1.0] * 6
    assert by_layer.base[slices["2.weight"]].tolist() == [3.0] * 30


def test_tied_weights_belong_to_one_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())

    lin = linearize(double(Tied()))
    J = lin.jacobian(normal(4, 3))
    prior = make_prior(lin, "layerwise")
    assert len(prior.scales) == len(J.layer_grams())
    s = torch.rand(len(prior.scales), dtype=torch.float64) + 0.5
    total = sum(a * K for a, K in zip(s, J.layer_grams().values(), strict=True))
    torch.testing.assert_close(J.gram(scale=prior.variance(s)), total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [*NAMES, 1, 0.5, np.float32(0.5), np.int64(2), {"*": 2}])
def test_good_priors_pass(spec) -> None:
    assert check_prior(spec) is None


@pytest.mark.parametrize("spec", ["Shared", "layer", ""])
def test_unknown_names_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"prior must be one of 'unit', 'shared'.*got "):
        check_prior(spec)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, None, [1.0], "1.0"])
def test_variances_must_be_positive(value) -> None:
    if not isinstance(value, str):
        with pytest.raises(ValueError, match="prior is a variance and must be a positive number"):
            check_prior(value)
    with pytest.raises(ValueError, match=r"prior\['0'\] is a variance and must be a positive number"):
        check_prior({"*": 1.0, "0": value})


def test_an_empty_dict_is_refused() -> None:
    with pytest.raises(ValueError, match=r"empty dict; name at least one layer, as in \{'\*': 1.0\}"):
        check_prior({})


def test_globs_must_cover_and_match() -> None:
    lin = linearize(mlp())
    with pytest.raises(ValueError, match=r"no variance for '2.weight', '2.bias'.*'\*' as the last"):
        make_prior(lin, {"0": 1.0, "4": 1.0})
    with pytest.raises(ValueError, match=r"prior names 'head'.*the layers are '0', '2', '4'"):
        make_prior(lin, {"head": 1.0, "*": 2.0})
    with pytest.raises(ValueError, match=r"come after another that matches"):
        make_prior(lin, {"*": 2.0, "0": 1.0})


def test_balanced_needs_data() -> None:
    with pytest.raises(ValueError, match="measures the layers on the training data; pass its Jacobian"):
        make_prior(linearize(mlp()), "balanced")


def test_the_number_of_scales_is_checked() -> None:
    with pytest.raises(ValueError, match="'shared' has 1 scales; got 2"):
        Prior("shared", torch.ones(3), ("all",)).variance([1.0, 2.0])
    with pytest.raises(ValueError, match="'unit' has 0 scales; got 1"):
        Prior("unit", torch.ones(3)).variance([1.0])


class Conv1D(nn.Module):
    """Named and stored as Hugging Face does it: (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(3))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.zeros(1, 4, 6)), nn.Parameter(torch.zeros(3, 4, 5))


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.Linear(5, 3), {"weight": 5, "bias": 1}),
        (nn.Conv2d(4, 6, (2, 3), groups=2), {"weight": 2 * 6, "bias": 1}),
        (nn.ConvTranspose2d(4, 6, (2, 3), groups=2), {"weight": 2 * 6, "bias": 1}),
        (nn.Bilinear(2, 3, 4), {"weight": 6, "bias": 1}),
        (nn.Embedding(7, 3), {"weight": 1}),
        (nn.LayerNorm((2, 3)), {"weight": 1, "bias": 1}),
        (Conv1D(), {"weight": 5, "bias": 1}),
        (nn.GRU(3, 4), {"weight_ih_l0": 3, "weight_hh_l0": 4, "bias_ih_l0": 1, "bias_hh_l0": 1}),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            {
                "in_proj_weight": 4,
                "in_proj_bias": 1,
                "bias_k": 1,
                "bias_v": 1,
                "out_proj.weight": 4,
                "out_proj.bias": 1,
            },
        ),
        (Own(), {"token": 1, "table": 20}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_fan_in_of_every_kind_of_layer(module: nn.Module, wanted: dict[str, int]) -> None:
    lin = linearize(nn.ModuleDict({"layer": module}))
    found = ntk_variances(lin)
    assert set(lin.layout.slices) == {f"layer.{name}" for name in wanted}
    for name, inputs in wanted.items():
        part = found[lin.layout.slices[f"layer.{name}"]]
        assert part.tolist() == pytest.approx([1 / inputs] * len(part)), name
