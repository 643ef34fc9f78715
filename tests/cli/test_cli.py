"""The `linnet` command: its commands, and what it imports at the start."""

import subprocess
import sys

import linnet
from tests.support.command_cases import run as invoke

HEAVY = ("matplotlib", "gpytorch", "linnet.cli.commands")
COMMANDS = (
    *("demo", "adapt", "uncertainty", "predict", "select", "forget", "attribute", "export"),
    *("embed", "spectrum", "similarity", "info"),
)


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"linnet {linnet.__version__}\n"


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output
        help_ = invoke(command, "--help")
        assert help_.exit_code == 0
        said = result.output.split(f" {command} ")[1].split(maxsplit=1)[0]  # the first word on the command
        assert said.isalpha() and said in help_.output
    assert invoke("demo", "--seed", -1).exit_code == 2


def test_startup_imports_nothing_heavy():
    code = f"import sys, linnet.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
