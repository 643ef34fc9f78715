"""Options of the command line, which are text, as what the commands take."""

from __future__ import annotations

from typing import Any

from linnet.cli.data_files.examples import Reading
from linnet.cli.terminal import UsageError

_READING = ("target", "task", "columns", "drop", "size", "gray", "pixel_mean", "pixel_std", "strict", "max_length")


def about_data(options: dict[str, Any]) -> dict[str, Any]:
    """The options about data, of all that a command has."""
    return {name: options[name] for name in _READING if name in options}


def reading_of(model: str, *, target: list[str] | None, task: str = "auto", gray: bool, **options: Any) -> Reading:
    """How data files are read, from the options about them.

    Args:
        model: As --model takes it; one of Hugging Face brings its tokenizer.
        target: Columns.
        task: "auto", "classification" or "regression".
        gray: Whether images have one channel.
        options: The others, as text.
    """
    one_of("--task", task, ("auto", "classification", "regression"))
    if options["columns"] and options["drop"]:
        raise UsageError("--columns names all columns that are used, so that there is nothing to --drop; give one.")
    columns, drop, strict, longest = (options[name] for name in ("columns", "drop", "strict", "max_length"))
    return Reading(
        targets=tuple(target or ()),
        columns=None if columns is None else _names(columns),
        drop=() if drop is None else _names(drop),
        task=task,
        size=None if options["size"] is None else _size(options["size"]),
        channels=1 if gray else 3,
        pixel_mean=_numbers("--pixel-mean", options["pixel_mean"]),
        pixel_std=_numbers("--pixel-std", options["pixel_std"]),
        strict=strict,
        tokenizer=model.removeprefix("hf:") if model.startswith("hf:") else None,
        max_length=longest,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--size is a number of pixels, or height x width such as 32x48; got {text!r}.")
    return int(parts[0]), int(parts[-1])


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} is one number for each channel, with commas; got {text!r}.") from error


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise unless an option has one of the known values."""
    if value not in known:
        raise UsageError(f"{option} must be one of {', '.join(known)}; got {value!r}.")
