r"""Knowledge distillation: a student that matches its teacher's Fisher embedding (Zhang et al. 2022, appendix D.2).

.. math:: \alpha \, L_{cls}(f_s(x), y) + (1 - \alpha) \, L_t(h_s(x), Q_t(x)) \qquad \text{(equation 16)}

:math:`Q_t` is the embedding of the teacher, :math:`h_s` a linear head beside the student's own. With the teacher's
logits in place of both it is the usual distillation (equation 15).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet._common import messages
from linnet._estimator import epoch
from linnet.network import checks

Distance = str | Callable[[Tensor, Tensor], Tensor]


def distill_loss(
    logits: Tensor,
    y: Tensor,
    *,
    embedding: Tensor | None = None,
    target: Tensor | None = None,
    teacher: Tensor | None = None,
    alpha: float = 0.5,
    distance: Distance = "mse",
    temperature: float = 1.0,
) -> Tensor:
    r"""The distillation loss of a batch, one number: ``alpha * cross entropy + (1 - alpha) * L_t``.

    Either ``embedding`` and ``target`` are given (equation 16), or ``teacher`` (equation 15), where L_t is
    :math:`T^2 KL(\mathrm{softmax}(t / T) \| \mathrm{softmax}(f / T))` (Hinton et al. 2015).

    Args:
        logits: Logits of the student, (n, c).
        y: Labels (n,).
        embedding: Output of the student's embedding head, (n, k).
        target: The teacher's embedding, (n, k).
        teacher: The teacher's logits, (n, c).
        alpha: Weight of the labels, from 0 to 1.
        distance: Distance of the embeddings: "mse", "cosine", or a callable ``(embedding, target) -> number``.
        temperature: T.

    Example:
        >>> logits, y, Q = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), torch.ones(4, 3)
        >>> distill_loss(logits, y, embedding=torch.zeros(4, 3), target=Q, alpha=0.0)
        tensor(1.)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is the weight of the labels, from 0 to 1; got {alpha!r}.")
    by_embedding = embedding is not None and target is not None
    if by_embedding == (teacher is not None) or (embedding is None) != (target is None):
        raise ValueError("distill_loss needs embedding= and target= (equation 16), or teacher= (equation 15) alone.")
    labels = F.cross_entropy(logits, y)
    if embedding is not None and target is not None:
        _check_shapes("embedding", embedding, "target", target)
        return alpha * labels + (1 - alpha) * _find_distance(distance)(embedding, target)
    assert teacher is not None
    _check_shapes("logits", logits, "teacher", teacher)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature!r}.")
    log_q, log_p = (logits / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    kl = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return alpha * labels + (1 - alpha) * temperature**2 * kl


class WithEmbedding(nn.Module, ABC):
    """A student whose calls give logits (n, c) and an embedding (n, k), to be compared with the teacher's.

    `EmbeddingHead` makes such a student of any classifier. Write another class where the embedding is not a linear
    function of the last features: `distill` takes it as it is.

    Attributes:
        student: The classifier inside.
    """

    student: nn.Module

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Logits and embedding."""


class EmbeddingHead(WithEmbedding):
    """A student with a second, linear head: it maps the inputs of the last layer to k numbers.

    Args:
        student: Any classifier.
        k: Length of the embedding.
        layer: The ``nn.Linear`` whose inputs are the features; by default the last ``nn.Linear`` of the student.

    A call gives the logits (n, c) and the embedding (n, k).

    Example:
        >>> student = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> logits, embedding = EmbeddingHead(student, 5)(torch.zeros(2, 4))
        >>> logits.shape, embedding.shape
        (torch.Size([2, 3]), torch.Size([2, 5]))
    """

    def __init__(self, student: nn.Module, k: int, *, layer: str | None = None) -> None:
        super().__init__()
        linear = [name for name, module in student.named_modules() if isinstance(module, nn.Linear)]
        if not linear or (layer is not None and layer not in linear):
            what = "has no nn.Linear" if layer is None else f"has no nn.Linear named {layer!r}"
            raise ValueError(
                f"{type(student).__name__} {what}. Its linear layers: {messages.listing(linear) or 'none'}."
            )
        self.student, self.layer = student, layer or linear[-1]
        read: Any = student.get_submodule(self.layer)
        self.head = nn.Linear(read.in_features, k, dtype=read.weight.dtype, device=read.weight.device)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = self.student.get_submodule(self.layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            raw = self.student(*args, **kwargs)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].ndim != 2:
            raise RuntimeError(
                f"The embedding head reads features (n, d) from {self.layer!r}, called once for each batch; it was "
                f"called {len(seen)} times, with {[tuple(t.shape) for t in seen]}. Choose another with layer=."
            )
        return checks.output_tensor(raw), self.head(seen[0])


@dataclass(frozen=True)
class Distilled:
    """A trained student.

    Attributes:
        model: The student with its embedding head, in eval mode; ``model.student`` is the student alone.
        losses: The mean loss of each epoch.
        scale: (k,), the divisor of each component of the target; None where targets were not divided.
    """

    model: WithEmbedding
    losses: tuple[float, ...]
    scale: Tensor | None


def distill(
    student: nn.Module,
    X: Tensor,
    y: Tensor,
    *,
    target: Tensor | None = None,
    teacher: Tensor | None = None,
    alpha: float = 0.5,
    distance: Distance = "mse",
    temperature: float = 1.0,
    epochs: int = 250,
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    layer: str | None = None,
    standardize: bool = True,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> Distilled:
    """Train a student **in place** with `distill_loss`: SGD whose rate falls tenfold after 60 % and 80 % of the epochs.

    Each component of the target is divided by its root mean square, so that all components count alike.

    Args:
        student: The classifier to train, on its device; or one that gives an embedding itself (`WithEmbedding`).
        X: Inputs (n, ...).
        y: Labels (n,).
        target: The teacher's embedding of X, (n, k), as ``FisherEmbedding.fit_transform`` gives it.
        teacher: Or the teacher's logits, (n, c).
        alpha: Weight of the labels; 1 trains without the teacher.
        distance: The same as for `distill_loss`.
        temperature: The same as for `distill_loss`.
        epochs: Passes over the data.
        batch_size: Examples per step.
        lr: Learning rate of the first epochs.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        augment: Function of a batch of inputs and a generator; returns as many inputs.
        layer: The same as for `EmbeddingHead`.
        standardize: False to take the target as it is.
        seed: Seed of the head and of the order of the examples.
        progress: Function that is called after each epoch with its number and mean loss.
    """
    if (target is None) == (teacher is None):
        raise ValueError("distill needs target= (the teacher's embedding) or teacher= (its logits), and not both.")
    known = target if target is not None else teacher
    assert known is not None
    if not len(X) == len(y) == len(known):
        raise ValueError(f"distill needs as many inputs, labels and targets; got {len(X)}, {len(y)}, {len(known)}.")
    first = next(student.parameters())
    device = first.device
    if isinstance(student, WithEmbedding):
        if layer is not None:
            raise ValueError(
                f"{type(student).__name__} gives an embedding itself, so layer= says nothing: leave it out."
            )
        model: WithEmbedding = student
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = EmbeddingHead(student, 1 if target is None else target.shape[1], layer=layer)
    X, y, known = (torch.as_tensor(t, device=device) for t in (X, y, known))
    known = known.to(first.dtype)
    scale = known.square().mean(0).sqrt() if target is not None and standardize else None
    if scale is not None:
        known = known / torch.where(scale > 0, scale, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    falls = [round(0.6 * epochs), round(0.8 * epochs)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    model.train()

    def loss(index: Tensor) -> Tensor:
        x = X[index] if augment is None else augment(X[index], random)
        logits, embedding = model(x)
        given = {"teacher": known[index]} if target is None else {"embedding": embedding, "target": known[index]}
        return distill_loss(logits, y[index], alpha=alpha, distance=distance, temperature=temperature, **given)

    for number in range(epochs):
        batches = torch.randperm(len(X), generator=random).to(device).split(batch_size)
        losses.append(epoch(loss, [(index, len(index)) for index in batches], optimizer))
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"The loss is {losses[-1]} in epoch {number}: the steps are too long. Lower lr={lr}.")
        schedule.step()
        if progress is not None:
            progress(number, losses[-1])
    return Distilled(model.eval(), tuple(losses), scale)


def _find_distance(distance: Distance) -> Callable[[Tensor, Tensor], Tensor]:
    known: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": F.mse_loss, "cosine": _cosine}
    if callable(distance):
        return distance
    if distance not in known:
        raise ValueError(f"distance must be {', '.join(map(repr, known))} or a callable; got {distance!r}.")
    return known[distance]


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(a, b, dim=1)).mean()


def _check_shapes(a: str, x: Tensor, b: str, y: Tensor) -> None:
    if x.shape != y.shape or x.ndim != 2:
        raise ValueError(
            f"distill_loss compares {a} and {b}, which need one shape (n, k); got {tuple(x.shape)}, {tuple(y.shape)}."
        )
