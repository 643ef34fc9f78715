"""`linnet.adapt`: what is tried, what is chosen, what is returned and saved."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.adaptation import choice
from linnet.adaptation.choice import HEAD, NETWORK, TANGENT, TUNED, Trials, fit_classes, read_examples, split
from linnet.adaptation.fine_tuning import measure_losses

RATES = (1e-2, 1e-3)


def network(outputs: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def points(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes_of(X: torch.Tensor) -> torch.Tensor:
    return (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def let_win(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Trials, "_choose", lambda self: name)


# What is returned.


def test_a_regressor_with_error_bars_and_a_table():
    model, X = network(1), points(90)
    before = copy.deepcopy(model.state_dict())
    reg = linnet.adapt(model, X, X[:, 0] * X[:, 1] + 0.05 * points(90, 1)[:, 0], rates=RATES, progress=False)
    assert isinstance(reg, linnet.TangentRegressor)
    assert [trial.name for trial in reg.selection_] == [NETWORK, TUNED, TANGENT, HEAD]
    assert reg.selection_[-1].note == "left out: the tangent was fitted"
    assert sum(trial.chosen for trial in reg.selection_) == 1
    assert all(trial.score is None or math.isfinite(trial.score) for trial in reg.selection_)
    mean, std = reg.predict(X, return_std=True, noise=True)
    assert mean.shape == (90,) and bool((std > 0).all())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_network_that_is_right_stays_as_it_stands():
    model, X = network(1), points(200)
    y = model(X)[:, 0].detach() + 0.3 * points(200, 1)[:, 0]
    reg = linnet.adapt(model, X, y, rates=RATES, progress=False)
    assert [trial.name for trial in reg.selection_ if trial.chosen] == [NETWORK]
    assert reg.model is model
    torch.testing.assert_close(reg.predict(X), model(X)[:, 0].detach(), rtol=1e-4, atol=1e-4)
    assert reg.noise_ == pytest.approx(0.09, rel=0.25)


def test_fine_tuning_is_found_where_linear_ways_are_not_enough():
    # Units with weights of next to nothing are linear, and so is the network around its weights.
    model, X = network(1), points(300)
    with torch.no_grad():
        model[0].weight *= 1e-3
    y = X[:, 0].abs() + 0.01 * points(300, 1)[:, 0]
    reg = linnet.adapt(model, {"input": X}, y, progress=False)  # without features of a matrix of inputs
    scores = {trial.name: trial.score for trial in reg.selection_}
    assert [trial.name for trial in reg.selection_ if trial.chosen] == [TUNED]
    assert scores[TUNED] < scores[TANGENT] - 0.5
    new = points(200, 2)
    assert (reg.predict({"input": new}) - new[:, 0].abs()).square().mean() < 0.2 * new[:, 0].abs().var()


def test_the_last_layer_is_judged_after_its_fit_and_numbers_may_need_a_new_head():
    model, X = network(1), points(90)
    y = 5 + 3 * model(X)[:, 0].detach() + 0.01 * points(90, 1)[:, 0]  # another last layer, and nothing else
    reg = linnet.adapt(model, X, y, rates=(), seconds=1e-6, progress=False)
    scores = {trial.name: trial.score for trial in reg.selection_}
    assert scores[TANGENT] is None and scores[HEAD] < scores[NETWORK] - 3
    assert [trial.name for trial in reg.selection_ if trial.chosen] == [HEAD]
    reg = linnet.adapt(network(3), X, y, rates=(), progress=False)
    assert [trial.name for trial in reg.selection_] == [HEAD, TUNED, TANGENT]
    assert float((reg.predict(X) - y).square().mean()) < 0.1 * float(y.var())


def test_labels_that_are_new_get_a_head():
    model, X = network(7), points(80)
    labels = np.array(["low", "middle", "high"])[classes_of(X).numpy()]
    clf = linnet.adapt(model, X.numpy(), labels, rates=RATES, progress=False)
    assert [trial.name for trial in clf.selection_] == [HEAD, TUNED, TANGENT]
    assert sorted(clf.classes_.tolist()) == ["high", "low", "middle"]
    assert (clf.predict(X.numpy()) == labels).mean() > 0.8


def test_outputs_that_say_nothing_about_the_labels_are_replaced():
    model, X = network(3), points(90)
    with torch.no_grad():
        model[2].weight.zero_()
    clf = linnet.adapt(model, X, classes_of(X), rates=(), progress=False)
    assert [trial.name for trial in clf.selection_] == [NETWORK, HEAD, TUNED, TANGENT]
    assert [trial.note for trial in clf.selection_ if trial.name == TUNED] == ["left out: no learning rate was given"]
    assert (clf.predict(X) == classes_of(X)).double().mean() > 0.8


def test_two_classes_several_labels_and_data_that_carries_labels():
    X = points(90)
    y = (X[:, 0] > 0).long()
    one = linnet.adapt(network(1), X, y, rates=(), progress=False)
    two = linnet.adapt(network(2), torch.utils.data.TensorDataset(X, y), rates=(), progress=False)
    assert one.predict_proba(X).shape == two.predict_proba(X).shape == (90, 2)
    several = linnet.adapt(network(2), {"input": X}, torch.stack([y, 1 - y], 1), task="multilabel", progress=False)
    assert several.multilabel_ and several.predict_proba({"input": X}).shape == (90, 2)


def test_the_same_seed_gives_the_same_answer():
    X = points(90)
    first, second = (linnet.adapt(network(3), X, classes_of(X), rates=RATES, progress=False) for _ in range(2))
    assert torch.equal(first.predict_proba(X), second.predict_proba(X))
    assert [(t.score, t.chosen) for t in first.selection_] == [(t.score, t.chosen) for t in second.selection_]


# The choice.


def test_what_changes_the_network_must_be_better_beyond_the_error():
    trials = Trials.__new__(Trials)
    base = torch.linspace(0, 1, 20, dtype=torch.float64)
    noise = torch.tensor([-1.0, 1.0] * 10, dtype=torch.float64)
    trials.losses = {NETWORK: base, TUNED: base - 0.1 + noise, HEAD: base - 0.3 + noise}
    assert trials._choose() == HEAD
    trials.losses = {NETWORK: base, TUNED: base - 0.1 + noise}
    assert trials._choose() == NETWORK
    trials.losses = {NETWORK: base - 0.1, TANGENT: base + noise}
    assert trials._choose() == TANGENT
    trials.losses = {NETWORK: base - 0.3, TANGENT: base + noise}
    assert trials._choose() == NETWORK
    trials.losses = {HEAD: base, TANGENT: base + 0.1 + noise, TUNED: base - 0.01}
    assert trials._choose() == TANGENT
    trials.losses = {HEAD: base, TANGENT: base + 0.3 + noise, TUNED: base - 0.01}
    assert trials._choose() == TUNED


def test_time_that_is_short_leaves_the_tangent_out():
    X = points(90)
    clf = linnet.adapt(network(5), X, classes_of(X), seconds=1e-3, rates=RATES, progress=False)
    (left,) = [trial for trial in clf.selection_ if trial.name == TANGENT]
    assert left.score is None and left.note == "left out: no time is left"
    assert clf.predict_proba(X).shape == (90, 3)


def test_a_tangent_that_would_take_longer_than_fine_tuning_is_left_out(monkeypatch):
    monkeypatch.setattr(Trials, "_expect_seconds", lambda self, base: 1e9)
    monkeypatch.setattr(choice, "PROBED", 10)
    X = points(90)
    reg = linnet.adapt(network(1), X, X[:, 0], rates=RATES, progress=False)
    (left,) = [trial for trial in reg.selection_ if trial.name == TANGENT]
    assert left.score is None and left.note == "left out: it would take about 1000000000 seconds"


def test_seconds_are_expected_from_a_fit_to_few_examples(monkeypatch):
    monkeypatch.setattr(choice, "PROBED", 10)
    X = points(90)
    examples = read_examples(network(1), X, X[:, 0], task="auto", classes=None, share=0.2, seed=0, progress=False)
    assert Trials(examples, None, ())._expect_seconds(network(1)) > 0


# Files.


@pytest.mark.parametrize("name", [NETWORK, HEAD, TANGENT, TUNED])
@pytest.mark.parametrize("task", ["regression", "classification", "new labels"])
def test_files_hold_what_the_given_network_does_not(tmp_path, monkeypatch, name, task):
    if task == "new labels" and name == NETWORK:
        pytest.skip("A network without outputs for the labels has no answer as it stands.")
    let_win(monkeypatch, name)
    X = points(90)
    model = network({"regression": 1, "classification": 3, "new labels": 5}[task])
    labels = ["a", "b", "c"]
    y = torch.sin(X[:, 0]) if task == "regression" else classes_of(X)
    y = np.array(labels)[y.numpy()] if task == "new labels" else y
    est = linnet.adapt(model, X, y, rates=(1e-2,), progress=False)
    est.save(tmp_path / "file")
    again = linnet.load(tmp_path / "file", model)
    assert again.selection_ == est.selection_
    for ask in ("predict",) if task == "regression" else ("predict_proba",):
        torch.testing.assert_close(getattr(again, ask)(X), getattr(est, ask)(X), rtol=1e-9, atol=1e-12)
    again.save(tmp_path / "twice")
    linnet.load(tmp_path / "twice", model)


def test_a_file_without_weights_needs_the_weights_it_was_fitted_with(tmp_path, monkeypatch):
    let_win(monkeypatch, HEAD)
    X, model = points(90), network(2)
    with torch.no_grad():
        model[2].weight *= 5
        model[2].bias -= model(X).mean(0)
    linnet.adapt(model, X, model(X).argmax(1), rates=(), progress=False).save(tmp_path / "file")
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(ValueError, match="fitted around other weights"):
        linnet.load(tmp_path / "file", model)


# Pieces.


def test_classes_are_split_evenly_and_keep_an_example():
    labels = torch.tensor([0] * 75 + [1] * 15 + [2])
    part, held = split(labels, 91, 0.2, 3)
    assert sorted([*part.tolist(), *held.tolist()]) == list(range(91))
    assert torch.bincount(labels[held], minlength=3).tolist() == [15, 3, 0]
    part, held = split(None, 100, 0.2, 3)
    assert (len(part), len(held)) == (80, 20)
    part, held = split(torch.tensor([0] * 98 + [1] * 2), 100, 0.2, 3)  # a fifth of two is less than one half
    assert torch.bincount((held >= 98).long(), minlength=2).tolist() == [20, 0]


def read(model: nn.Module, X: torch.Tensor, y: object, task: str = "auto") -> choice.Examples:
    return read_examples(model, X, y, task=task, classes=None, share=0.2, seed=0, progress=False)


def test_scores_are_densities_of_the_examples_held_out():
    X = points(90)
    Y = torch.stack([X[:, 0].sin(), X[:, 1]], 1)
    given = read(network(2), X, Y)
    reg = linnet.TangentRegressor(network(2), noise=0.1, prior=0.5).fit(X[given.part], Y[given.part])
    mean, std = reg.predict(X[given.held], return_std=True, noise=True)
    expected = -torch.distributions.Normal(mean, std).log_prob(Y[given.held]).sum(1)
    torch.testing.assert_close(given.score(reg), expected, rtol=1e-9, atol=1e-12)
    f = network(2)(X).detach()
    noise = (f - Y)[given.part].square().mean().sqrt()
    expected = -torch.distributions.Normal(f, noise).log_prob(Y)[given.held].sum(1)
    torch.testing.assert_close(given.score_network(network(2)), expected, rtol=1e-9, atol=1e-12)
    y = classes_of(X)
    given = read(network(3), X, y)
    clf = linnet.TangentClassifier(network(3), inference="map", prior=0.5).fit(X, y)
    expected = measure_losses(given.likelihood, clf.to_module()(X[given.held]), y[given.held])
    torch.testing.assert_close(given.score(clf), expected, rtol=1e-9, atol=1e-12)
    counts = torch.bincount(y[given.part], minlength=3).double() + 1
    expected = -(counts / counts.sum()).log()[y[given.held]].mean()
    assert given.constant_loss == pytest.approx(float(expected), rel=1e-12)
    several = (X > 0).long()
    given = read(network(2), X, several, "multilabel")
    clf = linnet.TangentClassifier(network(2), inference="map", prior=0.5).fit(X, several)
    expected = measure_losses(given.likelihood, clf.to_module()(X[given.held]), several[given.held].double())
    torch.testing.assert_close(given.score(clf), expected, rtol=1e-9, atol=1e-12)


def test_the_error_of_a_score_is_that_of_a_mean():
    X = points(90)
    trials, losses = Trials(read(network(1), X, X[:, 0]), None, ()), points(25)[:, 0]
    with trials._trial("name") as note:
        note(losses, "a note")
    (found,) = trials.done
    assert found.score == pytest.approx(float(losses.mean())) and found.note == "a note"
    assert found.error == pytest.approx(float(losses.std()) / 5)


def test_fine_tuned_networks_are_conditioned_on_what_is_new_to_them(monkeypatch):
    let_win(monkeypatch, TUNED)
    X = points(90)
    reg = linnet.adapt(network(1), X, torch.sin(X[:, 0]), rates=(1e-2,), progress=False)
    assert len(reg.loo_.mean) == 18


def test_whole_numbers_as_inputs_and_labels_that_other_calls_ignore():
    torch.manual_seed(0)
    X = torch.randint(5, (90, 2))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2)).double()
    labels = torch.where(X[:, 0] > 1, -100, 7)
    clf = linnet.adapt(model, X, labels, classes=[-100, 7], rates=(), progress=False)
    assert clf.classes_.tolist() == [-100, 7]
    assert float((clf.predict(X) == labels).double().mean()) > 0.9
    given = read_examples(model, X, labels, task="auto", classes=[-100, 7], share=0.2, seed=0, progress=False)
    alone = given.condition(model, given.part, mean="zero", prior=1.0)
    assert float((alone.predict(X) == labels).double().mean()) > 0.9


def test_classes_that_fit():
    assert fit_classes(np.array([1, 0]), 3, None)[1] is False
    assert fit_classes(np.array(["a", "b"]), 1, None)[1] is False
    assert fit_classes(np.array(["a", "b"]), 3, None)[1] is True
    assert fit_classes(np.array(["a", "b"]), 5, ["a", "b", "c"])[1] is True


# Errors.


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seconds": 0}, ValueError, "seconds must be positive, or None for no limit; got 0"),
        ({"held_out": 1.0}, ValueError, "held_out is a share of the examples, between 0 and 1; got 1.0"),
        ({"rates": (1e-3, -1.0)}, ValueError, "Learning rates must be positive"),
        ({"classes": [0, 1, 5]}, ValueError, r"Labels \[2\] are not among classes"),
        ({"classes": [0, 1]}, ValueError, r"Labels \['2'\] are not among classes"),
        ({"task": "numbers"}, ValueError, "task must be one of"),
        ({"task": "regression", "classes": [1]}, ValueError, "classes= is for one label for each example"),
        ({"seed": "a"}, (TypeError, ValueError), "seed"),
    ],
)
def test_options_are_checked(changed, error, message):
    X = points(30)
    with pytest.raises(error, match=message):
        linnet.adapt(network(3), X, classes_of(X), **changed)


def test_data_that_does_not_serve():
    X = points(30)
    with pytest.raises(ValueError, match="at least two classes; got one class"):
        linnet.adapt(network(3), X, torch.zeros(30, dtype=torch.long))
    with pytest.raises(ValueError, match="There are 30 examples"):
        linnet.adapt(network(3), X, classes_of(X)[:20])

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, classes_of(X), strict=True))

    with pytest.raises(TypeError, match="adapt holds examples out, so that it needs data that can be read by position"):
        linnet.adapt(network(3), Stream(), classes_of(X))


def test_frozen_networks_are_not_fine_tuned():
    model, X = network(3), points(40)
    examples = read_examples(model, X, classes_of(X), task="auto", classes=None, share=0.2, seed=0, progress=False)
    trials = Trials(examples, None, RATES)
    assert trials._fine_tune(copy.deepcopy(model).requires_grad_(False)) is None
    assert trials.done[0].note == "left out: no parameter is trainable"


def test_fits_by_laplace_are_said(monkeypatch):
    """Where variational inference does not settle, Laplace's approximation takes its place, and selection_ says so."""
    torch.manual_seed(0)
    X = torch.randn(90, 3)
    model, refit = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), linnet.TangentClassifier.refit

    def fail(self, *args, **given):
        if self.inference == "vi":
            raise ArithmeticError("not settled")
        return refit(self, *args, **given)

    let_win(monkeypatch, TANGENT)
    monkeypatch.setattr(linnet.TangentClassifier, "refit", fail)
    found = linnet.adapt(model, X, (X[:, 0] > 0).long(), rates=(), progress=False)
    assert found.inference == "laplace"
    said = {trial.name: trial.note for trial in found.selection_ if trial.chosen}
    assert "variational inference did not settle" in said["tangent"]


def test_a_classifier_is_refitted_to_all_examples_with_the_prior_of_its_trial(monkeypatch):
    let_win(monkeypatch, TANGENT)
    X = points(90)
    y = classes_of(X)
    found = linnet.adapt(network(3), X, y, rates=(), progress=False)
    assert found.inference == "vi"
    part = read(network(3), X, y).part
    tried = linnet.TangentClassifier(found.model, mean=found.mean_, progress=False).fit(X[part], y[part])
    assert found.scales_ == pytest.approx(tried.scales_, rel=1e-6)
    expected = tried.refit(X, y)
    torch.testing.assert_close(found.predict_proba(X), expected.predict_proba(X), rtol=1e-6, atol=1e-9)


def test_of_few_examples_none_are_held_out():
    X = points(9)
    found = linnet.adapt(network(1), X, X[:, 0].sin(), progress=False)
    (only,) = found.selection_
    assert only.name == TANGENT and only.chosen and only.score is None and "9 examples are too few" in only.note
    alone = linnet.TangentRegressor(network(1), progress=False).fit(X, X[:, 0].sin())
    torch.testing.assert_close(found.predict(X), alone.predict(X), rtol=1e-9, atol=0)
    X = points(72)
    (only,) = linnet.adapt(network(3), X, classes_of(X), progress=False).selection_
    assert only.chosen and "72 examples are too few" in only.note


def test_a_refit_is_saved_with_its_network(tmp_path):
    X = points(40)
    model = network(3)
    found = linnet.adapt(model, X, classes_of(X), rates=(), progress=False)
    again = found.refit(X[:20], classes_of(X[:20]))
    again.save(tmp_path / "refit")
    loaded = linnet.load(tmp_path / "refit", model)
    torch.testing.assert_close(loaded.predict_proba(X), again.predict_proba(X), rtol=1e-9, atol=1e-12)


def test_few_labels_that_are_new_to_the_network_get_a_head():
    X = points(40)
    torch.manual_seed(0)
    model = network(3)
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.zero_()  # says nothing about any class
    found = linnet.adapt(model, X, classes_of(X), progress=False)
    assert linnet.network.has_fitted_head(found.model) and found.mean_ == "zero"
    assert len(found.selection_) == 1
    knowing = network(3)
    opt = torch.optim.Adam(knowing.parameters(), 1e-2)
    for _ in range(200):
        opt.zero_grad()
        nn.functional.cross_entropy(knowing(points(200, 5)), classes_of(points(200, 5))).backward()
        opt.step()
    assert linnet.adapt(knowing, X, classes_of(X), progress=False).mean_ == "network"
