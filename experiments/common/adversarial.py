"""Adversarial training with spectral norm, hinge loss and differentiable augmentation; on a GPU each step is a graph.

A discriminator has no batch norm, so its examples do not interact. The spectral norm is not part of the network: each
step divides the weights by estimates of their largest singular values, and `bake` stores the quotients as plain
weights. Images stay on the device in uint8, all draws are made there, and the host reads the losses rarely.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from experiments.common.networks import LATENT

SHIFT, HOLE = 4, 16  # pixels that an image is shifted by at most; side of the square that is cut out
RATES, BETAS = (4e-4, 1e-4), (0.5, 0.999)  # of discriminators and of all others: one step of each is enough then
WARM = 5  # steps before a graph is captured, in which cuDNN chooses its kernels
READ = 500  # steps between two readings of the clock


def augment_alike(x: Tensor) -> Tensor:
    """Images (n, 3, h, w) with other colors, shifted, and with a hole, each by its own draw; x has a gradient.

    After Zhao et al. 2020: brightness, saturation, contrast; a shift by up to an eighth, with zeros where nothing was;
    and a square of half the side that is set to zero. Other than there, half of the images have no such hole: as the
    discriminator is used, none has. Draws come from torch's generator of the device.
    """
    n, _, h, w = x.shape

    def draw(*size: int) -> Tensor:
        return torch.rand(n, *size, device=x.device, dtype=x.dtype)

    x = x + draw(1, 1, 1) - 0.5
    mean = x.mean(1, keepdim=True)
    x = (x - mean) * (2 * draw(1, 1, 1)) + mean
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * (draw(1, 1, 1) + 0.5) + mean
    # A shift is a product with matrices of zeros and ones, whose gradient needs no scattering.
    down, right = (_shift(n, size, x) for size in (h, w))
    x = down.unsqueeze(1) @ x @ right.mT.unsqueeze(1)
    rows, columns = (_hole(n, size, x) for size in (h, w))
    rows = rows * (torch.rand(n, 1, device=x.device) < 0.5)
    return x * (1 - rows[:, None, :, None] * columns[:, None, None, :])


def _shift(n: int, size: int, like: Tensor) -> Tensor:
    """Matrices (n, size, size) that shift by up to `SHIFT` either way."""
    by = torch.randint(-SHIFT, SHIFT + 1, (n, 1, 1), device=like.device)
    at = torch.arange(size, device=like.device)
    return (at[:, None] + by == at).to(like.dtype)


def _hole(n: int, size: int, like: Tensor) -> Tensor:
    """Ones (n, size) where a hole is, whose middle is anywhere."""
    middle = torch.randint(0, size + 1, (n, 1), device=like.device)
    at = torch.arange(size, device=like.device)
    return ((at >= middle - HOLE // 2) & (at < middle + HOLE // 2)).to(like.dtype)


class SpectralNorm:
    """Weights of a network over estimates of their largest singular values (Miyato et al. 2018).

    A convolution's weight counts as a matrix (out, in * height * width), as in that paper.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.weights = {
            f"{name}.weight" if name else "weight": layer.weight
            for name, layer in net.named_modules()
            if isinstance(layer, nn.Conv2d | nn.Linear)
        }
        draws = torch.Generator().manual_seed(0)
        self.u = {key: torch.randn(len(w), generator=draws).to(w.device) for key, w in self.weights.items()}
        self.v = {key: torch.zeros_like(w[0].detach().flatten()) for key, w in self.weights.items()}
        self.iterate(20)

    @torch.no_grad()
    def iterate(self, count: int = 1) -> None:
        """Improve the estimates in place, by power iteration."""
        for key, w in self.weights.items():
            matrix, u, v = w.flatten(1), self.u[key], self.v[key]
            for _ in range(count):
                v.copy_(F.normalize(matrix.mT @ u, dim=0))
                u.copy_(F.normalize(matrix @ v, dim=0))

    def normalized(self) -> dict[str, Tensor]:
        """The weights by name, to be called with; with gradients, also those of the singular values."""
        return {key: w / (self.u[key] @ (w.flatten(1) @ self.v[key])) for key, w in self.weights.items()}

    @torch.no_grad()
    def bake(self) -> None:
        """Put the quotients in the place of the weights: the network is then plain, and the function that was trained.

        The estimates stay as they are. Exact singular values would change each layer's scale, but not its bias.
        """
        for key, new in self.normalized().items():
            self.weights[key].copy_(new)


class Average:
    """A copy of networks whose weights are an exponential moving average."""

    def __init__(self, nets: Sequence[nn.Module], steps: int) -> None:
        self.nets = [copy.deepcopy(net) for net in nets]
        self.decay = max(0.0, min(0.999, 1 - 50 / steps))  # short runs forget their start too
        self.pairs = [
            (old.detach(), new.detach())
            for mine, net in zip(self.nets, nets, strict=True)
            for old, new in zip(mine.parameters(), net.parameters(), strict=True)
        ]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_([old for old, _ in self.pairs], [new for _, new in self.pairs], 1 - self.decay)


@torch.no_grad()
def renew_statistics(net: nn.Module, batches: Iterable[Tensor]) -> None:
    """Let batch norm take the mean statistics of batches, and leave the network in eval mode."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # the average over all batches
    net.train()
    for batch in batches:
        net(batch)
    net.eval()


def _adam(parameters: Iterable[nn.Parameter], rate: float, device: torch.device) -> torch.optim.Optimizer:
    fast: dict[str, Any] = {"fused": True, "capturable": True} if device.type == "cuda" else {}
    return torch.optim.Adam(list(parameters), rate, betas=BETAS, **fast)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step on the optimizer's own parameters; no other gradient is computed."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
        p.grad = torch.empty_like(p).copy_(gradient)  # in the layout of p, as fused steps need
    optimizer.step()


def repeat(
    step: Callable[[], None],
    steps: int,
    seen: Tensor,
    *,
    seconds: float | None = None,
    graph: bool = True,
    every: int = 2000,
    name: str = "",
) -> tuple[int, list[tuple[float, ...]]]:
    """Take steps until there are enough or the time is over; on a GPU by replaying one that was captured.

    Args:
        step: Takes no input and reads nothing back; it adds its losses to ``seen``.
        steps: How many at most.
        seen: Sums of losses, on the device; set to zero where they are read.
        seconds: After which no more steps are taken.
        graph: Whether a GPU replays a graph.
        every: Steps between two lines of progress.
        name: Name at the start of each line of progress.

    Returns:
        The number of steps, and the mean losses of each stretch between two lines.
    """
    cuda, start, done, path = seen.is_cuda, time.perf_counter(), 0, []
    run, last = step, 0
    if cuda and graph and steps > WARM:
        run, done = _capture(step), WARM
        print(f"{name}: captured after {time.perf_counter() - start:.1f} s", flush=True)
    while done < steps:
        run()
        done += 1
        if done % READ == 0 and cuda:
            torch.cuda.synchronize()  # else the clock tells of steps that were asked for only
        over = seconds is not None and (done % READ == 0 or not cuda) and time.perf_counter() - start > seconds
        if done % every == 0 or done == steps or over:
            means = tuple(float(total) / (done - last) for total in seen.tolist())
            seen.zero_()
            spent, last = time.perf_counter() - start, done
            path.append(means)
            shown = ", ".join(f"{mean:.3f}" for mean in means)
            print(f"{name}: step {done:,}, losses {shown}, {spent:.1f} s, {done / spent:.0f} steps/s", flush=True)
        if over:
            break
    return done, path


def _capture(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step; before, `WARM` steps are taken on a stream of their own, as capturing needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    found = torch.cuda.CUDAGraph()
    with torch.cuda.graph(found):
        step()
    return found.replay


class Draws:
    """Batches of real images and of latents, drawn on the device."""

    def __init__(self, images: Tensor, batch: int) -> None:
        self.images, self.batch = images, batch

    def real(self) -> Tensor:
        """Images in [-1, 1] from those in uint8."""
        index = torch.randint(len(self.images), (self.batch,), device=self.images.device)
        return self.images[index].float() / 127.5 - 1

    def latents(self) -> Tensor:
        return torch.randn(self.batch, LATENT, device=self.images.device)


def _prepare(nets: Sequence[nn.Module], images: Tensor, seed: int) -> Callable[[], torch.autocast]:
    """Networks in training mode and in the layout that convolutions like; and the precision of a GPU, bfloat16."""
    if images.dtype != torch.uint8:
        raise ValueError(f"Images stay in uint8 on the device; got {images.dtype}.")
    torch.manual_seed(seed)
    cuda = images.is_cuda
    for net in nets:
        net.train().to(images.device, memory_format=torch.channels_last)
    if cuda:
        torch.backends.cudnn.benchmark = True
    # A graph must not read weights that autocast has kept from another step.
    return lambda: torch.autocast(images.device.type, torch.bfloat16, enabled=cuda, cache_enabled=False)


def _seen_by(x: Tensor) -> Tensor:
    return augment_alike(x.float()).contiguous(memory_format=torch.channels_last)


def train_hinge(
    D: nn.Module,
    G: nn.Module,
    images: Tensor,
    *,
    steps: int,
    seed: int,
    batch: int = 64,
    seconds: float | None = None,
    graph: bool = True,
    every: int = 2000,
) -> tuple[nn.Module, int, list[tuple[float, ...]]]:
    """Train discriminator and generator; D comes out in place with plain weights, in eval mode.

    Args:
        D: From images to one number (n,); without batch norm.
        G: From latents (n, 100) to images in [-1, 1].
        images: (n, 3, h, w) in uint8, on the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Seed of all random draws.
        batch: Real and generated images of a step.
        seconds: After which training stops.
        graph: Whether a GPU replays a captured step.
        every: Steps between two lines of progress.

    Returns:
        The generator with averaged weights and fresh statistics of batch norm, in eval mode; the number of steps; and
        the mean losses of both networks, stretch by stretch.
    """
    precision, norm, draws = _prepare((D, G), images, seed), SpectralNorm(D), Draws(images, batch)
    for_D, for_G = (_adam(net.parameters(), rate, images.device) for net, rate in zip((D, G), RATES, strict=True))
    average, seen = Average([G], steps), torch.zeros(2, device=images.device)

    def judge(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        with precision():
            return functional_call(D, weights, (_seen_by(x),)).float()

    def generate() -> Tensor:
        with precision():
            return G(draws.latents())

    def step() -> None:
        norm.iterate()
        with torch.no_grad():
            fake = generate()
        real, made = judge(norm.normalized(), torch.cat([draws.real(), fake.float()])).split(batch)
        loss_D = F.relu(1 - real).mean() + F.relu(1 + made).mean()
        _descend(for_D, loss_D)
        fixed = {key: w.detach() for key, w in norm.normalized().items()}
        loss_G = -judge(fixed, generate()).mean()
        _descend(for_G, loss_G)
        average.update()
        seen.add_(torch.stack([loss_D.detach(), loss_G.detach()]))

    done, path = repeat(step, steps, seen, seconds=seconds, graph=graph, every=every, name="GAN")
    norm.bake()
    D.eval()
    renew_statistics(average.nets[0], (torch.randn(500, LATENT, device=images.device) for _ in range(40)))
    return average.nets[0], done, path


def train_bigan(
    D: nn.Module,
    E: nn.Module,
    G: nn.Module,
    images: Tensor,
    *,
    steps: int,
    seed: int,
    batch: int = 64,
    seconds: float | None = None,
    graph: bool = True,
    every: int = 2000,
) -> tuple[nn.Module, nn.Module, int, list[tuple[float, ...]]]:
    """Train an encoder, a generator and a discriminator of pairs: images and their codes, or latents and their images.

    Arguments as for `train_hinge`; D takes images and codes, E gives the codes of images (Dumoulin et al. 2016). E and
    G take one step together.

    Returns:
        Encoder and generator with averaged weights and fresh statistics, in eval mode; the number of steps; the losses.
    """
    precision, norm, draws = _prepare((D, E, G), images, seed), SpectralNorm(D), Draws(images, batch)
    for_D = _adam(D.parameters(), RATES[0], images.device)
    both = _adam([*E.parameters(), *G.parameters()], RATES[1], images.device)
    average, seen = Average([E, G], steps), torch.zeros(2, device=images.device)

    def pairs() -> tuple[Tensor, Tensor]:
        """Real images with their codes, then generated ones with their latents."""
        x, z = draws.real(), draws.latents()
        with precision():
            code, made = E(x.contiguous(memory_format=torch.channels_last)), G(z)
        return torch.cat([x, made.float()]), torch.cat([code.float(), z])

    def judge(weights: dict[str, Tensor], x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        with precision():
            return functional_call(D, weights, (_seen_by(x), z)).float().split(batch)

    def step() -> None:
        norm.iterate()
        with torch.no_grad():
            x, z = pairs()
        real, made = judge(norm.normalized(), x, z)
        loss_D = F.relu(1 - real).mean() + F.relu(1 + made).mean()
        _descend(for_D, loss_D)
        real, made = judge({key: w.detach() for key, w in norm.normalized().items()}, *pairs())
        loss = real.mean() - made.mean()
        _descend(both, loss)
        average.update()
        seen.add_(torch.stack([loss_D.detach(), loss.detach()]))

    done, path = repeat(step, steps, seen, seconds=seconds, graph=graph, every=every, name="BiGAN")
    norm.bake()
    D.eval()
    encoder, generator = average.nets
    renew_statistics(generator, (torch.randn(500, LATENT, device=images.device) for _ in range(40)))
    order = torch.randperm(len(images), device=images.device)[:20_000].split(500)
    renew_statistics(encoder, (images[index].float() / 127.5 - 1 for index in order))
    return encoder, generator, done, path
