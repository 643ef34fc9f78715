"""Make small wrong changes in the source, one at a time, and see which of them no test notices.

Each change (a mutant) runs against the tests that execute the changed line. A mutant that fails a test, cannot be
imported or runs into its time limit is killed; a mutant that passes them all survives, and asks for a test.

Two commands, from the root of a checkout (PYTHONPATH may name more folders with packages; CUDA_VISIBLE_DEVICES= leaves
a GPU out, which many processes would share):

    python tools/mutate.py                                        # the files that differ from the revision `main`
    python tools/mutate.py --all --count 300 --seed 0 --workers 16 --minutes 25      # a sample over all of src

The first run executes the suite once and writes down which test executes which lines. Tests that fail or skip are left
out from then on. This map, and the verdicts so far, lie in build/mutate: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mutants import Mutant, changed, sample

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutate"
PLUGINS = ["-p", "watch_lines", "-p", "no:cacheprovider", "-p", "no:xdist"]
FIRST = 25
"""Tests of one child process: most mutants fail in the first, and the test files of the others are never imported."""


class Trees:
    """Copies of the checkout, one for each worker, in which mutants are made and tests run."""

    def __init__(self, workers: int, end: float) -> None:
        self.end, self.free, self.running = end, queue.SimpleQueue[Path](), set[int]()
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (workers + 1)
        shutil.rmtree(WORK / "trees", ignore_errors=True)
        skipped = shutil.ignore_patterns(".*cache*", ".git", ".venv*", "venv", ".hypothesis", "build", "__pycache__")
        for number in range(workers):
            self.free.put(Path(shutil.copytree(ROOT, WORK / "trees" / str(number), ignore=skipped)))

    def stop(self, *_: object) -> None:
        """End all that runs, and the program: what was found is in its file."""
        for pid in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    def pytest(self, tree: Path, tests: list[str], limit: float, *, trace: bool = False) -> tuple[int | None, dict]:
        """Exit status, None where the time was over, and what the tests said."""
        out = tree / "mutate.json"
        out.unlink(missing_ok=True)
        paths = [tree / "src", tree / "tools", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path))}
        env |= {"MUTATE_OUT": str(out), "MUTATE_MEMORY": str(self.memory), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a stale .pyc would hide the next mutant
        env |= {"MUTATE_TRACE": str(tree / "src")} if trace else {}
        command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, *([] if trace else ["-x", "--tb=no"]), *tests]
        with (WORK / f"{tree.name}.log").open("w") as log:
            child = subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log, start_new_session=True)
            self.running.add(child.pid)
            try:
                status: int | None = child.wait(max(0.0, min(limit, self.end - time.monotonic())))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # it and what it started
                child.wait()
                self.running.discard(child.pid)
        shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # examples that failed with this mutant
        return status, json.loads(out.read_text()) if out.exists() else {}


def digest(paths: list[Path]) -> str:
    parts = [path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() for path in sorted(paths)]
    return hashlib.sha256(b"\0".join([sys.version.encode(), *parts])).hexdigest()[:16]


def units(suite: list[str]) -> dict[str, list[str]]:
    """What one process of the map runs, by name: a test file, or the examples of some modules."""
    source = sorted((ROOT / "src").rglob("*.py"))
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    common = digest([*source, *helpers, ROOT / "conftest.py"])
    found = {
        f"{path.stem}-{digest([path])}-{common}": [str(path.relative_to(ROOT))]
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    shown = [str(path.relative_to(ROOT)) for path in source if ">>> " in path.read_text()]
    found |= {f"examples{start}-{common}": shown[start : start + 12] for start in range(0, len(shown), 12)}
    return {name: files for name, files in found.items() if not suite or any(file in suite for file in files)}


def trace(trees: Trees, wanted: dict[str, list[str]], name: str) -> None:
    tree = trees.free.get()
    status, tests = trees.pytest(tree, wanted[name], 3600, trace=True)
    prefix = f"{tree}{os.sep}"
    for test in tests.values():
        test["lines"] = {file.removeprefix(prefix): numbers for file, numbers in test.get("lines", {}).items()}
    if status is not None:
        part = WORK / "map" / f"{name}.tmp"
        part.write_text(json.dumps(tests))
        part.rename(WORK / "map" / f"{name}.json")
        bad = [test for test, seen in tests.items() if seen["failed"]]
        print(
            f"map: {len(tests)} tests of {' '.join(wanted[name])[:80]}"
            + (f", failing and left out: {', '.join(bad)}" if bad else "" if tests else ": none could run"),
            flush=True,
        )
    trees.free.put(tree)


@dataclass
class Suite:
    """Tests that pass, their times, and the lines that they execute."""

    seconds: dict[str, float]
    executed: dict[tuple[str, int], set[str]]
    near: dict[str, set[str]]
    sound: dict[str, bool]

    @classmethod
    def read(cls, names: list[str]) -> Suite:
        suite = cls({}, defaultdict(set), defaultdict(set), {})
        for name in names:
            for test, seen in json.loads((WORK / "map" / f"{name}.json").read_text()).items():
                if seen["passed"] and not seen["failed"]:
                    suite.seconds[test] = seen["seconds"]
                    for file, numbers in seen["lines"].items():
                        suite.near[file].add(test)
                        for number in numbers:
                            suite.executed[file, number].add(test)
        return suite

    def of(self, mutant: Mutant, most: int) -> list[str]:
        """Tests that execute the statement: those of its own module first, then the fastest.

        What is kept in a cache is computed by the first test of a process alone: few tests are filled up with others
        that execute the same file.
        """
        found = set().union(*(self.executed[mutant.file, n] for n in range(mutant.lines[0], mutant.lines[1] + 1)))
        own = re.compile(rf"{re.escape(mutant.file)}|tests/(.*/)?test_{Path(mutant.file).stem}\.py")

        def ordered(tests: set[str]) -> list[str]:
            return sorted(tests, key=lambda test: (not own.match(test), self.seconds[test], test))

        more = ordered(self.near[mutant.file] - found)[: max(0, FIRST - len(found))] if found else []
        return [*ordered(found)[:most], *more]


def judge(trees: Trees, suite: Suite, most: int, mutant: Mutant) -> dict[str, Any]:
    """Run the mutant's tests: killed, survived, executed by no test, or not judged in time."""
    tree, tests = trees.free.get(), suite.of(mutant, most)
    path, number = tree / mutant.file, len(tests)
    original = path.read_bytes()
    killer, verdict = "", "survived" if tests else "not executed"
    while verdict == "survived" and (tests := [test for test in tests if suite.sound.get(test, True)]):
        group, tests = tests[:FIRST], tests[FIRST:]
        limit = 60 + 5 * sum(suite.seconds[test] for test in group)
        path.write_bytes(changed(original, mutant))
        status, seen = trees.pytest(tree, group, limit)
        path.write_bytes(original)
        if status == 0:
            continue
        verdict = "killed"
        killer = next((test for test, report in seen.items() if report["failed"]), "")
        if status is None:
            killer = "time limit"
        elif killer not in suite.sound:
            # Without the mutant the tests must pass here, or they say nothing.
            again, _ = trees.pytest(tree, [killer] if killer else group, limit)
            if killer:
                suite.sound[killer] = again == 0
            elif again != 0:
                verdict = "not judged"
        if killer in suite.sound and not suite.sound[killer]:
            verdict, tests = "survived", group + tests
        if time.monotonic() > trees.end:
            verdict = "not judged"
    trees.free.put(tree)
    return asdict(mutant) | {"verdict": verdict, "killer": killer, "tests": number}


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
    parser.add_argument("--suite", nargs="+", default=[], help="only these test files; all by default")
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--tests", type=int, default=400, help="most tests for a mutant")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop by then and report the verdicts so far")
    parser.add_argument("--out", type=Path, default=WORK / "verdicts.json", help="where the verdicts go")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    cases = re.compile(r"testing/(zoo|hostile)_\w+\.py$")  # networks that tests are made of, not code under test
    every = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py") if not cases.search(str(path))]
    chosen = every if options.all else options.files or changed_files(options.base)
    drawn = sample({file: (ROOT / file).read_bytes() for file in sorted(chosen)}, options.seed, options.count)
    if not drawn:
        sys.exit(f"No file of src differs from {options.base}. Name files with --files, or take --all.")
    (WORK / "map").mkdir(parents=True, exist_ok=True)
    trees, wanted = Trees(options.workers, end), units(options.suite)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, trees.stop)
    missing = [name for name in wanted if not (WORK / "map" / f"{name}.json").exists()]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(partial(trace, trees, wanted), missing))
    if any(not (WORK / "map" / f"{name}.json").exists() for name in wanted):
        sys.exit("The time was over before the map of lines and tests was complete; run this again to go on.")
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    state = digest([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    if options.out.exists() and (before := json.loads(options.out.read_text()))["state"] == state:
        known = {(m["file"], m["start"], m["stop"], m["new"]): m for m in before["mutants"]}
    keys = {(mutant.file, mutant.start, mutant.stop, mutant.new): mutant for mutant in drawn}
    found = [known[key] for key in keys if key in known]
    todo = [mutant for key, mutant in keys.items() if key not in known]
    suite = Suite.read(list(wanted))
    with ThreadPoolExecutor(options.workers) as pool:
        for future in as_completed([pool.submit(judge, trees, suite, options.tests, mutant) for mutant in todo]):
            result = future.result()
            if result["verdict"] != "not judged":
                found.append(result)
            print(f"{len(found)}/{len(drawn)} {result['verdict']}: {line_of(result)}", flush=True)
            options.out.write_text(json.dumps({"state": state, "mutants": found}, indent=1))
    report(found, len(drawn))


def line_of(result: dict[str, Any]) -> str:
    return f"{result['file']}:{result['line']}: {result['old']!r} -> {result['new']!r} ({result['tests']} tests)"


def report(found: list[dict[str, Any]], drawn: int) -> None:
    by = {verdict: [m for m in found if m["verdict"] == verdict] for verdict in ("survived", "not executed", "killed")}
    for verdict in ("survived", "not executed"):
        print(f"\n{verdict}:", *sorted(map(line_of, by[verdict])), sep="\n  ")
    judged = len(by["survived"]) + len(by["killed"])
    print(
        f"\n{len(by['survived'])} of {judged} mutants survived ({100 * len(by['survived']) / max(1, judged):.1f} %); "
        f"no test executes {len(by['not executed'])} more; {drawn - len(found)} of {drawn} were not judged."
    )


if __name__ == "__main__":
    main()
