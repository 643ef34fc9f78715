"""Make small wrong changes in the source, one at a time, and see which of them no test notices.

Each change (a mutant) runs against the tests that execute the changed statement: tests of its own module first (its
examples, and the test file of the same name), then those of its room, then the fastest of the others, for at most
`--seconds` of tests. A mutant that fails a test, cannot be imported or runs into its time limit is killed. A mutant
that passes them all survives, and asks for a test. The survival rate is an upper bound: slow tests, and tests of
experiments and pages, are left out.

Two commands, from the root of a checkout:

    python tools/mutate.py                                 # the files that differ from the revision `main`
    python tools/mutate.py --all --count 300 --seed 0      # a sample over all of src

The first run executes the suite once, with probes in the source, and writes down which test executes which lines. Tests
that fail or skip are left out from then on. This map, and the verdicts so far, lie in build/mutate: a run that was
stopped, or that ran into its `--minutes`, goes on where it was. When tests have changed, their part of the map is made
again. A killed mutant stays killed as long as its file is the same.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from mutants import Mutant, changed, probed, sample
from watch_tests import run

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutate"
FIRST = 25
"""Tests of a mutant's first process: most mutants fail there, and the test files of the others are never imported."""
MOST = 40
"""Tests of a part of the map: few, so that all workers end at about the same time; many, so that starts cost little."""
MATERIAL = re.compile(r"testing/(architectures|hostile)/")
"""Networks that tests are made of, not code under test."""
ELSEWHERE = re.compile(r"tests/(benchmarks|documentation|experiments|tools)/|test_cuda")
"""Tests of other folders than src, and of a GPU."""
SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if not MATERIAL.search(path.as_posix())]


class TimeOverError(Exception):
    """The minutes of this run are over: what still ran has no answer."""


class Trees:
    """Copies of the checkout, one for each worker, in which mutants are made and tests run."""

    def __init__(self, workers: int, minutes: float) -> None:
        self.free, self.all, self.running = queue.SimpleQueue[Path](), list[Path](), set[int]()
        self.end = time.monotonic() + 60 * minutes
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (workers + 1)
        self.beside = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), *self.beside])}
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["watch_tests"])
        shutil.rmtree(WORK / "trees", ignore_errors=True)
        passed_over = (".git", ".venv*", ".*cache*", "__pycache__", ".carry*", ".hypothesis", "build", "results")
        skipped = shutil.ignore_patterns(*passed_over)
        for number in range(workers):
            self.all.append(Path(shutil.copytree(ROOT, WORK / "trees" / str(number), ignore=skipped)))
            shutil.copy(ROOT / "tools" / "line_hits.py", self.all[-1] / "src")
            self.free.put(self.all[-1])

    def write(self, sources: dict[Path, bytes]) -> None:
        """Put other sources into all trees."""
        first, *others = self.all
        for path, source in sources.items():
            (first / path.relative_to(ROOT)).write_bytes(source)
        for part in ("src", "tests"):  # compiled once, for all processes
            compileall.compile_dir(first / part, quiet=1, force=True, workers=len(self.all))
            for tree in others:
                shutil.copytree(first / part, tree / part, dirs_exist_ok=True)

    def stop(self, *_: object) -> None:
        """End all that runs, and the program: what was found is in its file."""
        for pid in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    @contextlib.contextmanager
    def one(self) -> Iterator[Path]:
        """A tree that no other worker has."""
        tree = self.free.get()
        try:
            yield tree
        finally:
            self.free.put(tree)

    def pytest(self, tree: Path, arguments: list[str], limit: float) -> tuple[int | None, dict[str, Any]]:
        """Exit status of pytest, None where the time was over, and what the tests said."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeOverError
        out, hits = tree / "mutate.json", tree / "mutate.hits"
        out.unlink(missing_ok=True)
        hits.write_bytes(bytes(STARTS[-1] + 1))
        environment = {"MUTATE_HITS": str(hits), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), *self.beside])
        child = self.processes.Process(target=run, args=(tree, arguments, environment, self.memory))
        child.start()
        assert child.pid
        self.running.add(child.pid)
        child.join(min(limit, left))
        late = child.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the process and what it started
        child.join()
        self.running.discard(child.pid)
        shutil.rmtree(tree / ".hypothesis" / "examples", ignore_errors=True)  # examples that failed with this mutant
        if late and left < limit:
            raise TimeOverError
        answer = json.loads(out.read_text()) if out.exists() else {"status": 1, "tests": {}}
        return None if late else answer["status"], answer["tests"]


STARTS = list(accumulate((path.read_bytes().count(b"\n") + 1 for path in SOURCES), initial=0))
"""The number of the first line of each source among the lines of all."""


def digest(paths: list[Path]) -> str:
    parts = [path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() for path in sorted(paths)]
    return hashlib.sha256(b"\0".join([sys.version.encode(), *parts])).hexdigest()[:16]


def units(suite: list[str]) -> dict[str, list[str]]:
    """What one process of the map runs, by name: a test file, or the examples of some modules."""
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    common = digest([*(ROOT / "src").rglob("*.py"), *helpers, ROOT / "conftest.py"])
    found = {
        f"{path.stem}-{digest([path])}-{common}": [str(path.relative_to(ROOT))]
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not ELSEWHERE.search(path.as_posix())
    }
    shown = [str(path.relative_to(ROOT)) for path in SOURCES if ">>> " in path.read_text()]
    found |= {f"examples{start}-{common}": shown[start : start + 12] for start in range(0, len(shown), 12)}
    return {name: files for name, files in found.items() if not suite or any(file in suite for file in files)}


def collect(trees: Trees, files: list[str]) -> list[list[str]]:
    """The tests of a unit, in parts."""
    with trees.one() as tree:
        status, found = trees.pytest(tree, ["--collect-only", "-m", "not slow", *files], 600)
    tests = list(found)
    if status not in (0, 5):
        print(f"map: status {status} without the tests of {' '.join(files)}", flush=True)
    return [tests[start : start + MOST] for start in range(0, len(tests), MOST)]


def trace(trees: Trees, part: list[str]) -> dict[str, Any]:
    """Run some tests over probed sources: the lines of each."""
    with trees.one() as tree:
        status, tests = trees.pytest(tree, part, 600)
    if lost := [test for test in part if test not in tests]:
        print(f"map: status {status} without an answer of {len(lost)} tests: {lost[0]} ...", flush=True)
    for test, seen in tests.items():
        if seen["failed"]:
            print(f"map: fails and is left out: {test}", flush=True)
    return tests


def write_map(trees: Trees, pool: ThreadPoolExecutor, wanted: dict[str, list[str]]) -> None:
    """Run tests over probed sources, and write down the lines of each test, a file for each unit."""
    parts = dict(zip(wanted, pool.map(partial(collect, trees), wanted.values()), strict=True))
    running = {name: [pool.submit(trace, trees, part) for part in parts[name]] for name in wanted}
    for name, futures in running.items():
        tests = {test: seen for future in futures for test, seen in future.result().items()}
        part = WORK / "map" / f"{name}.tmp"
        part.write_text(json.dumps(tests))
        part.rename(WORK / "map" / f"{name}.json")
        print(f"map: {len(tests)} tests of {' '.join(wanted[name])[:80]}", flush=True)


class Suite:
    """Tests that pass, their times, and the lines that they execute."""

    def __init__(self, names: list[str]) -> None:
        self.seconds, self.executed = dict[str, float](), defaultdict[int, set[str]](set)
        for name in names:
            for test, seen in json.loads((WORK / "map" / f"{name}.json").read_text()).items():
                if seen["passed"] and not seen["failed"]:
                    self.seconds[test] = seen["seconds"]
                    for number in seen["lines"]:
                        self.executed[number].add(test)

    def of(self, mutant: Mutant, most: float) -> list[str]:
        """Tests that execute the statement, and take at most so many seconds together: those nearest by come first."""
        start = STARTS[SOURCES.index(ROOT / mutant.file)]
        found = set().union(*(self.executed[start + n] for n in range(mutant.lines[0], mutant.lines[1] + 1)))
        own = re.compile(rf"{re.escape(mutant.file)}|tests/(.*/)?test_{Path(mutant.file).stem}\.py")
        room = Path(mutant.file).parent.as_posix().replace("src/linnet", "tests") + "/"

        def distance(test: str) -> tuple[int, float, str]:
            return 0 if own.match(test) else 1 if test.startswith(room) else 2, self.seconds[test], test

        tests = sorted(found, key=distance)
        sums = accumulate(self.seconds[test] for test in tests)
        return [test for test, total in zip(tests, sums, strict=True) if total < most or test in tests[:FIRST]]


def judge(trees: Trees, suite: Suite, most: float, mutant: Mutant) -> dict[str, Any]:
    """Run the mutant's tests: killed, survived, or executed by no test."""
    tests, killer = suite.of(mutant, most), ""
    verdict = "survived" if tests else "not executed"
    with trees.one() as tree:
        path = tree / mutant.file
        original, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_bytes(changed(original, mutant))
        for group in (tests[:FIRST], tests[FIRST:]):
            if group and verdict == "survived":
                limit = 60 + 5 * sum(suite.seconds[test] for test in group)
                status, seen = trees.pytest(tree, ["-x", "--tb=no", *group], limit)
                if status != 0:
                    verdict = "killed" if status in (None, 1, 2, 3) else "not judged"  # pytest found no such test
                    killer = "time limit" if status is None else "import"
                    killer = next((test for test, report in seen.items() if report["failed"]), killer)
        path.write_bytes(original)
        os.utime(path, ns=times)
    return asdict(mutant) | {"verdict": verdict, "killer": killer, "tests": len(tests)}


def find_unsound(trees: Trees, tests: list[str]) -> set[str]:
    """Tests that fail without any mutant where they run among others than in their file: they say nothing."""
    with trees.one() as tree:
        seen = trees.pytest(tree, ["--tb=no", *tests], 3600)[1]
    return {test for test in tests if seen.get(test, {"failed": True})["failed"]}


def changed_files(base: str) -> list[str]:
    """Files of src that differ from a revision, with those that git does not know yet."""
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    fork = run(["git", "merge-base", base, "HEAD"]).stdout.strip()
    listed = run(["git", "diff", "--name-only", "--diff-filter=d", fork, "--", "src"]).stdout
    listed += run(["git", "ls-files", "--others", "--exclude-standard", "--", "src"]).stdout
    return [file for file in listed.split() if file.endswith(".py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="main", help="revision that the files must differ from")
    parser.add_argument("--all", action="store_true", help="all files of src")
    parser.add_argument("--files", nargs="+", help="these files of src")
    parser.add_argument("--suite", nargs="+", default=[], help="only these test files; all rooms by default")
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds of tests for a mutant")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command goes on")
    parser.add_argument("--out", type=Path, default=WORK / "verdicts.json", help="where the verdicts go")
    options = parser.parse_args()
    every = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    chosen = every if options.all else [file for file in options.files or changed_files(options.base) if file in every]
    sources = {path: path.read_bytes() for path in SOURCES}
    drawn = sample({file: sources[ROOT / file] for file in sorted(chosen)}, options.seed, options.count)
    if not drawn:
        sys.exit(f"No file of src differs from {options.base}. Name files with --files, or take --all.")
    (WORK / "map").mkdir(parents=True, exist_ok=True)
    trees, wanted = Trees(options.workers, options.minutes), units(options.suite)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, trees.stop)
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.workers) as pool, contextlib.suppress(TimeOverError):
        if missing := {name: files for name, files in wanted.items() if not (WORK / "map" / f"{name}.json").exists()}:
            trees.write({path: probed(sources[path], start) for path, start in zip(SOURCES, STARTS, strict=False)})
            write_map(trees, pool, missing)
        trees.write(sources)
        state = digest([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        known = {(m["file"], m["start"], m["new"]): m for m in before if m["state"] == state_of(m, state)}
        places = {(mutant.file, mutant.start, mutant.new): mutant for mutant in drawn}
        found += [known[place] for place in places if place in known]
        todo = [mutant for place, mutant in places.items() if place not in known]
        suite = Suite(list(wanted))
        for future in as_completed([pool.submit(judge, trees, suite, options.seconds, mutant) for mutant in todo]):
            with contextlib.suppress(TimeOverError):
                result = future.result()
                found.append(result | {"state": state_of(result, state)})
                print(f"{len(found)}/{len(drawn)} {result['verdict']}: {line_of(result)}", flush=True)
                options.out.write_text(json.dumps(found, indent=1))
        killers = sorted({result["killer"] for result in found} & suite.seconds.keys())
        parts = [part for i in range(options.workers) if (part := killers[i :: options.workers])]
        unsound = set().union(*pool.map(partial(find_unsound, trees), parts))
        for result in found:
            if result["killer"] in unsound:
                result["verdict"] = "killed by an unsound test"
    report(found, len(drawn))


def state_of(result: dict[str, Any], state: str) -> str:
    """What must not change for a verdict to hold: the file of a killed mutant, source and tests of another."""
    file = ROOT / result["file"]
    return digest([file]) if result["verdict"] == "killed" and file.exists() else state


def line_of(result: dict[str, Any]) -> str:
    return f"{result['file']}:{result['line']}: {result['old']!r} -> {result['new']!r} ({result['tests']} tests)"


def report(found: list[dict[str, Any]], drawn: int) -> None:
    by = defaultdict[str, list[dict[str, Any]]](list)
    for result in found:
        by[result["verdict"]].append(result)
    for verdict, results in by.items():
        if verdict != "killed":
            print(f"\n{verdict}:", *sorted(map(line_of, results)), sep="\n  ")
    alive, judged = len(by["survived"]), len(by["survived"]) + len(by["killed"])
    print(f"\n{alive} of {judged} mutants survived ({100 * alive / max(1, judged):.1f} %); ", end="")
    print(f"no test executes {len(by['not executed'])} more.")
    if len(found) < drawn:
        print(f"The time was over: {drawn - len(found)} of {drawn} have no verdict yet. The same command goes on.")


if __name__ == "__main__":
    main()
