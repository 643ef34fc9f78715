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
stopped goes on where it was. When tests have changed, their part of the map is made again. A killed mutant stays killed
as long as its file is the same.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
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
MATERIAL = re.compile(r"testing/(architectures|hostile)/")
"""Networks that tests are made of, not code under test."""
ELSEWHERE = re.compile(r"tests/(benchmarks|documentation|experiments|tools)/|test_cuda")
"""Tests of other folders than src, and of a GPU."""
SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if not MATERIAL.search(path.as_posix())]


class Trees:
    """Copies of the checkout, one for each worker, in which mutants are made and tests run."""

    def __init__(self, workers: int) -> None:
        self.free, self.all, self.running = queue.SimpleQueue[Path](), list[Path](), set[int]()
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (workers + 1)
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tools")}
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["watch_tests"])
        shutil.rmtree(WORK / "trees", ignore_errors=True)
        skipped = shutil.ignore_patterns(".*cache*", ".git", ".venv*", "venv", ".hypothesis", "build", "__pycache__")
        for number in range(workers):
            self.all.append(Path(shutil.copytree(ROOT, WORK / "trees" / str(number), ignore=skipped)))
            shutil.copy(ROOT / "tools" / "line_hits.py", self.all[-1] / "src")
            self.free.put(self.all[-1])

    def write(self, sources: dict[Path, bytes]) -> None:
        """Put other sources into all trees."""
        for tree in self.all:
            for path, source in sources.items():
                (tree / path.relative_to(ROOT)).write_bytes(source)
            for part in ("src", "tests"):  # unchanged files are compiled once
                compileall.compile_dir(tree / part, quiet=1, force=True)

    def stop(self, *_: object) -> None:
        """End all that runs, and the program: what was found is in its file."""
        for pid in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    def pytest(self, tree: Path, arguments: list[str], limit: float) -> tuple[int | None, dict[str, Any]]:
        """Exit status of pytest, None where the time was over, and what the tests said."""
        out, hits = tree / "mutate.json", tree / "mutate.hits"
        out.unlink(missing_ok=True)
        hits.write_bytes(bytes(STARTS[-1] + 1))
        environment = {"PYTHONPATH": str(tree / "src"), "MUTATE_HITS": str(hits), "PYTHONDONTWRITEBYTECODE": "1"}
        child = self.processes.Process(target=run, args=(tree, arguments, environment, self.memory))
        child.start()
        assert child.pid
        self.running.add(child.pid)
        child.join(limit)
        late = child.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the process and what it started
        child.join()
        self.running.discard(child.pid)
        shutil.rmtree(tree / ".hypothesis" / "examples", ignore_errors=True)  # examples that failed with this mutant
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


def trace(trees: Trees, wanted: dict[str, list[str]], name: str) -> None:
    """Run a test file over probed sources, and write down the lines of each test."""
    tree = trees.free.get()
    status, tests = trees.pytest(tree, ["-m", "not slow", *wanted[name]], 3600)
    trees.free.put(tree)
    part = WORK / "map" / f"{name}.tmp"
    part.write_text(json.dumps(tests))
    part.rename(WORK / "map" / f"{name}.json")
    bad = [test for test, seen in tests.items() if seen["failed"]]
    said = f"map: {len(tests)} tests of {' '.join(wanted[name])[:80]}, status {status}"
    print(said + (f", failing and left out: {', '.join(bad)}" if bad else ""), flush=True)


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
    tree, tests = trees.free.get(), suite.of(mutant, most)
    path, killer, verdict = tree / mutant.file, "", "survived" if tests else "not executed"
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
    trees.free.put(tree)
    return asdict(mutant) | {"verdict": verdict, "killer": killer, "tests": len(tests)}


def find_unsound(trees: Trees, suite: Suite, killers: set[str]) -> set[str]:
    """Tests that fail without any mutant where they run among others than in their file: they say nothing."""
    tree, tests = trees.free.get(), sorted(killers & suite.seconds.keys())
    seen = trees.pytest(tree, ["--tb=no", *tests], 3600)[1] if tests else {}
    trees.free.put(tree)
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
    parser.add_argument("--out", type=Path, default=WORK / "verdicts.json", help="where the verdicts go")
    options = parser.parse_args()
    every = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    chosen = every if options.all else [file for file in options.files or changed_files(options.base) if file in every]
    sources = {path: path.read_bytes() for path in SOURCES}
    drawn = sample({file: sources[ROOT / file] for file in sorted(chosen)}, options.seed, options.count)
    if not drawn:
        sys.exit(f"No file of src differs from {options.base}. Name files with --files, or take --all.")
    (WORK / "map").mkdir(parents=True, exist_ok=True)
    trees, wanted = Trees(options.workers), units(options.suite)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, trees.stop)
    with ThreadPoolExecutor(options.workers) as pool:
        if missing := [name for name in wanted if not (WORK / "map" / f"{name}.json").exists()]:
            trees.write({path: probed(sources[path], start) for path, start in zip(SOURCES, STARTS, strict=False)})
            list(pool.map(partial(trace, trees, wanted), missing))
        trees.write(sources)
        state = digest([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        known = {(m["file"], m["start"], m["new"]): m for m in before if m["state"] == state_of(m, state)}
        places = {(mutant.file, mutant.start, mutant.new): mutant for mutant in drawn}
        found = [known[place] for place in places if place in known]
        todo = [mutant for place, mutant in places.items() if place not in known]
        suite = Suite(list(wanted))
        for future in as_completed([pool.submit(judge, trees, suite, options.seconds, mutant) for mutant in todo]):
            result = future.result()
            found.append(result | {"state": state_of(result, state)})
            print(f"{len(found)}/{len(drawn)} {result['verdict']}: {line_of(result)}", flush=True)
            options.out.write_text(json.dumps(found, indent=1))
        unsound = find_unsound(trees, suite, {result["killer"] for result in found})
    for result in found:
        if result["killer"] in unsound:
            result["verdict"] = "killed by an unsound test"
    report(found)


def state_of(result: dict[str, Any], state: str) -> str:
    """What must not change for a verdict to hold: the file of a killed mutant, source and tests of another."""
    file = ROOT / result["file"]
    return digest([file]) if result["verdict"] == "killed" and file.exists() else state


def line_of(result: dict[str, Any]) -> str:
    return f"{result['file']}:{result['line']}: {result['old']!r} -> {result['new']!r} ({result['tests']} tests)"


def report(found: list[dict[str, Any]]) -> None:
    by = defaultdict[str, list[dict[str, Any]]](list)
    for result in found:
        by[result["verdict"]].append(result)
    for verdict, results in by.items():
        if verdict != "killed":
            print(f"\n{verdict}:", *sorted(map(line_of, results)), sep="\n  ")
    alive, judged = len(by["survived"]), len(by["survived"]) + len(by["killed"])
    print(f"\n{alive} of {judged} mutants survived ({100 * alive / max(1, judged):.1f} %); ", end="")
    print(f"no test executes {len(by['not executed'])} more.")


if __name__ == "__main__":
    main()
