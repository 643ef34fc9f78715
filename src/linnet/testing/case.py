"""One tiny model with its data, and the dense Jacobian every fast path is held against."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

Data = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny architecture of the zoo.

    Attributes:
        name: What it is called in `zoo()`.
        build: Makes the model: the same one every time, float64, in eval mode, no parameter at a
            special value such as zero or one.
        data: `data(n, seed)` gives n examples in any form `linearize(...).jacobian` takes: a tensor, a
            tuple of positional arguments, or a dict of keyword arguments.
        output: From the model's raw output to `(n, c)` or `(n,)`; None where the raw output already is.
        needs: An optional package without which `build` fails, or None.

    Example:
        >>> from linnet.testing import zoo
        >>> case = zoo()["mlp"]
        >>> case.outputs(case.build(), case.data(5, 0)).shape
        torch.Size([5, 3])
    """

    name: str
    build: Callable[[], nn.Module]
    data: Data
    output: Callable[[Any], Tensor] | None = None
    needs: str | None = None

    def __str__(self) -> str:
        return self.name

    def outputs(self, model: nn.Module, data: Any) -> Tensor:
        """The outputs `(n, c)` of `model` on `data`, an output `(n,)` as `(n, 1)`."""
        return call(model, data, output=self.output)

    def dense(self, model: nn.Module, data: Any) -> Tensor:
        """The dense Jacobian `(n*c, p)` of `model` on `data`, see `dense_jacobian`."""
        return dense_jacobian(model, data, output=self.output)


def call(model: Callable[..., Any], data: Any, *, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Call `model` on a tensor, a tuple of arguments or a dict of keywords; returns `(n, c)`.

    Example:
        >>> call(nn.Linear(3, 2), torch.ones(4, 3), output=lambda raw: raw[:, 0]).shape
        torch.Size([4, 1])
    """
    if isinstance(data, Mapping):
        raw = model(**data)
    elif isinstance(data, (tuple, list)):
        raw = model(*data)
    else:
        raw = model(data)
    f: Tensor = output(raw) if output is not None else getattr(raw, "logits", raw)
    return f.unsqueeze(1) if f.ndim == 1 else f


def dense_jacobian(
    model: nn.Module, data: Any, *, output: Callable[[Any], Tensor] | None = None, names: Iterable[str] | None = None
) -> Tensor:
    """The Jacobian as one dense matrix `(n*c, p)`, by plain reverse mode, example by example: slow, the reference.

    Each example runs alone, as a batch of one, through the module itself, and each of its outputs is differentiated by
    `torch.autograd.grad`: no vectorization, no transform of `torch.func`, no forward mode. A model that cannot run one
    example alone runs on the whole batch instead. Rows are example-major (row `i*c + j` is output j of example i),
    columns follow `model.named_parameters()`, tied parameters once. Parameters, buffers and data stay as they are.

    Args:
        model: The network, used in the mode it is in.
        data: A tensor, a tuple of positional arguments or a dict of keyword arguments, n examples each.
        output: From the model's raw output to `(n, c)` or `(n,)`; by default the raw output or its
            attribute `logits`.
        names: Names of the parameters to differentiate by; by default those with `requires_grad`.

    Example:
        >>> dense_jacobian(nn.Linear(3, 2), torch.ones(4, 3)).shape
        torch.Size([8, 8])
    """
    parameters = dict(model.named_parameters())
    if names is None:
        names = [name for name, tensor in parameters.items() if tensor.requires_grad]
    theta = [parameters[name] for name in names]
    if not theta:
        raise ValueError("dense_jacobian needs at least one parameter to differentiate by; got none.")
    # A model that differentiates inside its forward needs attention kernels with a second derivative.
    with enable_gradients(theta), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            ones = [_rows(model, one, theta, output) for one in split_examples(data)]
            alone = all(len(one) == 1 for one in ones)
        except Exception:  # whatever the model raises for one example alone
            alone = False
        rows = torch.cat(ones) if alone else _rows(model, _copied(data), theta, output)
    return rows.flatten(0, 1)


def _rows(model: nn.Module, data: Any, theta: Sequence[Tensor], output: Callable[[Any], Tensor] | None) -> Tensor:
    """The Jacobian `(n, c, p)` of a batch: one backward pass for each number that the model returns."""
    with preserve_values(model):
        f = call(model, data, output=output)
        rows = []
        for value in f.flatten() if f.requires_grad else ():
            found = torch.autograd.grad(value, theta, retain_graph=True, allow_unused=True)
            dense = [torch.zeros_like(t) if g is None else g.to_dense() for t, g in zip(theta, found, strict=True)]
            rows.append(torch.cat([g.detach().flatten() for g in dense]))
    p = sum(t.numel() for t in theta)
    return torch.stack(rows).view(*f.shape, p) if rows else theta[0].detach().new_zeros(*f.shape, p)


def split_examples(data: Any) -> list[Any]:
    """Each example alone, as a batch of one with memory of its own.

    Example:
        >>> [one.shape for one in split_examples(torch.ones(2, 3))]
        [torch.Size([1, 3]), torch.Size([1, 3])]
    """
    leaves, spec = pytree.tree_flatten(data)
    n = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)

    def one(leaf: Any, i: int) -> Any:
        by_example = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == n
        return leaf[i : i + 1].clone() if by_example else leaf

    return [pytree.tree_unflatten([one(leaf, i) for leaf in leaves], spec) for i in range(n)]


def _copied(data: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.clone, data)


@contextlib.contextmanager
def enable_gradients(theta: Iterable[Tensor]) -> Iterator[None]:
    """Make tensors ask for gradients inside the block."""
    frozen = [t for t in theta if not t.requires_grad]
    try:
        for t in frozen:
            t.requires_grad_()
        yield
    finally:
        for t in frozen:
            t.requires_grad_(False)


@contextlib.contextmanager
def preserve_values(model: nn.Module) -> Iterator[None]:
    """Leave the values of parameters and buffers after the block as they were before the block."""
    state = [(t, t.detach().clone(), t._version) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for t, value, version in state:
            if t._version != version:
                with torch.no_grad():
                    t.copy_(value)


@contextlib.contextmanager
def fix_seed(seed: int) -> Iterator[None]:
    """Seed the CPU's random numbers inside the block and leave them outside as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def case(
    name: str,
    factory: Callable[[], nn.Module],
    data: Data,
    output: Callable[[Any], Tensor] | None = None,
    needs: str | None = None,
) -> Case:
    """A `Case` whose `build` runs `factory` seeded by the name and moves it away from special values.

    Zero biases, unit scales and fresh running statistics hide wrong rules, so every parameter gets
    noise and every normalization some statistics of its own.
    """

    def build() -> nn.Module:
        with fix_seed(zlib.crc32(name.encode())), torch.no_grad():
            model = factory().double().eval()
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                    module.running_mean.normal_(std=0.5)
                    module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        return model

    return Case(name, build, data, output, needs)


class Net(nn.Module):
    """A module written as one function of itself and its inputs, with its parts as keywords.

    Example:
        >>> net = Net(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
        >>> net(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def net(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    """A factory of a `Net`. A pair of sizes stands for a linear layer; other parts are made when the factory runs.

    Without parts, the network has the layers a (4, 5) and head (5, 2).

    Example:
        >>> net(lambda m, x: m.head(m.a(x)), a=(3, 4), head=(4, 2))()(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """
    given = parts or {"a": (4, 5), "head": (5, 2)}
    return lambda: Net(function, **{k: nn.Linear(*p) if isinstance(p, tuple) else p() for k, p in given.items()})


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    """A part of `net`: a raw parameter with standard normal entries."""
    return lambda: parameter(*shape)


def normal(*shape: int) -> Data:
    """Standard normal inputs `(n, *shape)` in float64."""

    def data(n: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, *shape, dtype=torch.float64, generator=generator)

    return data


def tokens(vocabulary: int, length: int) -> Data:
    """Token indices `(n, length)`, int64."""

    def data(n: int, seed: int) -> Tensor:
        return torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(seed))

    return data


def parameter(*shape: int) -> nn.Parameter:
    """A raw parameter with standard normal entries."""
    return nn.Parameter(torch.randn(shape))
