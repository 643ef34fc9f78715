"""`linnet demo`, which runs once, in its quick form."""

import json
import math
import os
import time
from dataclasses import replace

import matplotlib
import pytest
import torch

import linnet
from linnet import metrics
from linnet.cli.commands import demo
from linnet.cli.commands.demo import ANGLE, build_network, fine_tune, split_digits, turn
from tests.support.command_cases import run as invoke


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run into a folder that holds an old figure and a file of the user's."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / demo.PICTURE).write_text("old")
    (folder / "notes.txt").write_text("mine")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    bars, track = [], demo.track
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "track", lambda *args, **options: bars.append(options) or track(*args, **options))
        clock = time.perf_counter()
        result = invoke("demo", "--quick", "--seed", 3, "--out", folder)
        longest = time.perf_counter() - clock
    # Bars go when they are full, and there are none in a file.
    assert len(bars) == 3 and all(bar["transient"] and bar["disable"] for bar in bars)
    assert result.exit_code == 0, result.output
    assert torch.equal(torch.get_rng_state(), before)
    found = json.loads((folder / demo.METRICS).read_text())
    # The adaptations are a part of the run.
    assert 0 < sum(scores["seconds"][0] for scores in found["methods"].values()) < longest
    return folder, result.output, found


@pytest.fixture(scope="module")
def few_digits():
    """Few digits and an untrained network."""
    return split_digits(4, 30, seed=0)


def test_demo_writes_its_files_and_leaves_others(quick):
    folder, output, _ = quick
    assert sorted(path.name for path in folder.iterdir()) == sorted([*demo.FILES, "notes.txt"])
    assert (folder / "notes.txt").read_text() == "mine"
    check_picture((folder / demo.PICTURE).read_bytes())
    for name in demo.FILES:
        assert str(folder / name) in output


def check_picture(picture):
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    assert width > 1500
    assert height > 800
    assert len(picture) > 50_000


def test_demo_prints_each_step_and_method(quick):
    _, output, found = quick
    for i in range(1, 4):
        assert f"{i}/3" in output
    size = found["digits"]["source"]
    words = f"random splits: 1; {found['parameters']:,} parameters, trained on {size:,} digits each"
    assert words in output
    assert f"accuracy on 200 other upright digits: {found['upright_accuracy'][0]:.1%}" in output
    assert "200 test digits; NLL in nats. The seconds include all tuning:" in output
    assert "cross-validation for the methods above linnet, the evidence for linnet" in output
    for method, scores in found["methods"].items():
        (line,) = (line for line in output.splitlines() if line.startswith(f"  {method}  "))
        accuracy, nll, ece, seconds = line.removeprefix(f"  {method}").split()
        assert accuracy == f"{scores['accuracy'][0]:.1%}"
        assert nll == f"{scores['nll'][0]:.2f}"
        assert ece == f"{scores['ece'][0]:.3f}"
        assert seconds == f"{scores['seconds'][0]:.1f}"
    for claim in found["claims"]:
        assert claim in " ".join(output.split())


def test_demo_metrics(quick):
    found = quick[2]
    assert found["linnet"] == linnet.__version__
    assert (found["seed"], found["quick"]) == (3, True)
    assert 20_000 <= found["parameters"] <= 60_000
    assert found["digits"] == {"source": 1000, "labels": 40, "test": 200}
    assert 0.85 < found["upright_accuracy"][0] <= 1
    assert tuple(found["methods"]) == demo.METHODS
    for scores in found["methods"].values():
        assert {len(values) for values in scores.values()} == {1}
        assert all(math.isfinite(scores[name][0]) for name in ("accuracy", "nll", "brier", "ece", "seconds"))


def test_every_adaptation_beats_none(quick):
    methods = quick[2]["methods"]
    none = methods[demo.NONE]
    for method in demo.METHODS[1:]:
        assert methods[method]["accuracy"][0] > none["accuracy"][0]
        assert methods[method]["nll"][0] < none["nll"][0]


def test_demo_details(quick):
    methods = quick[2]["methods"]
    assert methods[demo.LAST]["details"][0]["C"] in (1e-3, 1e-2, 1e-1, 1.0, 10.0)
    assert methods[demo.TUNED]["details"][0]["rate"] in (1e-3, 3e-3, 1e-2, 3e-2)
    assert 1 <= methods[demo.TUNED]["details"][0]["epochs"] <= 10
    mode, default = (methods[method]["details"][0] for method in demo.TANGENT)
    assert mode["prior_variance"] == pytest.approx(default["prior_variance"])  # one prior, chosen by the evidence
    assert mode["elbo"] is None and default["elbo"] < 0
    for details in (mode, default):
        assert list(details["layers"]) == ["conv1", "conv2", "conv3", "head"]
        assert sum(details["layers"].values()) == pytest.approx(1)


def test_the_curve_is_learned_with_its_error_bars(quick):
    curves = quick[2]["curves"]
    assert len(curves) == 2
    for scores in curves:
        assert scores["rmse"] < scores["before"] and 0 < scores["coverage"] <= 1


def test_the_curve_is_adapted_where_it_is_drawn():
    curve = demo.adapt_curve(3)
    step = curve.at[:, 0].diff()
    assert curve.at.shape == (200, 1) and (float(curve.at[0]), float(curve.at[-1])) == (-3.0, 3.0)
    torch.testing.assert_close(step, torch.full((199,), 6 / 199), rtol=1e-4, atol=1e-6)
    assert torch.equal(curve.truth, demo.bend(curve.at[:, 0], new=True))
    assert curve.X.shape == (demo.POINTS, 1) and float(curve.X.abs().max()) <= 3
    assert curve.mean.shape == curve.std.shape == curve.before.shape == (200,)
    near = (curve.at[:, 0] - curve.X.T[0, :, None]).abs().argmin(1)  # the drawn input next to each point
    inside = (curve.mean[near] - curve.y).abs() <= 3 * curve.std[near]
    assert inside.float().mean() >= 0.9
    assert curve.scores["rmse"] < curve.scores["before"]


CURVE = demo.Curve(
    *(
        torch.randn(n, *more)
        for n, more in ((demo.POINTS, (1,)), (demo.POINTS, ()), (9, (1,)), (9, ()), (9, ()), (9, ()))
    ),
    torch.ones(9),
    {"before": 0.8, "rmse": 0.2, "coverage": 0.94, "seconds": 0.1},
)


def test_figures_of_several_splits(few_digits):
    generator = torch.Generator().manual_seed(0)
    splits = []
    for _ in range(2):
        results = {}
        for method in demo.METHODS:
            p = torch.rand(30, 10, dtype=torch.float64, generator=generator).softmax(1)
            scores = {**metrics.classification(p, few_digits.test[1]), "seconds": 1.0}
            results[method] = (p, scores, {})
        splits.append(replace(few_digits, results=results))
    before = dict(matplotlib.rcParams)
    picture = demo.draw_picture(splits, [CURVE], ["A claim."])
    check_picture(picture)
    assert dict(matplotlib.rcParams) == before
    assert demo.draw_picture(splits, [CURVE], ["Another claim."]) != picture
    assert demo.draw_picture(splits, [replace(CURVE, mean=CURVE.mean + 1)], ["A claim."]) != picture
    p, scores, details = splits[1].results[demo.LAST]
    for name in demo.SCORES:
        other = {**splits[1].results, demo.LAST: (p, {**scores, name: 0.5 * scores[name]}, details)}
        assert demo.draw_picture([splits[0], replace(splits[1], results=other)], [CURVE], ["A claim."]) != picture


@pytest.mark.parametrize(
    ("linnet_reads", "tuned_reads", "words"),
    [
        ([0.84, 0.80, 0.82], [0.83, 0.81, 0.82], "as many as fine-tuning (82%)"),
        ([0.84, 0.85, 0.86], [0.74, 0.76, 0.75], "more than fine-tuning (75%)"),
        ([0.74, 0.76, 0.75], [0.84, 0.85, 0.86], "fewer than fine-tuning (85%)"),
        ([0.74], [0.84], "fewer than fine-tuning (84%)"),
    ],
)
def test_the_words_follow_from_the_numbers(few_digits, linnet_reads, tuned_reads, words):
    def result(accuracy):
        return torch.zeros(1), {"accuracy": accuracy, "nll": 0.5, "seconds": 2.0}, {}

    splits = [
        replace(few_digits, results={demo.LINNET: result(a), demo.MODE: result(a), demo.TUNED: result(b)})
        for a, b in zip(linnet_reads, tuned_reads, strict=True)
    ]
    digits, points = demo.describe_results(splits, [CURVE])
    assert words in digits and "2.0 s with error bars, 2.0 s without" in digits
    assert "goes from 0.80 to 0.20 in 0.1 s" in points and "hold 94%" in points


def test_no_digit_is_used_twice():
    split = split_digits(5, seed=1)
    sizes = [len(x) for x, _ in (split.source, split.few, split.test)]
    assert sizes == [1000, 50, 497]
    assert split.few[1].bincount().tolist() == [5] * 10
    images = torch.cat([turn(split.source[0], ANGLE), split.few[0], split.test[0]]).flatten(1)
    assert len(images.unique(dim=0)) == sum(sizes)  # no two digits of the data set are equal
    torch.testing.assert_close(turn(split.upright, ANGLE), split.test[0])
    again, other = split_digits(5, seed=1), split_digits(5, seed=2)
    assert torch.equal(again.few[0], split.few[0])
    assert not torch.equal(other.few[0], split.few[0])
    assert len(split_digits(5, 20, seed=1).test[0]) == 20


def test_too_many_labels():
    with pytest.raises(ValueError, match="300 digits do not hold 60 of every class"):
        split_digits(60, seed=0)


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_turns_by_right_angles_are_exact(quarters):
    x = split_digits(4, 5, seed=0).upright
    torch.testing.assert_close(turn(x, 90 * quarters), x.rot90(quarters, (2, 3)), atol=1e-5, rtol=0)


def test_same_seed_same_network():
    one, two, other = build_network(1), build_network(1), build_network(2)
    assert torch.equal(one.head.weight, two.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


@pytest.mark.parametrize("method", demo.METHODS[:3])
def test_baselines_leave_the_network_as_it_is(few_digits, method):
    before = {name: value.clone() for name, value in few_digits.model.state_dict().items()}
    result = demo.adapt(method, few_digits, longest=2)
    for name, value in few_digits.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert result[0].shape == (30, 10)
    torch.testing.assert_close(result[0].sum(1), torch.ones(30, dtype=torch.float64))
    again = demo.adapt(method, few_digits, longest=2)
    assert torch.equal(again[0], result[0])


def test_fine_tuning_is_chosen_without_the_test_digits(few_digits):
    x = few_digits.test[0]
    _, chosen = fine_tune(few_digits, x, longest=3)
    _, same = fine_tune(few_digits, x[:2].flip(2), longest=3)
    assert chosen == same
    # Three epochs of few digits leave much to learn, so that small steps lose.
    assert chosen["rate"] in (1e-2, 3e-2)
    assert chosen["epochs"] == 3


@pytest.mark.parametrize("below", [False, True])
def test_out_that_is_a_file(tmp_path, below):
    path = tmp_path / "taken"
    path.write_text("mine")
    result = invoke("demo", "--quick", "--out", path / "deeper" if below else path)
    assert result.exit_code == 1
    assert "needs a folder it can write to" in result.output
    assert "Choose another folder with --out" in result.output
    assert "1/3" not in result.output  # before any work
    assert path.read_text() == "mine"


def test_out_below_folders_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_run", lambda folder, **_: (folder / demo.METRICS).write_text("{}"))
    assert invoke("demo", "--out", tmp_path / "a" / "b").exit_code == 0
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [demo.METRICS]


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
        demo.write(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == [demo.METRICS]
    assert path.read_text() == "old"
