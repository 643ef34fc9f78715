"""GAN inversion by a linear map, against PCA, and images of components (Zhang et al. 2022, figures 4 and 6).

A discriminator's Fisher embedding of generated images is mapped linearly to the latents that they came from; the
generator then makes an image of the latents of a real one. Two rivals with as many components: the same map from
principal components of the pixels, and the image that these components add up to, which uses no GAN. `--parts` takes
MNIST, CIFAR-10 or both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.data import MEAN, STD, color_images, mnist
from experiments.common.networks import LATENT, lenet5, load_encoder, resnet
from experiments.common.training import in_parts
from experiments.zhang2022.spectra import from_generator
from linnet._estimator import convert_like
from linnet.data import Signature
from linnet.fisher import top_projections
from linnet.scores.generated_samples import GeneratedSamples, Generator, Latent, draw_latents

NFK, MAPPED, PIXELS = "NFK, mapped to latents", "PCA, mapped to latents", "PCA, added up"
PARTS = ("mnist", "cifar10")
SIDE = 8  # images of a row, and rows, of a picture
SHOWN, ROWS = 10, 5  # images with the largest projections on a component, and components
KEPT = common.RESULTS / "inversion"
CLASSES = "classes read right"
RIDGES = (0.0, 1e-2, 1e-1, 1.0, 10.0)  # over the mean square of the embedding


# Components, generated images to learn from and to choose with, real ones to invert.
FULL = Sizes(components=100, samples=5000, held=1000, real=2000)
LARGE = Sizes(components=100, samples=10_000, held=2000, real=10_000)  # on a GPU
QUICK = Sizes(components=8, samples=100, held=40, real=40)


@dataclass(frozen=True)
class Inversion:
    """A linear map from embeddings to the latents of a generator."""

    embedding: Any  # the fitted `linnet.FisherEmbedding` of the discriminator
    generator: Generator  # from latents to samples
    W: Tensor  # (k, d), and ``b`` (d,): the latent of x is ``E(x) W + b``, flattened
    b: Tensor  # see W
    shape: tuple[int, ...]  # shape of one latent
    explained: float  # share of the latents' variance that the map explains on the samples it was fitted to

    def latents(self, X: Any) -> Any:
        """The latents of examples, (n, *shape)."""
        E = torch.as_tensor(self.embedding.transform(X)).to(self.W)
        return convert_like(X, (E @ self.W + self.b).view(-1, *self.shape))

    def reconstruct(self, X: Any) -> Any:
        """The images that the generator makes from the latents of examples."""
        h = torch.as_tensor(self.latents(X))
        source = GeneratedSamples(self.generator, h, Signature(lambda x: x), device=self.W.device)
        return convert_like(X, torch.cat([batch.args[0] for batch in source.batches(256)]))


def invert(
    embedding: Any, generator: Generator, *, latent: Latent, samples: int = 10_000, ridge: float = 0.0, seed: int = 0
) -> Inversion:
    r"""Invert a GAN by a linear map from embeddings to latents (Zhang et al. 2022, appendix C.2).

    .. math:: \min_W \sum_i \| h_i - W e(G(h_i)) - b \|^2 + \lambda \|W\|^2

    Args:
        embedding: A fitted `linnet.FisherEmbedding` of the discriminator.
        generator: G.
        latent: Distribution of the latents h; see `linnet.scores.gan`.
        samples: How many h.
        ridge: lambda.
        seed: Seed of the draws of h.
    """
    h = draw_latents(latent, samples, seed)
    lin = embedding.lin_
    E = embedding.transform(GeneratedSamples(generator, h, Signature(lin.module.forward), device=lin.device)).double()
    H = h.flatten(1).to(E)
    if len(H) <= E.shape[1]:
        raise ValueError(f"A map from {E.shape[1]} numbers needs more than as many samples; got {len(H)}.")
    # Centered, so that the constant is not penalized.
    e, mean = E - E.mean(0), H.mean(0)
    A = torch.cat([e, torch.full((), ridge, dtype=E.dtype).sqrt() * torch.eye(E.shape[1]).to(E)])
    W = torch.linalg.lstsq(A, torch.cat([H - mean, H.new_zeros(E.shape[1], H.shape[1])])).solution
    left = (H - mean - e @ W).square().sum() / (H - mean).square().sum()
    b = mean - E.mean(0) @ W
    return Inversion(embedding, generator, W, b, tuple(h.shape[1:]), 1 - float(left))


class Pixels(nn.Module):
    """Principal components of images, in the form of an embedding that `invert` takes."""

    def __init__(self, X: Tensor, k: int) -> None:
        super().__init__()
        flat = X.flatten(1).double()
        self.center = flat.mean(0)
        self.P = torch.linalg.eigh((flat - self.center).T @ (flat - self.center)).eigenvectors.flip(1)[:, :k]

    @property
    def lin_(self) -> Any:
        """What is looked at to place generated images: a module and a device."""
        return argparse.Namespace(module=self, device=self.P.device)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).double() - self.center) @ self.P

    def transform(self, X: Any) -> Tensor:
        batches = [X] if isinstance(X, Tensor) else [batch.args[0] for batch in X.batches(500)]
        return torch.cat([self(x) for x in batches])

    def added_up(self, X: Tensor) -> Tensor:
        """The images that their components add up to."""
        return (self(X) @ self.P.T + self.center).view_as(X).to(X.dtype)


def sizes_of(options: argparse.Namespace) -> Sizes:
    return {"quick": QUICK, "cuda": LARGE}.get(common.kind_of(options), FULL)


def load(name: str, options: argparse.Namespace) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Discriminator, generator, real test images and their labels."""
    count = sizes_of(options).real
    D, G = load_encoder(options, "mnist" if name == "mnist" else "gan")
    if name == "mnist":
        x, y = mnist(options.data, False, network="dcgan", count=count)
    else:
        x, y = color_images(options.data, "test", count=count)
    return D.eval().to(options.device), G.eval().to(options.device), x.to(options.device), y.to(options.device)


def measure(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Errors of each way, and the images that show them."""
    sizes = sizes_of(options)
    D, G, x, y = load(name, options)
    latents = torch.randn(sizes.samples + sizes.held, LATENT, generator=torch.Generator().manual_seed(options.seed))
    with torch.no_grad():
        made = in_parts(G, (latents.to(options.device),))
    here, held = made[: sizes.samples], made[sizes.samples :]
    h = latents[: sizes.samples]
    how: dict[str, Any] = (
        {"precision": "high", "tolerance": 1e-4, "passes": 12} if options.device.startswith("cuda") else {}
    )
    # New networks make images that hardly differ.
    how |= {"dtype": "float64"} if options.quick else {}
    how |= {"score": from_generator(G, sizes.samples), "progress": False, "seed": options.seed}
    embedding = linnet.FisherEmbedding(D, sizes.components, **how)
    E = embedding.fit_transform(here)
    pca = Pixels(here, sizes.components)
    ways: dict[str, Any] = {NFK: (embedding, E.double()), MAPPED: (pca, pca.transform(here))}
    truth = latents[sizes.samples :].to(options.device).double()
    found: dict[str, Any] = {"explained variance": float(torch.as_tensor(embedding.explained_variance_ratio_).sum())}
    found |= {"test images": len(x), "generated images": sizes.samples}
    shown = SIDE * SIDE
    images = {"real": x[:shown]}
    for way, (fitted, features) in ways.items():
        tried = {}
        for ridge in RIDGES:
            scale = float(features.square().mean()) * len(features)
            one = invert(fitted, G, latent=h, samples=len(h), ridge=ridge * scale)
            tried[ridge] = one, explain(torch.as_tensor(one.latents(held)).double(), truth)
        ridge = max(tried, key=lambda r: tried[r][1])
        best, share = tried[ridge]
        again = torch.cat([best.reconstruct(part) for part in x.split(500)])
        found[way] = {"latents explained, new generated images": share, "ridge": ridge, **score(again, x, y, options)}
        images[way] = again[:shown]
    again = pca.added_up(x)
    found[PIXELS] = score(again, x, y, options)
    images[PIXELS] = again[:shown]
    E = embedding.transform(x)
    for sign in ("positive", "negative"):
        index = torch.as_tensor(top_projections(E[:, :ROWS], SHOWN, sign=sign))
        images[f"components, {sign}"] = x[index.flatten()]
    found["images as they are"] = score(x, x, y, options)
    return found, {key: (image / 2 + 0.5).clamp(0, 1).cpu() for key, image in images.items()}


def explain(h: Tensor, truth: Tensor) -> float:
    """Share of the variance of latents that is explained."""
    return 1 - float((h - truth).square().sum() / (truth - truth.mean(0)).square().sum())


@torch.no_grad()
def score(again: Tensor, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """How far from the image, and whether LeNet-5 still reads the right digit, or ResNet-20 the right class."""
    found = {"squared error of a pixel": float((again - x).square().mean())}
    weights, gray = options.data / "weights", x.shape[1] == 1
    if gray:
        net: nn.Module = lenet5(weights).to(x.device)
        seen = F.interpolate(again / 2 + 0.5, (32, 32), mode="bilinear", align_corners=False)
    elif (weights / "resnet20_cifar10.safetensors").exists():
        net = resnet(weights).to(x.device)
        seen = (again / 2 + 0.5 - MEAN.to(x)) / STD.to(x)
    else:
        return found
    found["digits read right" if gray else CLASSES] = float((in_parts(net, (seen,)).argmax(1) == y).double().mean())
    return found


# The experiment.


ARGUMENTS = {
    "--parts": {"nargs": "*", "choices": PARTS, "help": "default: mnist; cuda: cifar10"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    if options.parts is None:
        options.parts = ("cifar10",) if options.device.startswith("cuda") else ("mnist",)
    own = common.own_folder(options)
    own.mkdir(parents=True, exist_ok=True)

    def measure_part(name: str) -> dict[str, Any]:
        found, images = measure(name, options)
        pixels = {key: (255 * image).byte().contiguous() for key, image in images.items()}
        save_file(pixels, own / f"{name}.safetensors")
        return found

    parts = common.measure_parts(options, options.parts, measure_part)
    ordered = {name: parts[name] for name in PARTS if name in parts}
    command = "python -m experiments inversion (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in parts.values()))
    return common.Outcome({"parts": ordered}, figure(pictures(own, ordered)), rows(ordered), command, spent)


def pictures(own: Path, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The images that runs have kept, by data set, in [0, 1]."""
    files = {name: next((f for f in (own, KEPT) if (f / f"{name}.safetensors").exists()), None) for name in names}
    return {
        name: {key: image.float() / 255 for key, image in load_file(where / f"{name}.safetensors").items()}
        for name, where in files.items()
        if where is not None
    }


def rows(parts: Mapping[str, Any]) -> Iterator[common.Row]:
    for name, part in parts.items():
        gan = "DCGAN" if name == "mnist" else "GAN"
        of = "{generated images:,} generated and {test images:,} test images; " if "test images" in part else ""
        spent = f"{common.duration(part['seconds'])} on {part['machine']}"
        differs = f"100 components; {of.format(**part)}{gan} of `encoders`; {spent}"
        for way in (NFK, MAPPED, PIXELS):
            one = part[way]
            ours = f"squared error {one['squared error of a pixel']:.3f}"
            if "digits read right" in one:
                ours += f", {100 * one['digits read right']:.1f} % read right by LeNet-5"
            if CLASSES in one:
                ours += f", class of {100 * one[CLASSES]:.1f} % read right by ResNet-20"
            key = "latents explained, new generated images"
            if key in one:
                ours += f"; {100 * one[key]:.0f} % of new latents explained"
            said = {NFK: "faithful (figure 4, no number)", PIXELS: "blurry"}.get(way, "not in the paper")
            yield common.Row(f"{name}, images from their components: {way}", said, ours, differs)


def figure(shown: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """For each data set, test images and what is made of them, side by side; below, images of components."""
    result = Figure(figsize=(12, 6.4 * max(1, len(shown))))
    panels = result.subfigures(max(1, len(shown)), 1, squeeze=False)[:, 0]
    for panel, (name, images) in zip(panels, shown.items(), strict=False):
        panel.suptitle({"mnist": "MNIST", "cifar10": "CIFAR-10"}[name])
        above, below = panel.subfigures(2, 1)
        count = len(images["real"])
        columns = SIDE if count >= SIDE * SIDE else 5
        keys = {"real": "test images", **{key: key for key in (NFK, MAPPED, PIXELS)}}
        for ax, (key, title) in zip(above.subplots(1, 4), keys.items(), strict=True):
            ax.imshow(plots.mosaic(images[key], columns), cmap="gray", vmin=0, vmax=1)
            ax.set_title(title, fontsize=9)
            ax.axis("off")
        height = images["real"].shape[2]
        for ax, sign in zip(below.subplots(1, 2), ("positive", "negative"), strict=True):
            ax.imshow(plots.mosaic(images[f"components, {sign}"], SHOWN), cmap="gray", vmin=0, vmax=1)
            ax.set_title(f"largest {sign} projections", fontsize=9)
            ax.set_yticks([height * (i + 0.5) for i in range(ROWS)], [f"component {i + 1}" for i in range(ROWS)])
            ax.set_xticks([])
            ax.grid(False)
            ax.tick_params(length=0)
            ax.spines[["left", "bottom"]].set_visible(False)
    return result
