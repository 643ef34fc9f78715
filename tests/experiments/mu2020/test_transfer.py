"""Adapting to new labels: what the experiments on it share, and a small version of one; no real results here."""

import copy
import json
import math
from argparse import Namespace

import pytest
import torch
from torch import nn

import linnet
from experiments import common
from experiments.__main__ import main
from experiments.common.data import CIFAR10_MEAN, CIFAR10_STD, as_cifar10
from experiments.common.networks import resnet
from experiments.common.statistics import interval, show_interval
from experiments.common.training import Labeled, Search, cross_entropy, fine_tune, in_turn, probabilities
from experiments.mu2020 import contest, gains, transfer
from experiments.mu2020.contest import GRADIENTS, LINEAR
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Draws.


def test_classes_come_in_turn_and_nothing_twice():
    y = torch.tensor([2, 2, 2, 0, 0, 1, 1, 1, 1])
    index = in_turn(y, 9, 3, generator())
    assert index.sort().values.tolist() == list(range(9))
    assert y[index].tolist() == [0, 1, 2, 0, 1, 2, 1, 2, 1]
    assert torch.equal(in_turn(y, 4, 3, generator()), index[:4])
    with pytest.raises(ValueError, match="can be 3 to 9; got 2"):
        in_turn(y, 2, 3, generator())


# Fine-tuning.


def problem(n=30):
    X = normal(n, 4).float()
    return Labeled((X,), (X[:, 0] > 0).long())


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_fine_tuning_is_adam_for_the_chosen_epochs():
    data, first = problem(), network()
    search = Search((1e-2,), 4, batch=8)
    seen = []

    def start(part):
        seen.append(len(part))
        return copy.deepcopy(first)

    found = fine_tune(start, data, search, seed=3)
    assert seen == [24, 30]  # tuned without the last fifth
    assert found.rate == 1e-2 and found.epochs == 4  # the loss still falls
    optimizer, order = torch.optim.Adam(first.parameters(), 1e-2), generator(3)
    for _ in range(4):
        for index in torch.randperm(30, generator=order).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(first(data.X[0][index]), data.y[index]).backward()
            optimizer.step()
    for a, b in zip(found.model.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_fine_tuning_that_only_harms_is_not_done():
    data, first = problem(), nn.Linear(4, 2)
    data.y[:24] = 1 - data.y[:24]  # wrong where it trains, right where it is held out
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[-5.0, 0, 0, 0], [5.0, 0, 0, 0]]))
        first.bias.zero_()
    found = fine_tune(lambda part: copy.deepcopy(first), data, Search((0.1, 1.0), 2))
    assert found.epochs == 0 and torch.equal(found.model.weight, first.weight)


def test_one_logit_is_two_classes():
    f, y = normal(7, 1), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    both = torch.cat([torch.zeros_like(f), f], 1)
    torch.testing.assert_close(cross_entropy(f, y), nn.functional.cross_entropy(both, y))
    p = probabilities(nn.Identity(), (f,))
    torch.testing.assert_close(p, both.softmax(1))


# Over draws.


def draws(values):
    """Runs whose contenders have these accuracies, by name."""
    others = dict.fromkeys((*gains.SCORES, *gains.TIMES), 1.0)
    return [
        {
            "set": "a",
            "labels": 10,
            "contenders": {name: {**others, "accuracy": accuracy[i]} for name, accuracy in values.items()},
        }
        for i in range(3)
    ]


def test_differences_are_paired():
    runs = draws({LINEAR: [0.5, 0.6, 0.9], "better": [0.52, 0.61, 0.93], "worse": [0.4, 0.5, 0.8]})
    found = gains.differences(runs, "accuracy")[10]
    assert found["better"]["mean"] == pytest.approx(0.02)
    # The t distribution with two degrees of freedom: 4.302653 standard errors of 0.01 / sqrt(3).
    assert found["better"]["high"] - found["better"]["mean"] == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)
    assert found["worse"]["high"] < 0
    assert show_interval(found["better"], factor=100) == "+2.0 (-0.5 to +4.5)"
    assert show_interval(interval([1.0])) == "+1.0"


def test_contenders_of_some_draws_are_compared_where_they_are():
    runs = draws({LINEAR: [0.5, 0.5, 0.5], "rare": [0.6, 0.6, 0.6]})
    del runs[2]["contenders"]["rare"]
    assert gains.pair_with_linear(runs, "rare", "accuracy", size=10)["count"] == 2
    assert gains.summary(runs)["a"][10]["rare"]["accuracy"]["mean"] == pytest.approx(0.6)


def test_times_are_those_of_one_machine():
    runs = draws({LINEAR: [0.5, 0.6, 0.7]})
    for run, machine, seconds in zip(runs, ("slow", "fast", "fast"), (100.0, 1.0, 3.0), strict=True):
        run["machine"] = machine
        run["contenders"][LINEAR]["seconds"] = seconds
    found = gains.summary(runs)["a"][10][LINEAR]
    assert found["seconds"]["mean"] == 2.0 and found["accuracy"]["mean"] == pytest.approx(0.6)


def test_draws_of_every_label_have_an_interval_over_test_examples():
    runs = draws({LINEAR: [0.5] * 3, "better": [0.6] * 3, "other": [0.6, 0.7, 0.8]})
    runs[2]["contenders"]["better"][contest.ERRORS] = {"accuracy": 0.02}
    for run in runs:
        assert gains.pair_with_linear([run], "better", "accuracy", size=10)["count"] == 1
    better = gains.pair_with_linear(runs, "better", "accuracy", size=10)
    assert show_interval(better, factor=100) == "+10.0 (+10.0 to +10.0)"
    runs[2]["every label"] = True
    found = gains.pair_with_linear(runs, "better", "accuracy", size=10)
    assert found["mean"] == pytest.approx(0.1) and found["high"] - found["mean"] == pytest.approx(0.0392, rel=1e-4)
    assert "over test examples" in found
    for name, key in (("other", "accuracy"), ("better", "nll")):  # of which no run knows it
        assert "over test examples" not in gains.pair_with_linear(runs, name, key, size=10)


def test_errors_are_those_of_paired_differences():
    p, q, y = (normal(50, 3, seed=1).softmax(1), normal(50, 3, seed=2).softmax(1), torch.arange(50) % 3)
    found = contest.errors(p, q, y)
    lost = (q[torch.arange(50), y] / p[torch.arange(50), y]).log()
    assert found["nll"] == pytest.approx(float(lost.std() / 50**0.5), rel=1e-12)
    only_p, only_q = (float(((a.argmax(1) == y) & (b.argmax(1) != y)).double().mean()) for a, b in ((p, q), (q, p)))
    variance = (only_p + only_q - (only_p - only_q) ** 2) / 49
    assert found["accuracy"] == pytest.approx(variance**0.5, rel=1e-12)


def test_what_another_process_kept_meanwhile_is_shown(tmp_path):
    options, spent = Namespace(name="some", out=tmp_path, quick=False), common.Spent(1.0, 1.0)
    drawn = draws({LINEAR: [0.5] * 3, GRADIENTS: [0.6, 0.7, 0.8]})
    runs = [{**run, "seed": seed} for seed, run in enumerate(drawn)]
    said = {
        "said": {GRADIENTS: "so"},
        "differs": lambda how, runs, gain: f"{gains.draws(runs)} draws",
        "command": "some",
    }
    parts = gains.keep(options, "here", {"of": "all"}, runs[0])
    early = gains.of_parts(parts, "here", **said)
    assert early.rows[0].differs == "1 draws"
    gains.keep(options, "here", {"of": "all"}, runs[1])
    gains.keep(options, "there", {"of": "all"}, runs[2])
    where = common.save(early, tmp_path, name="some", command="given", spent=spent, device="cpu")
    record = json.loads((where / "metrics.json").read_text())
    assert record["settings"] == {"draws": 2, "of": "all"} and record["parts"].keys() == {"here", "there"}
    assert record["less the linear one"]["accuracy"]["10"][GRADIENTS]["count"] == 2
    assert (where / "figure.svg").read_text().startswith("<?xml") and (where / "figure.png").exists()
    page = (tmp_path / "README.md").read_text()
    assert page.count(f"| some: 10 labels, {GRADIENTS} less linear") == 2
    assert "+15.0 (" in page and "| 2 draws |" in page


def test_of_several_settings_that_with_the_most_labels_is_shown():
    drawn = draws({LINEAR: [0.5] * 3, GRADIENTS: [0.6, 0.7, 0.8]})
    runs = [{**run, "seed": seed, "machine": f"machine {seed}"} for seed, run in enumerate(drawn)]
    more = {**runs[2], "labels": 1000}
    parts = {"a": {"settings": {}, "runs": {0: runs[0], 1: runs[1]}}, "b": {"settings": {}, "runs": {2: more}}}

    def differs(how, runs, gain):
        return gains.machines(how, runs)

    for now in parts:  # whichever was run last
        found = gains.of_parts(parts, now, said={GRADIENTS: "so"}, differs=differs, command="some")
        assert list(found.metrics["results"]["a"]) == [1000] and found.metrics["parts"] == parts
        assert found.figure.get_suptitle() == "b"
        assert [row.differs for row in found.rows] == ["machine 2", "machine 0, machine 1"]
        assert [row.what.split(" labels")[0] for row in found.rows] == ["1,000", "10"]
    assert gains.machines({"machine": "all"}, [{"seed": 0}, runs[1]]) == "all, machine 1"


# Networks in two parts.


def test_gray_images_are_normalized_as_cifar():
    x = torch.zeros(2, 28, 28, dtype=torch.uint8)
    x[1] = 255
    found = as_cifar10(x)
    assert found.shape == (2, 3, 32, 32)
    mean, std = torch.tensor(CIFAR10_MEAN), torch.tensor(CIFAR10_STD)
    torch.testing.assert_close(found[0, :, 5, 5], -mean / std)
    torch.testing.assert_close(found[1, :, 5, 5], (1 - mean) / std)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_parts_of_a_resnet_are_the_network(blocks):
    net, x = resnet(None), normal(3, 3, 32, 32).float()
    last = contest.Top(list(net.layer3)[-blocks:], net.linear).eval()
    top = linnet.fold_batchnorm(last)
    A = transfer.below(net, blocks, x)
    with torch.no_grad():
        torch.testing.assert_close(top(A), net(x), rtol=1e-4, atol=1e-5)
        head = nn.Linear(64, 10)
        changed = transfer.with_head(net, head)
        torch.testing.assert_close(changed(x), head(last.blocks(A).mean((2, 3))))
    assert net.linear is not head


# A small version of the experiment.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The evidence of these 20 labels")  # which are too few
def test_transfer_runs(tmp_path):
    needs("mnist.npz", "weights/resnet20_cifar10.safetensors")
    record = run_quick(tmp_path, "transfer", "--sets", "mnist")
    table = record["results"]["MNIST"]["20"]
    assert list(table) == list(contest.METHODS) == list(record["methods"])
    assert all(0 <= one["accuracy"]["mean"] <= 1 and one["nll"]["mean"] > 0 for one in table.values())
    assert table[GRADIENTS]["seconds"]["mean"] > table[LINEAR]["seconds"]["mean"]  # which it starts from
    assert f"| transfer: 20 labels, {GRADIENTS} less linear" in (tmp_path / "README.md").read_text()
    # Without a number nothing is measured.
    again = run_quick(tmp_path, "transfer", "--sizes")
    (part,) = again["parts"].values()
    assert list(part["runs"]) == ["MNIST, draw 0, 20 labels"] and again["parts"] == record["parts"]
    with pytest.raises(ValueError, match="No runs are kept of 'ResNet-20, 2 blocks adapt, 40 test images'"):
        main(["transfer", "--quick", "--sizes", "--blocks", "2", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="has 3 blocks; got --blocks 4"):
        main(["transfer", "--quick", "--blocks", "4"])
