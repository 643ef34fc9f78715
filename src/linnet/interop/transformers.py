"""A callback of Hugging Face's Trainer that leaves a fitted `linnet.Laplace` behind."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from linnet._common import needs_extra
from linnet.interop.after_training import FitAfterTraining
from linnet.interop.batches import SplitTargets

with needs_extra("transformers", "linnet.interop.transformers"):
    from transformers import TrainerCallback

__all__ = ["LaplaceCallback"]


class LaplaceCallback(FitAfterTraining, TrainerCallback):
    __doc__ = f"""Fit a `linnet.Laplace` to the model when `Trainer.train` ends, in one pass over the training data.

    The training data are those of the trainer, with its collator; the key ``labels`` of each batch has the targets.
    {(FitAfterTraining.__doc__ or "").partition("say when.")[2]}
    Example:
        >>> callback = LaplaceCallback(params="last_layer", save="laplace.safetensors")
        >>> trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> callback.laplace_.predict_proba(tokens)  # doctest: +SKIP
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse trainings on several devices before they begin."""
        if args.world_size > 1 or args.n_gpu > 1:
            devices = max(args.world_size, args.n_gpu)
            raise NotImplementedError(
                f"LaplaceCallback fits on one device, and this training has {devices}. Leave the callback out, and fit "
                "linnet.Laplace to the trained model."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit to the trained model."""
        loader = kwargs.get("train_dataloader")
        data = None
        if self.data is None:
            if loader is None or not hasattr(loader, "dataset"):
                raise TypeError(f"The training data are a {type(loader).__name__}, not a DataLoader. Give data=.")
            collate = SplitTargets(loader.collate_fn, "labels")
            data = DataLoader(loader.dataset, batch_size=args.per_device_train_batch_size, collate_fn=collate)
        self._fit(kwargs["model"], data)
