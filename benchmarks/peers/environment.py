"""A virtual environment with the peers, made when it is first needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.jobs import MODULES, PACKAGES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = ".installed"

UNWANTED = "torchvision"
"""A requirement of laplace-torch and BackPACK that no job uses; where it was built for another torch than the one that
the constraints name, its mere presence makes imports fail."""


def environment(folder: Path = FOLDER) -> str:
    """The interpreter of an environment in ``folder`` that has the peers; made there, or the one made before."""
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    if ready(folder):
        return python
    print(
        f"Installing {', '.join(PACKAGES.values())} into {folder}; this takes a few minutes the first time.", flush=True
    )
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    _run(*pip, "install", "--constraint", str(CONSTRAINTS), *PACKAGES.values())
    _run(*pip, "uninstall", "--yes", UNWANTED)
    check(python, PACKAGES)
    (folder / STAMP).write_text(_wanted(), encoding="utf-8")
    return python


def ready(folder: Path) -> bool:
    """Whether the environment was made, with these packages and constraints."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _wanted()


def check(python: str, peers: Iterable[str]) -> None:
    """Refuse an interpreter that does not import these peers."""
    needed = [MODULES[name] for name in peers]
    code = f"import importlib\nfor name in {needed!r}:\n    importlib.import_module(name)"
    try:
        done = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise FileNotFoundError(f"--peer needs a Python interpreter; {python} does not start: {error}") from error
    if done.returncode:
        packages = " ".join(PACKAGES[name] for name in peers)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ImportError(
            f"{python} needs {', '.join(needed)}; {last}. Install them there (pip install {packages}), "
            "or leave --peer out, and an environment is made"
        )


def _wanted() -> str:
    """What the stamp says: other packages or constraints need another environment."""
    constraints = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    return f"{' '.join(PACKAGES.values())}\n{constraints}\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
