"""Batch norm folded into the layer before it: the same function with fewer parameters (Mu et al. 2020, section 4)."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnet._common import messages
from linnet._common.torch_settings import network
from linnet.network.call_trace import arguments
from linnet.network.copies import copy_sharing_parameters
from linnet.network.result_uses import Uses, by_example, by_graph, tensors

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *PLAIN, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""What gives on its input, in eval mode."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


class Flat(nn.Identity):
    """In place of a folded BatchNorm1d, which takes inputs of two kinds, of which only one could be folded.

    Args:
        ndim: Axes of the inputs; None for any.
    """

    def __init__(self, ndim: int | None) -> None:
        super().__init__()
        self.ndim = ndim

    def forward(self, input: Tensor) -> Tensor:
        if self.ndim is not None:
            torch._assert(
                input.ndim == self.ndim,
                f"The batch norm that was here is folded into the layer before it for inputs with {self.ndim} axes "
                "only. Call fold_batchnorm with example= of the inputs that are meant.",
            )
        return input


class Watched(Flat):
    """In place of a batch norm of a network whose order of layers was seen in one run only.

    Its code may branch. Where the layer runs without the batch norm, or the batch norm without the layer, the folded
    network would compute something else, and an error says so.

    Args:
        name: Of the batch norm.
        layer: Name of the layer that the batch norm is folded into.
        ndim: As in `Flat`.
    """

    def __init__(self, name: str, layer: str, ndim: int | None) -> None:
        super().__init__(ndim)
        self.name, self.layer, self.opened = name, layer, False

    def watch(self, network: nn.Module) -> None:
        """Look at the network's calls; methods, not closures, so that copies of the network watch themselves."""
        network.register_forward_pre_hook(self.begin)
        network.register_forward_hook(self.finish)
        network.get_submodule(self.layer).register_forward_hook(self.opens)

    def begin(self, network: nn.Module, args: Any) -> None:
        self.opened = False

    def opens(self, layer: nn.Module, args: Any, out: Any) -> None:
        self._check(not self.opened)
        self.opened = True

    def forward(self, input: Tensor) -> Tensor:
        self._check(self.opened)
        self.opened = False
        return super().forward(input)

    def finish(self, network: nn.Module, args: Any, out: Any) -> None:
        self._check(not self.opened)

    def _check(self, right: bool) -> None:
        if not right:
            raise RuntimeError(
                f"The batch norm {self.name!r} is folded into {self.layer!r}, and for these inputs the network calls "
                "one without the other, unlike for the example of fold_batchnorm. Use the network as it was."
            )


def fold_batchnorm(model: nn.Module, example: Any = None, *, strict: bool = True) -> nn.Module:
    r"""An equivalent network with every batch norm folded into the Linear or convolution right before it.

    .. math:: \gamma \frac{W x + b - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta = W' x + b', \qquad
              W' = s W, \quad b' = s (b - \mu) + \beta, \quad s = \gamma / \sqrt{\sigma^2 + \epsilon}

    It is a copy in eval mode whose outputs are those of the network in eval mode, up to rounding; an ``Identity``
    stands where a batch norm was, so that all other names stay. The network is untouched.

    A batch norm cannot be folded if what comes before it is not a Linear or a convolution (as in pre-activation
    networks), if that layer's output is used elsewhere too, if either is called more than once, shares its weights or
    has hooks, or if it has no running statistics. Such ones are refused by name. One that is never called stays where
    it is. Where only a run shows the order of the layers, the folded network raises if other inputs take another way.

    Args:
        model: The network.
        example: A few inputs, as the model takes them (a tensor, a tuple, a dict of keywords). Without them the order
            of layers is read by `torch.fx`; with them in a run, which works for any code, and the outputs are compared.
        strict: False leaves those that cannot be folded where they are, and warns; `unfoldable` lists them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        >>> folded = fold_batchnorm(model)
        >>> folded[1], list(dict(folded.named_parameters())), torch.allclose(folded(x), model(x), atol=1e-6)
        (Identity(), ['0.weight', '0.bias'], True)
    """
    pairs, refused = _pairs(model, example)
    if refused:
        text = "; ".join(f"{name!r} {reason}" for name, reason in refused.items())
        if strict:
            raise ValueError(
                f"{len(refused)} of {len(pairs) + len(refused)} batch norms cannot be folded: {text}. Pass "
                "strict=False to leave them where they are."
            )
        warnings.warn(f"Batch norms that cannot be folded stay: {text}.", stacklevel=2)
    new = copy.deepcopy(model)
    branches = example is not None and not _readable(model)
    for name, layer in pairs.items():
        found = new.get_submodule(layer)
        _fold(found, new.get_submodule(name))
        one = isinstance(model.get_submodule(name), nn.BatchNorm1d)
        axes = (2 if isinstance(found, nn.Linear) else 3) if one else None
        if branches:
            watched = Watched(name, layer, axes)
            new.set_submodule(name, watched)
            watched.watch(new)
        else:
            new.set_submodule(name, nn.Identity() if axes is None else Flat(axes))
    new.eval()
    if example is not None:
        _check_equal(model, new, example)
    return new


def unfoldable(model: nn.Module, example: Any = None) -> dict[str, str]:
    """The batch norms that `fold_batchnorm` cannot fold, by name, and why.

    Example:
        >>> unfoldable(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        {'0': 'comes first, not after a Linear or a convolution'}
    """
    return _pairs(model, example)[1]


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    """Scale and shift the outputs of a layer as a batch norm does, in float64."""
    assert isinstance(layer, LAYERS) and isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None and norm.running_var is not None
    weight = layer.weight.detach().double()
    s = (norm.running_var.double() + norm.eps).rsqrt()
    s = s if norm.weight is None else s * norm.weight.detach().double()
    bias = torch.zeros_like(s) if layer.bias is None else layer.bias.detach().double()
    bias = (bias - norm.running_mean.double()) * s
    bias = bias if norm.bias is None else bias + norm.bias.detach().double()
    if isinstance(layer, TRANSPOSED):  # (in, out / groups, ...), the outputs of each group after those of the last
        g = layer.groups
        grouped = weight.unflatten(0, (g, -1)) * s.view(g, 1, -1, *[1] * (weight.ndim - 2))
        weight = grouped.flatten(0, 1)
    else:
        weight = weight * s.view(-1, *[1] * (weight.ndim - 1))
    asks = layer.weight.requires_grad
    layer.weight = nn.Parameter(weight.to(layer.weight), requires_grad=asks)
    layer.bias = nn.Parameter(bias.to(layer.weight), requires_grad=asks)


def _pairs(model: nn.Module, example: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Each batch norm that can be folded with the layer it goes into, and the others with the reason."""
    messages.check_module(model)
    messages.check_materialized(dict(model.named_parameters()))
    modules = dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if isinstance(module, _BatchNorm)}
    if not norms:
        return {}, {}
    uses = _uses(model, example)
    pairs: dict[str, str] = {}
    refused: dict[str, str] = {}
    shared = _shared(model)
    for name, norm in norms.items():
        if not uses.calls(name):  # it has no part in what the network computes
            continue
        found = _layer_before(name, norm, uses, modules, shared)
        if found in modules:
            pairs[name] = found
        else:
            refused[name] = found
    return pairs, refused


def _layer_before(
    name: str, norm: _BatchNorm, uses: Uses, modules: Mapping[str, nn.Module], shared: Mapping[str, str]
) -> str:
    """The name of the layer that a batch norm goes into, or why there is none."""
    calls = uses.calls(name)
    if type(norm) not in NORMS:
        return f"is a {type(norm).__name__}, which may compute something else"
    if norm.running_mean is None or norm.running_var is None:
        return "has no running statistics: what it computes depends on the batch"
    if len(calls) > 1:
        return f"is called {len(calls)} times"
    if name in shared:
        return shared[name]
    result = calls[0].inputs[0] if calls[0].inputs else -1
    source = uses.source(result)
    while source is not None and source.module and type(modules[source.what]) in PASSING and len(source.inputs) == 1:
        if len(uses.users(result)) > 1 or _changed(modules[source.what]):
            break
        result = source.inputs[0]
        source = uses.source(result)
    if source is None:
        return "comes first, not after a Linear or a convolution"
    layer = modules[source.what] if source.module else None
    if type(layer) not in LAYERS:
        what = f"{source.what!r} ({type(layer).__name__})" if layer is not None else source.what
        return f"comes after {what}, not after a Linear or a convolution"
    if len(uses.calls(source.what)) > 1:
        return f"comes after {source.what!r}, which is called {len(uses.calls(source.what))} times"
    others = [step.what for step in uses.users(result) if step is not calls[0]]
    if len(uses.users(result)) > 1:
        other = next((what for what in others if what != name), name)
        return f"comes after {source.what!r}, whose output also goes into {other}"
    for key in (source.what, name):
        if _changed(modules[key]):
            return f"comes after {source.what!r}, and {key!r} has hooks or a forward of its own"
        if key in shared:
            return f"comes after {source.what!r}, which {shared[key]}"
        if any(f"{key}.{p}" in uses.read for p in ("weight", "bias")):
            return f"comes after {source.what!r}, and parameters of {key!r} are read elsewhere too"
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[union-attr]
    if width != norm.num_features:
        return f"normalizes another axis than the {width} outputs of {source.what!r}"
    return source.what


def _changed(module: nn.Module) -> bool:
    """Whether a call of the module may compute something else than its class does."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


WHOLE = (*LAYERS, _BatchNorm, *PASSING)
"""Modules that count as one step."""


def _readable(model: nn.Module) -> bool:
    """Whether torch.fx can read the network, which then has no branches that depend on the inputs."""
    try:
        by_graph(model, WHOLE)
    except Exception:  # whatever torch.fx meets
        return False
    return True


def _uses(model: nn.Module, example: Any) -> Uses:
    if example is not None:
        return by_example(model, WHOLE, *arguments(example))
    try:
        return by_graph(model, WHOLE)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot read the forward of {type(model).__name__} ({error}). Pass example=, a few inputs, so "
            "that the order of its layers can be seen in a run."
        ) from error


def _shared(model: nn.Module) -> dict[str, str]:
    """Modules that hold a parameter which another one holds too, or that hang in several places."""
    places: dict[int, list[str]] = {}
    for name, t in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(t), []).append(name)
    found: dict[str, str] = {}
    for names in places.values():
        for name in names if len(names) > 1 else ():
            other = next(n for n in names if n != name)
            found[name.rpartition(".")[0]] = f"shares a parameter with {other.rpartition('.')[0]!r}"
    twice = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        if twice[id(module)] > 1 and name:
            found[name] = "is registered under several names"
    return found


def _check_equal(model: nn.Module, new: nn.Module, example: Any) -> None:
    """Both networks give the same outputs on the example."""
    args, kwargs = arguments(example)
    shadow = copy_sharing_parameters(model).eval()
    device = next(model.parameters()).device
    with torch.no_grad(), network(shadow, "highest", device):
        pairs = list(zip(tensors(shadow(*args, **kwargs)), tensors(new(*args, **kwargs)), strict=True))
    for a, b in pairs:
        if a.is_floating_point() and not messages.close(a, b, TOLERANCE.get(a.dtype, 5e-2)):
            error = float((a - b).abs().max() / a.abs().max())
            raise RuntimeError(
                f"The folded network differs from the given one by {error:.1e} on the example. Look for code that "
                "reads parameters or statistics of a batch norm or of the layer before it, or that is random."
            )
