"""`save_pretrained`, `push_to_hub` and `from_pretrained`, which every estimator has; the work is in
`linnet._estimator.hub`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Self

from torch import nn


def _hub() -> ModuleType:
    """`linnet._estimator.hub`, which needs an extra that is imported when it is asked for."""
    try:
        from linnet._estimator import hub
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "huggingface_hub":
            raise
        raise ModuleNotFoundError(
            "Folders and repositories in the style of Hugging Face need huggingface_hub: pip install linnet[hub]. "
            "save(path) and linnet.load(path, model) do without.",
            name=error.name,
        ) from None
    return hub


class Portable:
    """An estimator that can be kept in a folder or a repository of the Hugging Face hub.

    There is one file with what was fitted, as ``save`` writes it; the network that it belongs to is not part of it,
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
        """Write what was fitted to a folder, with a model card; a README.md that is there already stays as it is.

        Args:
            folder: Made where it is missing.
            base_model: What the network is called on the hub, for the card; models of transformers and timm know it.
            metrics: How well it does, by name, for the card.
            with_network: Also write the network's weights, for networks that cannot be had elsewhere.
        """
        _hub().Carrier(self, base_model=base_model, metrics=metrics, with_network=with_network).save_pretrained(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_model: str | None = None,
        metrics: Mapping[str, float] | None = None,
        with_network: bool = False,
        **options: Any,
    ) -> str:
        """Upload the same to a repository of the hub, which is made where it is missing; returns the commit's address.

        Args:
            repo_id: Such as "name/adapter".
            base_model: As for `save_pretrained`.
            metrics: As for `save_pretrained`.
            with_network: As for `save_pretrained`.
            options: As `huggingface_hub.ModelHubMixin.push_to_hub` takes them: private, token, branch, create_pr,
                commit_message.
        """
        carrier = _hub().Carrier(self, base_model=base_model, metrics=metrics, with_network=with_network)
        return str(carrier.push_to_hub(repo_id, **options))

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        output: Any = None,
        score: Any = None,
        **options: Any,
    ) -> Self:
        """What `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: The folder, or the repository's name on the hub.
            model: The network it was fitted around. Where its weights were saved too, any network of the same
                architecture: they are put into a copy of it.
            output: As for `linnet.load`.
            score: As for `linnet.load`.
            options: As `huggingface_hub.ModelHubMixin.from_pretrained` takes them: revision, token, cache_dir,
                local_files_only, force_download.
        """
        found = _hub().fetched(name, model, output=output, score=score, options=options)
        if not isinstance(found, cls):
            raise TypeError(f"{name} holds a {type(found).__name__}; load it with that class, not with {cls.__name__}.")
        return found
