"""Networks from what `--model` and `--weights` say."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from linnet._common.messages import listing
from linnet.cli.terminal import UsageError

HELP = "--model is module:function or file.py:function (a function that returns the network), timm:NAME or hf:PATH."
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which checkpoints keep the weights among other things."""


def locate(spec: str) -> str:
    """What --model says, with the absolute path of a file or a folder; the rest as it is.

    >>> locate("timm:resnet18"), locate("package.module:build")
    ('timm:resnet18', 'package.module:build')
    """
    head, _, tail = spec.rpartition(":")
    if head.endswith(".py"):
        return f"{Path(head).resolve()}:{tail}"
    return f"hf:{Path(tail).resolve()}" if head == "hf" and Path(tail).is_dir() else spec


def network(spec: str, weights: Path | None, *, seed: int, device: torch.device, home: str | None = None) -> nn.Module:
    """The network, in eval mode on the device, with its weights.

    Args:
        spec: ``module:function``, ``file.py:function``, ``timm:NAME`` or ``hf:PATH``.
        weights: A .safetensors, .pt or .pth file with the state dict; None for what the function gives.
        seed: Set while the function runs, so that weights that it draws are the same next time.
        device: Where it goes.
        home: The folder that modules are looked for in; by default the folder that the command runs in.
    """
    if weights is not None and not weights.is_file():
        raise UsageError(f"There is no file {weights} with weights.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _built(spec, pretrained=weights is None, home=os.getcwd() if home is None else home)
    if weights is not None:
        _load(model, weights)
    if next(model.parameters(), None) is None:
        raise UsageError(f"The network of {spec} has no parameters.")
    try:
        return model.to(device).eval()
    except NotImplementedError as error:
        raise UsageError(
            f"The network of {spec} has weights without values ({error}); give them with --weights."
        ) from error


def _built(spec: str, *, pretrained: bool, home: str) -> nn.Module:
    head, _, tail = spec.rpartition(":")
    if not head or not tail:
        raise UsageError(f"{spec!r} names no function. {HELP}")
    if spec.startswith("timm:"):
        return _timm(spec.removeprefix("timm:"), pretrained=pretrained)
    if spec.startswith("hf:"):
        return _hugging_face(spec.removeprefix("hf:"))
    made = _attribute(_module(head, home), tail, spec)
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise UsageError(f"{spec} is {type(made).__name__}, neither a network nor a function that returns one. {HELP}")
    model = _called(made, spec)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} returned {type(model).__name__}; it must return the network, a torch.nn.Module.")
    return model


def _module(name: str, here: str) -> ModuleType:
    """A module by name, looked for in the folder ``here`` first; or a file."""
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name).resolve()
        if not path.is_file():
            raise UsageError(f"There is no file {name}. {HELP}")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules.setdefault(path.stem, module)
        found.loader.exec_module(module)
        return module
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) is no success: there is no network yet
        raise UsageError(
            f"{name} cannot be imported. {_original(error)}\n{HELP} Modules are looked for in {here} and among what is "
            "installed."
        ) from error


def _attribute(module: ModuleType, name: str, spec: str) -> Any:
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{spec}: the module has no {name!r}; it has {listing(known, limit=12) or 'no functions'}.")
    return getattr(module, name)


def _called(function: Callable[[], Any], spec: str) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{spec} failed; it is called without arguments. {_original(error)}") from error


def _original(error: BaseException) -> str:
    """The error itself, and the last line of the user's code that it comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {error}{where}"


def _timm(name: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UsageError(f"--model timm:{name} needs timm: pip install timm.") from error
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # an unknown name, or no way to the weights
        raise UsageError(f"timm cannot make {name!r}: {_original(error)}") from error
    return model


def _hugging_face(path: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"--model hf:{path} needs transformers: pip install transformers.") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        made = (config.architectures or [""])[0]
        kinds = ("SequenceClassification", "ImageClassification")
        kind = next((f"AutoModelFor{kind}" for kind in kinds if made.endswith(f"For{kind}")), "AutoModel")
        model: nn.Module = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # no such folder or name, no way to the hub, a damaged file
        raise UsageError(f"transformers finds no model at {path!r}: {_original(error)}") from error
    return model


# Weights.


def _load(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into the network; all keys and shapes have to fit."""
    state = read_weights(path)
    own = model.state_dict()
    missing, surplus = [k for k in own if k not in state], [k for k in state if k not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} (the network has {tuple(own[key].shape)})"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if missing or surplus or shapes:
        parts = (("missing", missing), ("not in the network", surplus), ("of another shape", shapes))
        found = "; ".join(f"{what}: {listing(keys, limit=8)}" for what, keys in parts if keys)
        raise UsageError(
            f"The weights in {path} do not fit the network. {found}. Save model.state_dict() of this network."
        )
    model.load_state_dict(state)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name; pickles run no code."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UsageError(f"{path} is not a complete safetensors file ({error}).") from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(f"{path} has no ending of weights that is known: .safetensors, .pt, .pth, .bin, .ckpt.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{path} is not a state dict that can be loaded without running code ({first}). Save model.state_dict(), "
            "best as .safetensors."
        ) from error
    inner = next(
        (found[key] for key in WRAPPERS if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), found
    )
    if not isinstance(inner, Mapping) or not all(isinstance(value, Tensor) for value in inner.values()):
        kinds = (
            listing(sorted({type(v).__name__ for v in inner.values()}))
            if isinstance(inner, Mapping)
            else type(inner).__name__
        )
        raise UsageError(f"{path} holds {kinds}, and a state dict holds tensors by name. Save model.state_dict().")
    return dict(inner)


# What a network says about its inputs.


def pixels_of(model: nn.Module) -> dict[str, Any]:
    """How a timm model wants its images: means and standard deviations of pixels, and their size; else nothing."""
    config: Any = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or "mean" not in config or "std" not in config:
        return {}
    size = tuple(config["input_size"][1:]) if "input_size" in config else None
    return {"pixel_mean": tuple(config["mean"]), "pixel_std": tuple(config["std"]), "size": size}
