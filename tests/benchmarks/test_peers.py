"""What `python -m benchmarks peers` prepares, compares and prints; the peers' side runs where they are installed."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import compare, environment, ours, process, theirs
from benchmarks.peers.jobs import JOBS, MODULES, PACKAGES, Job, network
from linnet.probability import Categorical
from linnet.testing import dense_jacobian

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc, which only Linux has"
)
SMALL = Job("small", "curvlinops", "product", (64, 4, 3), 8, columns=2)


def given(job: Job, folder: Path):
    compare.prepare(job, folder, steps=2)
    parts = torch.load(folder / "job.pt", weights_only=True)
    model = network(job.network).double().eval()
    model.load_state_dict(parts.pop("state"))
    return model, parts


class InThisProcess:
    """A side without a process of its own; notes the turns it takes."""

    turns = ()

    def __init__(self, name, python):
        self.name, self.versions = name, {name: "1.0", "torch": "2.0" if name == "linnet" else python}

    def run(self, folder):
        InThisProcess.turns += (self.name,)
        tasks = ours if self.name == "linnet" else theirs
        return process.measured(getattr(tasks, json.loads((folder / "job.json").read_text())["task"]), folder)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_every_job_has_both_sides_and_a_small_version():
    assert {job.peer for job in JOBS} == set(PACKAGES) == set(MODULES)
    for job in JOBS:
        assert callable(getattr(ours, job.task)) and callable(getattr(theirs, job.task))
        assert job.quick().n <= 40 and job.quick().task == job.task


def test_linnet_finds_products_and_diagonals_of_the_ggn(tmp_path):
    model, parts = given(Job("small", "curvlinops", "product", (64, 4, 10), 8, columns=2), tmp_path)
    J = dense_jacobian(model, parts["X"])
    n, c = 8, 10
    B = torch.block_diag(*Categorical().curvature(model(parts["X"]).detach()))
    G = J.T @ B @ J
    assert J.shape[0] == B.shape[0] == n * c
    found = ours.product(model, {}, **parts)["product"]
    torch.testing.assert_close(found, G @ parts["V"], rtol=1e-9, atol=1e-12)
    found = ours.diagonal(model, {}, X=parts["X"], y=parts["y"])["diagonal"]
    torch.testing.assert_close(found, G.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("last_layer", [False, True])
def test_linnet_finds_evidence_and_probabilities(tmp_path, last_layer):
    job = Job("small", "laplace-torch", "laplace", (64, 4, 10), 40, 5, structure="full", last_layer=last_layer)
    assert compare.prepare(job, tmp_path, steps=2) == (50 if last_layer else 310)
    model, parts = given(job, tmp_path)
    found = ours.laplace(model, job.told(), **parts)
    assert found["log evidence"].dtype == torch.float64 and found["log evidence"] < 0
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(5).double())


@needs_linux
def test_the_gaussian_process_is_gpytorchs_and_all_is_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gpytorch", reason="needs the extra gpytorch")
    monkeypatch.setattr(compare, "Side", InThisProcess)
    monkeypatch.setattr(compare, "check", lambda python, peers: None)
    monkeypatch.setattr(compare, "JOBS", (Job("GP", "gpytorch", "gp", (64, 8, 1), 30, 6),))
    monkeypatch.setattr(InThisProcess, "turns", ())
    found = compare.run(tmp_path / "kept" / "peers.json", peer="3.0", only="gpytorch", rounds=2)
    assert InThisProcess.turns == ("gpytorch", "linnet", "linnet", "gpytorch")
    assert json.loads((tmp_path / "kept" / "peers.json").read_text()) == found
    assert found["versions"] == {"torch": "2.0 and 3.0", "gpytorch": "1.0", "linnet": "1.0"}
    (row,) = found["rows"]
    assert (row["p"], row["n"], row["new"], row["network"]) == (529, 30, 6, "MLP 64-8-1")
    assert set(row["differences"]) == {"log evidence", "mean", "variance"}
    assert max(row["differences"].values()) < 1e-9
    assert row["gpytorch"].keys() == row["linnet"].keys() == {"seconds", "CPU seconds", "MiB"}
    printed = capsys.readouterr().out
    assert "different versions of torch (2.0, 3.0)" in printed and compare.table([row]) in printed


def test_a_row_has_medians_the_ratio_and_the_worst_difference():
    def side(seconds, value):
        cost = [{"seconds": 9.0, "CPU seconds": s, "MiB": 10 * s} for s in seconds]
        return [({"product": torch.tensor([4.0, value])}, one) for one in cost]

    row = compare.row(SMALL, 275, {"linnet": side([1, 2, 30], 1.0), "curvlinops": side([5, 6, 40], 2.0)})
    assert row["ratio"] == 3 and row["linnet"] == {"seconds": 9.0, "CPU seconds": 2, "MiB": 20}
    assert row["differences"] == {"product": 0.25} and row["columns"] == 2 and "new" not in row
    titles, line = compare.table([row]).splitlines()
    assert len(titles) == len(line) and line.split()[-8:] == ["275", "8", "6.000", "2.000", "3.0", "60", "20", "2e-01"]
    other = [({"diagonal": torch.zeros(2)}, side([1], 0.0)[0][1])]
    with pytest.raises(ValueError, match=r"must find the same; linnet has \['diagonal'\], curvlinops \['product'\]"):
        compare.row(SMALL, 275, {"linnet": other, "curvlinops": side([1], 1.0)})
    short = [({"product": torch.zeros(3)}, side([1], 0.0)[0][1])]
    with pytest.raises(ValueError, match=r"product of linnet is \(3,\), of curvlinops \(2,\)"):
        compare.row(SMALL, 275, {"linnet": short, "curvlinops": side([1], 1.0)})


@needs_linux
def test_a_side_forks_for_each_job_and_says_why_one_failed(tmp_path):
    job = Job("small", "curvlinops", "product", (64, 4, 10), 8, columns=2)
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        compare.prepare(job, folder, steps=1)
    (bad / "job.json").write_text(json.dumps(job.told() | {"task": "nothing"}))
    with compare.Side("linnet", sys.executable) as side:
        assert set(side.versions) == {"linnet", "torch"}
        with pytest.raises(RuntimeError, match=r"(?s)linnet ended with 1:.*has no attribute 'nothing'"):
            side.run(bad)
        found, cost = side.run(good)
    assert found["product"].shape == (310, 2)
    assert cost["CPU seconds"] > 0 and cost["MiB"] >= 0
    assert side.process.returncode == 0


def test_the_environment_is_made_once(tmp_path, monkeypatch):
    commands, checked = [], []
    monkeypatch.setattr(environment, "_run", lambda *words: commands.append(words))
    monkeypatch.setattr(environment, "check", lambda python, peers: checked.append(list(peers)))
    folder = tmp_path / "peers"
    folder.mkdir()
    python = environment.environment(folder)
    assert Path(python).parent.parent == folder and checked == [list(PACKAGES)]
    made, installed, removed = commands
    assert made[1:3] == ("-m", "venv")
    assert installed[-3:] == tuple(PACKAGES.values()) and str(environment.CONSTRAINTS) in installed
    assert removed[-1] == "torchvision"
    assert environment.ready(folder)
    assert environment.environment(folder) == python and len(commands) == 3
    monkeypatch.setitem(environment.PACKAGES, "other", "other")  # another wish needs another environment
    assert not environment.ready(folder)
    environment.environment(folder)
    assert len(commands) == 6


def test_an_interpreter_without_the_peers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "curvlinops", "no_such_module")
    with pytest.raises(
        ImportError, match=r"needs no_such_module; .*pip install curvlinops-for-pytorch\), or leave --peer"
    ):
        environment.check(sys.executable, ["curvlinops"])
    with pytest.raises(FileNotFoundError, match="--peer needs a Python interpreter"):
        environment.check(str(tmp_path / "python"), ["curvlinops"])
    with pytest.raises(RuntimeError, match="ended with 3"):
        environment._run(sys.executable, "-c", "raise SystemExit(3)")


@needs_linux
def test_the_peers_find_the_same(monkeypatch):
    if not environment.ready(environment.FOLDER):
        pytest.skip("laplace-torch and curvlinops are not here; `python -m benchmarks peers` makes their environment")
    chosen = [job for job in JOBS[1:] if job.name in ("GGN product, 1 column", "Laplace, Kronecker factors")]
    monkeypatch.setattr(compare, "JOBS", chosen)
    rows = compare.run(None, quick=True)["rows"]
    assert [row["peer"] for row in rows] == ["curvlinops", "laplace-torch"]
    for row in rows:
        assert max(row["differences"].values()) < 1e-9, row
