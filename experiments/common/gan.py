"""A small DCGAN for 28 x 28 images (Radford et al. 2016), trained in a minute."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.pretrained import Discriminator, dcgan_discriminator, draw_as_dcgan

LATENT = 100


class Generator(nn.Module):
    """From latents (n, 100) to images (n, 1, 28, 28) in [-1, 1].

    >>> Generator(4)(torch.zeros(3, 100)).shape
    torch.Size([3, 1, 28, 28])
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def up(d_in: int, d_out: int, size: int, stride: int, padding: int) -> list[nn.Module]:
            layer = nn.ConvTranspose2d(d_in, d_out, size, stride=stride, padding=padding, bias=False)
            return [layer, nn.BatchNorm2d(d_out), nn.ReLU()]

        self.main = nn.Sequential(
            *up(LATENT, 4 * width, 4, 1, 0),
            *up(4 * width, 2 * width, 3, 2, 1),
            *up(2 * width, width, 4, 2, 1),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


def untrained_generator(seed: int, *, width: int = 16) -> Generator:
    """A new generator in eval mode, drawn as the discriminators are."""
    net = Generator(width)
    draw_as_dcgan(net, seed)
    return net.eval()


def train_gan(
    images: Tensor, *, steps: int, seed: int, widths: tuple[int, int] = (10, 16), batch: int = 32, rate: float = 5e-4
) -> tuple[Discriminator, Generator]:
    """Both networks for gray images (n, 1, 28, 28), trained from the start; see `train_pair`.

    Args:
        images: In [-1, 1], on the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Of the start and of all draws.
        widths: Channels of the discriminator's first and of the generator's last but one layer.
        batch: Real and generated images per step.
        rate: Of Adam.
    """
    D = dcgan_discriminator(None, seed, width=widths[0]).to(images.device)
    G = untrained_generator(seed, width=widths[1]).to(images.device)
    train_pair(D, G, images, steps=steps, seed=seed, batch=batch, rates=(rate, rate))
    return D, G


def train_pair(
    D: nn.Module,
    G: nn.Module,
    images: Tensor,
    *,
    steps: int,
    seed: int,
    batch: int,
    rates: tuple[float, float],
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> list[tuple[float, float]]:
    """Train both in place with the losses of Radford et al., and leave them in eval mode.

    Args:
        D: From images to the number (n,) before the sigmoid.
        G: From latents (n, 100) to images.
        images: On the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Of all draws; those of images and latents are the same on every device.
        batch: Real and generated images per step.
        rates: Of Adam with beta1 = 0.5, for the discriminator and the generator.
        change: Done to all images that the discriminator sees, real and generated.

    Returns:
        The mean losses of both in each tenth of the steps.
    """
    random, device = torch.Generator().manual_seed(seed), images.device
    own = torch.Generator(device).manual_seed(seed)
    D.train(), G.train()
    for_D, for_G = (
        torch.optim.Adam(net.parameters(), rate, betas=(0.5, 0.999)) for net, rate in zip((D, G), rates, strict=True)
    )
    seen: list[Tensor] = []

    def shown(x: Tensor) -> Tensor:
        return x if change is None else change(x, own)

    for _ in range(steps):
        real = images[torch.randint(len(images), (batch,), generator=random).to(device)]
        fake = G(torch.randn(batch, LATENT, generator=random).to(device))
        # log sigmoid(f) = -softplus(-f): real images up, generated ones down, each in a batch of its own.
        loss_D = F.softplus(-D(shown(real))).mean() + F.softplus(D(shown(fake.detach()))).mean()
        step(for_D, loss_D)
        loss_G = F.softplus(-D(shown(fake))).mean()
        step(for_G, loss_G)
        seen.append(torch.stack([loss_D.detach(), loss_G.detach()]))
    D.eval(), G.eval()
    tenths = torch.stack(seen).cpu().tensor_split(min(10, steps))
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in tenths]


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
