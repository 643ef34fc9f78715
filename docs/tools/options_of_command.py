"""Tables of the `linnet` command, read from the command itself."""

from __future__ import annotations

from typing import Any


def _commands() -> dict[str, Any]:
    from typer.main import get_command

    from linnet.cli import app

    group: Any = get_command(app)
    return dict(group.commands)


def commands() -> str:
    """All commands, with the first sentence of their help."""
    rows = [
        f"| [`linnet {name}`](#linnet-{name}) | {(command.help or '').split(chr(10))[0]} |"
        for name, command in _commands().items()
    ]
    return "\n".join(["| command | what it does |", "| --- | --- |", *rows])


def options(name: str) -> str:
    """The help of one command and its options; required ones first."""
    command = _commands()[name]
    params = [p for p in command.params if "--help" not in p.opts]
    rows = [_row(p) for p in sorted(params, key=lambda p: not p.required)]
    table = ["| option | | default |", "| --- | --- | --- |", *rows]
    return "\n".join([command.help or "", "", '<div class="options" markdown>', "", *table, "", "</div>"])


def _row(param: Any) -> str:
    name = param.opts[0] if param.opts[0].startswith("-") else param.name.upper()
    help_text = (param.help or "").replace("|", "\\|").replace("*", "\\*")
    default = "required" if param.required else _default(param.default)
    return f"| `{name}` | {help_text} | {default} |"


def _default(value: Any) -> str:
    value = value() if callable(value) else value
    return "" if value in (None, False) else f"`{value}`"
