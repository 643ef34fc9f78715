"""The experiments' parts are what they claim, and small versions of both run; no timing, no real results here."""

import json
import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from experiments import common, sinusoids, uci
from experiments.__main__ import main, parser
from experiments.baselines import Search, fit_networks, likeliest_noise
from experiments.networks import forward, initial, module, train
from experiments.processes import Features, Process
from tests.support.drawn import normal

WIDTHS = (2, 5, 4, 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def networks(m, widths=WIDTHS):
    return initial(m, widths, generator=generator(), dtype=torch.float64)


# Networks trained together.


def test_batched_networks_are_torch_modules():
    theta, X = networks(3), normal(3, 7, 2)
    f = forward(theta, X, WIDTHS)
    for i in range(3):
        torch.testing.assert_close(module(theta[i], WIDTHS)(X[i]).squeeze(-1), f[i], rtol=1e-12, atol=1e-12)


def test_training_together_is_training_alone():
    theta, X, y = networks(3), normal(3, 40, 2), normal(3, 40, seed=1)
    rate, decay = torch.tensor([1e-2, 1e-3, 3e-3]), torch.tensor([0.0, 0.1, 0.5])
    valid = (normal(3, 9, 2, seed=2), normal(3, 9, seed=3))

    def run(i):
        return train(
            theta[i],
            X[i],
            y[i],
            WIDTHS,
            rate=rate[i],
            decay=decay[i],
            steps=30,
            batch=16,
            every=5,
            valid=(valid[0][i], valid[1][i]),
            generator=generator(4),
        )

    both = run(slice(None))
    for i in range(3):
        alone = run(slice(i, i + 1))
        torch.testing.assert_close(alone.theta[0], both.theta[i], rtol=1e-9, atol=1e-12)
        assert alone.steps[0] == both.steps[i]


def test_training_matches_torch_adam():
    theta, X, y = networks(1), normal(1, 20, 2), normal(1, 20, seed=1)
    stop = torch.tensor([10])
    ours = train(theta, X, y, WIDTHS, rate=torch.tensor([1e-2]), steps=25, stop=stop, generator=generator())
    model = module(theta[0], WIDTHS).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 25))
        optimizer.zero_grad()
        (model(X[0]).squeeze(-1) - y[0]).square().mean().backward()
        optimizer.step()
    again = module(ours.theta[0], WIDTHS)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-9)


def test_the_best_step_is_kept_even_if_it_is_the_start():
    X = normal(1, 20, 2)
    theta = networks(1)
    y = forward(theta, X, WIDTHS)
    found = train(theta, X, -y, WIDTHS, rate=torch.tensor([1e-2]), steps=20, valid=(X, y), generator=generator())
    assert int(found.steps) == 0 and float(found.loss) == 0
    assert torch.equal(found.theta, theta)


def test_training_needs_one_way_to_stop():
    with pytest.raises(ValueError, match="either validation data"):
        train(networks(1), normal(1, 3, 2), normal(1, 3), WIDTHS, rate=torch.ones(1), steps=1, generator=generator())


def test_an_ensemble_adds_its_disagreement_to_the_noise():
    X = normal(2, 60, 2)
    y = X.sum(-1) + 0.1 * normal(2, 60, seed=1)
    search = Search(steps=60, rates=(1e-2, 1e-3), decays=(0.0,))
    one, five = fit_networks(X, y, WIDTHS, members=3, search=search, generator=generator())
    at = normal(2, 11, 2, seed=2)
    f = torch.stack([forward(five.theta[:, k], at, WIDTHS) for k in range(3)])
    found = five.predict(at, WIDTHS)
    torch.testing.assert_close(found.mean, f.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.variance, f.var(0, unbiased=False) + five.noise[:, None], rtol=1e-9, atol=1e-9)
    assert torch.equal(one.theta[:, 0], five.theta[:, 0])
    torch.testing.assert_close(one.predict(at, WIDTHS).mean, f[0], rtol=1e-9, atol=1e-9)


def test_the_likeliest_noise_takes_the_disagreement_off():
    y = normal(1, 4000)
    found = likeliest_noise(torch.zeros(1, 4000).double(), torch.full((1, 4000), 0.4).double(), y)
    assert float(found) == pytest.approx(0.6, abs=0.06)


# Gaussian processes.


def closed_form(K, k, k0, y, noise):
    solve = torch.linalg.solve(K + noise * torch.eye(len(K)), torch.cat([y[:, None], k], 1))
    return k.T @ solve[:, 0], k0 - (k * solve[:, 1:]).sum(0) + noise


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_processes_are_the_closed_form(kernel):
    X, y, at = normal(12, 2), normal(12, seed=1), normal(5, 2, seed=2)
    features = Features(module(networks(1)[0], WIDTHS))
    process = Process(X, y, kernel=kernel, features=features)
    process.fit(iterations=5, starts=False)
    mean, variance = process.predict(at)
    Z, W = features(X).detach(), features(at).detach()
    scale, noise = process.kernel.outputscale.item(), process.likelihood.noise.item()
    if kernel == "linear":
        K, k, k0 = scale * Z @ Z.T, scale * Z @ W.T, scale * W.square().sum(1)
    else:
        length = process.kernel.base_kernel.lengthscale.item()
        K, k = (scale * torch.exp(-torch.cdist(Z, V).square() / (2 * length**2)) for V in (Z, W))
        k0 = torch.full((5,), scale, dtype=torch.float64)
    expected = closed_form(K, k, k0, y, noise)
    torch.testing.assert_close(mean, expected[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(variance, expected[1], rtol=1e-6, atol=1e-8)


def test_own_hyperparameters_have_the_larger_evidence():
    X, y = normal(3, 8, 1), normal(3, 8, seed=1) * torch.tensor([[0.1], [1.0], [5.0]])
    shared, own = (Process(X, y, kernel="rbf", own=own) for own in (False, True))
    together, apart = (process.fit(iterations=15, starts=False) for process in (shared, own))
    assert apart > together + 1
    assert own.likelihood.noise.shape == (3, 1)


def test_hyperparameters_travel():
    X, y = normal(8, 1), normal(8, seed=1)
    first = Process(X, y, kernel="rbf")
    first.fit(starts=False)
    second = Process(normal(2, 5, 1), normal(2, 5), kernel="rbf")
    second.load_hyperparameters(first.hyperparameter_state())
    assert second.likelihood.noise.item() == first.likelihood.noise.item()


# Scores, files, data.


def test_scores_are_those_of_the_normal_distribution():
    mean, variance, y = normal(50), normal(50, seed=1).square() + 0.1, normal(50, seed=2)
    found = common.scores(mean, variance, y, unit=3.0)
    expected = -Normal(3 * mean, 3 * variance.sqrt()).log_prob(3 * y).mean()
    assert found["nll"] == pytest.approx(float(expected), rel=1e-12)
    assert found["rmse"] == pytest.approx(3 * float((mean - y).square().mean().sqrt()), rel=1e-12)
    with pytest.raises(ValueError, match="must be positive; the smallest is 0"):
        common.scores(mean, torch.zeros(50), y)


def test_rows_are_replaced_where_they_stand():
    rows = [common.Row("a", "1", "2", "x | y"), common.Row("b", "1", "2", "")]
    text = common.updated("", "one", "run one", "3 s", rows)
    text = common.updated(text, "two", "run two", "3 s", rows[:1])
    text = common.updated(text, "one", "run one again", "9 s", rows[:1])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| one: a", "| two: a"]
    assert "`run one again`" in lines[2] and r"x \| y" in lines[2]
    assert text.count("run one again") == 1 and "9 s" in lines[2]


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    common.write(path, "old")
    with pytest.raises(RuntimeError, match="half"), common.replacing(path) as temporary:
        temporary.write_text("new")
        raise RuntimeError("half way")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    assert common.clean({"a": [math.nan, 1 / 3]}) == {"a": [None, 0.333333]}


def made_up(folder, sizes):
    """Sets in the layout of the data folder: a smooth function of three inputs, two splits."""
    (folder / "uci").mkdir()
    masks = {}
    for i, (name, n) in enumerate(sizes.items()):
        X = normal(n, 3, seed=i).numpy()
        y = 20 + 5 * np.sin(X.sum(1)) + 0.3 * normal(n, seed=i + 10).numpy()
        np.savetxt(folder / "uci" / f"{name}.csv", np.column_stack([X, y]), delimiter=",", header="a,b,c,y")
        test = np.zeros((2, n), dtype=bool)
        test[0, : n // 5] = test[1, -(n // 5) :] = True
        masks[name] = np.packbits(test, axis=1)
    np.savez(folder / "uci" / "splits.npz", **masks)
    return folder


def test_splits_are_standardized_by_their_training_part(tmp_path):
    data = uci.load(made_up(tmp_path, {"boston": 60}), "boston", 2)
    assert data.X.shape == (2, 48, 3) and data.X_test.shape == (2, 12, 3)
    torch.testing.assert_close(data.X.mean(1), torch.zeros(2, 3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(data.y.std(1, correction=0), torch.ones(2).double(), rtol=1e-12, atol=0)
    assert 3 < float(data.unit[0]) < 7
    with pytest.raises(ValueError, match="boston has 2 splits; 3 were asked for"):
        uci.load(tmp_path, "boston", 3)
    with pytest.raises(FileNotFoundError, match="--data PATH"):
        uci.load(tmp_path / "nowhere", "boston", 1)


def test_real_sets_have_their_sizes():
    if not (common.DATA / "uci" / "splits.npz").exists():
        pytest.skip(f"no data under {common.DATA}")
    data = uci.load(common.DATA, "energy", 2)
    assert data.X.shape == (2, 691, 8) and data.y_test.shape == (2, 77)


# Small versions of the experiments.


def test_uci_runs(tmp_path, capsys):
    folder = made_up(tmp_path, {"wine": 50})
    where = main(
        ["uci", "--quick", "--sets", "wine", "--splits", "1", "--data", str(folder), "--out", str(tmp_path / "out")]
    )
    record = json.loads((where / "metrics.json").read_text())
    for setting in uci.SETTINGS:
        table = record["results"][setting]["wine"]
        missing = set(uci.METHODS) - set(table)
        assert missing == (set() if setting == "new" else {uci.RETRAINED})
        assert all(len(one["by split"]) == 1 and one["rmse"]["mean"] < 20 for one in table.values())
    assert (where / "figure.png").stat().st_size > 10_000
    assert "among tangents" in capsys.readouterr().out
    assert "| uci: new data, ensemble of 5" in (tmp_path / "out" / "README.md").read_text()


def test_sinusoids_run(tmp_path):
    where = main(["sinusoids", "--quick", "--tasks", "3", "--out", str(tmp_path)])
    table = json.loads((where / "metrics.json").read_text())["context points"]["5"]
    assert list(table) == list(sinusoids.METHODS)
    assert all(0 <= one["coverage"]["mean"] <= 1 for one in table.values())
    # Adapting on five points beats the network of another task.
    assert table["finite NTK, shared"]["rmse"]["mean"] < table["no adaptation"]["rmse"]["mean"]
    assert (where / "figure.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="on the CPU only; got 'cuda'"):
        main(["sinusoids", "--quick", "--device", "cuda"])


def test_tasks_are_sinusoids_with_one_percent_noise():
    tasks = sinusoids.draw(40, 300, generator())
    A, b, w = tasks.parameters.T[:, :, None]
    error = (tasks.y - A * torch.sin(w * tasks.X.squeeze(-1) + b)) / A
    assert float(error.std()) == pytest.approx(0.01, rel=0.05)
    assert float(A.min()) >= 0.1 and float(A.max()) <= 5 and float(w.min()) >= 0.5 and float(w.max()) <= 2


def test_the_command_line_lists_what_exists(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["nothing"])
    assert "sinusoids" in capsys.readouterr().err
    options = parser().parse_args(["uci"])
    assert options.data == common.DATA and common.results_folder(None, quick=True) == common.RESULTS / "quick"
