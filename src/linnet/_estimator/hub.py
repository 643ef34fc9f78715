"""Fitted estimators in folders and repositories of the Hugging Face hub; needs the extra ``linnet[hub]``.

huggingface_hub is imported when one of its functions is called, so that estimators do without the extra.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from torch import nn

from linnet._common import __version__, files, listing
from linnet._estimator import files as saved
from linnet._estimator.ensembles import is_ensemble, members_of
from linnet.network import check_whole

FILE = "linnet.safetensors"
"""The file with the fitted estimator."""
NETWORK = "network.safetensors"
"""The file with the network's weights, where these are kept too."""
KIND = "network weights"


class HubMixin:
    """An estimator that can be kept in a folder or a repository of the Hugging Face hub.

    The folder has one file with the fitted estimator, as ``save`` writes it. The network is not part of the folder,
    unless ``with_network`` says so.
    """

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        base_model: str | None = None,
        metrics: Mapping[str, float] | None = None,
        with_network: bool = False,
    ) -> None:
        """Write the fitted estimator to a folder, with a model card; a README.md that is there already stays.

        Args:
            folder: Made where it is missing.
            base_model: Name of the network on the hub, for the card; models of transformers and timm know their names.
            metrics: Measured quality, by name, for the card.
            with_network: Also write the network's weights, for networks that cannot be had elsewhere.
        """
        _carrier()(Package(self, base_model, dict(metrics or {}), with_network)).save_pretrained(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_model: str | None = None,
        metrics: Mapping[str, float] | None = None,
        with_network: bool = False,
        **options: Any,
    ) -> str:
        """Upload the same files to a repository of the hub, made where it is missing; returns the commit's address.

        Args:
            repo_id: Such as "name/adapter".
            base_model: As for `save_pretrained`.
            metrics: As for `save_pretrained`.
            with_network: As for `save_pretrained`.
            options: As `huggingface_hub.ModelHubMixin.push_to_hub` takes them: private, token, branch, create_pr,
                commit_message.
        """
        carrier = _carrier()(Package(self, base_model, dict(metrics or {}), with_network))
        return str(carrier.push_to_hub(repo_id, **options))

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        output: Any = None,
        score: Any = None,
        likelihood: Any = None,
        **options: Any,
    ) -> Self:
        """The estimator that `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: The folder, or the repository's name on the hub.
            model: The network of the fit. Where the folder holds its weights too, any network of the same
                architecture: the weights are put into a copy of it. The list of networks of an ensemble.
            output: As for `linnet.load`.
            score: As for `linnet.load`.
            likelihood: As for `linnet.load`.
            options: As `huggingface_hub.ModelHubMixin.from_pretrained` takes them: revision, token, cache_dir,
                local_files_only, force_download.
        """
        carrier, name = _carrier(), os.fspath(name)
        if (os.path.isabs(name) or name.startswith(".") or name.count("/") > 1) and not os.path.isdir(name):
            raise FileNotFoundError(f"There is no folder {name}; a repository of the hub is called owner/name.")
        given = {"model": model, "output": output, "score": score, "likelihood": likelihood}
        given = {key: value for key, value in given.items() if value is not None}
        found = carrier.from_pretrained(name, **given, **options).package.estimator
        if not isinstance(found, cls):
            raise TypeError(f"{name} holds a {type(found).__name__}; load it with that class, not with {cls.__name__}.")
        return found


@dataclass
class Package:
    """An estimator with all that its folder says about it.

    Attributes:
        estimator: Fitted.
        base_model: Name of its network on the hub; found out where None.
        metrics: Name to number.
        with_network: Whether the network's weights go along.
    """

    estimator: Any
    base_model: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    with_network: bool = False

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"metrics are finite numbers by name; {name!r} is {value!r}.")
        if self.with_network and getattr(self.estimator, "model", None) is None:
            raise ValueError("with_network=True, and this estimator has no network of its own: its file holds it all.")
        if self.with_network and is_ensemble(self.estimator):
            raise ValueError(
                "with_network=True keeps the weights of one network, and an ensemble has several. Save the state dict "
                "of each network yourself, and leave with_network out."
            )
        if self.base_model is None:
            self.base_model = known_name(self.estimator.model)

    def write(self, folder: Path) -> None:
        """Write the estimator, and the network where it goes along."""
        self.estimator.save(folder / FILE)
        if self.with_network:
            files.save(folder / NETWORK, self.estimator.lin_.given.state_dict(), {}, kind=KIND)
        else:
            (folder / NETWORK).unlink(missing_ok=True)  # of an estimator saved there before

    def config(self) -> dict[str, Any]:
        """The config.json."""
        return {
            "library": f"linnet {__version__}",
            "estimator_class": type(self.estimator).__name__,
            "base_model": self.base_model,
            "base_checksum": self._checksum(),
            "metrics": self.metrics,
        }

    def _checksum(self) -> str | None:
        """The checksum of the network's weights; of an ensemble those of all networks, with commas."""
        if self.estimator.model is None:
            return None
        return ", ".join(saved.base_of(member) for member in members_of(self.estimator))

    def text(self, repo_id: str | None) -> str:
        """The text of the model card: the network, the measured quality, how to load the estimator."""
        estimator = self.estimator
        name, model = type(estimator).__name__, estimator.model
        what = "an untrained network of its own" if model is None else _name(model)
        base = f" ([{self.base_model}](https://huggingface.co/{self.base_model}))" if self.base_model else ""
        rows = [("parameters", f"{members_of(estimator)[0].lin_.p:,}")]
        if model is not None:
            rows.append(("SHA-256 of the network's weights", f"`{self._checksum()}`"))
        if getattr(estimator, "classes_", None) is not None:
            labels = [str(label) for label in estimator.classes_]
            rows.append(("classes", ", ".join(labels if len(labels) <= 12 else [*labels[:12], "..."])))
        if isinstance(getattr(estimator, "log_evidence_", None), float):
            rows.append(("log evidence", f"{estimator.log_evidence_:.6g}"))
        rows += [(metric, f"{value:.6g}") for metric, value in self.metrics.items()]
        head = f"# {name} around {what}{base}"
        about = f"Fitted with linnet {__version__}: the network, linearized around its own weights."
        table = ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)]
        return "\n".join([head, "", about, "", *table, "", "```python", *self._snippet(repo_id), "```", ""])

    def _snippet(self, repo_id: str | None) -> list[str]:
        estimator, name = self.estimator, repr(repo_id or "path/to/this/folder").replace("'", '"')
        call = [f"{type(estimator).__name__}.from_pretrained({name}"]
        lines = ["import linnet", ""]
        if estimator.model is not None:
            weights = "any weights; its own are here too" if self.with_network else "with the weights above"
            kind = _name(estimator.model).removeprefix("a ")
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


def _name(model: Any) -> str:
    """A network, or the list of networks of an ensemble, in words."""
    several = isinstance(model, list | tuple)
    return f"list of {len(model)} networks" if several else f"a {type(model).__name__}"


@cache
def _carrier() -> Any:
    """The class that carries a `Package` through huggingface_hub's mixin, which makes folders and commits."""
    try:
        from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "huggingface_hub":
            raise
        raise ModuleNotFoundError(
            "Folders and repositories in the style of Hugging Face need huggingface_hub: pip install linnet[hub]. "
            "save(path) and linnet.load(path, model) do without.",
            name=error.name,
        ) from None

    class Carrier(ModelHubMixin, library_name="linnet", tags=["linnet", "uncertainty"]):
        def __init__(self, package: Package) -> None:
            self.package = package

        def _save_pretrained(self, save_directory: Path) -> None:
            self.package.write(save_directory)

        @classmethod
        def _from_pretrained(
            cls,
            *,
            model_id: str,
            model: nn.Module | None = None,
            output: Any = None,
            score: Any = None,
            likelihood: Any = None,
            **where: Any,
        ) -> Carrier:
            given = {"output": output, "score": score, "likelihood": likelihood}
            return cls(_unpack(model_id, model, given, where))

        def generate_model_card(self, repo_id: str | None = None, **_: Any) -> ModelCard:
            data = ModelCardData(
                library_name="linnet",
                tags=list(self._hub_mixin_info.model_card_data.tags or ()),
                base_model=self.package.base_model,
                metrics=sorted(self.package.metrics) or None,
            )
            return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{self.package.text(repo_id)}")

        def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
            given: Any = options.pop("config", None)
            config = self.package.config() if given is None else given
            return super().save_pretrained(save_directory, config=config, **options)

        def push_to_hub(self, repo_id: str, **options: Any) -> str:
            card = {"repo_id": repo_id, **(options.pop("model_card_kwargs", None) or {})}
            return super().push_to_hub(repo_id, model_card_kwargs=card, **options)

    return Carrier


def _unpack(model_id: str, model: nn.Module | None, given: dict[str, Any], where: dict[str, Any]) -> Package:
    """The package in a folder or repository; ``given`` is for `load`, ``where`` holds the options of a download."""
    path = _file(model_id, FILE, where)
    if path is None:
        there = f"; it has {listing(sorted(os.listdir(model_id)), limit=8)}" if os.path.isdir(model_id) else ""
        raise FileNotFoundError(f"{model_id} has no {FILE}, which linnet's save_pretrained writes{there}.")
    weights = _file(model_id, NETWORK, where)
    if weights is not None and model is not None:
        model = _with_weights(model, weights)
    return Package(saved.load(path, model, **given))


def known_name(model: nn.Module | None) -> str | None:
    """Name of a model of transformers or timm on the hub; None where it does not say, or came from a folder."""
    config: Any = getattr(model, "pretrained_cfg", None)
    timm = config.get("hf_hub_id") if isinstance(config, Mapping) else None
    for name in (getattr(model, "name_or_path", None), timm):
        if isinstance(name, str) and name and name[0] not in "./~" and name.count("/") < 2 and not os.path.exists(name):
            return name
    return None


def _file(model_id: str, name: str, where: Mapping[str, Any]) -> Path | None:
    """A file of a folder or repository, which may not be there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

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
    check_whole(model, "from_pretrained")
    found = copy.deepcopy(model)
    try:
        found.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"The weights in {path} are of another architecture than model=. {error}") from None
    return found
