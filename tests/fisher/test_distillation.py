"""Distillation: the two losses written out, the head, and a student that learns from an embedding alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linnet.fisher import EmbeddingHead, distill, distill_loss
from tests.support.drawn import double, normal

LOGITS, TEACHER, Y = normal(6, 3), normal(6, 3, seed=1), torch.tensor([0, 2, 1, 1, 0, 2])
H, Q = normal(6, 4, seed=2), normal(6, 4, seed=3)


def cross_entropy() -> Tensor:
    return -LOGITS.log_softmax(1)[torch.arange(6), Y].mean()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_equation_16(alpha: float) -> None:
    cases: list[tuple[Any, Tensor]] = [
        ("mse", (H - Q).square().mean()),
        ("cosine", 1 - ((H * Q).sum(1) / (H.norm(dim=1) * Q.norm(dim=1))).mean()),
        (lambda a, b: (a - b).abs().sum(), (H - Q).abs().sum()),
    ]
    for distance, expected in cases:
        loss = distill_loss(LOGITS, Y, embedding=H, target=Q, alpha=alpha, distance=distance)
        torch.testing.assert_close(loss, alpha * cross_entropy() + (1 - alpha) * expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_equation_15(temperature: float) -> None:
    p, q = (TEACHER / temperature).softmax(1), (LOGITS / temperature).softmax(1)
    kl = (p * (p.log() - q.log())).sum(1).mean()
    loss = distill_loss(LOGITS, Y, teacher=TEACHER, alpha=0.2, temperature=temperature)
    torch.testing.assert_close(loss, 0.2 * cross_entropy() + 0.8 * temperature**2 * kl, rtol=1e-12, atol=0)
    own = distill_loss(LOGITS, Y, teacher=LOGITS, alpha=0.0, temperature=temperature)
    assert float(own) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "embedding= and target=.*or teacher="),
        ({"embedding": H}, "embedding= and target="),
        ({"embedding": H, "target": Q, "teacher": TEACHER}, "or teacher=.*alone"),
        ({"embedding": H, "target": Q[:, :3]}, r"one shape \(n, k\); got \(6, 4\), \(6, 3\)"),
        ({"teacher": TEACHER[:4]}, r"got \(6, 3\), \(4, 3\)"),
        ({"teacher": TEACHER, "alpha": 1.5}, "alpha is the weight"),
        ({"teacher": TEACHER, "temperature": 0.0}, "temperature must be positive"),
        ({"embedding": H, "target": Q, "distance": "l1"}, "distance must be 'mse', 'cosine'"),
    ],
)
def test_losses_that_make_no_sense(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        distill_loss(LOGITS, Y, **given)


def student(seed: int = 0) -> nn.Sequential:
    model = double(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), seed)
    assert isinstance(model, nn.Sequential)
    return model


def test_the_head_reads_the_last_layers_inputs_and_leaves_no_hook() -> None:
    model, x = student(), normal(4, 5)
    head = EmbeddingHead(model, 6)
    logits, embedding = head(x)
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(embedding, head.head(model[1](model[0](x))))
    first = EmbeddingHead(model, 2, layer="0")
    torch.testing.assert_close(first(x)[1], first.head(x))
    assert not model[0]._forward_pre_hooks
    assert not model[2]._forward_pre_hooks


def test_heads_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"no nn.Linear named '1'. Its linear layers: '0', '2'"):
        EmbeddingHead(student(), 2, layer="1")
    with pytest.raises(ValueError, match=r"Tanh has no nn.Linear"):
        EmbeddingHead(nn.Tanh(), 2)
    twice = nn.Linear(5, 5)
    with pytest.raises(RuntimeError, match=r"called 2 times, with \[\(4, 5\), \(4, 5\)\]"):
        EmbeddingHead(nn.Sequential(twice, twice), 2)(torch.ones(4, 5))
    with pytest.raises(RuntimeError, match=r"called 1 times, with \[\(4, 3, 5\)\]"):
        EmbeddingHead(nn.Linear(5, 2), 2)(torch.ones(4, 3, 5))


def test_a_student_learns_from_the_embedding_alone() -> None:
    x = normal(60, 5)
    target = torch.tanh(x @ normal(5, 4, seed=7)) * torch.tensor([1.0, 10.0, 0.1, 3.0])
    y = torch.zeros(60, dtype=torch.long)
    seen: list[int] = []
    found = distill(
        student(),
        x,
        y,
        target=target,
        alpha=0.0,
        epochs=60,
        batch_size=20,
        weight_decay=0.0,
        progress=lambda epoch, loss: seen.append(epoch),
    )
    assert found.losses[0] > 0.8
    assert found.losses[-1] < 0.3
    assert seen == list(range(60))
    assert not found.model.training
    assert found.scale is not None
    torch.testing.assert_close(found.scale, target.square().mean(0).sqrt())
    error = (found.model(x)[1].detach() * found.scale - target).square().mean(0) / target.square().mean(0)
    assert float(error.max()) < 0.5


def test_a_student_learns_from_logits_and_labels() -> None:
    x, teacher = normal(60, 5), student(seed=4)
    with torch.no_grad():
        logits = 3 * teacher(x)
    y = logits.argmax(1)
    model = student()
    found = distill(model, x, y, teacher=logits, epochs=40, batch_size=20)
    assert found.scale is None
    assert found.model.student is model
    assert float((model(x).argmax(1) == y).double().mean()) > 0.9


def test_training_is_repeatable_and_augmented() -> None:
    x, y, target = normal(20, 5), torch.zeros(20, dtype=torch.long), normal(20, 2, seed=1)
    runs = [distill(student(), x, y, target=target, epochs=2, lr=0.01, seed=5).losses for _ in range(2)]
    assert runs[0] == runs[1]
    shapes: list[tuple[int, ...]] = []

    def flipped(batch: Tensor, generator: torch.Generator) -> Tensor:
        shapes.append(tuple(batch.shape))
        return -batch

    other = distill(student(), x, y, target=target, epochs=2, lr=0.01, seed=5, batch_size=15, augment=flipped)
    assert shapes == [(15, 5), (5, 5)] * 2
    assert other.losses != runs[0]


def test_training_that_cannot_go_well() -> None:
    x, y, target = normal(6, 5), torch.zeros(6, dtype=torch.long), normal(6, 2, seed=1)
    with pytest.raises(ValueError, match="and not both"):
        distill(student(), x, y)
    with pytest.raises(ValueError, match="got 6, 6, 5"):
        distill(student(), x, y, target=target[:5])
    with pytest.raises(ArithmeticError, match="Lower lr=1e"):
        distill(student(), x, y, target=target, lr=1e200, epochs=5)


def test_the_rate_falls_tenfold_after_60_and_80_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float, float]] = []

    def epoch(loss: Any, batches: Any, optimizer: torch.optim.Optimizer) -> float:
        group = optimizer.param_groups[0]
        seen.append((round(group["lr"], 9), group["momentum"], group["weight_decay"]))
        optimizer.step()
        return 0.0

    monkeypatch.setattr("linnet.fisher.distillation.epoch", epoch)
    x, y, target = normal(6, 5), torch.zeros(6, dtype=torch.long), normal(6, 2, seed=1)
    distill(student(), x, y, target=target, epochs=10, lr=0.2, momentum=0.7, weight_decay=0.03)
    assert seen == [(0.2, 0.7, 0.03)] * 6 + [(0.02, 0.7, 0.03)] * 2 + [(0.002, 0.7, 0.03)] * 2
