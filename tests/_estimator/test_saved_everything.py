"""Files of every estimator with every kind of setting: there and back, damaged, foreign, and written under fire."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet._common import files
from linnet._estimator import files as saved
from tests.support.drawn import double, normal

X, NEW = normal(14, 3), normal(4, 3, seed=5)
NUMBERS = normal(14, 2, seed=1)
LABELS = (X[:, 0] > 0).long()


def net(outputs: int = 2, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)), seed)


def first_column(raw: Tensor) -> Tensor:
    return raw[:, :1]


# ------------------------------------------------------------------------------- there and back, by settings

# What changes what is kept: each a function from the network to a fitted estimator.
REGRESSORS: dict[str, Callable[[nn.Module], Any]] = {
    "mean zero": lambda m: linnet.TangentRegressor(m, mean="zero").fit(X, NUMBERS),
    "ntk prior": lambda m: linnet.TangentRegressor(m, prior="ntk").fit(X, NUMBERS),
    "layerwise prior": lambda m: linnet.TangentRegressor(m, prior="layerwise").fit(X, NUMBERS),
    "a variance": lambda m: linnet.TangentRegressor(m, prior=0.3, noise=0.1).fit(X, NUMBERS),
    "variances by layer": lambda m: linnet.TangentRegressor(m, prior={"0": 0.3, "2": 1.0}).fit(X, NUMBERS),
    "noise per output": lambda m: linnet.TangentRegressor(m, noise="per-output").fit(X, NUMBERS),
    "noises given": lambda m: linnet.TangentRegressor(m, noise=[0.1, 0.2]).fit(X, NUMBERS),
    "noises in a tensor": lambda m: linnet.TangentRegressor(m, noise=torch.tensor([0.1, 0.2])).fit(X, NUMBERS),
    "log variances": lambda m: linnet.TangentRegressor(m, noise="heteroscedastic").fit(X, NUMBERS[:, 0]),
    "some parameters": lambda m: linnet.TangentRegressor(m, "2.*").fit(X, NUMBERS),
    "parameters by function": lambda m: linnet.TangentRegressor(m, lambda name, t: t.ndim == 1).fit(X, NUMBERS),
    "top block": lambda m: linnet.TangentRegressor(m, top=1).fit(X, NUMBERS),
    "float32": lambda m: linnet.TangentRegressor(m, dtype="float32").fit(X, NUMBERS),
    "of a loader": lambda m: linnet.TangentRegressor(m, solver="weight").fit(
        DataLoader(TensorDataset(X, NUMBERS), batch_size=5)
    ),
    "more data": lambda m: linnet.TangentRegressor(m).fit(X, NUMBERS).condition(NEW, normal(4, 2, seed=2)),
    "several tasks": lambda m: linnet.TangentRegressor(m).fit_tasks([(X, NUMBERS), (X + 1, NUMBERS)]).refit(X, NUMBERS),
    "samples": lambda m: linnet.TangentRegressor(m, solver="cg-weight", samples=8).fit(X, NUMBERS),
    "tuples": lambda m: linnet.TangentRegressor(m, noise=0.1).fit((X,), NUMBERS),
}
CLASSIFIERS: dict[str, Callable[[nn.Module], Any]] = {
    "names": lambda m: linnet.TangentClassifier(m, inference="map", classes=["no", "yes"]).fit(
        X, np.array(["no", "yes"])[LABELS]
    ),
    "monte carlo": lambda m: linnet.TangentClassifier(m, inference="laplace", link="mc").fit(X, LABELS),
    "several labels": lambda m: linnet.TangentClassifier(m).fit(X, (NUMBERS > 0).long()),
    "by weights": lambda m: linnet.TangentClassifier(m, inference="laplace", solver="weight").fit(
        X, LABELS.to(torch.int16)
    ),
    "independent weights": lambda m: linnet.TangentClassifier(m, family="meanfield", prior=0.5).fit(X, LABELS),
    "low rank": lambda m: linnet.TangentClassifier(m, family="lowrank", prior=0.5).fit(X, LABELS),
    "by products": lambda m: linnet.TangentClassifier(m, inference="laplace", solver="cg-weight", samples=8).fit(
        X, LABELS
    ),
    "adam": lambda m: linnet.TangentClassifier(m, inference="map", solver="adam", prior=1.0, epochs=3).fit(
        TensorDataset(X, LABELS)
    ),
    "evidence of blocks": lambda m: linnet.TangentClassifier(m, inference="map", top="evidence").fit(X, LABELS),
    "dict, float32": lambda m: linnet.TangentClassifier(m, dtype=torch.float32).fit({"input": X}, LABELS),
}
EMBEDDINGS: dict[str, Callable[[nn.Module], Any]] = {
    "share of the variance": lambda m: linnet.FisherEmbedding(m, 0.5).fit(X),
    "tangent kernel": lambda m: linnet.FisherEmbedding(m, 3, kernel="ntk").fit(X.numpy()),
    "exact": lambda m: linnet.FisherEmbedding(m, 3, method="exact", params="0.*").fit(X),
    "float32": lambda m: linnet.FisherEmbedding(m, 3, dtype="float32").fit(X),
}
LAPLACES: dict[str, Callable[[nn.Module], Any]] = {
    "layerwise": lambda m: linnet.Laplace(m, "regression", "full", "layerwise").fit(X, m(X).detach() + NUMBERS),
    "drawn information": lambda m: linnet.Laplace(m, structure="diag", draws=2, prior=0.1).fit(X, LABELS),
    "last layer": lambda m: linnet.Laplace(m, structure="kron", params="2.*", prior=0.1).fit(X, LABELS),
}


def said(estimator: Any, X: Any) -> list[Any]:
    """All that an estimator says about inputs."""
    if isinstance(estimator, linnet.FisherEmbedding):
        return [estimator.transform(X), estimator.kernel(X), estimator.residuals_, estimator.eigenvalues_]
    if isinstance(estimator, linnet.TangentClassifier):
        return [estimator.predict_proba(X), *estimator.predict_logits(X), estimator.sample(X, 2)]
    if isinstance(estimator, linnet.Laplace):
        return [*estimator.predict(X, return_std=True), estimator.sample(X, 2)]
    return [*estimator.predict(X, return_std=True, noise=True), estimator.sample(X, 2), estimator.linearity(X).network]


ALL = {
    f"{kind}, {name}": fit
    for kind, cases in (
        ("regressor", REGRESSORS),
        ("classifier", CLASSIFIERS),
        ("embedding", EMBEDDINGS),
        ("laplace", LAPLACES),
    )
    for name, fit in cases.items()
}


@pytest.mark.filterwarnings("ignore:.*error bars too wide:UserWarning", "ignore:.*is not trained:UserWarning")
@pytest.mark.parametrize("case", ALL)
def test_there_and_back(tmp_path: Path, case: str) -> None:
    model = net()
    estimator = ALL[case](model)
    tolerance = 1e-6 if "float32" in case else 1e-9
    given: Any = {"input": NEW} if "dict" in case else (NEW,) if "tuples" in case else NEW
    if case.endswith("tangent kernel"):
        given = NEW.numpy()
    estimator.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", net())
    again.save(tmp_path / "b.safetensors")  # what was loaded can be saved
    third = linnet.load(tmp_path / "b.safetensors", net())
    for other in (again, third):
        for one, two in zip(said(estimator, given), said(other, given), strict=True):
            assert type(one) is type(two)
            np.testing.assert_allclose(two, one, rtol=tolerance, atol=tolerance)
        check_attributes(estimator, other, tolerance)


COURSE = {"mode_", "solution_", "evidence_path_", "elbo_path_", "objective_path_"}
"""The course of a fit, which files leave out."""


def check_attributes(one: Any, two: Any, tolerance: float) -> None:
    """What an estimator tells about its fit is the same, or at least there where it is an object of its own."""

    def plain(value: Any) -> Any:
        """Numbers, texts, arrays and what is made of them; the type of anything else."""
        if isinstance(value, Tensor | np.ndarray):
            array = np.asarray(value)
            return plain(array.tolist()) if array.dtype.kind == "f" else [str(array.dtype), array.tolist()]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float | np.floating):
            return pytest.approx(float(value), rel=tolerance, abs=tolerance, nan_ok=True)
        return value if value is None or isinstance(value, bool | int | str) else type(value).__name__

    names = [n for n in vars(one) if n.endswith("_") and not n.startswith("_") and n not in COURSE]
    assert [n for n in names if not hasattr(two, n)] == []
    assert [n for n in names if plain(getattr(two, n)) != plain(getattr(one, n))] == []


def test_an_output_function_and_a_network_without_a_name(tmp_path: Path) -> None:
    clf = linnet.TangentClassifier(net(), output=first_column, inference="map").fit(X, LABELS)
    clf.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", net(), output=first_column)
    np.testing.assert_allclose(again.predict_proba(NEW), clf.predict_proba(NEW), rtol=1e-12)
    own = linnet.TangentClassifier(inference="map").fit(X.numpy(), LABELS.numpy())
    own.save(tmp_path / "b.safetensors")
    np.testing.assert_allclose(
        linnet.load(tmp_path / "b.safetensors").predict_proba(NEW.numpy()), own.predict_proba(NEW.numpy()), rtol=1e-12
    )


def test_each_kind_of_file_has_a_home() -> None:
    from importlib import import_module

    known = set()
    for kind, home in saved.READERS.items():
        module = import_module(home)
        assert kind == module.KIND
        known |= set(module.ESTIMATORS)
    assert known == {"FisherEmbedding", "Laplace", "TangentClassifier", "TangentGLM", "TangentRegressor"}


# ------------------------------------------------------------------------------------- damaged and foreign


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    linnet.TangentRegressor(net(), "2.*", noise=0.1, prior=1.0, solver="weight").fit(X, NUMBERS).save(path)
    return path


def test_a_file_cut_short_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for size in (*range(0, 64), *range(64, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"not a complete safetensors file .* cut short"):
            linnet.load(file, net())
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        linnet.load(file, net())


def test_a_file_with_one_byte_changed_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")  # of the numbers
    assert 500 < start < len(whole) - 500
    places = [*range(0, 16), *range(16, start, 7), *range(start, len(whole), 29), len(whole) - 1]
    refused = r"not a complete safetensors|linnet did not write|was changed after|Upgrade linnet|holds .* was asked for"
    for place in places:
        for flip in (0x01, 0x80):
            changed = bytearray(whole)
            changed[place] ^= flip
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=refused):
                linnet.load(file, net())
    changed = bytearray(whole)
    changed[-1] ^= 1  # of a number
    file.write_bytes(changed)
    with pytest.raises(ValueError, match=r"was changed after it was saved: what it holds does not have the checksum"):
        linnet.load(file, net())
    file.write_bytes(whole.replace(b'noise\\":0.1', b'noise\\":0.2').replace(b'noise\\": 0.1', b'noise\\": 0.2'))
    assert file.read_bytes() != whole
    with pytest.raises(ValueError, match=r"was changed after it was saved: its description does not have the checksum"):
        linnet.load(file, net())
    with pytest.raises(ValueError, match="its description"):
        files.describe(file)  # which reads no numbers


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / "sprung"),)


def test_foreign_files_are_refused_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Trap(tmp_path), protocol))
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            linnet.load(path, net())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Trap(tmp_path)))
    with pytest.raises(ValueError, match="looks like a pickle or an archive"):
        linnet.load(path, net())
    for text in (b"", b"{}", b"\0" * 100, b"\xff" * 100, "täglich".encode() * 10):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            linnet.load(path, net())
    with pytest.raises(FileNotFoundError, match="is a folder"):
        linnet.load(tmp_path, net())
    files.save(path, {}, {}, kind="tangent estimator")
    with pytest.raises(ValueError, match="holds a None, which this version of linnet does not know"):
        linnet.load(path, net())
    assert not (tmp_path / "sprung").exists()


# ---------------------------------------------------------------------------------------- written under fire

FIRE = """
    import os, random, signal, sys, time
    import torch
    from linnet._common import files as io

    torch.set_num_threads(1)  # a fork does not have the threads that OpenMP counts on
    path, children = sys.argv[1], int(sys.argv[2])
    seen = set()
    for child in range(children):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            step = 100 * child
            while True:
                io.save(path, {"x": torch.full((50_000,), float(step))}, {"step": step}, kind="test")
                os.write(writing, b".")
                step += 1
        os.read(reading, 1)  # it has written once
        time.sleep(0.003 * child)
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        tensors, meta = io.load(path, kind="test")
        assert bool((tensors["x"] == meta["step"]).all()) and meta["step"] // 100 == child
        seen.add(meta["step"])
    print(len(seen))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_processes_killed_while_they_write_leave_whole_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FIRE), str(tmp_path / "a.safetensors"), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 12
