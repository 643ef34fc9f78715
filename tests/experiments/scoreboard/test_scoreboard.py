"""Comparisons of the scoreboard say no where a method is worse, tasks are what they claim, and a small version runs."""

import pytest
import torch

from experiments import common
from experiments.__main__ import main
from experiments.common import ensembles
from experiments.common.training import Labeled
from experiments.scoreboard import classes, counts, methods, numbers, relinearized, tasks
from experiments.scoreboard.methods import ADAPT, AS_IS, ENSEMBLE, FINE, LAST, LINNET, LINNET_ENSEMBLE, TEMPERATURE
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick


def cell(**nll):
    """A cell in which methods have these NLLs, seed by seed."""
    count = len(next(iter(nll.values())))
    return {
        f"seed {i}": {name: {"nll": values[i], "seconds": 1.0 + (name == FINE)} for name, values in nll.items()}
        for i in range(count)
    }


# Comparisons.


def test_a_method_that_is_always_worse_is_behind():
    seeds = cell(**{LINNET: [1.1, 2.1, 3.1], AS_IS: [1.0, 2.0, 3.0], ENSEMBLE: [0.5, 0.5, 0.5]})
    found = counts.place(seeds, LINNET)
    assert found["verdict"] == "behind" and found["ahead"] == [AS_IS]  # five networks are no rival of one
    assert found["less the best rival"]["mean"] == pytest.approx(0.1)
    assert counts.count([seeds])[f"{LINNET} best or level"] == {"yes": 0, "best": 0, "cells": 1}


def test_a_difference_within_its_paired_error_is_level():
    # The differences are 0.3, -0.1, 0.1 with mean 0.1 and standard error 0.2 / sqrt(3) = 0.115.
    seeds = cell(**{LINNET: [1.3, 5.9, 9.1], FINE: [1.0, 6.0, 9.0]})
    assert counts.compare(seeds, LINNET, FINE)["error"] == pytest.approx(0.2 / 3**0.5)
    assert counts.place(seeds, LINNET)["verdict"] == "level"
    closer = cell(**{LINNET: [1.2, 6.0, 9.1], FINE: [1.0, 6.0, 9.0]})  # mean 0.1, standard error 0.058
    assert counts.place(closer, LINNET)["verdict"] == "behind"


def test_one_seed_has_no_error_to_hide_behind():
    assert counts.is_behind(cell(**{LINNET: [1.001], FINE: [1.0]}), LINNET, FINE)
    assert not counts.is_behind(cell(**{LINNET: [1.0], FINE: [1.0]}), LINNET, FINE)


def test_five_networks_are_compared_with_everything():
    seeds = cell(**{LINNET_ENSEMBLE: [1.0, 2.0], ENSEMBLE: [1.5, 2.5], FINE: [0.5, 1.5], LINNET: [0.1, 0.1]})
    assert counts.place(seeds, LINNET_ENSEMBLE)["ahead"] == [FINE]
    assert counts.place(seeds, LINNET)["verdict"] == "best"


def test_counts_are_over_the_cells_that_have_the_methods():
    worse = cell(**{ADAPT: [1.1, 2.1], FINE: [1.0, 2.0], LINNET: [1.0, 2.0], AS_IS: [1.0, 2.0]})
    better = cell(**{ADAPT: [0.9, 1.9], FINE: [1.0, 2.0], LINNET: [1.0, 2.0], AS_IS: [1.0, 2.0]})
    without = cell(**{LINNET: [1.0, 2.0], AS_IS: [0.5, 1.5]})
    found = counts.count([worse, better, without])
    assert found[f"{ADAPT} behind {FINE}"] == {"yes": 1, "cells": 2}
    assert found[f"{LINNET} behind {AS_IS}"] == {"yes": 1, "cells": 3}
    assert found[f"seconds, {ADAPT} over {FINE}"] == pytest.approx(0.5)
    assert f"{LINNET_ENSEMBLE} best or level" not in found


def test_a_method_that_failed_is_behind():
    seeds = cell(**{LINNET: [1.0, 2.0], FINE: [1.5, 2.5]})
    seeds["seed 1"][LINNET] = {"failed": "RuntimeError: no"}
    assert counts.measured(seeds) == [FINE] and counts.place(seeds, LINNET)["verdict"] == "behind"
    found = counts.count([seeds])
    assert found[f"{LINNET} best or level"]["yes"] == 0 and found[f"{LINNET} behind {FINE}"] == {"yes": 1, "cells": 1}
    assert counts.place(cell(**{FINE: [1.0, 2.0]}), LINNET) is None  # did not take part


# Methods.


def regression_task(n=30):
    widths, X, X_test = (2, 6, 1), normal(n, 2), normal(50, 2, seed=1)
    start = ensembles.initial(5, widths, generator=torch.Generator().manual_seed(0))
    target = [Labeled((x,), x.sum(1).sin()) for x in (X, X_test)]
    return tasks.Task(tasks.members(start, widths), *target)


def test_parameters_of_a_network_are_those_it_was_made_from():
    theta = ensembles.initial(1, (3, 4, 1), generator=torch.Generator().manual_seed(0))[0]
    (model,) = tasks.members(theta[None], (3, 4, 1))
    assert torch.equal(tasks.flatten(model).float(), theta) and tasks.widths_of(model) == [3, 4, 1]


@pytest.mark.parametrize("n", [4, 30, 120])
def test_fine_tuning_helps_an_untrained_network(n):
    task = regression_task(n)
    before, after = (numbers.keep_networks(task, 1), numbers.fine_tune(task, 1))
    error = [float((one.mean - task.test.y).square().mean()) for one in (before, after)]
    assert error[1] < error[0] and bool((after.variance > 0).all())
    both = numbers.fine_tune(task, 5)
    assert both.mean.shape == (50,) and float(both.variance.std()) > 0  # the members disagree


def class_task(start=None, held=None, own=False, members=5):
    X, X_test = normal(40, 4).float(), normal(60, 4, seed=1).float()
    data = [Labeled((x,), (x[:, 0] > 0).long()) for x in (X, X_test)]
    networks = [ensembles_of_classes(i) for i in range(members)]
    return tasks.Task(networks, *data, classes=2, start=start, held=held, own=own)


def ensembles_of_classes(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).eval()


def test_methods_of_classes_give_probabilities():
    task = class_task()
    for name, method in methods.CLASSES.items():
        if methods.takes_part(name, task):
            p = method(task)
            assert p.shape == (60, 2) and torch.allclose(p.sum(1), torch.ones(60).double())
    assert methods.measure(task, [FINE])[FINE]["accuracy"] > 0.7


def test_a_temperature_is_fitted_where_the_network_has_seen_nothing():
    task = class_task()
    assert classes.find_held(task)[1] is task.train
    headed = tasks.with_heads(task.networks, task.train, task.test, 2, 0)
    model, held = classes.find_held(headed)
    assert len(held) == 8 and torch.equal(held.y, task.train.y[32:])
    assert not torch.equal(*(tasks.flatten(one) for one in (model, headed.networks[0])))


def test_who_takes_part():
    headed, own, alone = class_task(start=lambda i, data: None), class_task(own=True), class_task(members=1)
    assert not methods.takes_part(LAST, headed) and methods.takes_part(TEMPERATURE, headed)
    assert not methods.takes_part(FINE, own) and methods.takes_part(LINNET, own)
    assert not methods.takes_part(ENSEMBLE, alone) and methods.takes_part(methods.FINE_ENSEMBLE, alone)
    assert not methods.takes_part(TEMPERATURE, regression_task())


# Tasks.


def test_what_is_kept_is_read_again(tmp_path):
    setting, made = tasks.Setting(tmp_path, tmp_path / "cache"), []

    def make():
        made.append(1)
        return {"x": normal(3)}

    first, again = (setting.keep({"what": "numbers", "of": 3}, make) for _ in range(2))
    setting.keep({"what": "numbers", "of": 4}, make)
    assert len(made) == 2 and torch.equal(first["x"], again["x"]) and torch.equal(first["x"], normal(3))


def test_halves_share_no_seed_and_names_are_unique():
    setting = tasks.Setting(common.DATA, None)
    cells = [*tasks.number_cells(setting), *tasks.class_cells(setting)]
    assert len({(cell.half, cell.key) for cell in cells}) == len(cells) >= 45
    for family in {cell.family for cell in cells}:
        halves = {
            half: {
                (cell.name, seed) for cell in cells if (cell.family, cell.half) == (family, half) for seed in cell.seeds
            }
            for half in (tasks.DEVELOPMENT, tasks.HELD)
        }
        assert not halves[tasks.DEVELOPMENT] & halves[tasks.HELD]
    assert {cell.key for cell in cells} >= set(tasks.QUICK)


@pytest.mark.slow
def test_scoreboard_runs_and_goes_on(tmp_path):
    needs("uci/boston.csv", "uci/splits.npz")
    record = run_quick(tmp_path, "scoreboard", "--only", "boston, 50", "sinusoids, 5", "own digits, decay 0,")
    development = record["results"]["development"]
    assert set(development["boston, 50 labels"]) >= {AS_IS, LAST, FINE, LINNET, ENSEMBLE}
    assert {"nll", "accuracy", "ece", "seconds"} <= set(development["own digits, decay 0, 100 labels"][LINNET])
    assert record["counts"]["both halves"][f"{LINNET} best or level"]["cells"] == 5
    assert "held, power, 50 labels" in record["not measured"]
    assert next(iter(development)) == "boston, 50 labels" and not record["failed"]
    assert (tmp_path / "scoreboard" / "figure.svg").read_text().startswith("<?xml")
    more = run_quick(tmp_path, "scoreboard", "--only", "new digits, decay 0,", "--methods", AS_IS)
    assert more["parts"]["development"]["boston, 50 labels"] == record["parts"]["development"]["boston, 50 labels"]
    assert set(more["results"]["development"]["new digits, decay 0, 100 labels"]) == {AS_IS}
    with pytest.raises(ValueError, match="No cell has one of the texts"):
        main(["scoreboard", "--quick", "--only", "nothing", "--out", str(tmp_path)])


def test_steps_count_as_better_or_worse_beyond_their_error():
    def measured(nll, steps):
        return {str(k): {"nll": value, "log evidence": 0.0, "taken": k} for k, value in zip(steps, nll, strict=True)}

    runs = [measured(nll, relinearized.STEPS) for nll in ([1.0, 0.5, 1.1], [2.0, 1.4, 1.9])]
    cell = relinearized.compare(runs)
    assert cell["1"]["change of nll"]["mean"] == pytest.approx(-0.55)
    assert cell["1"]["change of nll"]["error"] == pytest.approx(0.05)
    counted = relinearized.count({"a cell": cell})
    assert (counted["1"]["better"], counted["1"]["worse"]) == (1, 0)
    assert (counted["3"]["better"], counted["3"]["worse"]) == (0, 0)


@pytest.mark.slow
def test_relinearized_runs(tmp_path):
    needs("uci/boston.csv", "uci/splits.npz")
    record = run_quick(tmp_path, "relinearized")
    assert set(record["cells"]["auto"]) == {"boston, 50 labels", "sinusoids, 5 labels"}
    assert record["verdicts"]["network"]["1"]["cells"] == 2
