"""Checks of networks: parameters, outputs, and reasons to refuse a network.

Each check raises a built-in exception that says what was needed, what came and what to do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from linnet._common import kind, listing

# Parameters.


def check_module(model: object) -> nn.Module:
    """The module whose code Python runs: the model itself, or what torch.compile was given; raise if there is none."""
    if isinstance(model, type):
        raise TypeError(
            f"linnet needs a model that is a torch.nn.Module; got the class {model.__name__}. Make a network of the "
            f"class first, as in {model.__name__}(...), and load its weights."
        )
    if not isinstance(model, nn.Module):
        if isinstance(model, Mapping) and model and all(isinstance(value, Tensor) for value in model.values()):
            raise TypeError(
                "linnet needs a model that is a torch.nn.Module; got a state dict. Make the network of these weights "
                "first, and load them: model.load_state_dict(weights)."
            )
        raise TypeError(f"linnet needs a model that is a torch.nn.Module; got {kind(model)}.")
    if is_compiled(model):
        warn_of_compiled(model)
        return check_module(model._orig_mod)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"submodule {name!r}" if name else "model"
            raise TypeError(
                f"linnet swaps parameters inside the network, and the {what} is a torch.jit script, which does not "
                "allow it. Pass the module that was scripted or traced."
            )
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether a module is what torch.compile has made of another module."""
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)


_said: WeakSet[nn.Module] = WeakSet()


def warn_of_compiled(model: nn.Module) -> None:
    """Say once that a compiled module runs as it was before torch.compile."""
    if model in _said:
        return
    _said.add(model)
    warnings.warn(
        "linnet looks at each call inside the network, and torch.compile hides the calls: linnet runs the module that "
        "was compiled, model._orig_mod, without torch.compile. The compiled model itself stays as it is.",
        stacklevel=4,
    )


def warn_of_autocast(dtype: torch.dtype, dtypes: Iterable[torch.dtype]) -> None:
    """Say that a network of several dtypes runs only under autocast."""
    warnings.warn(
        f"The network has parameters in {', '.join(sorted(map(str, dtypes)))}, and its layers meet without a cast: the "
        f"network runs only under torch.autocast. linnet runs the network under torch.autocast in {dtype}. To run the "
        "network without autocast, cast between layers, as in self.head(x.to(self.head.weight.dtype)).",
        stacklevel=2,
    )


def check_params_argument(params: object) -> None:
    """``params`` is None, a glob, globs, or a callable."""
    globs = isinstance(params, list | tuple | set | frozenset)
    if globs and all(isinstance(glob, str) for glob in params):  # type: ignore[attr-defined]
        return
    if params is None or isinstance(params, str) or (callable(params) and not isinstance(params, nn.Module)):
        return
    raise TypeError(
        "params must be None (every trainable parameter), a glob such as 'layer4.*', a list of globs, or a "
        f"callable (name, tensor) -> bool; got {kind(params)}."
    )


def check_materialized(parameters: Mapping[str, Tensor]) -> None:
    """No parameter waits for its shape (lazy modules) or for its values (the meta device)."""
    for name, tensor in parameters.items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Call the model once on a batch, "
                "load or train its weights, then linearize it."
            )
        if tensor.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Load the weights onto a real device, "
                "then linearize the model; with accelerate, choose a device_map that offloads no weights to "
                "the CPU or disk."
            )


def check_devices(parameters: Mapping[str, Tensor], selected: Mapping[str, Tensor], *, dispatched: bool) -> None:
    """All parameters of the model share a device; of a model that moves its inputs, all selected parameters do.

    Args:
        parameters: All parameters.
        selected: The selected ones.
        dispatched: Whether the model has layers on several devices and moves inputs between them (``device_map``).
    """
    some, what = (selected, "all selected parameters") if dispatched else (parameters, "the whole model")
    first = next(iter(some), "")
    for name, tensor in some.items():
        if tensor.device != some[first].device:
            how = "Select parameters of one device with params=." if dispatched else "Move it with model.to(device)."
            raise ValueError(
                f"linnet needs {what} on one device; {first!r} is on {some[first].device} and {name!r} on "
                f"{tensor.device}. {how}"
            )


def check_glob_matched(glob: str, matched: Sequence[str], names: Sequence[str], modules: Sequence[str]) -> None:
    """A glob has matched a parameter; ``names`` and ``modules`` serve to suggest one that does."""
    if matched:
        return
    inside = f"{glob}.*"
    if any(fnmatchcase(module, glob) for module in modules) and any(fnmatchcase(n, inside) for n in names):
        hint = f"It names a module; for the parameters inside it use {inside!r}."
    elif near := get_close_matches(glob, names, n=3, cutoff=0.4):
        hint = f"The nearest names: {listing(near)}."
    else:
        hint = f"The parameters are {listing(names)}."
    raise ValueError(f"params={glob!r} matches none of the model's {len(names)} floating parameters. {hint}")


def check_not_complex(parameters: Mapping[str, Tensor]) -> None:
    """No selected parameter is complex."""
    for name, tensor in parameters.items():
        if tensor.is_complex():
            raise ValueError(
                f"linnet differentiates real parameters; {name!r} is {tensor.dtype}. Leave it out with "
                "params=, or store it as two real tensors."
            )


def check_selected(selected: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Something is selected from the model's ``parameters``."""
    if selected:
        return
    frozen = sum(not tensor.requires_grad for tensor in parameters.values())
    adapters = [name for name in parameters if re.search(r"(^|[._])(lora|adapter|ia3|prompt)", name, re.IGNORECASE)]
    if not parameters:
        hint = "There is nothing to linearize in it."
    elif frozen and adapters:
        hint = (
            f"Its adapter is frozen too (such as {adapters[0]!r}): load the adapter for training "
            "(PeftModel.from_pretrained(..., is_trainable=True)), or name its parameters with params= (globs also "
            "select frozen ones, such as params='*lora*')."
        )
    elif frozen:
        hint = "Set requires_grad_(True), or name parameters with params= (globs also select frozen ones)."
    else:
        hint = "Name some with params=, such as params='*' for all."
    raise ValueError(
        f"No parameter is selected: linnet needs at least one floating parameter, and the model has "
        f"{len(parameters)} parameters, {frozen} of them frozen. {hint}"
    )


def check_not_empty(tensors: Mapping[str, Tensor]) -> None:
    """A layout has at least one tensor."""
    if not tensors:
        raise ValueError("A Layout needs at least one named tensor; got an empty dict.")


def check_tree(tree: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """A tree has the layout's names and its shapes (all plain, or all with one trailing axis)."""
    missing = [name for name in shapes if name not in tree]
    unknown = [name for name in tree if name not in shapes]
    wrong = [f"{word} {listing(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
    if wrong:
        raise ValueError(f"flatten needs one tensor for each of the layout's {len(shapes)} names; {', '.join(wrong)}.")
    first = next(iter(shapes))
    columns = tree[first].shape[len(shapes[first]) :]
    columns = columns if len(columns) <= 1 else torch.Size()
    for name, shape in shapes.items():
        if tree[name].shape != shape + columns:
            axes = ", ".join(str(size) for size in (*shape, "k"))
            beside = f", while {first!r} has {tuple(tree[first].shape)}" if name != first else ""
            raise ValueError(
                f"flatten needs {name!r} of shape {tuple(shape)} or, for all names alike, ({axes}); "
                f"got {tuple(tree[name].shape)}{beside}."
            )


def check_flat(vector: Tensor, p: int) -> None:
    """A flat vector or block of columns has p rows."""
    if vector.ndim not in (1, 2) or vector.shape[0] != p:
        raise ValueError(
            f"The layout has p = {p} entries, so unflatten needs shape ({p},) or ({p}, k); got {tuple(vector.shape)}."
        )


def check_same_shapes(mine: Mapping[str, torch.Size], theirs: Mapping[str, torch.Size]) -> None:
    """Two models have parameters of the same shapes in the same order."""
    for (a, shape), (b, other) in zip(mine.items(), theirs.items(), strict=False):
        if shape != other:
            raise ValueError(
                f"A Gram matrix between two models needs parameters of the same shapes; {a!r} is {tuple(shape)} and "
                f"the other's {b!r} {tuple(other)}."
            )
    if len(mine) != len(theirs):
        raise ValueError(
            f"A Gram matrix between two models needs as many parameters in both; got {len(mine)} and {len(theirs)}."
        )


# Outputs.


def output_tensor(raw: Any) -> Tensor:
    """The default reading of what a model returns: a tensor, or the ``logits`` of a model output or dict."""
    if isinstance(raw, Tensor):
        return raw
    logits = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"linnet needs a tensor of outputs (n, c), or an object with logits; the model returned {kind(raw)}. "
        "Say how to read it with output=, such as output=lambda out: out[0]."
    )


def explain_forward(error: Exception, inputs: Iterable[tuple[str, Any]], theta: Mapping[str, Tensor]) -> None:
    """Add a note to an error of the model's forward where dtypes explain it; refuse what cannot run in linnet's way."""
    if "is not an nn.Parameter" in str(error):
        raise not_functional() from error
    if "does not require grad" in str(error):
        raise differentiates_itself() from error
    first, parameter = next(iter(theta.items()))
    dtypes = {t.dtype for t in theta.values()}
    inputs = list(inputs)
    for name, leaf in inputs:
        other = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != parameter.dtype
        if other and (leaf.dtype not in dtypes or is_about_floating_dtypes(error)):
            error.add_note(
                f"linnet: {name} are {leaf.dtype} and the model's parameters {parameter.dtype} ({first!r}); nothing is "
                f"cast in silence. Convert the data with .to({parameter.dtype}), or the model."
            )
            return
    for name, leaf in inputs:
        whole = isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
        if whole and _names_whole_numbers(error):
            error.add_note(
                f"linnet: {name} are whole numbers ({leaf.dtype}), and the model's parameters are {parameter.dtype} "
                f"({first!r}); nothing is cast in silence. Convert the data with .to({parameter.dtype})."
            )
            return


def check_outputs_finite(f: Tensor, start: int, positions: Tensor | None = None) -> None:
    """No output is NaN or infinite; the error names the first example whose output is.

    Args:
        f: (n, c).
        start: Position of the first example.
        positions: Those of all, (n,), where they are not consecutive.
    """
    if bool(torch.isfinite(f).all()):
        return
    bad = ~torch.isfinite(f).all(1)
    row = int(bad.nonzero()[0])
    example = start + row if positions is None else int(positions[row])
    raise ValueError(
        f"The model's output is not finite for example {example}: {f[row].tolist()[:4]}. Look at that input and at "
        "the model's parameters (an overflow in half precision is a common cause: use model.float())."
    )


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree relative to their largest entry."""
    scale = max(float(a.detach().abs().max()), float(b.detach().abs().max()))
    return float((a.detach() - b.detach()).abs().max()) <= tolerance * scale


# Reasons to refuse a network.


def changed_parameter(name: str, *, parameter: bool = True) -> RuntimeError:
    """The error of weights that are not what they were when the model was linearized."""
    eval_mode = "" if parameter else " Forward passes in training mode change a buffer: use model.eval()."
    return RuntimeError(
        f"{'Parameter' if parameter else 'Buffer'} {name!r} has changed since the model was linearized, so f(x; "
        "theta0) and the Jacobian would belong to different weights. Call linnet.linearize(model) again after "
        f"training, and fit again.{eval_mode}"
    )


class Refusal(ValueError):
    """A network that has no Jacobian by examples, or that linnet cannot run without doing harm."""


class CannotCast(Refusal):
    """A network that does not run in another dtype, or computes something else there."""


def cannot_cast(dtype: torch.dtype, reason: str) -> CannotCast:
    return CannotCast(
        f"The network cannot be cast to {dtype}: {reason.rstrip('.')}. Its forward pass names a dtype (.float(), "
        ".half(), .to(dtype) or dtype=), or asks for one. Use the network in its own dtype, or write its forward with "
        "the dtype of its inputs or weights."
    )


def is_about_floating_dtypes(error: Exception) -> bool:
    """Whether an error of torch says that floating dtypes do not fit; whole numbers are no floating dtypes."""
    floating = re.search(r"dtype|scalar type|data type", str(error))
    return floating is not None and not _names_whole_numbers(error)


def _names_whole_numbers(error: Exception) -> bool:
    return re.search(r"\b(Long|Int|Short|Char|Byte|Bool|bool|long|int)\b|int64|int32", str(error)) is not None


def original_is_read(name: str) -> Refusal:
    return Refusal(
        f"The forward pass reads the parameter {name!r} past the attribute that holds it: through a closure, a "
        "hook, a replaced forward or a list. Its derivative would be lost. Read the parameter as an attribute of the "
        "module that is called (self.weight), or leave it out with params=."
    )


def unknown_shard(t: Tensor) -> Refusal:
    return Refusal(
        f"The forward pass uses a DTensor of shape {tuple(t.shape)} that is neither a parameter nor a buffer of the "
        "module. linnet gathers sharded parameters and buffers. Register the tensor in the module that uses it."
    )


def overwritten_argument() -> RuntimeError:
    return RuntimeError(
        "The network overwrites, in place, a tensor that the backward pass of a sharded layer needs. Replace in-place "
        "operations (x += y, relu_) by their ordinary forms."
    )


def not_as_parallel() -> Refusal:
    return Refusal(
        "The module gives other outputs under its tensor parallel plan than with whole weights. linnet gathers the "
        "weights and runs the layers as they were before parallelize_module; a forward pass that counts on local sizes "
        "(such as a number of heads divided by the size of the mesh) computes something else then. Take the sizes from "
        "the tensors, as in x.unflatten(-1, (-1, head_dim)), or linearize the module before it is parallelized."
    )


def check_shards(model: nn.Module) -> None:
    """Raise if a module is distributed in a way that linnet cannot gather its weights from."""
    for name, module in model.named_modules():
        kind, where = type(module).__name__, f"submodule {name!r}" if name else "model"
        home = type(module).__module__
        if kind == "FullyShardedDataParallel":
            raise TypeError(
                f"The {where} is wrapped in FullyShardedDataParallel (FSDP1), which flattens its parameters. linnet "
                "gathers weights that are DTensors: use torch.distributed.fsdp.fully_shard (FSDP2) instead."
            )
        if home.startswith("torch.distributed.pipelining"):
            raise TypeError(
                f"The {where} is a pipeline ({kind}), whose stages lie on different ranks. linnet runs all stages on "
                "every rank: pass the module before it was cut, sharded with fully_shard if it is large."
            )


def check_whole_numbers(shards: Mapping[str, Tensor]) -> None:
    """Raise if a sharded weight is quantized."""
    for name, t in shards.items():
        local = type(t.to_local())  # type: ignore[attr-defined]
        if isinstance(t, nn.Parameter) and (local is not Tensor or not (t.is_floating_point() or t.is_complex())):
            what = t.dtype if local is Tensor else local.__name__
            raise ValueError(
                f"Parameter {name!r} is sharded and quantized ({what}). linnet gathers sharded weights of floating "
                "dtypes: shard the weights before they are quantized, or use the quantized network on one device."
            )


def renormalizes(name: str) -> Refusal:
    return Refusal(
        f"The embedding {name!r} has rows longer than its max_norm, and its forward pass would shorten them in place. "
        "linnet changes no weights: shorten the rows first (torch.renorm), or build the embedding without max_norm."
    )


def scaled_by_frequency() -> Refusal:
    return Refusal(
        "An embedding with scale_grad_by_freq=True divides gradients by the number of times that a token occurs in the "
        "batch. Such gradients are no derivatives of the outputs. Build the embedding without scale_grad_by_freq."
    )


def not_functional() -> Refusal:
    return Refusal(
        "The model gives other outputs when tensors stand in the places of its parameters: its forward pass asks for "
        "nn.Parameter by type or by get_parameter, or looks at how a parameter is stored. Use parameters as tensors."
    )


def differentiates_itself() -> Refusal:
    return Refusal(
        "The forward pass of the model differentiates something with respect to the parameters of the model, which "
        "works only while gradients are recorded. linnet cannot linearize a model that trains itself in its forward."
    )


def keeps_state() -> Refusal:
    return Refusal(
        "The outputs of the model depend on its earlier calls: the forward pass leaves something behind in a buffer or "
        "an attribute (a running statistic, a counter, a cache), and later calls read it. Switch it off in eval mode, "
        "or run the model once before it is linearized if it only prepares itself."
    )


def not_linear() -> Refusal:
    return Refusal(
        "The backward pass of the model is not linear in the gradient that it is given, or mixes examples: a hook or "
        "an autograd.Function clips, scales or normalizes gradients. Such gradients are no derivatives of the outputs. "
        "Remove what changes gradients."
    )


def parameter_is_written(name: str) -> Refusal:
    return Refusal(
        f"The forward pass writes into the parameter {name!r}, so the network is not a function of its parameters. "
        "Write into a copy of the parameter instead."
    )


def data_is_read(name: str) -> Refusal:
    return Refusal(
        f"The forward pass reads .data of the sharded parameter {name!r}. linnet gathers the parameter for each call "
        "that uses it, and what is written into .data would be lost. Use the parameter itself, or parameter.detach()."
    )


def random_output() -> Refusal:
    return Refusal(
        "The model gives different outputs for the same input, even in eval mode, so it has no Jacobian. Remove what "
        "is random in its forward (functional dropout without training=self.training, sampled noise), or fix the seed."
    )


def examples_interact(start: int = 0, n: int = 0) -> Refusal:
    where = f" (examples {start} to {start + n - 1})" if n else ""
    return Refusal(
        f"The output of an example changes with the other examples of its batch{where}, so the Jacobian has no rows by "
        "example. Look for statistics over the batch (batch norm without running ones, normalization over axis 0), "
        "for time or attention along the batch axis (batch_first=False), for capacities shared by the batch and for "
        "padding to its longest example."
    )
