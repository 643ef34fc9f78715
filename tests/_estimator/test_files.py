"""Fitted estimators in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet._common import files
from tests.support.drawn import double, normal


def net(outputs: int = 2, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)), seed)


def cloned(model: nn.Module) -> nn.Module:
    other = net(next(reversed(list(model.parameters()))).shape[0], seed=9)
    other.load_state_dict(model.state_dict())
    return other


X, NEW = normal(15, 3), normal(4, 3, seed=5)


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight", "cg-function"])
@pytest.mark.parametrize("noise", ["evidence", 0.2])
def test_regressors_come_back(tmp_path: Path, solver: str, noise: Any) -> None:
    model = net()
    reg = linnet.TangentRegressor(model, noise=noise, solver=solver).fit(X, normal(15, 2, seed=1))
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", cloned(model))
    for a, b in zip(reg.predict(NEW, return_std=True), again.predict(NEW, return_std=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert again.log_evidence_ == reg.log_evidence_
    assert again.noise_ == reg.noise_
    assert again.layer_relevance_ == pytest.approx(reg.layer_relevance_)
    torch.testing.assert_close(again.sample(NEW, 2), reg.sample(NEW, 2))
    torch.testing.assert_close(again.to_module()(NEW), reg.to_module()(NEW))


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_what_follows_from_the_training_data_comes_back(tmp_path: Path, solver: str) -> None:
    model, y = net(1), normal(15, seed=1)
    reg = linnet.TangentRegressor(model, solver=solver).fit(X, y).condition(NEW, normal(4, seed=7))
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", model)
    new = normal(3, 3, seed=8)
    torch.testing.assert_close(again.influence(new), reg.influence(new))
    np.testing.assert_allclose(again.loo_.mean, reg.loo_.mean)
    torch.testing.assert_close(again.path(new, 0.3), reg.path(new, 0.3))
    more = [r.condition(new, normal(3, seed=3)).predict(new) for r in (reg, again)]
    torch.testing.assert_close(*more)


@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
def test_classifiers_come_back(tmp_path: Path, inference: Any) -> None:
    model = net()
    y = np.where(X[:, 0].numpy() > 0, "left", "right")
    clf = linnet.TangentClassifier(model, inference=inference).fit(X.numpy(), y)
    clf.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", cloned(model))
    np.testing.assert_allclose(again.predict_proba(NEW.numpy()), clf.predict_proba(NEW.numpy()), rtol=1e-12)
    assert again.predict(NEW.numpy()).tolist() == clf.predict(NEW.numpy()).tolist()
    assert again.classes_.tolist() == ["left", "right"]


def test_without_a_network_of_ones_own(tmp_path: Path) -> None:
    reg = linnet.TangentRegressor().fit(X.numpy(), X[:, 0].numpy())
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors")
    np.testing.assert_allclose(again.predict(NEW.numpy()), reg.predict(NEW.numpy()), rtol=1e-12)
    with pytest.raises(ValueError, match="no network of its own"):
        linnet.load(tmp_path / "a.safetensors", net())


def test_heteroscedastic_networks_and_dicts_come_back(tmp_path: Path) -> None:
    model = net(2)
    reg = linnet.TangentRegressor(model, noise="heteroscedastic").fit({"input": X}, normal(15, seed=1))
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", model)
    for a, b in zip(
        reg.predict({"input": NEW}, return_std=True, noise=True),
        again.predict({"input": NEW}, return_std=True, noise=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_other_weights_are_refused_with_both_checksums(tmp_path: Path) -> None:
    model = net()
    linnet.TangentRegressor(model, noise=0.1, prior=1.0).fit(X, normal(15, 2)).save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"checksum [0-9a-f]{64}, this one has [0-9a-f]{64}"):
        linnet.load(tmp_path / "a.safetensors", net(seed=1))
    with pytest.raises(ValueError, match="pass it as model="):
        linnet.load(tmp_path / "a.safetensors")


def test_an_output_function_is_asked_for_again(tmp_path: Path) -> None:
    model = net()

    def first(raw: Tensor) -> Tensor:
        return raw[:, :1]

    reg = linnet.TangentRegressor(model, output=first).fit(X, normal(15))
    reg.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="fitted with output="):
        linnet.load(tmp_path / "a.safetensors", model)
    again = linnet.load(tmp_path / "a.safetensors", model, output=first)
    torch.testing.assert_close(again.predict(NEW), reg.predict(NEW))


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    files.save(tmp_path / "a.safetensors", {"x": torch.ones(1)}, {}, kind="something else")
    with pytest.raises(ValueError, match="something else"):
        linnet.load(tmp_path / "a.safetensors", net())


def test_streamed_inputs_are_refused_by_name(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(X, normal(15, 2))
    listed = [data[i] for i in range(15)]
    reg = linnet.TangentRegressor(net(), noise=0.1, solver="function").fit(Listed(listed))
    with pytest.raises(TypeError, match="not in memory"):
        reg.save(tmp_path / "a.safetensors")


class Listed(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    def __init__(self, items: list[tuple[Tensor, ...]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return self.items[i]


@pytest.mark.parametrize(("solver", "prior"), [("function", "layerwise"), ("cg-weight", "shared")])
def test_everything_that_a_fit_says_of_itself_comes_back(tmp_path: Path, solver: str, prior: str) -> None:
    model = net(1)
    reg = linnet.TangentRegressor(model, prior=prior, solver=solver, seed=3).fit(X.numpy(), normal(15, seed=1).numpy())
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", cloned(model))
    for name in ("scales_", "log_evidence_", "log_evidence_error_", "solver_", "n_features_in_", "top_", "top_path_"):
        assert getattr(again, name) == getattr(reg, name), name
    for name in ("noise", "mean", "prior", "seed", "tolerance"):
        assert getattr(again, name) == getattr(reg, name), name
    assert reg.solver_ == solver and reg.n_features_in_ == 3
    assert bool(reg.log_evidence_error_) == (solver != "function") and len(reg.scales_) == (
        2 if prior != "shared" else 1
    )
    torch.testing.assert_close(again.prior_variance_, reg.prior_variance_, rtol=0, atol=0)
    assert list(again.lin_.theta) == list(reg.lin_.theta) and again.lin_.dtype == reg.lin_.dtype


def test_top_blocks_that_were_chosen_come_back(tmp_path: Path) -> None:
    model = net(1)
    reg = linnet.TangentRegressor(model, top="evidence").fit(X, normal(15, seed=1))
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", cloned(model))
    assert reg.top_ is not None and again.top_ == reg.top_
    assert reg.top_path_ and again.top_path_ == reg.top_path_
