"""Kill processes that save and that resume, at random moments, and count damaged or mixed results that are accepted.

    python -m benchmarks.kills --repeats 100

Every kind of file is written in turn from two fits by a child process, which is killed (SIGKILL) at a random moment.
What can be loaded afterwards must give the answers of one fit or of the other. A decomposition that writes checkpoints
is killed and started again, every other time with other data; where it gives a result, that must be the result of an
undisturbed run with the same data.
"""

from __future__ import annotations

import argparse
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
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet._common import Checkpoint

FITS = ("regressor", "classifier", "laplace", "embedding")
KINDS = ("checkpoint", *FITS, "folder")
Outcome = str  # "kept", "nothing", "refused" or "DAMAGED"


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2)).double().eval()


# Processes.


def child(work: Callable[[Callable[[], Any]], Any]) -> tuple[int, int]:
    """A forked process that does some work; its number, and a pipe on which it says that it has begun."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(heard)
            work(lambda: os.write(said, b"."))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(said)
    return pid, heard


def kill_after(work: Callable[[Callable[[], Any]], Any], delay: float) -> None:
    """Start the work, and kill it so many seconds after it has begun."""
    pid, heard = child(work)
    os.read(heard, 1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(heard)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("The process failed before it was killed.")


def result_of(work: Callable[[], Tensor], folder: Path) -> Tensor | None:
    """The result of some work in a process of its own; None if the work raises a ValueError."""
    out = folder / "result.pt"
    out.unlink(missing_ok=True)

    def whole(_: Callable[[], Any]) -> None:
        try:
            found = work()
        except ValueError:
            return
        torch.save(found, out)

    pid, heard = child(whole)
    status = os.waitpid(pid, 0)[1]
    os.close(heard)
    if status:
        raise RuntimeError("A process that nobody killed has failed.")
    return torch.load(out) if out.exists() else None


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-8 * b.abs().max()).all())


# Files.


def fitted(kind: str, seed: int) -> Any:
    """One of two fits that differ in their data; folders also hold a network, which differs too."""
    X, y = normal(30, 6, seed=1), normal(30, 2, seed=10 + seed)
    if kind == "classifier":
        return linnet.TangentClassifier(network(), inference="map", prior=1.0, progress=False).fit(X, y.argmax(1))
    if kind == "laplace":
        return linnet.Laplace(network(), "regression", "kron", noise=0.1 + seed, prior=1.0, progress=False).fit(X, y)
    if kind == "embedding":
        return linnet.FisherEmbedding(network(), 2, progress=False).fit(normal(30, 6, seed=10 + seed))
    model = network(seed if kind == "folder" else 0)
    return linnet.TangentRegressor(model, noise=0.1, prior=1.0, progress=False).fit(X, y)


def answers(estimator: Any) -> Tensor:
    X = normal(5, 6, seed=3)
    if hasattr(estimator, "transform"):
        return estimator.transform(X)
    if hasattr(estimator, "predict_logits"):
        return estimator.predict_logits(X)[0]
    return torch.cat(estimator.predict(X, return_std=True), 1)


def kill_save(kind: str, fits: list[Any], known: list[Tensor], path: Path, delay: float) -> Outcome:
    """Kill a process that writes two fits in turn; what is there afterwards?"""

    def save(one: Any) -> None:
        one.save_pretrained(path, with_network=True) if kind == "folder" else one.save(path)

    def work(begun: Callable[[], Any]) -> None:
        begun()
        while True:
            for one in fits:
                save(one)

    kill_after(work, delay)
    try:
        if kind == "folder":
            found = answers(linnet.TangentRegressor.from_pretrained(path, network()))
        else:
            found = answers(linnet.load(path, network()))
    except FileNotFoundError:
        return "nothing"
    except ValueError:
        return "refused"
    return "kept" if any(same(found, one) for one in known) else "DAMAGED"


def kill_saves(kind: str, repeats: int, chance: random.Random, folder: Path) -> Counter[Outcome]:
    fits = [fitted(kind, seed) for seed in (0, 1)]
    known = [answers(one) for one in fits]
    assert not same(*known)
    start = time.perf_counter()
    path = folder / f"{kind}.trial"
    fits[0].save_pretrained(path, with_network=True) if kind == "folder" else fits[0].save(path)
    once = time.perf_counter() - start
    return Counter(kill_save(kind, fits, known, path, chance.uniform(0, 4 * once)) for _ in range(repeats))


# Checkpoints.


def decomposed(data: Tensor, file: Path | None) -> Tensor:
    """Eigenvalues and components by many short passes, each of which writes a checkpoint."""
    emb = linnet.FisherEmbedding(
        network(), 3, kernel="ntk", method="krylov", block=2, passes=25, tolerance=0.0, checkpoint=file, progress=False
    )
    emb.fit(data)
    return torch.cat([emb.eigenvalues_[None], emb.right_vectors_])


def writing(data: Tensor, file: Path) -> Callable[[Callable[[], Any]], Any]:
    """The same as work that has begun when it is about to write its first checkpoint."""

    def work(begun: Callable[[], Any]) -> None:
        write = Checkpoint.save

        def save(self: Checkpoint, *args: Any) -> None:
            begun()
            write(self, *args)

        Checkpoint.save = save  # type: ignore[method-assign]
        decomposed(data, file)

    return work


def kill_checkpoints(repeats: int, chance: random.Random, folder: Path) -> Counter[Outcome]:
    data = [normal(60, 6, seed=5), normal(60, 6, seed=5)]
    data[1][30] = normal(6, seed=6)  # one example, which no probe of a few examples would see
    known = [result_of(lambda one=one: decomposed(one, None), folder) for one in data]
    pid, heard = child(writing(data[0], folder / "undisturbed.safetensors"))
    os.read(heard, 1)
    start = time.perf_counter()
    os.waitpid(pid, 0)
    once = time.perf_counter() - start
    assert known[0] is not None and known[1] is not None and not same(known[0], known[1])
    found: Counter[Outcome] = Counter()
    for i in range(repeats):
        file = folder / f"state{i}.safetensors"
        kill_after(writing(data[0], file), chance.uniform(0, once))
        there, other = file.exists(), i % 2
        again = result_of(lambda file=file, other=other: decomposed(data[other], file), folder)
        if again is None:
            found["refused" if other else "REFUSED ITS OWN"] += 1
        else:
            right = same(again, known[other])  # type: ignore[arg-type]
            found[("kept" if there else "nothing") if right else "DAMAGED"] += 1
    return found


def run(repeats: int, seed: int, kinds: tuple[str, ...] = KINDS) -> dict[str, Counter[Outcome]]:
    """Outcomes of so many kills of each kind."""
    torch.set_num_threads(1)
    for name in linnet.__all__:  # children need not import what their parent has
        getattr(linnet, name)
    import_module("sympy")  # and what torch imports in a first pass
    chance = random.Random(seed)
    found = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in KINDS:  # checkpoints first: a process that has run a backward pass cannot fork others that do
            if kind in kinds:
                folder = Path(name)
                one = kill_checkpoints(repeats, chance, folder) if kind == "checkpoint" else None
                found[kind] = kill_saves(kind, repeats, chance, folder) if one is None else one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=100, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=None, choices=KINDS)
    given = parser.parse_args()
    found = run(given.repeats, given.seed, KINDS if given.only is None else (given.only,))
    for kind, outcomes in found.items():
        print(f"{kind}: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}")
    bad = sum(outcomes["DAMAGED"] + outcomes["REFUSED ITS OWN"] for outcomes in found.values())
    print(f"damaged accepted: {bad} of {sum(outcomes.total() for outcomes in found.values())}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
