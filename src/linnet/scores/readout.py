"""How the output of a model becomes one number per example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet.network import Output, checks


def check_score(out: Any) -> Tensor:
    """A score as (n,); raise unless it has one number for each example."""
    if not isinstance(out, Tensor):
        raise TypeError(f"A score is a tensor with one number per example, (n,); got {messages.kind(out)}.")
    if out.ndim == 0:
        raise ValueError(
            "A score is one number per example, (n,); got a single number. Do not average or add up over the examples."
        )
    if out.ndim > 1 and out.shape[1:].numel() != 1:
        raise ValueError(
            f"A score is one number per example, (n,); got {tuple(out.shape)}. For class logits use "
            "linnet.scores.classifier(), for tokens linnet.scores.autoregressive(); else reduce it with a function: "
            "score=lambda out: ..."
        )
    return out.reshape(len(out))


@dataclass(frozen=True)
class ScoreOutput:
    """Reads the raw output of a model as a score."""

    fn: Output | None  # maps the raw output to the score; None takes the output itself

    def __call__(self, raw: Any) -> Tensor:
        return check_score(checks.output_tensor(raw) if self.fn is None else self.fn(raw))


def log_sum_exp(raw: Any) -> Tensor:
    logits = checks.output_tensor(raw)
    if logits.ndim > 2:
        raise ValueError(
            f"linnet.scores.classifier() reads class logits (n, c); got {tuple(logits.shape)}. A score is one number "
            "per example: for tokens use linnet.scores.autoregressive(), else a function: score=lambda out: ..."
        )
    return _promote(logits).logsumexp(1) if logits.ndim == 2 else check_score(logits)


def _promote(t: Tensor) -> Tensor:
    """At least float32, for sums over many entries."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


class TokenLikelihood:
    """The summed log likelihood of the tokens, as a forward with the arguments of the model's own."""

    def __init__(
        self, signature: inspect.Signature, targets: Callable[..., Tensor] | None, shift: bool, axis: int
    ) -> None:
        self.targets, self.shift, self.axis = targets, shift, axis
        self.__signature__ = signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        labels = kwargs.pop("labels", None)  # with them, a language model would also compute its mean loss
        logits = _promote(checks.output_tensor(module.forward(*args, **kwargs))).movedim(self.axis, -1)
        tokens = labels if labels is not None else args[0] if args else next(iter(kwargs.values()))
        mask = kwargs.get("attention_mask")
        if self.targets is not None:
            tokens, mask = self.targets(*args, **kwargs), None
        if tokens.is_floating_point() or tokens.shape != logits.shape[:-1]:
            raise ValueError(
                f"autoregressive needs logits (n, ..., classes) for tokens (n, ...) of whole numbers; got logits "
                f"{tuple(logits.shape)} and tokens {tuple(tokens.shape)} in {tokens.dtype}. Say where the classes lie "
                "with axis=, and which tokens they predict with targets=lambda *inputs: ..."
            )
        counted = tokens != -100
        if mask is not None:
            # A token after a hidden one is predicted from padding (on the left), and does not count either.
            seen = mask.bool()
            counted = counted & seen
            if self.shift:
                counted[:, 1:] &= seen[:, :-1]
        if self.shift:
            logits, tokens, counted = logits[:, :-1], tokens[:, 1:], counted[:, 1:]
        tokens = tokens.long().masked_fill(~counted, 0)
        log_p = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
        return log_p.masked_fill(~counted, 0.0).flatten(1).sum(1)
