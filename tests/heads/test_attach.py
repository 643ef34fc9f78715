"""A new head: where the features are, what is fitted, and that the result is an ordinary module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from benchmarks.models import ResNet, VisionTransformer
from linnet.heads import Head, NetworkWithHead, attach_head, head_of
from linnet.heads.features import pool_features
from linnet.heads.readout import fit_readout
from linnet.network import top_blocks
from linnet.testing import dense_jacobian, zoo
from linnet.testing.case import Net
from tests.support.drawn import double, normal


def mlp(seed: int = 0, outputs: int = 5) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))
    return double(model, seed)  # type: ignore[return-value]


def labels(X: Tensor, c: int = 3, seed: int = 5) -> Tensor:
    """Labels of a noisy linear rule."""
    flat = X.flatten(1)
    f = flat @ normal(flat.shape[1], c, seed=seed) / flat.shape[1] ** 0.5 + 0.5 * normal(len(X), c, seed=seed + 1)
    return f.argmax(1)


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(torch.as_tensor(a).detach(), torch.as_tensor(b).detach(), rtol=rtol, atol=rtol)


# What is fitted.


def reference(features: Tensor, y: Any, penalty: float) -> Any:
    """scikit-learn's own pipeline on the features."""
    model = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=10_000)
    return make_pipeline(StandardScaler(), model).fit(features.numpy(), y)


@pytest.mark.parametrize("c", [2, 3])
def test_the_logits_are_those_of_scikit_learn(c: int) -> None:
    model, X = mlp(), normal(60, 4)
    y = labels(X, c)
    new = attach_head(model, X, y, penalty=0.3)
    features = model[:4](X).detach()
    expected = reference(features, y.numpy(), 0.3).decision_function(features.numpy())
    close(new(X), expected.reshape(60, -1), rtol=1e-7)
    head = head_of(new)
    assert head.out_features == (1 if c == 2 else c) and head.classes_.tolist() == list(range(c))
    assert head.task_ == "classification" and head.penalty_ == 0.3 and head.features_ == "input of 4"


def test_cross_validation_chooses_the_penalty_by_its_log_loss() -> None:
    X = normal(60, 4)
    noise = torch.randint(2, (60,), generator=torch.Generator().manual_seed(0))
    clean = (X[:, 0] > 0).long()
    strong, weak = (head_of(attach_head(mlp(), X, y)).penalty_ for y in (noise, clean))
    assert strong > weak
    again = head_of(attach_head(mlp(), X, clean, seed=0))
    assert again.penalty_ == weak and torch.equal(again.weight, head_of(attach_head(mlp(), X, clean)).weight)


@pytest.mark.parametrize("how", [{"seed": 0}, {"seed": 1}, {"seed": 0, "folds": 3}, {"penalty": "evidence"}])
def test_options_reach_the_readout(how: dict[str, Any]) -> None:
    """Other folds choose another penalty here: 10 with five folds of the first seed, 1 with others."""
    model, X = mlp(), normal(60, 4)
    y = labels(X)
    head, alone = head_of(attach_head(model, X, y, **how)), fit_readout(model[:4](X).detach().numpy(), y, **how)
    assert head.penalty_ == alone.penalty and (head.penalty_ == 10) == (how == {"seed": 0})
    close(head.weight, alone.weight)


def test_the_evidence_chooses_the_penalty() -> None:
    model, X = mlp(), normal(50, 4)
    y = labels(X)
    chosen = head_of(attach_head(model, X, y, penalty="evidence"))
    features = model[:4](X).detach()
    Z = (features - features.mean(0)) / features.std(0, correction=0)
    linear = nn.Linear(8, 3, dtype=torch.float64)
    nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)
    clf = linnet.TangentClassifier(linear, prior="shared").fit(Z, y)
    close(chosen.penalty_, 1 / clf.scales_["all"], rtol=1e-4)
    at = linnet.TangentClassifier(linear, prior=1 / chosen.penalty_).fit(Z, y).log_evidence_
    for factor in (0.5, 2.0):
        assert at > linnet.TangentClassifier(linear, prior=factor / chosen.penalty_).fit(Z, y).log_evidence_


@pytest.mark.parametrize("shape", [(50,), (50, 2)])
@pytest.mark.parametrize("penalty", ["cv", "evidence", 2.0])
def test_numbers_are_fitted_by_ridge(shape: tuple[int, ...], penalty: Any) -> None:
    model, X = mlp(), normal(50, 4)
    Y = X[:, :2].tanh() @ normal(2, 2, seed=3) + 0.01 * normal(50, 2, seed=4)
    y = Y[:, 0] if len(shape) == 1 else Y
    new = attach_head(model, X, y, penalty=penalty)
    features = model[:4](X).detach()
    Z = (features - features.mean(0)) / features.std(0, correction=0)
    expected = Ridge(alpha=head_of(new).penalty_).fit(Z.numpy(), y.numpy()).predict(Z.numpy())
    close(new(X), expected.reshape(50, -1), rtol=1e-8)
    assert head_of(new).task_ == "regression" and head_of(new).classes_ is None
    assert float((new(X) - Y[:, : len(shape) if len(shape) == 2 else 1]).detach().square().mean()) < 0.1


def test_several_labels_at_once_are_one_logistic_regression_each() -> None:
    model, X = mlp(), normal(60, 4)
    Y = (X @ normal(4, 3, seed=2) + 0.3 * normal(60, 3, seed=3) > 0).long()
    new = attach_head(model, X, Y, penalty=0.5)
    features = model[:4](X).detach()
    for j in range(3):
        close(new(X)[:, j], reference(features, Y[:, j].numpy(), 0.5).decision_function(features.numpy()), rtol=1e-7)
    assert head_of(new).task_ == "multilabel"
    assert head_of(attach_head(model, X, Y)).penalty_.shape == (3,)
    assert len(set(head_of(attach_head(model, X, Y, penalty="evidence")).penalty_.tolist())) == 1
    clf = linnet.TangentClassifier(new, top_blocks(new, 0), inference="map", prior="ntk").fit(X, Y)
    assert clf.multilabel_ and clf.predict(X).shape == (60, 3)


@pytest.mark.parametrize("names", [["no", "yes"], [False, True], [-1, 1], [10.0, 20.0]])
def test_labels_of_any_kind_keep_their_order(names: list[Any]) -> None:
    model, X = mlp(), normal(40, 4)
    index = (X[:, 0] > 0).long()
    plain = attach_head(model, X, index, penalty=1.0)
    y = np.array(names)[index.numpy()]
    new = attach_head(model, X, y, penalty=1.0)
    assert head_of(new).classes_.tolist() == names and torch.equal(new(X), plain(X))
    turned = attach_head(model, X, y, classes=names[::-1], penalty=1.0)
    assert head_of(turned).classes_.tolist() == names[::-1]
    close(turned(X), -new(X), rtol=1e-6)
    clf = linnet.TangentClassifier(new, top_blocks(new, 0), inference="map").fit(X, y)
    assert clf.classes_.tolist() == names and (clf.predict(X) == y).mean() > 0.9


def test_features_that_say_nothing_get_no_weight() -> None:
    """A dead unit's rounding is not blown up by the standardization."""
    model = mlp()
    with torch.no_grad():
        model[2].weight[0] = 0.0
        model[2].weight[1] *= 1e-12
    X = normal(40, 4)
    head = head_of(attach_head(model, X, labels(X)))
    assert float(head.weight[:, :2].detach().abs().max()) < 1e-6 * float(head.weight.detach().abs().max())


@settings(max_examples=8, deadline=None)
@given(exponent=st.integers(-4, 4), shift=st.floats(-3, 3), seed=st.integers(0, 3), numbers=st.booleans())
def test_units_of_the_features_do_not_matter(exponent: int, shift: float, seed: int, numbers: bool) -> None:
    X = normal(30, 5, seed=seed).numpy()
    y = normal(30, seed=9).numpy() if numbers else labels(torch.as_tensor(X)).numpy()
    units = 10.0 ** (exponent * np.linspace(-1, 1, 5))
    other = X * units + shift * units
    a, b = (fit_readout(features, y, penalty=0.7) for features in (X, other))
    np.testing.assert_allclose(X @ a.weight.T + a.bias, other @ b.weight.T + b.bias, rtol=1e-5, atol=1e-5)


# Where the features are.


def test_the_last_linear_is_replaced_in_place_and_the_network_untouched() -> None:
    model, X = mlp().train(), normal(30, 4)
    before = copy.deepcopy(model.state_dict())
    new = attach_head(model, X, labels(X), penalty=1.0)
    assert type(new) is nn.Sequential and isinstance(new[4], Head)
    assert list(new.state_dict()) == list(before) and new.state_dict()["4.weight"].shape == (3, 8)
    assert not any(module.training for module in new.modules())
    with torch.no_grad():
        new[0].weight.zero_()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *new.modules()))


def test_the_last_linear_is_the_last_one_called() -> None:
    parts = {"last": nn.Linear(6, 2), "spare": nn.Linear(6, 2), "norm": nn.LayerNorm(6), "first": nn.Linear(4, 6)}
    model = double(Net(lambda m, x: m.last(m.norm(m.first(x)).tanh()), **parts))
    X = normal(30, 4)
    new = attach_head(model, X, labels(X), penalty=1.0)
    assert isinstance(new.last, Head) and not isinstance(new.spare, Head)


@pytest.mark.parametrize(
    ("features", "width"),
    [("1", 12), ("2", 8), ("input of 2", 12), ("input of 4", 8), ("output", 5), ("", 5)],
)
def test_features_by_name(features: str, width: int) -> None:
    model, X = mlp(), normal(30, 4)
    new = attach_head(model, X, labels(X), features=features, penalty=1.0)
    head = head_of(new)
    assert head.in_features == width
    cut = {"1": 2, "2": 3, "input of 2": 2, "input of 4": 4, "output": 5, "": 5}[features]
    close(new(X), F.linear(model[:cut](X), head.weight, head.bias))
    assert isinstance(new, NetworkWithHead) != (features == "input of 4")
    names = {name.partition(".")[2].partition(".")[0] for name, _ in new.named_parameters() if "backbone" in name}
    later = {"1": {"0"}, "2": {"0", "2"}, "input of 2": {"0"}, "output": {"0", "2", "4"}, "": {"0", "2", "4"}}
    assert names == later.get(features, set())


def test_what_comes_after_the_features_is_not_run() -> None:
    class Broken(nn.Module):
        limit = 2

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.limit:
                raise AssertionError("was run")
            return x

    model = nn.Sequential(mlp(), Broken()).double()
    X = normal(30, 4)
    new = attach_head(model, X, labels(X), features="0.3", penalty=1.0)
    assert new(X).shape == (30, 3)


@pytest.mark.parametrize("name", ["resnet", "convnext", "vit", "hf_bert", "hf_vit", "lstm", "dict_inputs", "embedding"])
def test_networks_of_the_zoo(name: str) -> None:
    case = zoo()[name]
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model, X = case.build(), case.data(12, 0)
    features = "input of head" if name == "dict_inputs" else None
    y = np.array(["a", "b", "c"])[np.arange(12) % 3]
    new = attach_head(model, X, y, features=features, penalty=1.0)
    assert isinstance(new, NetworkWithHead) == (name == "dict_inputs")
    lin = linnet.linearize(new, "*")
    J = lin.jacobian(X)
    assert J.shape == (36, lin.p)
    close(J @ torch.eye(lin.p, dtype=torch.float64), dense(new, X), rtol=1e-8)


def dense(model: nn.Module, X: Any) -> Tensor:
    return dense_jacobian(model, X, names=[name for name, _ in model.named_parameters()])


def test_maps_are_averaged_over_positions() -> None:
    model = double(ResNet(1))
    X = normal(20, 3, 8, 8)
    y = labels(X)
    last, named = attach_head(model, X, y, penalty=1.0), attach_head(model, X, y, features="layer3", penalty=1.0)
    assert isinstance(last, ResNet) and isinstance(named, NetworkWithHead) and named.pool == "spatial"
    close(last(X), named(X))
    assert [n for n, _ in named.named_parameters()][-1] == "head.bias" and not hasattr(named.backbone.linear, "weight")
    whole = attach_head(model, X, y, features="layer3", pool="flatten", penalty=1.0)
    assert head_of(whole).in_features == 64 * 2 * 2
    own = attach_head(model, X, y, features="layer3", pool=lambda h: h.amax((2, 3)), penalty=1.0)
    assert head_of(own).in_features == 64 and not torch.allclose(own(X), named(X))


def test_signals_of_a_convolution_are_averaged_over_their_length() -> None:
    model = double(nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)))
    X = normal(20, 2, 6)
    new = attach_head(model, X, labels(X), features="0", penalty=1.0)
    assert head_of(new).in_features == 5
    close(new(X), F.linear(model[0](X).mean(2), head_of(new).weight, head_of(new).bias))


def test_maps_with_channels_last_are_averaged_over_positions() -> None:
    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6))
    model = double(nn.Sequential(body, nn.Flatten(), nn.Linear(96, 2)))
    X = normal(20, 4, 4, 3)
    for features, pool in (("0.2", "auto"), ("0.0", "auto"), ("0", "tokens")):
        new = attach_head(model, X, labels(X), features=features, pool=pool, penalty=1.0)  # type: ignore[arg-type]
        assert head_of(new).in_features == 6
    close(new(X), F.linear(body(X).mean((1, 2)), head_of(new).weight, head_of(new).bias))


# Encoders.


def bert(**changes: Any) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    transformers = pytest.importorskip("transformers")
    options = {
        "vocab_size": 12,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 8,
    }
    model = double(transformers.BertModel(transformers.BertConfig(**options, **changes)).eval())
    data = zoo()["hf_bert"].data(16, 0)
    return model, data, (data["input_ids"][:, 1] > 5).long()


def test_a_hugging_face_encoder_is_pooled_over_its_tokens() -> None:
    model, data, y = bert()
    new = attach_head(model, data, y, penalty=1.0)
    hidden = model(**data).last_hidden_state
    mask = data["attention_mask"].double()[:, :, None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    head = head_of(new)
    close(new(**data), F.linear(mean, head.weight, head.bias))
    assert top_blocks(new, 1) == ["backbone.encoder.layer.1.*", "head.*"]  # the pooler is not needed
    first = attach_head(model, data, y, pool="cls", penalty=1.0)
    close(first(**data), F.linear(hidden[:, 0], head_of(first).weight, head_of(first).bias))
    pooled = attach_head(model, data, y, features="pooler", penalty=1.0)
    close(pooled(**data), F.linear(model(**data).pooler_output, head_of(pooled).weight, head_of(pooled).bias))


def test_padding_does_not_matter() -> None:
    model, data, y = bert()
    new = attach_head(model, data, y, penalty=1.0)
    longer = {key: F.pad(value, (0, 2)) for key, value in data.items()}
    close(new(**longer), new(**data))


def test_the_three_lines_for_an_encoder() -> None:
    model, data, y = bert()
    new = attach_head(model, data, y)
    clf = linnet.TangentClassifier(new, top=1, inference="map", mean="network", prior="ntk").fit(data, y)
    assert {name.partition(".")[0] for name in clf.delta_} == {"backbone", "head"}
    before = (new(**data)[:, 0] > 0).long()
    assert int((clf.predict(data) == y).sum()) >= int((before == y).sum())


def test_a_classifier_of_hugging_face_keeps_its_loss() -> None:
    transformers = pytest.importorskip("transformers")
    model = zoo()["hf_bert"].build()
    data = zoo()["hf_bert"].data(16, 0)
    y = torch.arange(16) % 4
    new = attach_head(model, data, y, penalty=1.0)
    assert isinstance(new, transformers.BertForSequenceClassification) and model.config.num_labels == 3
    close(new(**data, labels=y).loss, F.cross_entropy(new(**data).logits, y))
    two = attach_head(model, data, y % 2, penalty=1.0)
    target = (y % 2)[:, None].double()
    close(two(**data, labels=target).loss, F.binary_cross_entropy_with_logits(two(**data).logits, target))
    number = attach_head(model, data, normal(16), penalty=1.0)
    close(number(**data, labels=normal(16)).loss, F.mse_loss(number(**data).logits[:, 0], normal(16)))


class Output(dict):  # type: ignore[type-arg]
    """A model output as libraries make them: a dict with attributes."""

    __getattr__ = dict.__getitem__


class Encoder(nn.Module):
    """Returns its last hidden state, and a pooled one that nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.pooler = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        h = self.mix(self.embed(input_ids)).tanh()
        return Output(last_hidden_state=h, pooler_output=self.pooler(h[:, 0]), logits=None)


def test_an_output_like_hugging_faces() -> None:
    model = double(Encoder())
    ids = torch.randint(9, (20, 5), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < 1 + torch.arange(20)[:, None] % 5).long()
    y = (ids[:, 0] > 4).long()
    by_name = attach_head(model, {"input_ids": ids, "attention_mask": mask}, y, penalty=1.0)
    by_place = attach_head(model, (ids, mask, y), y, penalty=1.0)  # takes one argument: the mask is left out
    close(by_name(ids, mask), by_name(input_ids=ids, attention_mask=mask))
    assert not torch.allclose(by_name(ids, mask), by_name(ids))
    close(by_place(ids), F.linear(model(ids).last_hidden_state.mean(1), by_place.head.weight, by_place.head.bias))
    lin = linnet.linearize(by_name)
    J = lin.jacobian({"input_ids": ids, "attention_mask": mask})
    close(J @ torch.eye(lin.p, dtype=torch.float64), dense(by_name, {"input_ids": ids, "attention_mask": mask}))


# timm.


class Timm(nn.Module):
    """The interface of timm's models: forward_features, forward_head, num_classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, 6
        self.stem, self.mlp = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6, 6)
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.fc: nn.Module = nn.Linear(6, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.mlp(self.stem(x).relu().movedim(1, 3)).movedim(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.global_pool(self.forward_features(x)))


def test_models_of_timm() -> None:
    X = normal(20, 2, 5, 5)
    y = labels(X)
    with_head, without = double(Timm(7)), double(Timm(0))
    without.load_state_dict({k: v for k, v in with_head.state_dict().items() if not k.startswith("fc")})
    a = attach_head(with_head, X, y, penalty=1.0)
    assert isinstance(a, Timm) and isinstance(a.fc, Head)
    for features in (None, "output", "global_pool"):
        b = attach_head(without, X, y, features=features, penalty=1.0)
        assert isinstance(b, NetworkWithHead)
        close(b(X), a(X))


# The result as a module.


def test_it_is_copied_saved_and_linearized_as_any_module(tmp_path: Any) -> None:
    model, X = mlp(), normal(30, 4)
    for features in (None, "1"):
        new = attach_head(model, X, labels(X), features=features, penalty=1.0)
        twin = copy.deepcopy(new)
        assert torch.equal(twin(X), new(X)) and head_of(twin).classes_.tolist() == [0, 1, 2]
        torch.save(new, tmp_path / "whole.pt")
        assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=False)(X), new(X))
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not torch.equal(twin(X), new(X))
        twin.load_state_dict(new.state_dict())
        assert torch.equal(twin(X), new(X))
        lin = linnet.linearize(new)
        close(lin(X), new(X))
        V = normal(lin.p)
        close(lin.jacobian(X) @ V, dense(new, X) @ V)


@pytest.mark.parametrize("features", [None, "3", "input of 2"])
def test_a_second_head_replaces_the_first(features: str | None) -> None:
    model, X = mlp(), normal(30, 4)
    once = attach_head(model, X, labels(X), features=features, penalty=1.0)
    twice = attach_head(once, X, X[:, 0] > 0, penalty=1.0)
    assert type(twice) is type(once) and head_of(twice).out_features == 1
    close(twice(X), attach_head(model, X, X[:, 0] > 0, features=features, penalty=1.0)(X))
    lower = attach_head(once, X, labels(X), features="0" if features is None else "backbone.0", penalty=1.0)
    assert head_of(lower).in_features == 12
    assert top_blocks(twice, 0, example=X) == ["4.*" if features is None else "head.*"]


def test_data_of_every_kind_gives_the_same_head() -> None:
    model, X = mlp(), normal(23, 4)
    y = labels(X)
    expected = attach_head(model, X, y, features="1", penalty=1.0)(X)
    pairs = TensorDataset(X, y)
    for data, targets in (
        (X.numpy(), y.numpy()),
        ((X, y), None),
        (pairs, None),
        (DataLoader(pairs, batch_size=5), None),
        (DataLoader(TensorDataset(X), batch_size=4), y.tolist()),
    ):
        new = attach_head(model, data, targets, features="1", penalty=1.0, batch_size=7)
        close(new(X), expected, rtol=1e-7)
    # ... and its own arguments are those of the network, so that pairs bind to it as they do to the network.
    loader = DataLoader(pairs, batch_size=5)
    clf = linnet.TangentClassifier(new, "head.*", inference="map", prior="ntk").fit(loader)
    close(clf.decision_function(loader), clf.decision_function(X))


def test_float32_and_half_precision() -> None:
    X = normal(40, 4)
    y = labels(X)
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        model = mlp().to(dtype)
        new = attach_head(model, X.to(dtype), y, penalty=1.0)
        assert head_of(new).weight.dtype == dtype
        expected = attach_head(mlp(), X, y, penalty=1.0)(X)
        torch.testing.assert_close(new(X.to(dtype)).double(), expected, rtol=rtol, atol=rtol * 5)


def test_a_frozen_backbone_stays_frozen() -> None:
    model = mlp().requires_grad_(False)
    X = normal(30, 4)
    new = attach_head(model, X, labels(X), penalty=1.0)
    assert {name for name, p in new.named_parameters() if p.requires_grad} == {"4.weight", "4.bias"}


# Equation 2.


@pytest.mark.parametrize("features", [None, "3"])
def test_activation_and_gradient_features_together(features: str | None) -> None:
    """The optimum of the convex problem in (w1, w2), found here by dense Newton steps on explicit features."""
    model, X = mlp(), normal(40, 4)
    y = labels(X)
    new = attach_head(model, X, y, features=features, penalty=1.0)
    params = top_blocks(new, 1)
    clf = linnet.TangentClassifier(new, params, inference="map", mean="network", prior="ntk").fit(X, y)
    lin = linnet.linearize(new, params)
    names = list(lin.theta)
    assert {name.split(".")[-2] for name in names} == ({"2", "4"} if features is None else {"2", "head"})
    J = dense_jacobian(new, X, names=names).view(40, 3, -1)
    # The first part of the columns are activations: the head's weight sees them as they are.
    head = next(i for i, name in enumerate(names) if name in ("4.weight", "head.weight"))
    start = sum(lin.theta[name].numel() for name in names[:head])
    activations = model[:4](X).detach()
    close(J[:, 0, start : start + 8], activations)
    S, f0 = clf.prior_variance_, new(X).detach()
    delta = torch.zeros(lin.p, dtype=torch.float64)
    for _ in range(30):
        f = f0 + J @ delta
        p = f.softmax(1)
        gradient = torch.einsum("ncp,nc->p", J, p - F.one_hot(y, 3)) + delta / S
        B = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        H = torch.einsum("ncp,ncd,ndq->pq", J, B, J) + torch.diag(1 / S)
        delta = delta - torch.linalg.solve(H, gradient)
    assert float(gradient.norm()) < 1e-9
    close(torch.cat([t.flatten() for t in clf.delta_.values()]), delta, rtol=1e-5)
    loss = [F.cross_entropy(f, y) for f in (new(X), clf.decision_function(X))]
    assert float(loss[1].detach()) < float(loss[0].detach())


def test_the_first_order_change_of_the_new_network() -> None:
    """The error of the linear model relative to a step falls in proportion to the step."""
    model, X = mlp(), normal(20, 4)
    new = attach_head(model, X, labels(X), penalty=1.0)
    lin = linnet.linearize(new, top_blocks(new, 1))
    J = lin.jacobian(X)
    direction = normal(lin.p)
    along = lin.layout.unflatten(direction)
    errors = []
    for step in (1e-2, 1e-3, 1e-4):
        moved = {name: t + step * along[name] for name, t in lin.theta.items()}
        change = J.outputs(moved) - J.outputs()
        linear = step * (J @ direction).view(20, 3)
        errors.append(float((change - linear).norm() / linear.norm()))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1) and errors[1] / errors[2] == pytest.approx(10, rel=0.1)


def test_laplace_saving_and_error_bars_on_the_new_head(tmp_path: Any) -> None:
    X = normal(40, 4)
    y = labels(X)
    new = attach_head(mlp(), X, y, features="3")
    clf = linnet.TangentClassifier(new, "head.*", prior="ntk").fit(X, y)
    clf.save(tmp_path / "fit.safetensors")
    again = linnet.load(tmp_path / "fit.safetensors", copy.deepcopy(new))
    close(again.predict_proba(X), clf.predict_proba(X))
    assert np.isfinite(clf.log_evidence_)


# Bad input.


def test_no_linear_to_cut_at() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    X = normal(12, 2, 4, 4)
    with pytest.raises(ValueError, match=r"calls no nn\.Linear.*features='output'.*'3', '2'"):
        attach_head(model, X, labels(X))
    assert head_of(attach_head(model, X, labels(X), features="output", penalty=1.0)).in_features == 3


def test_a_last_linear_that_is_no_head() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    X = normal(12, 3, 4)
    with pytest.raises(ValueError, match=r"last Linear that is called, '2', is given \(2, 3, 6\).*input of 2"):
        attach_head(model, X, labels(X))
    assert head_of(attach_head(model, X, labels(X), features="input of 2", penalty=1.0)).in_features == 6
    ended = nn.Sequential(mlp(), nn.Softmax(1)).double()
    X = normal(12, 4)
    with pytest.warns(UserWarning, match=r"'0\.4', is taken for the head.*features='input of 0\.4'"):
        new = attach_head(ended, X, labels(X), penalty=1.0)
    close(new(X), F.linear(ended[0][:4](X), head_of(new).weight, head_of(new).bias))
    attach_head(ended, X, labels(X), features="input of 0.4", penalty=1.0)  # no warning


FEW, NAMES, SEVENTH = normal(12, 4), [0, 1, 2] * 4, torch.tensor([7])
IMAGES, RESNET = normal(12, 3, 8, 8), double(ResNet(1))


def attach_few(y: Any, **how: Any) -> nn.Module:
    return attach_head(mlp(), FEW[: len(y)], y, **how)


def attach_pooled(pool: Any, features: str = "layer3") -> nn.Module:
    return attach_head(RESNET, IMAGES, NAMES, features=features, pool=pool)


def attach_case(name: str, features: str) -> nn.Module:
    case = zoo()[name]
    return attach_head(case.build(), case.data(6, 0), [0, 1] * 3, features=features)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: attach_pooled("none"), ValueError, r"one vector of features.*the layer3 has shape \(2, 64, 2, 2\)"),
        (lambda: attach_pooled("cls"), ValueError, r"pool='cls' needs sequences"),
        (lambda: attach_pooled(lambda h: h.mean(3)), ValueError, r"after pool=, \(2, 64, 2\)"),
        (lambda: attach_pooled(lambda h: 3), ValueError, r"after pool=, an int"),
        (lambda: attach_pooled("max"), ValueError, r"pool must be one of 'auto'"),
        (
            lambda: attach_pooled("tokens", "linear"),
            ValueError,
            r"'tokens' needs sequences.*linear has shape \(2, 10\)",
        ),
        (lambda: attach_pooled("spatial", "linear"), ValueError, r"'spatial' needs maps.*linear has shape \(2, 10\)"),
        (lambda: attach_pooled("auto", "layer5"), ValueError, r"features='layer5'.*nearest names: 'layer"),
        (lambda: attach_few(NAMES, features="layer4"), ValueError, r"features='layer4' names no module.*'0', '1'"),
        (lambda: attach_few(NAMES, features=nn.Tanh()), TypeError, "features must be the name"),
        (lambda: attach_case("called_three_times", "step"), ValueError, "'step' is called 3 times"),
        (lambda: attach_case("unused_layer", "spare"), ValueError, r"'spare' is not called.*'body"),
        (lambda: attach_few([1] * 12), ValueError, r"at least two; all 12 labels are"),
        (lambda: attach_few(["a"] * 12), ValueError, r"at least two; all 12 labels are .*'a'"),
        (
            lambda: attach_head(mlp(), FEW, [0, 1] * 5),
            ValueError,
            r"12 examples, so y needs shape \(12,\).*got \(10,\)",
        ),
        (lambda: attach_few([[0, 3]] * 12), ValueError, r"labels or numbers\?"),
        (lambda: attach_few([[0, 1]] * 11 + [[0, 0]]), ValueError, r"columns \[0\] of y are the same everywhere"),
        (lambda: attach_few([0.5] * 11 + [float("nan")]), ValueError, "that of example 11 is"),
        (lambda: attach_few(np.arange(12) % 3, task="multilabel"), ValueError, "zeros and ones"),
        (lambda: attach_few(np.zeros((12, 2)), task="classification"), ValueError, "one label for each example"),
        (lambda: attach_few(np.arange(12), task="ranking"), ValueError, "task must be one of"),
        (lambda: attach_few(["a"] * 12, task="regression"), TypeError, "real numbers"),
        (lambda: attach_few(normal(12), classes=[0, 1]), ValueError, "classes= is for labels"),
        (lambda: attach_few(normal(12, 2), classes=[0, 1]), ValueError, "classes= is for labels"),
        (lambda: attach_few(torch.eye(12)[:, :2], classes=[0, 1]), ValueError, "one column for each"),
        (lambda: attach_few(np.array([1, "a", None] * 4, dtype=object)), TypeError, "Labels must be of one kind"),
        (lambda: attach_few([0.5]), ValueError, "at least two examples"),
        (
            lambda: attach_few(NAMES, classes=range(10)),
            ValueError,
            r"10 classes and no example of 7 of them \(\[3, 4, 5",
        ),
        (
            lambda: attach_few(NAMES, classes=[0, 1, 2, 3]),
            ValueError,
            r"1 of them \(\[3\]\).*leave them out of classes=",
        ),
        (lambda: attach_few(NAMES, classes=[0, 1]), ValueError, r"every label once; got \[0, 1\] without \[2\]"),
        (lambda: attach_few(NAMES, classes=[0, 1, 2, 1]), ValueError, r"every label once; got \[[0-2, ]*\]\."),
        (lambda: attach_few(NAMES, classes=[2, 0, 0, 1]), ValueError, r"every label once; got \[[0-2, ]*\]\."),
        (lambda: attach_few(["a", "b", "c"]), ValueError, r"no class has two.*penalty='evidence' or a number"),
        (lambda: attach_head("model", FEW, NAMES), TypeError, r"torch\.nn\.Module"),
        (lambda: attach_few(NAMES, folds=1), ValueError, "at least 2 folds"),
        (lambda: attach_few(NAMES, batch_size=0), ValueError, "batch_size must be"),
        (lambda: attach_head(nn.Tanh(), FEW, NAMES), ValueError, "no parameters"),
        (lambda: attach_head(mlp(), FEW), ValueError, "target y is None"),
        (lambda: head_of(mlp()), ValueError, "no head of linnet"),
        (
            lambda: attach_head(mlp(), FEW.index_fill(0, SEVENTH, torch.inf), NAMES),
            ValueError,
            "example 7 has NaN or infinity",
        ),
    ],
)
def test_refused(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_features_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match="the output is a dict"):
        attach_head(Net(lambda m, x: {"a": m.a(x)}, a=nn.Linear(8, 2).double()), IMAGES, NAMES, features="output")


def test_masks_that_do_not_fit() -> None:
    model, data, y = bert()
    bad = {**data, "attention_mask": data["attention_mask"].clone()}
    bad["attention_mask"][3] = 0
    with pytest.raises(ValueError, match="not finite for example 3"):
        attach_head(model, bad, y)
    hidden = model(**data).last_hidden_state[:, 1:]
    with pytest.raises(
        ValueError, match=r"attention mask has shape \(16, 6\) and the encoder \(16, 5, 8\).*pool='cls'"
    ):
        pool_features(hidden, "tokens", data["attention_mask"], "encoder")


def test_classes_with_one_example() -> None:
    # One example of each: nothing can be held out, but there is a right answer with a given penalty.
    for penalty in ("evidence", 0.1):
        assert attach_few(["a", "b", "c"], penalty=penalty)(FEW[:3]).argmax(1).tolist() == [0, 1, 2]
    # A class with one example is always trained on.
    assert head_of(attach_few(["rare", *["a", "b"] * 5, "a"])).classes_.tolist() == ["a", "b", "rare"]


def test_whole_numbers_are_ages_where_the_task_says_so() -> None:
    assert head_of(attach_few(np.arange(12), task="regression")).out_features == 1


@pytest.mark.parametrize("penalty", [0, -1.0, float("inf"), float("nan"), "auto", True])
def test_bad_penalties(penalty: Any) -> None:
    with pytest.raises(ValueError, match="penalty must be"):
        attach_head(mlp(), normal(12, 4), [0, 1] * 6, penalty=penalty)


def test_data_of_another_dtype() -> None:
    with pytest.raises(RuntimeError) as caught:
        attach_head(mlp(), FEW.float(), NAMES)
    assert "nothing is cast in silence" in "".join(caught.value.__notes__)


def test_examples_that_interact_are_refused() -> None:
    X = normal(12, 4)
    normalized = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2)).double()
    with pytest.raises(ValueError, match="uses the statistics of the batch"):
        attach_head(normalized, X, [0, 1] * 6)
    centered = double(Net(lambda m, x: m.b(m.a(x) - m.a(x).mean(0)), a=nn.Linear(4, 6), b=nn.Linear(6, 2)))
    with pytest.raises(ValueError, match="changes with the other examples"):
        attach_head(centered, X, [0, 1] * 6)


def test_a_vision_transformer_by_its_class_token() -> None:
    model = double(VisionTransformer(dim=12, depth=2))
    X = normal(8, 3, 32, 32)
    y = torch.arange(8) % 2
    new = attach_head(model, X, y, penalty=1.0)
    other = attach_head(model, X, y, features="norm", pool="cls", penalty=1.0)
    close(new(X), other(X))


def test_classes_are_the_order_of_the_outputs() -> None:
    found, wanted = (head_of(attach_few(NAMES, classes=classes)) for classes in ([2, 0, 1], None))
    assert list(found.classes_) == [2, 0, 1]
    torch.testing.assert_close(found.weight, wanted.weight[[2, 0, 1]], rtol=1e-5, atol=1e-7)


class Aliased(nn.Module):
    """Its last layer has two names, and the second one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 2)
        self.classifier = self.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.body(x)))


@pytest.mark.parametrize("features", [None, "input of fc", "input of classifier"])
def test_a_last_layer_with_two_names_is_replaced_under_both(features: str | None) -> None:
    model, X, y = Aliased().double(), normal(12, 4), [0, 1, 2] * 4
    new = attach_head(model, X, y, features=features)
    assert isinstance(new, Aliased) and new.fc is new.classifier is head_of(new)
    torch.testing.assert_close(new(X), head_of(new)(torch.tanh(model.body(X))))
    assert model.fc is model.classifier and model.fc.out_features == 2


# Weights.


@pytest.mark.parametrize("penalty", [1.0, "evidence"])
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_weights_count_as_repetitions(task: Any, penalty: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X = torch.randn(40, 4, dtype=torch.float64)
    w = torch.arange(40) % 3
    noisy = X[:, 0] + 0.5 * torch.randn(40, dtype=torch.float64)
    y = {"classification": (noisy > 0).long() + (noisy > 1).long(), "regression": noisy}.get(task)
    y = torch.stack([noisy > 0, noisy > 0.5], 1).long() if y is None else y
    a = attach_head(model, X, y, task=task, penalty=penalty, sample_weight=w)
    b = attach_head(model, X.repeat_interleave(w, 0), y.repeat_interleave(w, 0), task=task, penalty=penalty)
    rtol = 1e-5 if penalty == 1.0 else 0.02  # the search for a penalty ends where the evidence is flat
    torch.testing.assert_close(a(X), b(X), rtol=rtol, atol=rtol)


def test_weights_in_cross_validation_and_weights_that_are_none() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X = torch.randn(40, 4, dtype=torch.float64)
    y = (X[:, 0] + 0.5 * torch.randn(40, dtype=torch.float64) > 0).long()
    same = attach_head(model, X, y, sample_weight=torch.full((40,), 1.0))
    torch.testing.assert_close(same(X), attach_head(model, X, y)(X))
    for targets in (y, X[:, 0]):
        heavy = attach_head(model, X, targets, sample_weight=1 + 9 * (X[:, 1] > 0))
        assert not torch.allclose(heavy(X), attach_head(model, X, targets)(X))
    labels = y.clone()
    labels[0] = -100
    kept = attach_head(model, X, labels, penalty=1.0, sample_weight=torch.arange(40))
    torch.testing.assert_close(
        kept(X), attach_head(model, X[1:], y[1:], penalty=1.0, sample_weight=torch.arange(1, 40))(X)
    )
    for w, match in ((-torch.ones(40), "not negative"), (torch.zeros(40), "are zero"), (torch.ones(3), "40 examples")):
        with pytest.raises(ValueError, match=match):
            attach_head(model, X, y, sample_weight=w)


@pytest.mark.parametrize("features", [None, "1"])
def test_described_heads_are_put_back(features):
    from linnet.heads import describe_head, restore_head

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3))
    X = torch.randn(30, 4)
    new = linnet.attach_head(model, X, ["a" if x[0] > 0 else "b" for x in X], features=features)
    again = restore_head(model, describe_head(new))
    again.load_state_dict(new.state_dict())
    assert torch.equal(again(X), new(X)) and type(again) is type(new)
    assert head_of(again).classes_.tolist() == ["a", "b"]
    assert describe_head(model) is None
