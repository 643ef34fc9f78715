"""Networks from what `--model` and `--weights` say."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from linnet._common import listing
from linnet.cli.network_output import NetworkOutput
from linnet.cli.terminal import UsageError

HELP = "--model is module:function or file.py:function (a function that returns the network), timm:NAME or hf:PATH."


def locate(spec: str) -> str:
    """The value of --model with the absolute path of a file or a folder; other values unchanged.

    >>> locate("timm:resnet18"), locate("package.module:build")
    ('timm:resnet18', 'package.module:build')
    """
    before, path, after = split_path(spec)
    return f"{before}{Path(path).resolve()}{after}" if path else spec


def split_path(spec: str) -> tuple[str, str, str]:
    """The value of --model as text, a path and text; no path where the value names a module or a model of a hub."""
    head, _, tail = spec.rpartition(":")
    if head.endswith(".py"):
        return "", head, f":{tail}"
    local = spec.startswith("hf:") and (os.path.isabs(spec[3:]) or Path(spec[3:]).is_dir())
    return ("hf:", spec[3:], "") if local else (spec, "", "")


def find_code(spec: str, home: str | None) -> Path | None:
    """The file of code that a value of --model names; None for a hub, and for an installed package."""
    path = split_path(spec)[1]
    if not path and home is not None and not spec.startswith(("timm:", "hf:")):
        below = Path(home, *spec.rpartition(":")[0].split("."))
        path = next((str(one) for one in (below.with_suffix(".py"), below / "__init__.py") if one.is_file()), "")
    return Path(path) if path and Path(path).is_file() else None


def load_network(
    spec: str,
    weights: Path | None,
    *,
    seed: int,
    device: torch.device,
    home: str | None = None,
    random_weights: bool = True,
    output: NetworkOutput | None = None,
) -> nn.Module:
    """Make the network, in eval mode on the device, with its weights.

    Args:
        spec: ``module:function``, ``file.py:function``, ``timm:NAME`` or ``hf:PATH``.
        weights: A .safetensors, .pt or .pth file with the state dict; None for the weights that the function gives.
        seed: Seed of weights that the function draws, so that they are the same next time.
        device: The device of the network.
        home: The folder where modules are searched; by default the folder where the command runs.
        random_weights: Whether all weights may be drawn at random.
        output: Which output of the network is read, and in which units.
    """
    if weights is not None and not weights.is_file():
        raise UsageError(f"There is no file {weights} with weights.")
    home = os.getcwd() if home is None else home
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        model = _build(spec, pretrained=weights is None, home=home)
        if weights is None and not random_weights and not torch.equal(before, torch.get_rng_state()):
            _refuse_random(spec, model, _build(spec, pretrained=True, home=home))
    if weights is not None:
        _load_weights(model, weights)
    if next(model.parameters(), None) is None:
        raise UsageError(f"The network of {spec} has no parameters.")
    if output is not None:
        output.attach(model)
    try:
        return model.to(device).eval()
    except NotImplementedError as error:
        raise UsageError(
            f"The network of {spec} has weights without values ({error}). Give the weights with --weights."
        ) from error


def load_networks(spec: str, weights: Sequence[Path], **given: Any) -> list[nn.Module]:
    """One network for each file of weights, or the one network of the function; the rest is as for `load_network`."""
    return [load_network(spec, path, **given) for path in weights or (None,)]


def _refuse_random(spec: str, model: nn.Module, other: nn.Module) -> None:
    """Raise where another seed gives other weights everywhere; warn where it gives other weights in some places."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    same = {name: torch.equal(a, b) for (name, a), b in pairs if a.ndim > 1}  # biases and scales are often constants
    drawn = [name for name, equal in same.items() if not equal]
    if drawn and len(drawn) == len(same):
        raise UsageError(
            f"The weights of {spec} are drawn at random: another seed gives other weights. Give the trained weights "
            "with --weights, or pass --random-weights to use a network that is not trained."
        )
    if drawn:
        warnings.warn(
            f"Some weights of {spec} are drawn at random: {listing(drawn)}. Give trained weights with --weights if "
            "there are any.",
            stacklevel=2,
        )


def _build(spec: str, *, pretrained: bool, home: str) -> nn.Module:
    head, _, tail = spec.rpartition(":")
    if not head or not tail:
        raise UsageError(f"{spec!r} names no function. {HELP}")
    if spec.startswith("timm:"):
        return _make_timm(spec.removeprefix("timm:"), pretrained=pretrained)
    if spec.startswith("hf:"):
        return _make_hugging_face(spec.removeprefix("hf:"))
    made = _find_attribute(_import(head, home), tail, spec)
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise UsageError(
            f"{spec} is {type(made).__name__}, neither a network nor a function that returns a network. {HELP}"
        )
    model = _call(made, spec)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} returned {type(model).__name__}. It must return the network, a torch.nn.Module.")
    return model


def _import(name: str, here: str) -> ModuleType:
    """Import a file, or a module by name; the folder ``here`` is searched first."""
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
    except (Exception, SystemExit) as error:  # sys.exit(0) is a failure too: there is no network yet
        raise UsageError(
            f"{name} cannot be imported. {_quote(error)}\n{HELP} Modules are searched in {here} and among "
            "the installed packages."
        ) from error


def _find_attribute(module: ModuleType, name: str, spec: str) -> Any:
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{spec}: the module has no {name!r}. It has {listing(known, limit=12) or 'no functions'}.")
    return getattr(module, name)


def _call(function: Callable[[], Any], spec: str) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{spec} failed. It is called without arguments. {_quote(error)}") from error


def _quote(error: BaseException) -> str:
    """The error, and the last line of the user's code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {error}{where}"


def _make_timm(name: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UsageError(f"--model timm:{name} needs timm: pip install timm.") from error
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # an unknown name, or weights that cannot be downloaded
        raise UsageError(f"timm cannot make {name!r}: {_quote(error)}") from error
    return model


def _make_hugging_face(path: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"--model hf:{path} needs transformers: pip install transformers.") from error
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(path)
            made = (config.architectures or [""])[0]
            kinds = ("SequenceClassification", "ImageClassification")
            kind = next((f"AutoModelFor{kind}" for kind in kinds if made.endswith(f"For{kind}")), "AutoModel")
            model: nn.Module = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # an unknown folder or name, no access to the hub, a damaged file
        raise UsageError(f"{say_missing(path)}transformers finds no model at {path!r}: {_quote(error)}") from error
    return model


def say_missing(path: str) -> str:
    """The beginning of an error about a path of transformers: that there is no such folder, where there is none."""
    return "" if Path(path).is_dir() else f"There is no folder {path} here, and "


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Make transformers draw no progress bars and log no warnings in a block. Afterwards the settings are as before.

    The warnings are tables of weights that a file does not have. `_refuse_random` says what matters of them.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(max(level, logging.ERROR))
    if bars:
        _set_progress_bars(logging.disable_progress_bar)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            _set_progress_bars(logging.enable_progress_bar)


def _set_progress_bars(function: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an environment variable may decide about the bars of downloads
        function()


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into the network. All keys and shapes must fit, as for torch."""
    state = read_weights(path)
    try:
        model.load_state_dict(state)
        return
    except RuntimeError:
        own = model.state_dict()
    # Counters of batches may be missing: earlier versions of torch had none.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    surplus = [k for k in state if k not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} (the network has {tuple(own[key].shape)})"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if not (missing or surplus or shapes):
        model.load_state_dict(state, strict=False)
        return
    parts = (("missing", missing), ("not in the network", surplus), ("of another shape", shapes))
    found = "; ".join(f"{what}: {listing(keys, limit=8)}" for what, keys in parts if keys)
    raise UsageError(f"The weights in {path} do not fit the network. {found}. Save model.state_dict() of this network.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name. No code of the file is run."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UsageError(f"{path} is not a complete safetensors file ({error}).") from error
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(
            f"{path} has an unknown ending. Known endings of weights are .safetensors, .pt, .pth, .bin and .ckpt."
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors, such as a whole network, and loading it would run code of the file. Save "
            "model.state_dict(), best as .safetensors."
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{path} is not a state dict that can be loaded without running code ({first}). Save model.state_dict(), "
            "best as .safetensors."
        ) from error
    if isinstance(found, Mapping):  # checkpoints keep the weights among other things, under one of these keys
        wrappers = ("state_dict", "model_state_dict", "model")
        found = next((found[key] for key in wrappers if isinstance(found.get(key), Mapping)), found)
    values = found.values() if isinstance(found, Mapping) else [found]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in values):
        kinds = listing(sorted({type(value).__name__ for value in values}))
        raise UsageError(f"{path} holds {kinds}, but a state dict holds tensors by name. Save model.state_dict().")
    return dict(found)


def find_pixel_settings(model: nn.Module) -> dict[str, Any]:
    """The pixel means, the pixel standard deviations and the image size that a model was trained with.

    timm models have these settings themselves, and models of transformers in the folder of the image processor. The
    settings are empty for all other models.
    """
    config: Any = getattr(model, "pretrained_cfg", None)
    if isinstance(config, Mapping) and "mean" in config and "std" in config:
        size = tuple(config["input_size"][1:]) if "input_size" in config else None
        return {"pixel_mean": tuple(config["mean"]), "pixel_std": tuple(config["std"]), "size": size}
    path = getattr(getattr(model, "config", None), "name_or_path", None)
    if not path or getattr(model, "main_input_name", None) != "pixel_values":
        return {}
    from transformers import ImageProcessingMixin

    try:
        with quiet_transformers():
            processor, _ = ImageProcessingMixin.get_image_processor_dict(path)
    except OSError:  # the model has no image processor
        return {}
    return _translate_image_processor(processor, getattr(model.config, "num_channels", 3))


def _translate_image_processor(processor: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """The settings of an image processor, for pixels from 0 to 1. Only settings that change the pixels are there.

    >>> _translate_image_processor({"image_mean": [0.5], "image_std": [0.5], "size": {"height": 8, "width": 9}}, 1)
    {'pixel_mean': (0.5,), 'pixel_std': (0.5,), 'size': (8, 9)}
    >>> _translate_image_processor({"do_normalize": False, "rescale_factor": 1 / 127.5, "rescale_offset": True}, 1)
    {'pixel_mean': (0.5,), 'pixel_std': (0.5,)}
    """
    found: dict[str, Any] = {}
    # The processor computes (factor * pixel - shift - mean) / std.
    factor = round(255 * processor.get("rescale_factor", 1 / 255), 12) if processor.get("do_rescale", True) else 255.0
    shift = 1.0 if processor.get("rescale_offset") else 0.0
    means, stds = processor.get("image_mean"), processor.get("image_std")
    if not processor.get("do_normalize", True) or means is None or stds is None:
        means, stds = [0.0] * channels, [1.0] * channels
    found["pixel_mean"] = tuple((mean + shift) / factor for mean in means)
    found["pixel_std"] = tuple(std / factor for std in stds)
    if not any(found["pixel_mean"]) and set(found["pixel_std"]) == {1.0}:
        found = {}
    crop = processor.get("crop_size") if processor.get("do_center_crop") else None
    size = crop or (processor.get("size") if processor.get("do_resize", True) else None)
    if isinstance(size, int):
        found["size"] = (size, size)
    elif isinstance(size, Mapping) and {"height", "width"} <= set(size):
        found["size"] = (size["height"], size["width"])
    return found
