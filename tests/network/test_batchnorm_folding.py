"""Batch norm folded away: the same outputs, and refusals by name."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import weight_norm

import linnet
from benchmarks.models import ResNet, WideResNet
from experiments.common import DATA
from linnet.network import fold_batchnorm, unfoldable
from linnet.testing import zoo
from linnet.testing.case import Net, case
from tests.support.drawn import normal


def norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def awakened(model: nn.Module) -> nn.Module:
    """The model in float64 and eval mode, away from all special values."""
    return case("fold", lambda: model, normal).build()


def both(model: nn.Module, x: Tensor) -> list[nn.Module]:
    """Folded as torch.fx reads the network, and as a run shows it."""
    return [fold_batchnorm(model), fold_batchnorm(model, x)]


def exact(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


LAYERS: dict[str, tuple[Callable[[], nn.Module], nn.Module, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d(6), (4,)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), (4,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), (4, 5, 6)),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6), (4, 5, 6)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (4, 5, 6)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), (4, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (4, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (4, 3, 4)),
    "transposed 2d grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (4, 3, 4)),
    "transposed 3d grouped": (lambda: nn.ConvTranspose3d(4, 8, 2, groups=4), nn.BatchNorm3d(8), (4, 2, 3, 2)),
    "no affine": (lambda: nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (4, 5, 6)),
    "large eps": (lambda: nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=0.3), (4, 5, 6)),
    "synchronized": (lambda: nn.Conv2d(4, 6, 3), nn.SyncBatchNorm(6), (4, 5, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_each_kind_of_layer(kind: str) -> None:
    make, norm, shape = LAYERS[kind]
    model = awakened(nn.Sequential(make(), norm, nn.Tanh()))
    x = normal(3, *shape, seed=1)
    for folded in both(model, x):
        assert not norms(folded)
        exact(folded(x), model(x))
        assert [name for name, _ in folded.named_parameters()] == ["0.weight", "0.bias"]


@settings(max_examples=12, deadline=None)
@given(
    rank=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    transposed=st.booleans(),
    bias=st.booleans(),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_convolution(rank: int, groups: int, transposed: bool, bias: bool, affine: bool, seed: int) -> None:
    kind = f"Conv{'Transpose' if transposed else ''}{rank}d"
    layer = getattr(nn, kind)(4, 8, 2, stride=2, padding=1, groups=groups, bias=bias)
    norm = getattr(nn, f"BatchNorm{rank}d")(8, affine=affine)
    model, x = awakened(nn.Sequential(layer, norm)), normal(2, 4, *[4] * rank, seed=seed)
    exact(fold_batchnorm(model)(x), model(x))


FOLDABLE = ("batch_norm1d", "batch_norm1d_sequence", "batch_norm2d", "batch_norm3d", "batch_norm2d_no_affine", "resnet")
UNREAD = ("resnet",)  # makes a module in its forward, which torch.fx does not read


@pytest.mark.parametrize("name", FOLDABLE)
def test_the_zoo_folds_and_linearizes(name: str) -> None:
    chosen = zoo()[name]
    model, x = chosen.build(), chosen.data(3, 0)
    assert norms(model)
    for folded in [fold_batchnorm(model, x)] if name in UNREAD else both(model, x):
        assert not norms(folded)
        exact(folded(x), model(x))
        lin = linnet.linearize(folded)
        exact(lin.jacobian(x) @ torch.eye(lin.p, dtype=torch.float64), chosen.dense(folded, x))


def test_the_jacobian_of_the_weights_is_the_scaled_one() -> None:
    """W' = s W, so the gradient with respect to W is s times that with respect to W'."""
    model = awakened(nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)))
    x = normal(2, 2, 3, 3)
    folded = fold_batchnorm(model)
    s = model[1].weight / (model[1].running_var + model[1].eps).sqrt()  # type: ignore[index, union-attr]
    before = linnet.linearize(model, "0.weight").jacobian(x)
    after = linnet.linearize(folded, "0.weight").jacobian(x)
    V = normal(24)
    exact(before @ V, after @ (V.view(3, -1) * s.detach()[:, None]).flatten())


def test_the_given_network_is_untouched() -> None:
    model = awakened(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU())).train()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    before = copy.deepcopy(model.state_dict())
    for folded in both(model, normal(2, 2, 4, 4)):
        assert not any(module.training for module in folded.modules())
        assert [p.requires_grad for p in folded.parameters()] == [False, False]
        with torch.no_grad():
            folded[0].weight.zero_()  # type: ignore[index, union-attr]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dropout_and_identity_between_are_passed_through() -> None:
    model = awakened(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Dropout(), nn.Identity(), nn.BatchNorm2d(3)))
    x = normal(2, 2, 4, 4)
    for folded in both(model, x):
        exact(folded(x), model(x))
        assert not norms(folded)


def test_asking_for_the_shape_is_no_use() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        n, c = h.shape[0], h.size(1)
        return m.norm(h).reshape(n, c, -1).mean(2)

    model = awakened(Net(forward, conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3)))
    x = normal(2, 2, 4, 4)
    for folded in both(model, x):
        exact(folded(x), model(x))


def test_a_network_without_batch_norm_is_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    folded = fold_batchnorm(model)
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    assert folded is not model and torch.equal(folded(x), model(x)) and unfoldable(model) == {}


def test_half_precision_keeps_its_dtype() -> None:
    model = awakened(nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3))).bfloat16()
    x = normal(2, 2, 4, 4).bfloat16()
    folded = fold_batchnorm(model, x)
    assert {p.dtype for p in folded.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(folded(x), model(x), rtol=0.05, atol=0.05)


# What cannot be folded.


class Custom(nn.BatchNorm2d):
    """Normalizes and activates, as some libraries' batch norms do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def shared_conv() -> nn.Module:
    return Net(
        lambda m, x: m.a(m.conv(x)) + m.b(m.conv(x.flip(2))),
        conv=nn.Conv2d(2, 3, 2),
        a=nn.BatchNorm2d(3),
        b=nn.BatchNorm2d(3),
    )


def tied_conv() -> nn.Module:
    first, second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    second.weight = first.weight
    return nn.Sequential(nn.Conv2d(2, 3, 2), first, nn.BatchNorm2d(3), second, nn.BatchNorm2d(3))


def one_norm_twice() -> nn.Module:
    return Net(
        lambda m, x: m.norm(m.b(m.norm(m.a(x)))),
        a=nn.Conv2d(2, 3, 1),
        b=nn.Conv2d(3, 3, 1),
        norm=nn.BatchNorm2d(3),
    )


def in_place() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        h.mul_(2.0)
        return m.norm(h)

    return Net(forward, conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "norm first": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 2)),
        {"0": "comes first"},
    ),
    "after an activation": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.BatchNorm2d(3)),
        {"2": "comes after"},
    ),
    "output used twice": (
        lambda: Net(lambda m, x: (lambda h: m.norm(h) + h)(m.conv(x)), conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3)),
        {"norm": "'conv', whose output also goes into add"},
    ),
    "output returned": (
        lambda: Net(
            lambda m, x: (lambda h: (m.norm(h), h))(m.conv(x)), conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3)
        ),
        {"norm": "also goes into the output of the network"},
    ),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, track_running_stats=False)),
        {"1": "no running statistics"},
    ),
    "shared convolution": (shared_conv, {"a": "called 2 times", "b": "called 2 times"}),
    "shared norm": (one_norm_twice, {"norm": "is called 2 times"}),
    "tied weights": (tied_conv, {"2": "shares a parameter with '3'", "4": "shares a parameter with '1'"}),
    "another class": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), Custom(3)), {"1": "is a Custom"}),
    "parametrized": (
        lambda: nn.Sequential(weight_norm(nn.Conv2d(2, 3, 2)), nn.BatchNorm2d(3)),
        {"1": r"\(ParametrizedConv2d\)"},
    ),
    "changed in place": (in_place, {"norm": "comes after mul_|whose output also goes into mul_"}),
    "weight read elsewhere": (
        lambda: Net(
            lambda m, x: m.norm(m.conv(x)) * m.conv.weight.sum(), conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3)
        ),
        {"norm": "parameters of 'conv' are read elsewhere"},
    ),
    "another axis": (
        lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 5), nn.BatchNorm1d(2)),
        {"2": "another axis than the 5 outputs of '1'"},
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("run", [False, True], ids=["fx", "run"])
def test_refusals_name_the_norm_and_the_reason(kind: str, run: bool) -> None:
    make, reasons = REFUSED[kind]
    model, x = awakened(make()), normal(2, 2, 4, 4)
    example = x if run else None
    found = unfoldable(model, example)
    assert list(found) == list(reasons)
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found[name])
        with pytest.raises(ValueError, match=rf"batch norms cannot be folded.*{name!r}.*strict=False"):
            fold_batchnorm(model, example)
    with pytest.warns(UserWarning, match=next(iter(reasons.values()))):
        left = fold_batchnorm(model, example, strict=False)
    assert norms(left) == norms(model)
    exact(left(x), model(x))


def test_networks_with_the_norm_first_are_refused_in_part() -> None:
    """Of a pre-activation block only the norm between its two convolutions can be folded."""
    model = awakened(WideResNet(10, 1))
    x = normal(2, 3, 8, 8)
    found = unfoldable(model)
    assert set(found) == {*(f"groups.{i}.0.bn1" for i in range(3)), "bn"}
    assert "also goes into" in found["groups.0.0.bn1"]
    assert unfoldable(model, x) == found
    with pytest.warns(UserWarning, match="bn1"):
        folded = fold_batchnorm(model, strict=False)
    assert set(norms(folded)) == set(found)
    exact(folded(x), model(x))


class Auxiliary(nn.Module):
    """A second output while it is trained, which eval mode does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.aux = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.conv(x)
        return (self.norm(h), self.aux(h)) if self.training else self.norm(h)


def test_what_is_called_in_training_only_stays() -> None:
    model, x = awakened(Auxiliary()), normal(2, 2, 4, 4)
    expected = model(x)
    for folded in both(model.train(), x):
        assert norms(folded) == ["aux"]
        exact(folded(x), expected)
    assert unfoldable(model) == unfoldable(model, x) == {}


def test_code_that_fx_cannot_read_needs_an_example() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.norm(self.conv(x)))
            return h if h.sum() > 0 else -h

    model, x = awakened(Branching()), normal(2, 2, 4, 4)
    with pytest.raises(ValueError, match=r"torch\.fx cannot read.*Pass example="):
        fold_batchnorm(model)
    exact(fold_batchnorm(model, x)(x), model(x))


def test_a_folded_norm_of_vectors_refuses_sequences() -> None:
    model = awakened(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    folded = fold_batchnorm(model)
    assert model(normal(2, 6, 4)).shape == (2, 6, 6)
    with pytest.raises(AssertionError, match="2 axes only"):
        folded(normal(2, 6, 4))
    with pytest.raises((AssertionError, RuntimeError), match="2 axes only"):
        fold_batchnorm(model, normal(2, 6, 4))
    again = fold_batchnorm(fold_batchnorm(nn.Sequential(model, nn.Linear(6, 6), nn.BatchNorm1d(6)).double().eval()))
    assert not norms(again)


def test_a_wrong_fold_is_noticed_on_the_example() -> None:
    class Reads(nn.Module):
        """Reads a statistic of its batch norm, which no longer exists in the copy as it was."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + getattr(self.norm, "eps", 1.0)

    with pytest.raises(RuntimeError, match="differs from the given one"):
        fold_batchnorm(awakened(Reads()), normal(2, 2, 4, 4))


def test_a_slightly_wrong_fold_is_noticed_in_float64() -> None:
    class Reads(nn.Module):
        """Adds a little where the batch norm is folded."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) * (1 + 1e-11 * isinstance(self.norm, nn.BatchNorm2d))

    with pytest.raises(RuntimeError, match="differs from the given one"):
        fold_batchnorm(awakened(Reads()), normal(2, 2, 4, 4))


@pytest.mark.parametrize("features", ["2", "input of 2", "3"])
def test_a_network_that_stops_at_its_features(features: str) -> None:
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model, x = awakened(body), normal(12, 4)
    new = linnet.attach_head(model, x, [0, 1, 2] * 4, features=features, penalty=1.0)
    folded = fold_batchnorm(new, x)
    assert not norms(folded)
    exact(folded(x), new(x))


def test_dicts_and_tuples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(2, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
            return {"logits": self.norm(self.a(x)) * self.b(z)}

    model = awakened(Two())
    x, z = normal(3, 3), normal(3, 2, seed=1)
    for example in ((x, z), {"x": x, "z": z}):
        exact(fold_batchnorm(model, example)(x, z), model(x, z))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        fold_batchnorm("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lazy"):
        fold_batchnorm(nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3)))


@pytest.mark.parametrize("name", ["resnet20_cifar10", "resnet56_cifar10"])
def test_trained_resnets_fold_fully(name: str) -> None:
    path: Path = DATA / "weights" / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"no data under {DATA}")
    assert json.loads(path.with_suffix(".json").read_text())["block"].startswith("conv1")
    model = ResNet((int(name[6:8]) - 2) // 6)
    missing = model.load_state_dict(load_file(path), strict=False)
    assert not missing.unexpected_keys and all("num_batches" in key for key in missing.missing_keys)
    model.eval()
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    folded = [fold_batchnorm(model), fold_batchnorm(model, x)]
    out = [new(x).detach().double() for new in folded]
    reference = model.double()(x.double()).detach()
    for new, found in zip(folded, out, strict=True):
        assert not norms(new)
        assert float((found - reference).abs().max()) < 1e-6 * float(reference.abs().max())
    exact(fold_batchnorm(model)(x.double()), reference)


# Hooks and branches.


def normalized() -> nn.Sequential:
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), norm, nn.Tanh(), nn.Linear(5, 2)).double().eval()
    with torch.no_grad():
        for t in (norm.running_mean, norm.weight, norm.bias):
            t.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return model


HOOKS = {
    "after": lambda module: module.register_forward_hook(lambda m, args, out: out * 2),
    "before": lambda module: module.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "another forward": lambda module: setattr(module, "forward", lambda x: torch.ones(len(x), 5).to(x)),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("seen", [True, False])
def test_a_layer_with_hooks_is_not_folded(name, place, seen):
    model, x = normalized(), torch.randn(6, 4, dtype=torch.float64)
    HOOKS[name](model[place])
    example = x if seen else None
    with pytest.raises(ValueError, match=r"hooks or a forward of its own|not after a Linear"):
        linnet.fold_batchnorm(model, example)
    with pytest.warns(UserWarning, match="stay"):
        kept = linnet.fold_batchnorm(model, example, strict=False)
    torch.testing.assert_close(kept(x), model(x))


class Branching(nn.Module):
    """Runs the batch norm, the layer, or the layer twice, as its inputs say."""

    def __init__(self) -> None:
        super().__init__()
        whole = normalized()
        self.layer, self.norm, self.head = whole[0], whole[2], whole[4]

    def forward(self, x):
        first = float(x[0, 0])
        h = self.layer(x)
        if first < 1:
            h = self.norm(h)
        if first < 0:
            h = h + self.layer(x)
        return self.head(h)


def test_inputs_that_take_another_way_than_the_example_are_refused():
    model, x = Branching().eval(), torch.rand(6, 4, dtype=torch.float64)
    folded = linnet.fold_batchnorm(model, x)
    assert "norm.weight" not in dict(folded.named_parameters())
    for network in (folded, copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        for other in (x + 1, x - 1):
            with pytest.raises(RuntimeError, match=r"'norm' is folded into 'layer'.*calls one without the other"):
                network(other)
            torch.testing.assert_close(network(x), model(x))  # an error leaves nothing behind


def test_a_network_that_is_watched_is_linearized_as_any():
    model, x = Branching().eval(), torch.rand(6, 4, dtype=torch.float64)
    folded = linnet.fold_batchnorm(model, x)
    J = linnet.linearize(folded).jacobian(x)
    v = torch.randn(J.shape[1], dtype=torch.float64)
    rows = []
    for out in folded(x).flatten():
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(out, folded.parameters(), retain_graph=True)]))
    torch.testing.assert_close(J @ v, torch.stack(rows) @ v)
    torch.testing.assert_close(J.gram(), torch.stack(rows) @ torch.stack(rows).T)
