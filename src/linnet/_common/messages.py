"""Input checks. Each function raises a built-in exception that says what was needed, what came, what to do.

The error texts of the package sit together here, so that they stay alike; every function is small and
stands alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from difflib import get_close_matches
from fnmatch import fnmatchcase
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import data as torch_data


def kind(value: object) -> str:
    """How an error names a value's type: ``a Tensor``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def listing(names: Sequence[str], *, limit: int = 6) -> str:
    """The first few names for an error: ``'a', 'b' and 4 more``."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# ------------------------------------------------------------------------------------------- options


def check_memory(memory: object) -> None:
    """``memory`` is a positive number of bytes, or "auto"."""
    if isinstance(memory, str) and memory == "auto":
        return
    if isinstance(memory, bool) or not isinstance(memory, Real):
        hint = " For a gigabyte write memory=1e9." if isinstance(memory, str) else ""
        raise ValueError(f"memory must be a number of bytes or 'auto'; got {memory!r}.{hint}")
    if not memory > 0:  # type: ignore[operator]
        raise ValueError(f"memory must be a positive number of bytes; got {memory!r}.")


def check_seed(seed: object) -> None:
    """``seed`` is a whole number that torch's generators take."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**64:
        hint = " For other draws in every run take seed=torch.seed()." if seed is None else ""
        raise ValueError(f"seed must be a whole number, from -2**63 to 2**64 - 1; got {seed!r}.{hint}")


def check_writable(path: str | os.PathLike[str], name: str) -> None:
    """A file can be written at ``path``; ``name`` is the argument that names it."""
    place = Path(path)
    if place.is_dir():
        raise IsADirectoryError(f"{name} names a file to write, and {place} is a folder. Name a file in it.")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{name} names {place}, and there is no folder {place.parent}. Make the folder first.")
    if not os.access(place.parent, os.W_OK) or (place.exists() and not os.access(place, os.W_OK)):
        raise PermissionError(f"{name} names {place}, which cannot be written. Name a file that can be.")


# ---------------------------------------------------------------------------------------- parameters


def check_module(model: object) -> None:
    """The model is an ``nn.Module`` whose code Python runs."""
    if isinstance(model, type):
        raise TypeError(
            f"linnet needs a model that is a torch.nn.Module; got the class {model.__name__}. Make a network of the "
            f"class first, as in {model.__name__}(...), and load its weights."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"linnet needs a model that is a torch.nn.Module; got {kind(model)}.")
    if type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise TypeError(
            "linnet looks at each call inside the network, and torch.compile hides the calls. Pass the module that was "
            "compiled: model._orig_mod."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"submodule {name!r}" if name else "model"
            raise TypeError(
                f"linnet swaps parameters inside the network, and the {what} is a torch.jit script, which does not "
                "allow it. Pass the module that was scripted or traced."
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
                f"Parameter {name!r} is on the meta device and has no values. Load the weights onto a real "
                "device, then linearize the model."
            )


def check_one_device(parameters: Mapping[str, Tensor]) -> None:
    """All parameters of the model share a device."""
    first = next(iter(parameters), "")
    for name, tensor in parameters.items():
        if tensor.device != parameters[first].device:
            raise ValueError(
                f"linnet needs the whole model on one device; {first!r} is on {parameters[first].device} and "
                f"{name!r} on {tensor.device}. Move it with model.to(device)."
            )


def check_one_dtype(parameters: Mapping[str, Tensor]) -> None:
    """All selected parameters share a dtype."""
    first = next(iter(parameters), "")
    for name, tensor in parameters.items():
        if tensor.dtype != parameters[first].dtype:
            raise ValueError(
                f"The selected parameters need one dtype; {first!r} is {parameters[first].dtype} and "
                f"{name!r} {tensor.dtype}. Convert the model with model.to(dtype), or select parameters of "
                "one dtype with params=."
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
    if not parameters:
        hint = "There is nothing to linearize in it."
    elif frozen:
        hint = "Set requires_grad_(True), or name parameters with params= (globs also select frozen ones)."
    else:
        hint = "Name some with params=, such as params='*' for all."
    raise ValueError(
        f"No parameter is selected: linnet needs at least one floating parameter, and the model has "
        f"{len(parameters)} parameters, {frozen} of them frozen. {hint}"
    )


# -------------------------------------------------------------------------------------------- layout


def check_not_empty(tensors: Mapping[str, Tensor]) -> None:
    """A layout has at least one tensor."""
    if not tensors:
        raise ValueError("A Layout needs at least one named tensor; got an empty dict.")


def check_tree(tree: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """A tree has the layout's names, its shapes (all plain, or all with one trailing axis) and one dtype."""
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
        if tree[name].dtype != tree[first].dtype:
            # Concatenation would cast them in silence.
            raise ValueError(
                f"flatten needs tensors of one dtype; {first!r} is {tree[first].dtype} and {name!r} "
                f"{tree[name].dtype}. Convert them with tensor.to(dtype)."
            )


def check_flat(vector: Tensor, p: int) -> None:
    """A flat vector or block of columns has p rows."""
    if vector.ndim not in (1, 2) or vector.shape[0] != p:
        raise ValueError(
            f"The layout has p = {p} entries, so unflatten needs shape ({p},) or ({p}, k); got {tuple(vector.shape)}."
        )


# ---------------------------------------------------------------------------------------------- data


def check_range(size: int, start: int, stop: int, n: int) -> None:
    """A pass takes batches of at least one example from a range inside the data."""
    if size < 1:
        raise ValueError(f"batches needs a size of at least 1; got {size}.")
    if not 0 <= start <= stop <= n:
        raise ValueError(f"The data has {n} examples, so batches needs 0 <= start <= stop <= {n}; got {start}, {stop}.")


def check_subset_index(index: Tensor, n: int) -> None:
    """A subset's index is a non-empty vector of positions in the data."""
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        came = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else kind(index)
        hint = " For a mask use mask.nonzero()[:, 0]." if getattr(index, "dtype", None) is torch.bool else ""
        raise TypeError(f"subset needs an int64 tensor of shape (m,); got {came}.{hint}")
    if len(index) == 0:
        raise ValueError("subset needs at least one example; got an empty index.")
    if int(index.min()) < 0 or int(index.max()) >= n:
        bad = int(index.max()) if int(index.max()) >= n else int(index.min())
        raise IndexError(f"The data has {n} examples, so subset needs positions 0 to {n - 1}; got {bad}.")


def no_subset(source: str) -> TypeError:
    """The error of a source that can only be read in order."""
    return TypeError(
        "Choosing examples needs data that can be looked up by position; got data that is read in order "
        f"({source}). Use tensors, arrays, or a map-style Dataset (__len__ and __getitem__)."
    )


def check_positional(count: int, required: Sequence[str], by_name: Sequence[str], *, takes_one: bool) -> None:
    """The items of a tuple fill what forward requires by position."""
    if by_name or not takes_one:
        names = f"({', '.join(by_name)})" if by_name else "arguments"
        raise TypeError(f"The model's forward takes {names} by keyword only. Give the data as a dict of its arguments.")
    if count < len(required):
        raise TypeError(
            f"The model's forward requires {len(required)} arguments ({', '.join(required)}); the data has "
            f"{count}. Give a tuple of {len(required)} tensors, or a dict with these keys."
        )


def check_keywords(keys: Sequence[str], accepted: Sequence[str], required: Sequence[str], *, any_keyword: bool) -> None:
    """The keys of a dict are arguments of forward, and none that it requires is missing."""
    unknown = [] if any_keyword else [key for key in keys if key not in accepted]
    if unknown:
        raise TypeError(
            f"The model's forward accepts the keys {listing(accepted, limit=20) or '(none)'}; the data also "
            f"has {listing(unknown)}. Remove or rename them (targets travel as 'labels', 'targets' or 'y')."
        )
    missing = [name for name in required if name not in keys]
    if missing:
        raise TypeError(
            f"The model's forward requires {listing(required)}; the data has the keys "
            f"{listing(keys) or '(none)'}. Add {listing(missing)}."
        )


def check_array(array: np.ndarray, name: str) -> None:
    """A numpy array holds numbers that torch knows."""
    largest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}.get(array.dtype.kind, 0)  # bytes, by numpy's letter
    if array.dtype.itemsize > largest or not array.dtype.isnative:
        hint = "stack equal shapes with np.stack" if array.dtype == object else "convert it with array.astype"
        raise TypeError(f"linnet needs arrays of native numbers; {name} is an array of dtype {array.dtype}: {hint}.")


def check_some_tensor(leaves: Mapping[str, object]) -> None:
    """The data has a tensor, not only strings and numbers."""
    if not any(isinstance(leaf, Tensor) for leaf in leaves.values()):
        raise TypeError(
            "linnet needs data with at least one tensor or array whose first dimension counts the examples; "
            "found none. Convert lists of numbers with torch.tensor (tokenizers: return_tensors='pt')."
        )


def check_leaf(value: object, name: str) -> None:
    """What sits in the data is a dense tensor, a number, a string or None."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"linnet needs dense tensors; {name} has layout {value.layout}. Use tensor.to_dense().")
    elif value is not None and not isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        hint = "Use its to_numpy()." if hasattr(value, "to_numpy") else "Convert it with torch.as_tensor."
        raise TypeError(
            f"linnet needs data made of tensors and numpy arrays (in tuples or dicts); {name} is {kind(value)}. {hint}"
        )


def check_lengths(leaves: Mapping[str, Sized]) -> int:
    """Tensors of a batch agree on the first dimension, the number of examples, which is returned."""
    first, *others = leaves
    n = len(leaves[first])
    for name in others:
        if len(leaves[name]) != n:
            raise ValueError(
                "The first dimension counts the examples and must be the same everywhere; "
                f"{first} has {n} and {name} has {len(leaves[name])}."
            )
    return n


def check_some(n: int, source: str) -> None:
    """The data has an example."""
    if n == 0:
        raise ValueError(f"linnet needs at least one example; the data ({source}) is empty.")


def not_finite(example: int, name: str) -> ValueError:
    """The error of an input with NaN or infinity."""
    return ValueError(
        f"linnet needs finite inputs; example {example} has NaN or infinity in {name}. Clean it or leave it out."
    )


def unknown_data(data: object) -> TypeError:
    """The error of data that is none of the accepted types."""
    if isinstance(data, Iterator):
        hint = "It can be read only once: give a Dataset, or an IterableDataset whose __iter__ starts anew."
    elif hasattr(data, "iloc"):
        hint = "Convert it with data.to_numpy()."
    elif hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        hint = "A map-style Dataset also needs __len__."
    else:
        hint = "Convert it with torch.as_tensor."
    return TypeError(
        "linnet reads a Tensor, a numpy array, a tuple or dict of them, a Dataset or a DataLoader; "
        f"got {kind(data)}. {hint}"
    )


# ------------------------------------------------------------------------------------- streamed data


def check_loader_order(loader: torch_data.DataLoader) -> None:
    """A DataLoader's samplers give every example, in the same order every pass."""
    shuffling = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
    for outer in (loader.sampler, loader.batch_sampler):
        sampler: object = outer
        while sampler is not None:
            name = type(sampler).__name__
            if isinstance(sampler, shuffling):
                raise ValueError(
                    "linnet needs the examples in the same order every pass; the DataLoader uses a "
                    f"{name}. Build it with shuffle=False (for a random subset: torch.utils.data.Subset)."
                )
            if isinstance(sampler, torch_data.DistributedSampler):
                raise ValueError(
                    f"linnet shards the data itself; the DataLoader uses a {name}. Build it without a "
                    "sampler: every rank passes the whole data."
                )
            sampler = getattr(sampler, "sampler", None)
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ValueError(
            "linnet needs the examples in the same order every pass; the DataLoader was built with "
            "in_order=False. Build it with in_order=True."
        )


def check_same_order(first: object, second: object, sampler: object) -> None:
    """Asked twice, a sampler gives the same positions."""
    if first != second:
        raise ValueError(
            "linnet needs the examples in the same order every pass; asked twice, the DataLoader's "
            f"{type(sampler).__name__} gave two orders. Use a sampler that does not shuffle."
        )


def check_nothing_dropped(batch_size: int | None, n: int | None, *, drop_last: bool) -> None:
    """``drop_last`` drops no example; n is None when the count is unknown."""
    if drop_last and batch_size is not None and (n is None or n % batch_size):
        lost = "may drop examples" if n is None else f"drops {n % batch_size} of {n} examples"
        raise ValueError(
            f"linnet needs every example; the DataLoader's drop_last=True {lost}. Build it with drop_last=False."
        )


def check_item(item: object) -> None:
    """An example of a Dataset holds no list of numbers: collation would transpose it."""
    fields = item.items() if isinstance(item, Mapping) else enumerate(item if isinstance(item, tuple) else ())
    for name, value in fields:
        if isinstance(value, list) and value and isinstance(value[0], int | float | list):
            raise TypeError(
                f"Field {name!r} of the Dataset's examples is a list of numbers; linnet needs tensors or "
                "arrays. Convert it in __getitem__ (Hugging Face: use dataset.with_format('torch'))."
            )


def not_stackable(error: Exception) -> TypeError:
    """The error of examples that the default collation cannot make one batch of."""
    return TypeError(
        f"The examples of the Dataset cannot be stacked into a batch: {error}. "
        "Convert them to tensors of one shape, or give a DataLoader with a collate_fn that pads."
    )


def check_collated(n: int, expected: int, start: int) -> None:
    """A batch has as many examples as were put in."""
    if n != expected:
        raise ValueError(
            f"The DataLoader's collate_fn made a batch of {n} from the {expected} examples that begin at "
            f"example {start}. linnet needs one entry in the first dimension for each example."
        )


def changed(first: int, last: int, source: str) -> RuntimeError:
    """The error of examples that are not what they were in an earlier pass."""
    what = f"Example {first}" if first == last else f"Examples {first} to {last}"
    return RuntimeError(
        f"{what} changed between two passes over the data ({source}); linnet needs the same examples in the "
        "same order every pass. Fix what varies: disable or seed random transforms, and use shuffle=False."
    )


def check_pass(count: int, n: int, source: str) -> None:
    """A pass gives as many examples as the first one."""
    if count != n:
        more = "more than that" if count > n else f"only {count}"
        raise RuntimeError(
            f"The data ({source}) had {n} examples at first and {more} in a later pass; linnet needs the "
            "same examples every pass. A Dataset over a generator or a file must start anew in __iter__."
        )


# ------------------------------------------------------------------------------------------- outputs


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


def output_matrix(out: object, n: int) -> Tensor:
    """The output as (n, c)."""
    if not isinstance(out, Tensor):
        raise TypeError(f"output= must return a tensor (n, c) or (n,); it returned {kind(out)}.")
    if not out.is_floating_point():
        raise TypeError(
            f"linnet differentiates floating outputs; got {out.dtype} of shape {tuple(out.shape)}. Return logits or "
            "means rather than labels, for example with output=."
        )
    if out.layout is not torch.strided:
        raise TypeError(
            f"linnet needs dense outputs; the model's have layout {out.layout}. Use output=lambda out: out.to_dense()."
        )
    if out.ndim == 0 or len(out) != n or out.ndim > 2 or out.shape[-1] == 0:
        hint = (
            "For outputs with more axes use output=lambda out: out.flatten(1)."
            if out.ndim > 2 and len(out) == n
            else "There must be one row of outputs per example; say how to read it with output=."
        )
        raise ValueError(
            f"linnet needs outputs of shape (n, c) or (n,), with n = {n} examples here; got {tuple(out.shape)}. {hint}"
        )
    return out if out.ndim == 2 else out[:, None]


def explain_forward(error: Exception, inputs: Iterable[tuple[str, Any]], theta: Mapping[str, Tensor]) -> None:
    """Add a note to an error of the model's forward where dtypes explain it; refuse what cannot run in linnet's way."""
    if "is not an nn.Parameter" in str(error):
        raise not_functional() from error
    if "does not require grad" in str(error):
        raise differentiates_itself() from error
    first, parameter = next(iter(theta.items()))
    inputs = list(inputs)
    for name, leaf in inputs:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != parameter.dtype:
            error.add_note(
                f"linnet: {name} are {leaf.dtype} and the model's parameters {parameter.dtype} ({first!r}); nothing is "
                f"cast in silence. Convert the data with .to({parameter.dtype}), or the model."
            )
            return
    for name, leaf in inputs:
        whole = isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
        if whole and re.search(r"dtype|scalar type|\b(Long|Int|Short|Char|Byte|Bool)\b", str(error)):
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


def targets_of(parts: Sequence[Any], source: str) -> Tensor:
    """What came with the inputs, batch by batch, as one tensor."""
    found = [next(iter(part.values())) if isinstance(part, Mapping) and len(part) == 1 else part for part in parts]
    if all(isinstance(part, Tensor) for part in found):
        return torch.cat([part.cpu() for part in found])
    what = "none came with it" if all(part is None for part in found) else f"{kind(found[0])} came with it"
    raise ValueError(
        f"fit requires y to be passed, but the target y is None: the data ({source}) came without y, and {what}. Pass "
        "y, or data such as (X, y) or a Dataset of pairs."
    )


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


def original_is_read(name: str) -> Refusal:
    return Refusal(
        f"The forward pass reads the parameter {name!r} past the attribute that holds it: through a closure, a "
        "hook, a replaced forward or a list. Its derivative would be lost. Read the parameter as an attribute of the "
        "module that is called (self.weight), or leave it out with params=."
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


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree relative to their largest entry."""
    scale = max(float(a.detach().abs().max()), float(b.detach().abs().max()))
    return float((a.detach() - b.detach()).abs().max()) <= tolerance * scale


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


def check_batch_size(size: object, *, name: str = "batch_size", auto: bool = True) -> None:
    """A batch size is a positive number or, where that is a choice, "auto"."""
    if auto and size == "auto":
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        choice = " or 'auto'" if auto else ""
        raise ValueError(f"{name} must be a positive number of examples{choice}; got {size!r}.")


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
