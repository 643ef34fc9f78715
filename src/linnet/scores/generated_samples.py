"""Samples of a generator as data: where the statistics of a GAN's discriminator come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet.data import Batch, Signature, Source, as_source, check_finite, leaves
from linnet.jacobian import Linearization, linearize
from linnet.network import check_whole, checks, copy_sharing_parameters

Generator = nn.Module | Callable[[Tensor], Any]
Latent = int | Sequence[int] | Tensor | Callable[[int, torch.Generator], Tensor]


class GeneratedSamples(Source):
    """Samples that a generator makes batch by batch, again in every pass. Only their latents are kept.

    Args:
        generator: Maps latents (m, ...) to inputs of the discriminator.
        latents: (n, ...).
        signature: Signature of the discriminator's forward.
        device: Device of the latents for a generator that is no module.
    """

    def __init__(self, generator: Generator, latents: Tensor, signature: Signature, *, device: torch.device) -> None:
        self.n, self.kind = len(latents), "generated samples"
        self.latents, self.signature, self.device = latents, signature, device
        if isinstance(generator, nn.Module):
            # In eval mode, and in the dtype of its own weights.
            check_whole(generator, "A generator")
            generator = copy_sharing_parameters(generator).eval()
            first = next((t for t in generator.parameters() if t.is_floating_point()), None)
            if first is not None:
                self.device = first.device
                self.latents = latents.to(first.dtype) if latents.is_floating_point() else latents
        self.generator = generator

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        for latents in self.latents[start:stop].split(size):
            with torch.no_grad():
                samples = self.generator(latents.to(self.device))
            batch = self.signature.batch(samples, start)
            if batch.n != len(latents):
                raise ValueError(
                    f"The generator made {batch.n} samples from {len(latents)} latents; it needs one each."
                )
            check_finite(batch)
            yield batch
            start += batch.n


def make_samples(
    generator: Generator | None,
    latent: Latent | None,
    samples: Any,
    seed: int,
    *,
    lin: Linearization,
    data: Source,
) -> Source:
    """A source of samples, checked to fit the discriminator.

    Args:
        generator: None if ``samples`` are the samples themselves.
        latent: Latents, or the distribution of latents.
        samples: Number of samples.
        seed: Seed of the latents.
        lin: The discriminator, linearized.
        data: The data that the discriminator takes beside the samples.
    """
    source: Source
    if generator is None:
        if isinstance(samples, int):
            raise ValueError(
                "gan takes Z and I from generated samples: pass generator= and latent=, or samples= with samples made "
                "already."
            )
        source = as_source(samples, lin.module.forward)
    else:
        signature = Signature(lin.module.forward)
        source = GeneratedSamples(generator, draw_latents(latent, samples, seed), signature, device=lin.device)
    try:
        batch = next(iter(source.batches(2, 0, min(2, source.n))))
        _check_like(batch, next(iter(data.batches(1, 0, 1))))
        with torch.no_grad(), lin.network.in_precision("highest"):
            lin.forward({}, batch.to(lin.device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"The generator's samples do not fit the discriminator: {error}") from error
    return source


def draw_latents(latent: Latent | None, count: Any, seed: int) -> Tensor:
    """Latents (count, ...), drawn on the CPU: every device gets the same numbers.

    Example:
        >>> uniform = lambda m, generator: torch.rand(m, 2, generator=generator)
        >>> [tuple(draw_latents(latent, 5, 0).shape) for latent in ((3, 1, 1), 3, uniform)]
        [(5, 3, 1, 1), (5, 3), (5, 2)]
    """
    if isinstance(latent, Tensor):
        return latent
    messages.check_batch_size(count, name="samples", auto=False)
    random = torch.Generator().manual_seed(seed)
    if callable(latent):
        found = latent(count, random)
        if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != count:
            came = tuple(found.shape) if isinstance(found, Tensor) else messages.kind(found)
            raise ValueError(f"latent(m, generator) needs to return m = {count} latents, ({count}, ...); got {came}.")
        return found
    shape = (latent,) if isinstance(latent, int) else latent
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(
            "gan needs latent=: the length or shape of the generator's input, a tensor of latents, or a callable "
            f"(m, torch.Generator) -> (m, ...); got {latent!r}."
        )
    return torch.randn(count, *shape, generator=random)


def _check_like(batch: Batch, example: Batch) -> None:
    """Raise where the samples have another shape than the data."""
    mine, theirs = (dict(leaves((b.args, b.kwargs), "the inputs")) for b in (batch, example))
    for name, there in theirs.items():
        here = mine.get(name)
        if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape[1:] != there.shape[1:]:
            raise ValueError(f"they have shape {tuple(here.shape[1:])} each, and the data {tuple(there.shape[1:])}.")


# The output before the sigmoid.


def drop_sigmoid(model: nn.Module) -> nn.Module:
    """A copy of the discriminator without its final ``nn.Sigmoid``, sharing parameters; else the model itself.

    Only the last module of a chain is considered; `check_logits` compares the outputs.

    Example:
        >>> drop_sigmoid(nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()))
        Sequential(
          (0): Linear(in_features=2, out_features=1, bias=True)
          (1): Identity()
        )
    """
    path = _find_sigmoid(model)
    if path is None:
        return model
    other = copy_sharing_parameters(model)
    other.set_submodule(path, nn.Identity())
    return other


def _find_sigmoid(model: nn.Module) -> str | None:
    """Name of the final nn.Sigmoid: at the end of nested Sequentials, or of modules with one child."""
    path: list[str] = []
    here = model
    while not isinstance(here, nn.Sigmoid):
        children = list(here.named_children())
        if not children or not (isinstance(here, nn.Sequential) or len(children) == 1):
            return None
        name, here = children[-1]
        path.append(name)
    return ".".join(path) or None


def check_logits(model: nn.Module, lin: Linearization, source: Source, *, read: Callable[[Any], Tensor]) -> None:
    """Raise if the model's output is not the sigmoid of the output without it; warn if a sigmoid seems to remain."""
    several = min(64, source.n)
    batch = next(iter(source.batches(several, 0, several))).to(lin.device)
    with torch.no_grad(), lin.network.in_precision("highest"):
        z = lin.forward({}, batch)[:, 0]
    if _find_sigmoid(model) is None:
        if bool(((z > 0) & (z < 1)).all()):
            warnings.warn(
                "The discriminator's outputs lie between 0 and 1, as if a sigmoid had been applied. The score of a GAN "
                "is the output before it: pass output=torch.logit, or a discriminator that returns logits.",
                stacklevel=5,
            )
        return
    whole = linearize(model, list(lin.theta), lambda raw: read(checks.output_tensor(raw))).to(lin.dtype)
    with torch.no_grad(), whole.network.in_precision("highest"):
        p = whole.forward({}, batch)[:, 0]
    if not checks.close(z.sigmoid(), p, 1e-3):
        raise ValueError(
            "The discriminator contains an nn.Sigmoid at the end of its modules, and its output is not the sigmoid of "
            "what comes before. Say how to read the output before the sigmoid with output=, such as output=torch.logit."
        )
