"""The `linnet` command; the demo runs once, in its quick form."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import linnet
from linnet import demo
from linnet.cli import app

HEAVY = ("matplotlib", "sklearn", "gpytorch", "linnet.demo")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run into a folder that holds an old figure and a file of the user's."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / demo.FIGURE).write_text("old")
    (folder / "notes.txt").write_text("mine")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    result = invoke("demo", "--quick", "--seed", 3, "--out", folder)
    assert result.exit_code == 0, result.output
    assert torch.equal(torch.get_rng_state(), before)
    return folder, result.output, json.loads((folder / demo.METRICS).read_text())


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"linnet {linnet.__version__}\n"


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert invoke("demo", "--seed", -1).exit_code == 2


def test_startup_imports_nothing_heavy():
    code = f"import sys, linnet.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_demo_writes_its_two_files_and_leaves_others(quick):
    folder, output, _ = quick
    assert sorted(path.name for path in folder.iterdir()) == [demo.FIGURE, demo.METRICS, "notes.txt"]
    assert (folder / "notes.txt").read_text() == "mine"
    picture = (folder / demo.FIGURE).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    assert width > 1500
    assert height > 800
    assert len(picture) > 50_000
    for name in (demo.FIGURE, demo.METRICS):
        assert str(folder / name) in output


def test_demo_prints_each_step(quick):
    _, output, metrics = quick
    for i in range(1, 5):
        assert f"{i}/4" in output
    assert f"{metrics['accuracy']['test']:.1%} on those held out" in output
    for line in metrics["plan"]["lines"]:
        assert line["layer"] in output
        assert f"{line['parameters']:,}" in output
    for row in metrics["timings"]:
        assert row["pass"] in output


def test_demo_metrics_of_the_network(quick):
    _, _, metrics = quick
    assert metrics["linnet"] == linnet.__version__
    assert (metrics["seed"], metrics["quick"]) == (3, True)
    assert 20_000 <= metrics["parameters"] <= 60_000
    assert metrics["digits"] == {"train": 1000, "test": 240}
    assert 0.9 < metrics["accuracy"]["test"] <= 1
    assert 0.95 < metrics["accuracy"]["train"] <= 1
    plan = metrics["plan"]
    assert plan["shape"] == [240, metrics["parameters"]]
    assert sum(line["parameters"] for line in plan["lines"]) == metrics["parameters"]
    assert plan["c"] == 1


def test_demo_metrics_of_the_kernel(quick):
    kernel = quick[2]["kernel"]
    eigenvalues = torch.tensor(kernel["eigenvalues"], dtype=torch.float64)
    assert eigenvalues.shape == (240,)
    assert (eigenvalues.diff() <= 0).all()
    assert eigenvalues[-1] > -1e-10 * eigenvalues[0]
    assert eigenvalues.sum().item() == pytest.approx(kernel["trace"], rel=1e-9)
    assert kernel["product_error"] < 1e-12
    counts = kernel["components"]
    assert list(counts) == ["90.0%", "99.0%", "99.9%"]
    assert 1 <= counts["90.0%"] < counts["99.0%"] < counts["99.9%"] <= 240
    share = eigenvalues[: counts["90.0%"]].sum() / eigenvalues.sum()
    assert 0.9 <= share < 0.9 + eigenvalues[counts["90.0%"] - 1] / eigenvalues.sum()


def test_demo_metrics_of_the_timings(quick):
    rows = quick[2]["timings"]
    assert [row["k"] for row in rows] == [None, 1, 1, 1, 32, 32, 32, None]
    assert rows[0]["pass"] == demo.PLAIN
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert row["seconds"] > 0
        assert row["runs"] == 3
        assert row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"])


def test_demo_kernel_is_that_of_autodiff():
    (x, _), _ = demo.digits(6, 1, seed=0)
    model = demo.network(0).double().eval()
    K = linnet.linearize(model, output=demo.log_sum_exp).jacobian(x.double()).gram()
    rows = []
    for image in x.double():
        found = torch.autograd.grad(model(image[None]).logsumexp(1).sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]))
    J = torch.stack(rows)
    torch.testing.assert_close(K, J @ J.T, rtol=1e-9, atol=1e-9 * K.abs().max().item())


def test_same_seed_same_network_and_split():
    one, two, other = demo.network(1), demo.network(1), demo.network(2)
    assert torch.equal(one.head.weight, two.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    (x, y), (z, _) = demo.digits(1000, 797, seed=1)
    (again, _), _ = demo.digits(1000, 797, seed=1)
    assert torch.equal(x, again)
    assert x.shape == (1000, 1, 8, 8)
    assert z.shape == (797, 1, 8, 8)
    assert (x.min(), x.max()) == (0, 1)
    assert sorted(y.unique().tolist()) == list(range(10))


@pytest.mark.parametrize("below", [False, True])
def test_out_that_is_a_file(tmp_path, below):
    path = tmp_path / "taken"
    path.write_text("mine")
    result = invoke("demo", "--quick", "--out", path / "deeper" if below else path)
    assert result.exit_code == 1
    assert "needs a folder it can write to" in result.output
    assert "choose another with --out" in result.output
    assert "1/4" not in result.output  # before any work
    assert path.read_text() == "mine"


def test_out_without_permission(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    result = invoke("demo", "--quick", "--out", tmp_path)
    assert result.exit_code == 1
    assert "Permission denied" in result.output
    assert str(tmp_path) in result.output.replace("\n", "")


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / demo.METRICS
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        demo._write(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == [demo.METRICS]
    assert path.read_text() == "old"
