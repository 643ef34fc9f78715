"""Let ranks disagree, fail and die in the middle of a fit, and look at how the other ranks end.

    python -m benchmarks.failures --repeats 20

Each try starts two to four gloo processes that fit an estimator together. One of them has other weights, data, options
or versions, raises an exception at a random call of a function of linnet, or is killed at a random moment. All others
have to end within ten seconds, with an error that says what has happened, or else with the whole result. A fit that
writes a checkpoint goes on afterwards in one process and has to give the result of an undisturbed fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import linnet
from linnet._common import distributed
from linnet.jacobian import linearization

SAID = {
    "weights": "differ in the weights of the model",
    "data": "differ in the data",
    "options": "differ in options",
    "versions": "differ in the version of linnet",
    "calls": "make different calls",
    "raising": "failed with Injected: at random",
    "killed": "has lost the other ranks",
}
"""Faults, and what all ranks have to say about each."""

LIMIT, TIMEOUT, PATIENCE = 10.0, 5.0, 60.0
"""Seconds after the fault in which all ranks have to end, seconds of the group's own timeout, and seconds after which a
rank counts as hanging."""


class Injected(Exception):
    """An error that only a test raises."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Try:
    """One try.

    Attributes:
        fault: Name of the failure to provoke.
        door: Name of the estimator that the ranks fit.
        world: Number of ranks.
        culprit: The rank that goes wrong.
        place: The call of a function of linnet at which an error is raised; a share of all calls, from 0 to 1.
        folder: For the meeting, the results and the checkpoint.
    """

    fault: str
    door: str
    world: int
    culprit: int
    place: float
    folder: Path


def prepare(door: str, folder: Path | None, *, fault: str = "", wrong: bool = False) -> Callable[[], Tensor]:
    """A fit, which gives its result; ``wrong`` says that this rank has something else than the others."""
    torch.default_generator.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, labels, seed = normal(30, 4, seed=1), torch.arange(30) % 3, 0
    if wrong and fault == "weights":
        net[0].weight.data[0, 0] += 1e-9
    if wrong and fault == "data":
        x[-1, 0] += 1e-9
    if wrong and fault == "options":
        seed = 1
    if wrong and fault == "versions":
        linearization.__version__ = "0"
    given: dict[str, Any] = {"seed": seed, "progress": False}
    if door == "laplace":
        la = linnet.Laplace(net, "classification", "kron", **given)
        return lambda: la.fit(x, labels).predict_proba(x[:5])
    if door == "classifier":
        clf = linnet.TangentClassifier(net, **given)
        return lambda: clf.fit(x, labels).predict_proba(x[:5])
    if door == "regressor":
        reg = linnet.TangentRegressor(net, output=_first, solver="cg-function", **given)
        return lambda: torch.cat(reg.fit(x, x[:, 0]).predict(x[:5], return_std=True))
    file = None if folder is None else folder / "state"
    options: dict[str, Any] = {"method": "krylov", "block": 2, "passes": 12, "tolerance": 0.0, "checkpoint": file}
    emb = linnet.FisherEmbedding(net, 3, **options, **given)
    return lambda: emb.fit(x).eigenvalues_


def _first(out: Tensor) -> Tensor:
    return out[:, 0]


DOORS = ("laplace", "classifier", "regressor", "embedding")


class Calls:
    """Counts calls of functions of linnet, and raises at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.raised = at, 0, 0.0
        self.package = str(Path(linnet.__file__).parent)

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        # The exchange itself is no place: there a rank fails with its connection.
        if event != "call" or not name.startswith(self.package) or name == distributed.__file__:
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            self.raised = time.time()
            raise Injected("at random")


def work(one: Try, rank: int, calls: int, begun: int) -> None:
    """One rank, which writes down how it has ended."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{one.folder}/meeting",
        rank=rank,
        world_size=one.world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    wrong = rank == one.culprit
    os.write(begun, b".")
    calls_of = Calls(max(1, int(one.place * calls)) if wrong and one.fault == "raising" else None)
    try:
        fit = prepare(one.door, one.folder, fault=one.fault, wrong=wrong)
        if wrong and one.fault == "calls":
            linnet.linearize(nn.Linear(1, 1)).jacobian(torch.ones(3, 1)).outputs()
        with calls_of:
            result = fit()
        said = {"result": result.flatten().tolist()}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    (one.folder / f"rank{rank}.json").write_text(json.dumps(said | {"ended": time.time(), "raised": calls_of.raised}))


def start(one: Try, rank: int, calls: int) -> tuple[int, int]:
    """The number of a new process, and a pipe on which it says that it has begun."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(heard)
            work(one, rank, calls, said)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(said)
    return pid, heard


def run(one: Try, known: Tensor, calls: int, duration: float) -> tuple[str, float]:
    """How a try has ended, and how many seconds after the fault the last rank ended."""
    processes = [start(one, rank, calls) for rank in range(one.world)]
    for _, heard in processes:
        os.read(heard, 1)
        os.close(heard)
    began = time.time()
    if one.fault == "killed":
        time.sleep(one.place * duration)
        began = time.time()
        os.kill(processes[one.culprit][0], signal.SIGKILL)
    waiting = {pid for pid, _ in processes}
    while waiting and time.time() - began < PATIENCE:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    files = [one.folder / f"rank{rank}.json" for rank in range(one.world)]
    told = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if one.fault == "killed":
        told.pop(one.culprit)
    began = max([began, *(said["raised"] for said in told if said.get("raised"))])
    seconds = max((said["ended"] for said in told if said), default=began) - began
    if waiting:
        return "HANGS", seconds
    return judge(one, told, known), seconds


def judge(one: Try, told: list[dict[str, Any]], known: Tensor) -> str:
    """Whether all ranks have ended as they should."""
    if one.fault in ("raising", "killed") and all("result" in said for said in told):
        # The fault came when the fit was over, or linnet does without the function that failed.
        right = all(_same(torch.tensor(said["result"], dtype=torch.float64), known) for said in told)
        return "finished" if right else "WRONG RESULT"
    expected = SAID[one.fault]
    for said in told:
        text = said.get("error", "")
        own = one.fault == "raising" and text == "Injected: at random"
        if expected not in text and not own:
            print(f"{one}: {[other.get('trace', other) for other in told]}".replace("\\n", "\n"), file=sys.stderr)
            return "WRONG ERROR"
    if one.door == "embedding" and one.fault in ("raising", "killed") and not _goes_on(one, known):
        return "DAMAGED CHECKPOINT"
    return "told"


def _goes_on(one: Try, known: Tensor) -> bool:
    """Whether one process goes on from the checkpoint to the result of an undisturbed fit."""
    out = one.folder / "again.pt"
    pid = os.fork()
    if pid == 0:
        try:
            torch.save(prepare(one.door, one.folder)(), out)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return out.exists() and _same(torch.load(out), known)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.flatten().shape and bool(((a - b.flatten()).abs() <= 1e-6 * b.abs().max()).all())


def measure(door: str, world: int, folder: Path) -> tuple[Tensor, int, float]:
    """The result of an undisturbed fit, its calls of functions of linnet, and its seconds."""
    folder.mkdir()
    one, out = Try("", door, world, -1, 0.0, folder), folder / "known.pt"
    processes = [start(one, rank, 0) for rank in range(world)]
    for pid, _ in processes:
        os.waitpid(pid, 0)
    said = json.loads((folder / "rank0.json").read_text())
    if "result" not in said:
        raise RuntimeError(f"An undisturbed fit has failed: {said['trace']}")
    pid = os.fork()
    if pid == 0:
        begin = time.perf_counter()
        try:
            torch.set_num_threads(1)
            fit = prepare(door, None)
            with Calls(None) as calls:
                fit()
            torch.save((calls.count, time.perf_counter() - begin), out)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    count, seconds = torch.load(out)
    return torch.tensor(said["result"], dtype=torch.float64), count, seconds


def run_all(
    repeats: int, seed: int, faults: tuple[str, ...] = tuple(SAID), limit: float = LIMIT
) -> dict[str, Counter[str]]:
    """Outcomes of so many tries of each fault; the key "seconds" counts the whole seconds that the slowest took."""
    torch.set_num_threads(1)
    for name in linnet.__all__:  # children need not import what their parent has
        getattr(linnet, name)
    import_module("sympy")  # and what torch imports in a first pass
    chance = random.Random(seed)
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = {door: measure(door, 2, Path(name) / door) for door in DOORS}
        for fault in faults:
            found[fault] = Counter()
            for i in range(repeats):
                folder = Path(name) / f"{fault}{i}"
                folder.mkdir()
                world = chance.choice((2, 2, 3, 4))
                one = Try(fault, DOORS[i % len(DOORS)], world, chance.randrange(world), chance.random(), folder)
                outcome, seconds = run(one, *known[one.door])
                found[fault][outcome if seconds <= limit else "LATE"] += 1
                found.setdefault("seconds", Counter())[f"{seconds:.0f}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="tries of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=None, choices=tuple(SAID))
    parser.add_argument("--seconds", type=float, default=LIMIT, help="in which all ranks have to end")
    given = parser.parse_args()
    found = run_all(given.repeats, given.seed, tuple(SAID) if given.only is None else (given.only,), given.seconds)
    seconds = found.pop("seconds")
    for fault, outcomes in found.items():
        print(f"{fault}: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}")
    bad = sum(count for outcomes in found.values() for name, count in outcomes.items() if name.isupper())
    print(f"seconds until the last rank ended: {dict(sorted(seconds.items(), key=lambda item: int(item[0])))}")
    print(f"wrong: {bad} of {sum(outcomes.total() for outcomes in found.values())}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
