"""Estimators in folders and repositories of the Hugging Face hub; nothing here reaches a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet._estimator import hub
from tests.support.drawn import double, normal

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra linnet[hub]")

X, NEW = normal(14, 3), normal(4, 3, seed=5)
LABELS = (X[:, 0] > 0).long()


def net(outputs: int = 2, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)), seed)


def fitted() -> linnet.TangentClassifier:
    return linnet.TangentClassifier(net(), inference="laplace").fit(X, LABELS)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_folder_there_and_back(tmp_path: Path) -> None:
    clf = fitted()
    clf.save_pretrained(tmp_path / "adapter", base_model="someone/tiny", metrics={"accuracy": 0.875})
    assert names(tmp_path / "adapter") == ["README.md", "config.json", "linnet.safetensors"]
    again = linnet.TangentClassifier.from_pretrained(tmp_path / "adapter", net())
    torch.testing.assert_close(again.predict_proba(NEW), clf.predict_proba(NEW), rtol=1e-12, atol=0)
    config = json.loads((tmp_path / "adapter" / "config.json").read_text())
    assert config["estimator_class"] == "TangentClassifier" and config["metrics"] == {"accuracy": 0.875}
    card = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.base_model == "someone/tiny" and card.data.library_name == "linnet"
    assert {"linnet", "model_hub_mixin"} <= set(card.data.tags) and card.data.metrics == ["accuracy"]
    for text in ("TangentClassifier around a Sequential", "| accuracy | 0.875 |", "| classes | 0, 1 |", "log evidence"):
        assert text in card.text
    assert config["base_checksum"] in card.text


@pytest.mark.parametrize("kind", ["regressor", "embedding", "laplace"])
def test_every_estimator(tmp_path: Path, kind: str) -> None:
    model = net(1)
    if kind == "regressor":
        found: Any = linnet.TangentRegressor(model).fit(X, X[:, 0])
    elif kind == "embedding":
        found = linnet.FisherEmbedding(model, 3).fit(X)
    else:
        found = linnet.Laplace(model, "regression", prior=1.0).fit(X, model(X).detach() + normal(14, 1))
    found.save_pretrained(str(tmp_path))
    again = type(found).from_pretrained(str(tmp_path), model=model)
    say = [e.transform(NEW) if kind == "embedding" else e.predict(NEW, return_std=True)[1] for e in (found, again)]
    torch.testing.assert_close(*say, rtol=1e-12, atol=0)


def test_the_network_goes_along_where_it_is_asked_for(tmp_path: Path) -> None:
    clf, other = fitted(), net(seed=9)
    before = {key: t.clone() for key, t in other.state_dict().items()}
    clf.save_pretrained(tmp_path, with_network=True)
    again = linnet.TangentClassifier.from_pretrained(tmp_path, model=other)
    torch.testing.assert_close(again.predict_proba(NEW), clf.predict_proba(NEW), rtol=1e-12, atol=0)
    assert all(torch.equal(before[key], t) for key, t in other.state_dict().items())  # the given one is untouched
    with pytest.raises(ValueError, match=r"(?s)of another architecture than model=.*2\.weight"):
        linnet.TangentClassifier.from_pretrained(tmp_path, model=net(3))
    clf.save_pretrained(tmp_path)
    assert "network.safetensors" not in names(tmp_path)
    with pytest.raises(ValueError, match="fitted around other weights"):
        linnet.TangentClassifier.from_pretrained(tmp_path, model=other)


def test_without_a_network_and_with_functions(tmp_path: Path) -> None:
    own = linnet.TangentRegressor(noise=0.1).fit(X.numpy(), X[:, 0].numpy())
    own.save_pretrained(tmp_path / "own")
    again = linnet.TangentRegressor.from_pretrained(tmp_path / "own")
    np.testing.assert_allclose(again.predict(NEW.numpy()), own.predict(NEW.numpy()))
    assert "model=" not in (tmp_path / "own" / "README.md").read_text()
    with pytest.raises(ValueError, match="no network of its own"):
        own.save_pretrained(tmp_path / "own", with_network=True)

    def first(raw: Tensor) -> Tensor:
        return raw[:, :1]

    reg = linnet.TangentRegressor(net(), output=first, noise=0.1).fit(X, X[:, 0])
    reg.save_pretrained(tmp_path / "first")
    text = (tmp_path / "first" / "README.md").read_text()
    assert 'TangentRegressor.from_pretrained("path/to/this/folder", model=model, output=output)' in text
    assert "output = ...  # the function that it was fitted with" in text
    again = linnet.TangentRegressor.from_pretrained(tmp_path / "first", net(), output=first)
    torch.testing.assert_close(again.predict(NEW), reg.predict(NEW))


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("by hand")
    fitted().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "by hand"


def test_what_would_be_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    class Repository:
        repo_id = "someone/adapter"

    def create(self: Any, repo_id: str, **options: Any) -> Repository:
        sent["created"] = (repo_id, options["private"])
        return Repository()

    class Commit(str):  # the hub's answer is a string that carries more
        ...

    def upload(self: Any, *, repo_id: str, folder_path: Path, commit_message: str, **options: Any) -> Commit:
        sent["repo"], sent["message"] = repo_id, commit_message
        sent["files"] = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}
        return Commit("https://huggingface.co/someone/adapter/commit/1")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    clf = fitted()
    address = clf.push_to_hub("someone/adapter", metrics={"nll": 0.25}, private=True, commit_message="First")
    assert type(address) is str and address == "https://huggingface.co/someone/adapter/commit/1"
    assert sent["created"] == ("someone/adapter", True)
    assert (sent["repo"], sent["message"]) == ("someone/adapter", "First")
    assert sorted(sent["files"]) == ["README.md", "config.json", "linnet.safetensors"]
    card = sent["files"]["README.md"].decode()
    assert 'linnet.TangentClassifier.from_pretrained("someone/adapter", model=model)' in card
    assert "| nll | 0.25 |" in card
    for name, text in sent["files"].items():
        assert b"pickle" not in text, name


def test_what_a_repository_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clf, asked = fitted(), []
    clf.save_pretrained(tmp_path, base_model="someone/tiny", metrics={"accuracy": 0.875})

    def download(
        repo_id: str,
        filename: str,
        revision: Any,
        cache_dir: Any,
        force_download: Any,
        token: Any,
        local_files_only: Any,
    ) -> str:
        asked.append((repo_id, filename, revision))
        if not (tmp_path / filename).exists():
            raise huggingface_hub.errors.EntryNotFoundError(filename)
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    again = linnet.TangentClassifier.from_pretrained("someone/adapter", net(), revision="v1")
    torch.testing.assert_close(again.predict_proba(NEW), clf.predict_proba(NEW), rtol=1e-12, atol=0)
    assert ("someone/adapter", "linnet.safetensors", "v1") in asked


def test_errors(tmp_path: Path) -> None:
    fitted().save_pretrained(tmp_path / "a")
    with pytest.raises(TypeError, match=r"holds a TangentClassifier; load it with that class, not with TangentRegress"):
        linnet.TangentRegressor.from_pretrained(tmp_path / "a", net())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no linnet\.safetensors, .* it has 'config\.json'"):
        linnet.TangentRegressor.from_pretrained(tmp_path / "b", net())
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*missing; a repository of the hub is called"):
        linnet.TangentRegressor.from_pretrained(tmp_path / "missing", net())
    with pytest.raises(ValueError, match=r"metrics are finite numbers by name; 'accuracy' is nan"):
        fitted().save_pretrained(tmp_path / "c", metrics={"accuracy": float("nan")})
    assert not (tmp_path / "c").exists()
    with pytest.raises(Exception, match="not fitted"):
        linnet.TangentClassifier(net()).save_pretrained(tmp_path / "d")


def test_names_on_the_hub(tmp_path: Path) -> None:
    from linnet._estimator.hub import known_name

    model = net()
    assert known_name(model) is None and known_name(None) is None
    cases = {"org/tiny": "org/tiny", str(tmp_path): None, "./here": None, "": None, "bert": "bert"}
    for name, known in cases.items():
        model.name_or_path = name
        assert known_name(model) == known
    del model.name_or_path
    model.pretrained_cfg = {"hf_hub_id": "timm/tiny"}
    assert known_name(model) == "timm/tiny"


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests/test_public.py loads every estimator in a process without the extra.
    reg = linnet.TangentRegressor(net(1), noise=0.1).fit(X, X[:, 0])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    hub._carrier.cache_clear()
    for act in (lambda: reg.push_to_hub("a/b"), lambda: linnet.Laplace.from_pretrained("a/b")):
        with pytest.raises(ModuleNotFoundError, match=r"pip install linnet\[hub\]"):
            act()
