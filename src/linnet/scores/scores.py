r"""Scores: for each kind of model, the number per example whose gradient is the Fisher score.

The Fisher score of an example is the gradient of its log density, :math:`\nabla_\theta \log p_\theta(x)`. Models with a
density (`flow`, `autoregressive`, and `vae` by its bound) give the log density directly. The other models are energies:
a classifier by the log-sum-exp of its logits, the discriminator of a GAN by its own output. The gradient of their
unknown normalizer is the mean of the score, so their scores are *centered* (Zhang et al. 2022, section 3.1).

Each score has a short name too: `classifier` is `Classifier`, `energy` is `Energy`, and so on.

>>> import torch, linnet
>>> score = linnet.scores.classifier()
>>> module, output = score.bind(nn.Linear(4, 3))
>>> linnet.linearize(module, None, output)(torch.zeros(5, 4)).shape
torch.Size([5, 1])
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, final

from torch import Tensor, nn

from linnet._common import messages
from linnet.data import Source
from linnet.jacobian import Linearization
from linnet.network import Forward, Output, with_forward
from linnet.scores.elbo import LIKELIHOODS, Bound, Decode, Encode, LogLikelihood
from linnet.scores.generated_samples import Generator, Latent, check_logits, drop_sigmoid, make_samples
from linnet.scores.readout import ScoreOutput, TokenLikelihood, check_score, log_sum_exp


class Score(ABC):
    """One number per example, whose gradient is the Fisher score.

    Attributes:
        name: Name of the score.
        centered: Whether the mean is subtracted: Z is the mean of J rather than 0.
        not_kept: Settings that a fitted embedding no longer needs.
    """

    name: ClassVar[str]
    centered: ClassVar[bool]
    not_kept: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        """The module to linearize, and the function that reads its output as one number per example.

        The module has the model's parameters under their own names. The model is untouched.
        """

    def reference(self, model: nn.Module, lin: Linearization, data: Source) -> Source | None:
        """The source of Z and I; None for the data themselves.

        Args:
            model: The model as the user gave it.
            lin: Linearization of the model with this score.
            data: The data.
        """
        return None

    def settings(self) -> dict[str, Any] | None:
        """The settings that a file keeps; None if one of them is a function, which a file cannot keep."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.not_kept}  # type: ignore[arg-type]
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in kept.values())
        return {"name": self.name, **kept} if plain else None


# Energies, with an unknown normalizer.


@final
@dataclass(frozen=True)
class Classifier(Score):
    """The log-sum-exp of a classifier's logits (n, c), its negative free energy; a single logit is taken as it is.

    Centered; Z and I come from the data.
    """

    name = "classifier"
    centered = True

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        return model, log_sum_exp


@final
@dataclass(frozen=True)
class Energy(Score):
    """An energy or unnormalized log density, of any sign: ``fn(raw output)`` with shape (n,), or the output itself.

    Centered; Z and I come from the data.

    >>> energy(lambda out: out.square().sum(1)).centered
    True
    """

    fn: Output | None = None
    name = "energy"
    centered = True

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        return model, ScoreOutput(self.fn)


@final
@dataclass(frozen=True)
class Gan(Score):
    """The discriminator of a GAN; Z and I come from samples of the generator (Zhang et al. 2022, equation 1).

    The score is the output before the sigmoid: a final ``nn.Sigmoid`` is left out.

    Args:
        generator: Maps latents (m, ...) to inputs of the discriminator. A module runs in eval mode, on a copy.
        latent: Latents: a length or shape of standard normal numbers, a tensor, or a callable
            ``(m, torch.Generator) -> (m, ...)``.
        samples: Number of samples; or, without a generator, samples already made, in any form that data has.
        seed: Seed of the latents.
        output: Function that reads the discriminator's output as (n,). With it, no sigmoid is left out.
    """

    generator: Generator | None = None
    _: KW_ONLY
    latent: Latent | None = None
    samples: Any = 10_000
    seed: int = 0
    output: Output | None = None
    name = "gan"
    centered = True
    not_kept = ("generator", "latent", "samples", "seed")

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        return (drop_sigmoid(model) if self.output is None else model), ScoreOutput(self.output)

    def reference(self, model: nn.Module, lin: Linearization, data: Source) -> Source:
        source = make_samples(self.generator, self.latent, self.samples, self.seed, lin=lin, data=data)
        if self.output is None:
            check_logits(model, lin, source, read=check_score)
        return source


# Log densities.


@final
@dataclass(frozen=True)
class Flow(Score):
    """The log density of a normalizing flow: ``model.log_prob(x)``, or ``log_prob(model, x)``, with shape (n,).

    Not centered. The callable must use the model that it is given.
    """

    log_prob: Forward | None = None
    name = "flow"
    centered = False

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        given = self.log_prob if self.log_prob is not None else getattr(type(model), "log_prob", None)
        if given is None:
            raise TypeError(
                f"flow needs a module with log_prob(x); {type(model).__name__} has none. Say how to get it: "
                "flow(lambda model, x: model().log_prob(x))."
            )
        return with_forward(model, given), ScoreOutput(None)


@final
@dataclass(frozen=True)
class Vae(Score):
    """The evidence lower bound of a variational autoencoder with a standard normal prior (Zhang et al., equation 2).

    The draws of z depend on the example's values and the seed alone (`linnet.scores.elbo.draw_noise`), so an example
    has the same score in every batch and every pass. Not centered.

    Args:
        encode: ``(model, x)`` to the mean and log variance of q(z | x); by default ``model.encode(x)``. Both encode and
            decode must use the model that they are given.
        decode: ``(model, z)`` to the values that the likelihood reads; by default ``model.decode(z)``.
        likelihood: "bernoulli" (decode gives probabilities), "bernoulli-logits", "gaussian" (decode gives the mean, or
            the mean and the log variance), or a callable ``(x, decoded) -> (n,)``.
        noise: Variance of "gaussian" where decode gives the mean alone.
        samples: Draws of z per example.
        importance: Whether to take the tighter bound from importance weights (Burda et al. 2016).
        seed: Seed of the random draws.
    """

    encode: Encode | None = None
    decode: Decode | None = None
    _: KW_ONLY
    likelihood: str | LogLikelihood = "bernoulli"
    noise: float = 1.0
    samples: int = 1
    importance: bool = False
    seed: int = 0
    name = "vae"
    centered = False

    def __post_init__(self) -> None:
        if not callable(self.likelihood) and self.likelihood not in LIKELIHOODS:
            known = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(f"likelihood must be {known} or a callable; got {self.likelihood!r}.")
        messages.check_batch_size(self.samples, name="samples", auto=False)
        if not self.noise > 0:
            raise ValueError(f"noise is a variance and must be positive; got {self.noise!r}.")

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        for part in ("encode", "decode"):
            if getattr(self, part) is None and not callable(getattr(model, part, None)):
                raise TypeError(
                    f"vae needs a module with encode(x) and decode(z); {type(model).__name__} has no {part}. Say how: "
                    f"vae({part}=lambda model, {'x' if part == 'encode' else 'z'}: ...)."
                )
        encode, decode = self.encode or _encode, self.decode or _decode
        bound = Bound(encode, decode, self.likelihood, self.noise, self.samples, self.importance, self.seed)
        return with_forward(model, bound), ScoreOutput(None)


@final
@dataclass(frozen=True)
class Autoregressive(Score):
    """The log likelihood of a sequence: the sum over its tokens. Takes causal language models as they are.

    Tokens that ``attention_mask`` hides do not count, nor do labels of -100. Not centered.

    Args:
        targets: From the model's inputs to the tokens (n, ...) that the logits predict; by default ``labels`` where
            the data has them, else the first input.
        shift: Whether the logits at a position predict the next token (language models) or the one at that position
            (masked convolutions).
        axis: Axis of the classes in the logits.
    """

    _: KW_ONLY
    targets: Callable[..., Tensor] | None = None
    shift: bool = True
    axis: int = -1
    name = "autoregressive"
    centered = False

    def bind(self, model: nn.Module) -> tuple[nn.Module, Output]:
        forward = TokenLikelihood(inspect.signature(type(model).forward), self.targets, self.shift, self.axis)
        return with_forward(model, forward), ScoreOutput(None)


# The names that users write: `linnet.scores.classifier()`.
classifier, energy, gan, flow, vae, autoregressive = Classifier, Energy, Gan, Flow, Vae, Autoregressive


def as_score(score: Any) -> Score:
    """A score from what `linnet.FisherEmbedding` takes: None, a score, or a callable from the raw output to (n,)."""
    if score is None:
        return Classifier()
    if isinstance(score, Score):
        return score
    if isinstance(score, type):
        name = getattr(score, "name", score.__name__)
        raise TypeError(f"score needs a score, and {name} makes one: call it, {name}(...).")
    if callable(score):
        return Energy(score)
    raise TypeError(
        "score must be None (the classifier's), one of linnet.scores such as linnet.scores.flow(), or a callable from "
        f"the model's output to one number per example; got {messages.kind(score)}."
    )


def from_settings(kept: dict[str, Any]) -> Score:
    """The score that `Score.settings` describes."""
    known: Sequence[type[Score]] = (Classifier, Energy, Gan, Flow, Vae, Autoregressive)
    kinds = {kind.name: kind for kind in known}
    return kinds[kept["name"]](**{key: value for key, value in kept.items() if key != "name"})


def _encode(model: Any, x: Tensor) -> Any:
    return model.encode(x)


def _decode(model: Any, z: Tensor) -> Any:
    return model.decode(z)
