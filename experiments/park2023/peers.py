"""The peers of attribution: TRAK by its authors (traker), and EKFAC influence functions by kronfluence.

Neither is needed for linnet. Where a package cannot be imported, the experiment says so in its results.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Data = tuple[Tensor, Tensor]
BATCH = 250


def margin(f: Tensor, y: Tensor) -> Tensor:
    """The log odds of the target, (n,): what TRAK linearizes."""
    own = f.gather(1, y[:, None])[:, 0]
    others = f.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return own - others


def trak(nets: Sequence[nn.Module], train: Data, test: Data, *, rank: int, device: str, seed: int = 0) -> list[Tensor]:
    """Scores (m, n) of the first network, and of all networks together; larger where an example raises the margin.

    Args:
        nets: The networks.
        train: Training data.
        test: Data whose margins are explained.
        rank: Dimension of the projected gradients.
        device: Device of the networks.
        seed: Seed of the random projection.
    """
    package, projectors = importlib.import_module("trak"), importlib.import_module("trak.projectors")
    model = copy.deepcopy(nets[0])
    p = sum(t.numel() for t in model.parameters())
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        kind = projectors.ProjectionType.rademacher
        projector = projectors.BasicProjector(p, rank, seed, kind, torch.device(device), block_size=min(rank, 128))
        tracer = package.TRAKer(
            model=model,
            task="image_classification",
            train_set_size=len(train[0]),
            save_dir=folder,
            device=device,
            projector=projector,
            proj_dim=rank,
            use_half_precision=False,
            logging_level=logging.ERROR,
        )
        for i, net in enumerate(nets):
            tracer.load_checkpoint(net.state_dict(), model_id=i)
            for x, y in zip(train[0].split(BATCH), train[1].split(BATCH), strict=True):
                tracer.featurize(batch=(x, y), num_samples=len(x))
        tracer.finalize_features()
        projector.model_id = -1  # its matrix is gone, and it makes another one only for another network
        for i, net in enumerate(nets):
            tracer.start_scoring_checkpoint("test", net.state_dict(), model_id=i, num_targets=len(test[0]))
            for x, y in zip(test[0].split(BATCH), test[1].split(BATCH), strict=True):
                tracer.score(batch=(x, y), num_samples=len(x))
        for ids in ([0], list(range(len(nets)))):
            scores = tracer.finalize_scores("test", model_ids=ids)
            found.append(torch.as_tensor(scores).clone().T.to(device))
    return found


def ekfac(net: nn.Module, train: Data, test: Data, *, damping: float | None, device: str) -> Tensor:
    """Scores (m, n) by the influence functions of kronfluence; larger where an example raises the margin.

    Args:
        net: The network.
        train: Training data.
        test: Data whose margins are explained.
        damping: Added to the curvature; None is the heuristic of the package.
        device: Where.
    """
    package = importlib.import_module("kronfluence")
    arguments = importlib.import_module("kronfluence.arguments")

    class Margin(importlib.import_module("kronfluence.task").Task):  # type: ignore[misc]
        """Cross-entropy of the training data, margins of the test data."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            f = model(batch[0])
            y = torch.distributions.Categorical(logits=f.detach()).sample() if sample else batch[1]
            return nn.functional.cross_entropy(f, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return margin(model(batch[0]), batch[1]).sum()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        task = Margin()
        analyzer = package.Analyzer(
            "margins",
            package.prepare_model(copy.deepcopy(net), task),
            task,
            cpu=device == "cpu",
            log_level=logging.ERROR,
            disable_tqdm=True,
            output_dir=folder,
        )
        sets = [TensorDataset(x.cpu(), y.cpu()) for x, y in (train, test)]
        given = arguments.FactorArguments(strategy="ekfac")
        analyzer.fit_all_factors("factors", sets[0], per_device_batch_size=BATCH, factor_args=given)
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            query_dataset=sets[1],
            train_dataset=sets[0],
            per_device_query_batch_size=min(100, len(sets[1])),
            per_device_train_batch_size=BATCH,
            score_args=arguments.ScoreArguments(damping_factor=damping),
        )
        scores: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    # The weights move by minus the score as the loss of an example counts for more.
    return -scores.to(device)
