"""A small DCGAN for 28 x 28 images (Radford et al. 2016), trained in a minute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.pretrained import Discriminator, dcgan_discriminator, draw_as_dcgan

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
    """Both networks, trained on images (n, 1, 28, 28) with the losses of Radford et al.; in eval mode.

    Args:
        images: In [-1, 1], on the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Of the start and of all draws, which are the same on every device.
        widths: Channels of the discriminator's first and of the generator's last but one layer.
        batch: Real and generated images per step.
        rate: Of Adam, with beta1 = 0.5.
    """
    random = torch.Generator().manual_seed(seed)
    D = dcgan_discriminator(None, seed, width=widths[0]).to(images.device).train()
    G = untrained_generator(seed, width=widths[1]).to(images.device).train()
    for_D, for_G = (torch.optim.Adam(net.parameters(), rate, betas=(0.5, 0.999)) for net in (D, G))
    for _ in range(steps):
        real = images[torch.randint(len(images), (batch,), generator=random).to(images.device)]
        fake = G(torch.randn(batch, LATENT, generator=random).to(images.device))
        # log sigmoid(f) = -softplus(-f): real images up, generated ones down, each in a batch of its own.
        step(for_D, F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean())
        step(for_G, F.softplus(-D(fake)).mean())
    return D.eval(), G.eval()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
