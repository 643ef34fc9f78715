"""Fitted estimators in folders and repositories of the Hugging Face hub; needs the extra ``linnet[hub]``."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from linnet._common import files
from linnet._common.messages import listing
from linnet._common.versions import __version__
from linnet._estimator import files as saved

FILE = "linnet.safetensors"
"""What was fitted."""
NETWORK = "network.safetensors"
"""The network's weights, where they are kept too."""
KIND = "network weights"


class Carrier(ModelHubMixin, library_name="linnet", tags=["linnet", "uncertainty"]):
    """Carries an estimator through the mixin of huggingface_hub, which makes folders, repositories and commits.

    Args:
        estimator: Fitted.
        base_model: What its network is called on the hub.
        metrics: Name to number.
        with_network: Whether the network's weights go along.
    """

    def __init__(
        self,
        estimator: Any,
        *,
        base_model: str | None = None,
        metrics: Mapping[str, float] | None = None,
        with_network: bool = False,
    ) -> None:
        for name, value in (metrics or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"metrics are finite numbers by name; {name!r} is {value!r}.")
        if with_network and getattr(estimator, "model", None) is None:
            raise ValueError("with_network=True, and this estimator has no network of its own: its file holds it all.")
        self.estimator, self.metrics, self.with_network = estimator, dict(metrics or {}), with_network
        self.base_model = base_model if base_model is not None else known_name(estimator.model)

    # What the mixin asks for.

    def _save_pretrained(self, save_directory: Path) -> None:
        self.estimator.save(save_directory / FILE)
        if self.with_network:
            files.save(save_directory / NETWORK, self.estimator.lin_.given.state_dict(), {}, kind=KIND)
        else:
            (save_directory / NETWORK).unlink(missing_ok=True)  # of something saved there before

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        model: nn.Module | None = None,
        output: Any = None,
        score: Any = None,
        base_model: str | None = None,
        metrics: Mapping[str, float] | None = None,
        **where: Any,
    ) -> Carrier:
        path = _file(model_id, FILE, where)
        if path is None:
            there = f"; it has {listing(sorted(os.listdir(model_id)), limit=8)}" if os.path.isdir(model_id) else ""
            raise FileNotFoundError(f"{model_id} has no {FILE}, which linnet's save_pretrained writes{there}.")
        weights = _file(model_id, NETWORK, where)
        if weights is not None and model is not None:
            model = _with_weights(model, weights)
        found = saved.load(path, model, output=output, score=score)
        return cls(found, base_model=base_model, metrics=metrics)  # the last two are what the config says

    def generate_model_card(self, repo_id: str | None = None, **_: Any) -> ModelCard:
        """The README.md: what it is, what it is around, how well it does, how to load it."""
        data = ModelCardData(
            library_name="linnet",
            tags=list(self._hub_mixin_info.model_card_data.tags or ()),
            base_model=self.base_model,
            metrics=sorted(self.metrics) or None,
        )
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{self._text(repo_id)}")

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """As the mixin's, with a description of what was fitted as config.json."""
        given: Any = options.pop("config", None)
        return super().save_pretrained(save_directory, config=self._config() if given is None else given, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """As the mixin's, with the repository's name on the card."""
        card = {"repo_id": repo_id, **(options.pop("model_card_kwargs", None) or {})}
        return super().push_to_hub(repo_id, model_card_kwargs=card, **options)

    # What is said about it.

    def _config(self) -> dict[str, Any]:
        return {
            "library": f"linnet {__version__}",
            "estimator_class": type(self.estimator).__name__,
            "base_model": self.base_model,
            "base_checksum": self._checksum(),
            "metrics": self.metrics,
        }

    def _checksum(self) -> str | None:
        return None if self.estimator.model is None else saved.base_of(self.estimator)

    def _text(self, repo_id: str | None) -> str:
        estimator = self.estimator
        name, model = type(estimator).__name__, estimator.model
        what = "an untrained network of its own" if model is None else f"a {type(model).__name__}"
        base = f" ([{self.base_model}](https://huggingface.co/{self.base_model}))" if self.base_model else ""
        rows = [("parameters", f"{estimator.lin_.p:,}")]
        if model is not None:
            rows.append(("SHA-256 of the network's weights", f"`{self._checksum()}`"))
        if getattr(estimator, "classes_", None) is not None:
            labels = [str(label) for label in estimator.classes_]
            rows.append(("classes", ", ".join(labels if len(labels) <= 12 else [*labels[:12], "..."])))
        if isinstance(getattr(estimator, "log_evidence_", None), float):
            rows.append(("log evidence", f"{estimator.log_evidence_:.6g}"))
        rows += [(metric, f"{value:.6g}") for metric, value in self.metrics.items()]
        return "\n".join(
            [
                f"# {name} around {what}{base}",
                "",
                f"Fitted with linnet {__version__}: the network, linearized around its own weights.",
                "",
                "| | |",
                "| --- | --- |",
                *(f"| {key} | {value} |" for key, value in rows),
                "",
                "```python",
                *self._snippet(repo_id),
                "```",
                "",
            ]
        )

    def _snippet(self, repo_id: str | None) -> list[str]:
        estimator, name = self.estimator, repr(repo_id or "path/to/this/folder").replace("'", '"')
        call = [f"{type(estimator).__name__}.from_pretrained({name}"]
        lines = ["import linnet", ""]
        if estimator.model is not None:
            weights = "any weights; its own are here too" if self.with_network else "with the weights above"
            kind = type(estimator.model).__name__
            lines.append(f"model = ...  # the {kind}{f' of {self.base_model}' if self.base_model else ''}, {weights}")
            call.append("model=model")
        functions = {"output": getattr(estimator, "output", None)}
        if "score" in estimator.get_params(deep=False):  # the setting of an embedding, not the method of the others
            functions["score"] = estimator.score
        for argument, value in functions.items():
            if callable(value):
                lines.append(f"{argument} = ...  # the function that it was fitted with")
                call.append(f"{argument}={argument}")
        return [*lines, f"estimator = linnet.{', '.join(call)})"]


def fetched(
    name: str | os.PathLike[str], model: nn.Module | None, *, output: Any, score: Any, options: Mapping[str, Any]
) -> Any:
    """The estimator in a folder or repository; see `linnet._estimator.portable.Portable.from_pretrained`."""
    name = os.fspath(name)
    if (os.path.isabs(name) or name.startswith(".") or name.count("/") > 1) and not os.path.isdir(name):
        raise FileNotFoundError(f"There is no folder {name}; a repository of the hub is called owner/name.")
    given = {"model": model, "output": output, "score": score}
    return Carrier.from_pretrained(name, **{key: v for key, v in given.items() if v is not None}, **options).estimator


def known_name(model: nn.Module | None) -> str | None:
    """What a model of transformers or timm is called on the hub; None where it does not say, or came from a folder."""
    config: Any = getattr(model, "pretrained_cfg", None)
    timm = config.get("hf_hub_id") if isinstance(config, Mapping) else None
    for name in (getattr(model, "name_or_path", None), timm):
        if isinstance(name, str) and name and name[0] not in "./~" and name.count("/") < 2 and not os.path.exists(name):
            return name
    return None


def _file(model_id: str, name: str, where: Mapping[str, Any]) -> Path | None:
    """A file of a folder or repository, which may not be there."""
    if os.path.isdir(model_id):
        path = Path(model_id) / name
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(repo_id=model_id, filename=name, **where))
    except EntryNotFoundError:
        return None


def _with_weights(model: nn.Module, path: Path) -> nn.Module:
    """A copy of a network with the weights of a file."""
    tensors, _ = files.load(path, kind=KIND)
    found = copy.deepcopy(model)
    try:
        found.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"The weights in {path} are of another architecture than model=. {error}") from None
    return found
