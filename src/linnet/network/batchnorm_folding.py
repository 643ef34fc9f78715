"""Batch norm folded into the layer before it: the same function with fewer parameters (Mu et al. 2020, section 4)."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnet._common import network_settings
from linnet.network import checks
from linnet.network.call_trace import RETURNED, Step, Trace, as_arguments, find_tensors, trace
from linnet.network.copies import copy_sharing_parameters
from linnet.network.sharded import check_whole

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *PLAIN, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Modules that return their input in eval mode."""
WHOLE = (*LAYERS, _BatchNorm, *PASSING)
"""Modules that count as one step of a forward pass."""


class FoldedNorm(nn.Identity):
    """Stands in place of a folded BatchNorm1d. That takes inputs with two or three axes, and one kind is folded.

    Args:
        ndim: Number of axes of the inputs; None for any.
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


class GuardedNorm(FoldedNorm):
    """Stands in place of a folded batch norm of a network whose code may branch.

    One run showed the order of the layers. For other inputs the layer may run without the batch norm, or the batch
    norm without the layer; the folded network would then compute something else, and an error says so.

    Args:
        name: Name of the batch norm.
        layer: Name of the layer that the batch norm is folded into.
        ndim: See `FoldedNorm`.
    """

    def __init__(self, name: str, layer: str, ndim: int | None) -> None:
        super().__init__(ndim)
        self.name, self.layer, self.pending = name, layer, False

    def watch(self, network: nn.Module) -> None:
        """Put hooks on the network. They are methods, not closures, so copies of the network watch themselves."""
        network.register_forward_pre_hook(self._begin)
        network.register_forward_hook(self._finish)
        network.get_submodule(self.layer).register_forward_hook(self._note_layer)

    def _begin(self, network: nn.Module, args: Any) -> None:
        self.pending = False

    def _note_layer(self, layer: nn.Module, args: Any, out: Any) -> None:
        self._check(not self.pending)
        self.pending = True

    def forward(self, input: Tensor) -> Tensor:
        self._check(self.pending)
        self.pending = False
        return super().forward(input)

    def _finish(self, network: nn.Module, args: Any, out: Any) -> None:
        self._check(not self.pending)

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

    The result is a copy in eval mode. Its outputs are those of the network in eval mode, up to rounding. An
    ``Identity`` stands where a batch norm was, so all other names stay. The network itself is untouched.

    A batch norm is refused, by name, in these cases: the step before it is not a Linear or a convolution (as in
    pre-activation networks); the output of that layer is also used elsewhere; the batch norm or the layer is called
    more than once, shares its weights or has hooks; the batch norm has no running statistics. A batch norm that is
    never called stays where it is. Where only a run shows the order of the layers, the folded network raises an error
    for inputs that take another way through the code.

    Args:
        model: The network.
        example: A few inputs, as the model takes them (a tensor, a tuple, a dict of keywords). With an example, a run
            shows the order of the layers, whatever the code, and the outputs are compared. Without one, `torch.fx`
            reads the order from the code.
        strict: False keeps the batch norms that cannot be folded, with a warning; `unfoldable` lists them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        >>> folded = fold_batchnorm(model)
        >>> folded[1], list(dict(folded.named_parameters())), torch.allclose(folded(x), model(x), atol=1e-6)
        (Identity(), ['0.weight', '0.bias'], True)
    """
    model = checks.check_module(model)
    check_whole(model, "fold_batchnorm")
    pairs, refused = _pair_norms(model, example)
    if refused:
        text = "; ".join(f"{name!r} {reason}" for name, reason in refused.items())
        if strict:
            raise ValueError(
                f"{len(refused)} of {len(pairs) + len(refused)} batch norms cannot be folded: {text}. Pass "
                "strict=False to leave them where they are."
            )
        warnings.warn(f"Batch norms that cannot be folded stay: {text}.", stacklevel=2)
    new = copy.deepcopy(model)
    may_branch = example is not None and not _is_readable(model)
    for name, layer in pairs.items():
        found = new.get_submodule(layer)
        _fold(found, new.get_submodule(name))
        one = isinstance(model.get_submodule(name), nn.BatchNorm1d)
        axes = (2 if isinstance(found, nn.Linear) else 3) if one else None
        if may_branch:
            guard = GuardedNorm(name, layer, axes)
            new.set_submodule(name, guard)
            guard.watch(new)
        else:
            new.set_submodule(name, nn.Identity() if axes is None else FoldedNorm(axes))
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
    return _pair_norms(checks.check_module(model), example)[1]


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


def _pair_norms(model: nn.Module, example: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Each batch norm that can be folded with the layer it goes into, and the others with the reason."""
    checks.check_materialized(dict(model.named_parameters()))
    modules = dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if isinstance(module, _BatchNorm)}
    if not norms:
        return {}, {}
    seen = _trace(model, example)
    pairs: dict[str, str] = {}
    refused: dict[str, str] = {}
    shared = _find_shared(model)
    for name, norm in norms.items():
        if not seen.steps_of(name):  # the network does not call it
            continue
        found = _find_layer(name, norm, seen, modules, shared)
        if found in modules:
            pairs[name] = found
        else:
            refused[name] = found
    return pairs, refused


def _find_layer(
    name: str, norm: _BatchNorm, seen: Trace, modules: Mapping[str, nn.Module], shared: Mapping[str, str]
) -> str:
    """The name of the layer that a batch norm goes into, or the reason why there is none."""
    calls = seen.steps_of(name)
    if type(norm) not in NORMS:
        return f"is a {type(norm).__name__}, which may compute something else"
    if norm.running_mean is None or norm.running_var is None:
        return "has no running statistics: what it computes depends on the batch"
    if len(calls) > 1:
        return f"is called {len(calls)} times"
    if name in shared:
        return shared[name]
    tensor = calls[0].inputs[0] if calls[0].inputs else -1
    source = seen.source(tensor)
    while source is not None and source.is_module and type(modules[source.name]) in PASSING and len(source.inputs) == 1:
        if len(seen.users(tensor)) > 1 or _is_changed(modules[source.name]):
            break
        tensor = source.inputs[0]
        source = seen.source(tensor)
    if source is None:
        return "comes first, not after a Linear or a convolution"
    layer = modules[source.name] if source.is_module else None
    if type(layer) not in LAYERS:
        what = f"{source.name!r} ({type(layer).__name__})" if layer is not None else source.name
        return f"comes after {what}, not after a Linear or a convolution"
    times = len(seen.steps_of(source.name))
    if times > 1:
        return f"comes after {source.name!r}, which is called {times} times"
    users = seen.users(tensor)
    if len(users) > 1:
        other = next((step.name for step in users if step is not calls[0] and step.name != name), name)
        return f"comes after {source.name!r}, whose output also goes into {other}"
    for key in (source.name, name):
        if _is_changed(modules[key]):
            return f"comes after {source.name!r}, and {key!r} has hooks or a forward of its own"
        if key in shared:
            return f"comes after {source.name!r}, which {shared[key]}"
        if any(f"{key}.{p}" in seen.parameters_read for p in ("weight", "bias")):
            return f"comes after {source.name!r}, and parameters of {key!r} are read elsewhere too"
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[union-attr]
    if width != norm.num_features:
        return f"normalizes another axis than the {width} outputs of {source.name!r}"
    return source.name


def _is_changed(module: nn.Module) -> bool:
    """Whether a call of the module may compute something else than its class does."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def _trace(model: nn.Module, example: Any) -> Trace:
    if example is not None:
        return trace(model, *as_arguments(example), whole=WHOLE)
    try:
        return _read_code(model)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot read the forward of {type(model).__name__} ({error}). Pass example=, a few inputs, so "
            "that the order of its layers can be seen in a run."
        ) from error


def _is_readable(model: nn.Module) -> bool:
    """Whether torch.fx can read the network. Its code then has no branches that depend on the inputs."""
    try:
        _read_code(model)
    except Exception:  # whatever torch.fx meets
        return False
    return True


def _read_code(model: nn.Module) -> Trace:
    """The steps of the network in eval mode as `torch.fx` reads them from its code, without a run.

    Raises:
        Exception: Whatever torch.fx meets in code that it cannot read.
    """

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, WHOLE) or super().is_leaf_module(m, module_qualified_name)

    copied = copy_sharing_parameters(model).eval()
    graph = Tracer().trace(copied)
    number = {node: i for i, node in enumerate(graph.nodes)}
    first = {module: name for name, module in copied.named_modules()}  # a module may have several names
    found = Trace()
    for node in graph.nodes:
        inputs = tuple(number[n] for n in node.all_input_nodes)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            found.steps.append(Step(first[copied.get_submodule(name)], True, inputs, number[node]))
        elif node.op == "output":
            found.steps.append(Step(RETURNED, False, inputs, -1))
        elif node.op == "get_attr":
            found.parameters_read.add(name)
        elif node.op != "placeholder" and (name if name != "getattr" else node.args[1]) not in METADATA:
            found.steps.append(Step(name, False, inputs, number[node]))
    return found


METADATA = frozenset({"shape", "dtype", "device", "ndim", "layout", "size", "dim", "numel"})
"""Names by which code asks about a tensor without using its values."""


def _find_shared(model: nn.Module) -> dict[str, str]:
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
    args, kwargs = as_arguments(example)
    copied = copy_sharing_parameters(model).eval()
    device = next(model.parameters()).device
    with torch.no_grad(), network_settings(copied, "highest", device):
        pairs = list(zip(find_tensors(copied(*args, **kwargs)), find_tensors(new(*args, **kwargs)), strict=True))
    # A sum over the weights of one output rounds by as many eps as it has terms, and the errors of the layers add up. A
    # batch norm subtracts means from outputs, which may cost six bits more. Half of the digits agree in any case.
    terms = sum(w.numel() // len(w) for w in model.parameters() if w.ndim > 1)
    for a, b in pairs:
        if not a.is_floating_point():
            continue
        eps = torch.finfo(a.dtype).eps
        if not checks.close(a, b, min(64 * terms * eps, eps**0.5)):
            error = float((a - b).abs().max() / a.abs().max())
            raise RuntimeError(
                f"The folded network differs from the given one by {error:.1e} on the example. Look for code that "
                "reads parameters or statistics of a batch norm or of the layer before it, or that is random."
            )
