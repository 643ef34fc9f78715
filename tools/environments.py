"""Make fresh environments, and try linnet there: before a release, and on other versions of Python and torch.

Two commands, from the root of a checkout:

    python tools/environments.py release    # build, check and install what a package index would get
    python tools/environments.py matrix     # the tests on other versions; --only 3.13 for some of them

Everything lies in build/environments. Nothing of the environment of the caller is used but its Python and its pip
settings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "environments"
TOOLS = ["pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.120,<7"]
"""What the tests themselves import, for environments without extras."""
CORE = """
import importlib, pkgutil, linnet
libraries = ("gpytorch", "botorch", "lightning", "transformers")
optional = {"linnet.limits", "linnet.cli.commands.demo", *(f"linnet.interop.{name}" for name in libraries)}
missing = set()
for module in pkgutil.walk_packages(linnet.__path__, "linnet."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert "pip install 'linnet[" in str(error), error
        missing.add(module.name)
assert missing == optional, (missing, optional)
"""
"""Every module can be imported without extras, but for modules that name the extra that they need."""


@dataclass(frozen=True)
class Environment:
    """One environment of the matrix."""

    python: str  # as in python3.12
    torch: str  # a requirement; "torch" is the newest
    extras: bool = True  # whether all extras are installed; without them only tests of the core run

    @property
    def name(self) -> str:
        torch = self.torch.removeprefix("torch").strip("=~<>.*") or "newest"
        return f"python {self.python}, torch {torch}" + ("" if self.extras else ", no extras")


MATRIX = [
    Environment("3.11", "torch==2.11.*"),
    Environment("3.11", "torch==2.13.*"),
    Environment("3.12", "torch==2.13.*"),
    Environment("3.13", "torch"),
    Environment("3.11", "torch==2.13.*", extras=False),
]


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command. Its output is printed; a failure raises."""
    hidden = ("VIRTUAL_ENV", "VENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")  # make passes on what it was given
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=clean | variables)


def make(folder: Path, python: str, *requirements: str | Path, **variables: str) -> Path:
    """A new environment with these requirements; its folder of commands."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    run(
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        *requirements,
        **variables,
    )
    return folder / "bin"


def check_release() -> None:
    """Build the wheel and the sdist, check their contents, install the wheel alone, and test the unpacked sdist."""
    dist = WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    tools = make(WORK / "tools", sys.executable, "build>=1.2", "twine>=6", "check-wheel-contents>=0.6")
    run(tools / "python", "-m", "build", "--outdir", dist)
    wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
    run(tools / "twine", "check", "--strict", wheel, sdist)
    run(tools / "check-wheel-contents", wheel)
    pins = ROOT / "constraints.txt"
    core = make(WORK / "core", sys.executable, "-c", pins, wheel)
    run(core / "python", "-W", "error::FutureWarning", "-c", CORE, cwd=WORK)
    run(core / "linnet", "--version", cwd=WORK)
    unpacked = WORK / "sdist"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    run("make", "quick", f"PYTHON={sys.executable}", cwd=next(unpacked.iterdir()))
    print(f"{wheel.name} and {sdist.name} can be published.")


def try_environment(environment: Environment) -> bool | None:
    """Whether the tests pass in an environment; None where this machine has no such Python."""
    python = shutil.which(f"python{environment.python}")
    found = python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    if not found:
        return None
    folder = WORK / environment.name.replace(", ", "-").replace(" ", "")
    linnet = f"{ROOT}[dev,onnx]" if environment.extras else str(ROOT)
    try:
        assert python is not None
        wanted = [environment.torch, "-e", linnet, *([] if environment.extras else TOOLS)]
        pins = ["-c", str(ROOT / "constraints.txt")] if environment == MATRIX[1] else []
        commands = make(folder, python, *pins, *wanted)
        workers = str(len(os.sched_getaffinity(0)))
        # Without extras, modules that name the extra that they need have no doctests to run.
        options = ["-q", "-n", workers, "-m", "not slow", "-p", "no:cacheprovider"]
        options += [] if environment.extras else ["--doctest-ignore-import-errors"]
        run(commands / "pytest", *options, OMP_NUM_THREADS="1")
    except subprocess.CalledProcessError:
        return False
    return True


def try_matrix(only: list[str]) -> bool:
    """Try the environments whose names contain one of some words, and print a table."""
    rows, good = [], True
    for environment in MATRIX:
        if only and not any(word in environment.name for word in only):
            continue
        start = time.perf_counter()
        passed = try_environment(environment)
        good &= passed is not False
        said = {True: "pass", False: "FAIL", None: f"no python{environment.python} here"}[passed]
        rows.append(f"{environment.name:40} {said} ({time.perf_counter() - start:.0f} s)")
    print("\n".join(rows))
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["release", "matrix"])
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of environments")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if given.command == "release":
        check_release()
    else:
        sys.exit(0 if try_matrix(given.only) else 1)
