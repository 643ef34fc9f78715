"""Scores, files and the command line of the experiments."""

import json
import math
from argparse import Namespace

import pytest
import torch
from matplotlib import pyplot
from torch.distributions import Normal

from experiments import common
from experiments.__main__ import parser
from experiments.common import statistics
from tests.support.drawn import normal


def test_scores_are_those_of_the_normal_distribution():
    mean, variance, y = normal(50), normal(50, seed=1).square() + 0.1, normal(50, seed=2)
    found = statistics.scores(mean, variance, y, unit=3.0)
    expected = -Normal(3 * mean, 3 * variance.sqrt()).log_prob(3 * y).mean()
    assert found["nll"] == pytest.approx(float(expected), rel=1e-12)
    assert found["rmse"] == pytest.approx(3 * float((mean - y).square().mean().sqrt()), rel=1e-12)
    with pytest.raises(ValueError, match="must be positive; the smallest is 0"):
        statistics.scores(mean, torch.zeros(50), y)


def test_rows_are_replaced_where_they_stand():
    rows = [common.Row("a", "1", "2", "x | y"), common.Row("b", "1", "2", "")]
    text = common.update_table("", "one", "run one", "3 s", rows)
    text = common.update_table(text, "two", "run two", "3 s", rows[:1])
    text = common.update_table(text, "one", "run one again", "9 s", rows[:1])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| one: a", "| two: a"]
    assert "`run one again`" in lines[2] and r"x \| y" in lines[2]
    assert text.count("run one again") == 1 and "9 s" in lines[2]


def test_numbers_as_json_has_them():
    assert common.clean({"a": [math.nan, 1 / 3]}) == {"a": [None, 0.333333]}


def test_the_command_line_lists_what_exists(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["nothing"])
    assert "sinusoids" in capsys.readouterr().err
    options = parser().parse_args(["uci"])
    assert options.data == common.DATA and common.results_folder(None, quick=True) == common.RESULTS / "quick"


def test_metrics_have_the_commands_that_made_the_numbers(tmp_path):
    """A run that draws what earlier runs have kept leaves their command, time and machine."""
    options = Namespace(name="some", out=tmp_path, quick=False)

    def save(command, seconds):
        metrics = {"parts": common.kept_parts(options)}
        outcome = common.Outcome(metrics, pyplot.figure(), [common.Row("what", "theirs", "ours", "nothing")])
        spent = common.Spent(seconds, seconds)
        where = common.save(outcome, tmp_path, name="some", command=command, spent=spent, device="cpu")
        return json.loads((where / "metrics.json").read_text())

    for command in ("first", "second", "first"):
        options.command = command
        common.keep(options, {command: 1})
    found = save("first", 5.0)
    assert found["commands"] == ["second", "first"] and found["command"] == "first" and found["seconds"] == 5
    again = save("draw", 1.0)
    assert again == found and "| `first` |" in (tmp_path / "README.md").read_text()
