"""Networks that meet shifted data: the contenders are what they claim, and small versions of both experiments run."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import linnet
from experiments.common.networks import perceptron
from experiments.common.training import Labeled, Search, gaussian_nll, in_parts, loss_of, squared_error, train
from experiments.maddox2021 import malaria, olivetti, shifts
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick


def case(n=12, **given):
    x, net = normal(40, 2).float(), perceptron((2, 6, 2))
    y = x.sum(1).sin()
    adapt, test = Labeled((x[:n],), y[:n]), Labeled((x[n:],), y[n:])
    return shifts.Case(net, adapt, test, Search((1e-2,), 3), **given)


# Losses and training.


def test_the_gaussian_loss_is_the_normal_density():
    f, y = normal(9, 2), normal(9, seed=1)
    expected = -Normal(f[:, 0], (f[:, 1] / 2).exp()).log_prob(y).mean() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(gaussian_nll(f, y), expected, rtol=1e-12, atol=1e-12)


def test_training_is_for_the_epochs_given_and_in_place():
    x = normal(20, 3).float()
    data = Labeled((x,), x.sum(1))
    net = perceptron((3, 8, 1))
    losses = []
    for _ in range(2):
        assert train(net, data, epochs=20, rate=1e-2, loss=squared_error) is net
        losses.append(loss_of(net, data, squared_error))
    assert losses[1] < losses[0] < loss_of(perceptron((3, 8, 1)), data, squared_error)
    assert not net.training


# Contenders.


def test_contenders_leave_the_network_alone_and_score_in_units():
    one = case(unit=10.0)
    before = copy.deepcopy(one.model.state_dict())
    found = one.all()
    assert list(found) == list(shifts.METHODS)
    assert all(torch.equal(before[key], value) for key, value in one.model.state_dict().items())
    error = 10 * (in_parts(one.model, one.test.X)[:, 0] - one.test.y)
    assert found[shifts.NONE]["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    assert found[shifts.EXACT]["rmse"] != found[shifts.LINNET]["rmse"]


def test_the_linearized_network_is_the_regressor_with_the_networks_noise():
    one = case()
    given = {"noise": "heteroscedastic", "mean": "network", "average": False, "progress": False}
    reg = linnet.TangentRegressor(one.model, **given).fit(one.adapt.X[0], one.adapt.y)
    mean = reg.predict(one.test.X[0])
    rmse = float((mean - one.test.y.double()).square().mean().sqrt())
    assert one.tangent()["rmse"] == pytest.approx(rmse, rel=1e-9)


def test_the_published_baseline_trains_the_last_layer_alone():
    one = case()
    new = copy.deepcopy(one.model)
    data = Labeled((in_parts(one.model[:-1], one.adapt.X),), one.adapt.y)
    train(new[-1], data, epochs=6 * 3, batch=one.batch, loss=gaussian_nll)
    mean = in_parts(new, one.test.X)[:, 0]
    rmse = float((mean - one.test.y).square().mean().sqrt())
    assert one.published(times=6)["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert one.published()["rmse"] != pytest.approx(rmse, rel=1e-5)


def test_differences_are_paired_over_seeds():
    def run(seed, a, b):
        scores = {name: {"rmse": value, "nll": 0.0, "coverage": 1.0} for name, value in ((shifts.LINNET, a), ("x", b))}
        return {"shift": "s", "seed": seed, "points": 5, "contenders": scores}

    table = shifts.summary([run(0, 1.0, 1.5), run(1, 3.0, 3.7)])["s"][5]
    less = table["x"]["rmse less that of the linearized network"]
    assert less["mean"] == pytest.approx(0.6) and less["low"] < 0.5 and table["x"]["rmse"]["mean"] == pytest.approx(2.6)
    assert "NLL at 5: 0.00" in next(shifts.rows({"s": {5: table}}, said={}, differs="", unit="")).ours
    assert shifts.part(run(0, 1.0, 2.0))["s"]["5 points"]["seed 0"]["x"]["rmse"] == 2.0
    (first, second) = shifts.rows({"s": {5: table}}, said={"x": "said"}, differs="", unit="")
    assert first.paper == "not in the paper" and second.paper == "said" and "at 5: +0.600" in second.ours


# Data.


def test_maps_are_read_where_there_is_land(tmp_path):
    mask = np.array([[1, 0, 1], [0, 1, 1]], dtype=bool)
    years = {f"pfpr_{year}": np.arange(4, dtype=np.float32) + i for i, year in enumerate(("2000", "2012", "2015"))}
    place = {"lon": np.array([1.0, 5.0, 9.0]), "lat": np.array([12.0, 6.0])}
    np.savez(tmp_path / "malaria_africa_pfpr.npz", mask=np.packbits(mask, 1), shape=np.array([2, 3]), **place, **years)
    maps = malaria.load(tmp_path, "nigeria")  # west of 2.5 degrees is not in it
    assert maps.rates["2012"].tolist() == [2.0, 3.0, 4.0]
    assert maps.place.tolist() == [[0, 1], [1, 0], [1, 1]]
    torch.testing.assert_close(maps.X.mean(0), torch.zeros(2), rtol=0, atol=1e-6)
    assert len(malaria.load(tmp_path, "africa").X) == 4


def test_rotation_turns_a_ramp_and_crops_the_middle():
    ramp = (torch.arange(64.0) - 31.5).expand(64, 64)  # x, growing to the right
    down = ramp.T
    angle = torch.tensor([0.0, 30.0])
    found = olivetti.rotate_and_crop(ramp.expand(2, 1, 64, 64), angle)[:, 0]
    crop = slice((64 - 45) // 2, (64 - 45) // 2 + 45)
    for image, degrees in zip(found, angle.tolist(), strict=True):
        a = math.radians(degrees)
        expected = math.cos(a) * ramp[crop, crop] - math.sin(a) * down[crop, crop]
        torch.testing.assert_close(image, expected, rtol=0, atol=1e-3)


# Small versions of the experiments.


@pytest.mark.slow
def test_malaria_runs(tmp_path):
    needs("malaria_africa_pfpr.npz")
    record = run_quick(tmp_path, "malaria")
    for shift in malaria.SHIFTS.values():
        assert list(record["results"][shift]["20"]) == list(shifts.METHODS)
        assert 0 < record["results"][shift]["20"][shifts.LINNET]["rmse"]["mean"] < 0.4
    assert list(record["parts"]["nigeria, 20 units"]) == list(malaria.SHIFTS.values())
    assert "2015 stands for 2016" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_olivetti_runs(tmp_path):
    needs("olivetti.npz")
    table = run_quick(tmp_path, "olivetti")["results"][olivetti.NAME]
    assert list(table) == ["10", "20"]
    assert set(shifts.METHODS) - set(table["20"]) == {shifts.ALONE, shifts.RESIDUALS}
    assert 0 < table["20"][shifts.LINNET]["rmse"]["mean"] < 30
