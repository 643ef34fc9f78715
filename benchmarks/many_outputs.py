"""Error bars of images: a denoiser with 3 x 64 x 64 outputs, fitted to 16 images, error bars from posterior samples.

Exact error bars take a backward pass for each of the 12,288 outputs. As a check, the error bars of a few outputs are
compared with exact ones.

    python -m benchmarks.many_outputs --device cuda --doors kron diag samples regressor
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks.timing import machine, synchronize, timed
from linnet.jacobian import combine_outputs

SIDE, IMAGES, SAMPLES = 64, 16, 32
DOORS = ("kron", "ekfac", "diag", "subnetwork", "lowrank", "samples", "last layer", "regressor")


class Denoiser(nn.Module):
    """A small convolutional autoencoder whose output is the input less a correction."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.Tanh(),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.Tanh(),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x - self.layers(x)


def draw_images(n: int, side: int, *, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, and smooth images below the noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 3, 8, 8, generator=generator)
    clean = nn.functional.interpolate(coarse, (side, side), mode="bilinear", align_corners=False)
    return (clean + 0.3 * torch.randn(clean.shape, generator=generator)).to(device), clean.to(device)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def fit(door: str, model: nn.Module, x: Tensor, y: Tensor, samples: int) -> Any:
    """A fitted estimator with error bars, with the defaults of linnet but for the number of samples."""
    if door == "regressor":
        flat = {"output": lambda out: out.flatten(1), "samples": samples, "progress": False}
        return linnet.TangentRegressor(model, **flat).fit(x, y.flatten(1))
    last = door == "last layer"
    how: dict[str, Any] = {"params": "layers.8.*" if last else None, "samples": samples, "progress": False}
    return linnet.Laplace(model, "regression", "kron" if last else door, **how).fit(x, y)


def measure_error(estimator: Any, x: Tensor, std: Tensor, outputs: int) -> float:
    """The root mean square of the relative difference to exact standard deviations, at the first image."""
    lin = estimator.lin_
    J = lin.jacobian(x[:1], progress=False)
    index = torch.linspace(0, J.c - 1, outputs).long()
    chosen = torch.zeros(1, J.c, outputs, dtype=J.dtype, device=J.device)
    chosen[0, index, torch.arange(outputs)] = 1.0
    exact = estimator.posterior_.variance(combine_outputs(J, chosen))[0].sqrt()
    # Laplace has the sites of an image first, and its channels last.
    flat = std[0].movedim(0, -1).flatten() if std.ndim == 4 else std[0]
    return float((flat.to(exact)[index.to(exact.device)] / exact - 1).square().mean().sqrt())


def run(
    device: str = "cpu",
    doors: Sequence[str] = ("kron", "diag"),
    *,
    images: int = IMAGES,
    side: int = SIDE,
    samples: int = SAMPLES,
    checked: int = 32,
) -> dict[str, Any]:
    """Seconds of fits and of error bars, and the error of the error bars, by estimator.

    Args:
        device: Device of the network.
        doors: Names out of `DOORS`.
        images: Number of images, for the fit and for the predictions.
        side: Side of an image.
        samples: Posterior samples.
        checked: Outputs that are compared with exact error bars.
    """
    torch.manual_seed(0)
    model = Denoiser().to(device)
    x, y = draw_images(images, side, device=device, seed=0)
    new, _ = draw_images(images, side, device=device, seed=1)
    train(model, x, y, 200)
    synchronize(device)
    found: dict[str, Any] = {"machine": machine(device), "outputs": 3 * side**2, "images": images, "samples": samples}
    for door in doors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            seconds, estimator = timed(lambda door=door: fit(door, model, x, y, samples), device)
        first, _ = timed(lambda estimator=estimator: estimator.predict(new, return_std=True), device)
        again, (_, std) = timed(lambda estimator=estimator: estimator.predict(new, return_std=True), device)
        sampled = estimator.posterior_.known_from_samples
        found[door] = {
            "fit_s": round(seconds, 3),
            "error_bars_s": round(first, 3),
            "error_bars_again_s": round(again, 3),
            "variance": estimator.variance_,
            "std_error": round(estimator.std_error_, 4),
            "relative_difference_to_exact": None if sampled else round(measure_error(estimator, new, std, checked), 4),
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_outputs", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--doors", nargs="+", default=["kron", "diag"], choices=DOORS)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--images", type=int, default=IMAGES)
    args = parser.parse_args()
    print(json.dumps(run(args.device, args.doors, side=args.side, images=args.images), indent=2))
