"""A PyTorch Lightning callback that leaves a fitted `linnet.Laplace` behind."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from linnet._common import needs_extra
from linnet.interop.after_training import FitAfterTraining

with needs_extra("lightning", "linnet.interop.lightning"):
    import pytorch_lightning as lightning

__all__ = ["LaplaceCallback"]


class LaplaceCallback(FitAfterTraining, lightning.Callback):
    __doc__ = f"""Fit a `linnet.Laplace` to the module when `trainer.fit` ends, in one pass over the training data.

    The batches of the training loader must be pairs of inputs and targets; ``data=`` takes any others. The loggers of
    the trainer get the metrics.
    {(FitAfterTraining.__doc__ or "").partition("say when.")[2]}
    Example:
        >>> callback = LaplaceCallback("regression", structure="kron", save="laplace.safetensors")
        >>> trainer = lightning.Trainer(max_epochs=10, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.fit(module, loader)  # doctest: +SKIP
        >>> callback.laplace_.predict(X, return_std=True)  # doctest: +SKIP
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse trainings on several devices before they begin."""
        if stage == "fit" and trainer.world_size > 1:
            raise NotImplementedError(
                f"LaplaceCallback fits on one device, and this trainer has {trainer.world_size}. Leave the callback "
                "out, and fit linnet.Laplace to the trained module."
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, unless the training was interrupted or only tried."""
        if trainer.interrupted or trainer.fast_dev_run:
            return
        loader = trainer.train_dataloader
        if self.data is None and not isinstance(loader, DataLoader):
            raise TypeError(f"The training data are a {type(loader).__name__}, not one DataLoader. Give data=.")
        found = self._fit(pl_module, loader)
        for logger in trainer.loggers:
            logger.log_metrics({f"laplace_{name}": value for name, value in found.items()}, step=trainer.global_step)
