"""Hostile networks: right numbers or an error by name, never a wrong number in silence."""

import pytest
import torch

import linnet
from linnet.jacobian import Jacobian
from linnet.testing.hostile.judge import Verdict, judge, list_cases, main, tabulate

CASES = list_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_no_wrong_number_in_silence(case):
    if case.needs is not None:
        pytest.importorskip(case.needs)
    found = judge(case)
    assert found.answer != "wrong", f"{case.kind}: {found.details}"
    assert found.meets(case), f"{case.kind}: {found.answer} instead of {case.expects}: {found.details}"


def sabotage(monkeypatch, change):
    original = Jacobian.gram_diag
    monkeypatch.setattr(Jacobian, "gram_diag", lambda J, *args: change(J, original(J, *args)))


def test_judge_names_a_wrong_product(monkeypatch):
    sabotage(monkeypatch, lambda J, diagonal: 1.001 * diagonal)
    found = judge(CASES["scatter_add"])
    assert found.answer == "wrong"
    assert "batch_size=auto, J.gram_diag(): off by 1.0e-03; batch_size=7, J.gram_diag()" in found.details


def test_judge_tells_a_refusal_from_a_crash(monkeypatch):
    sabotage(monkeypatch, lambda J, diagonal: torch.ones(2) @ torch.ones(3))
    found = judge(CASES["scatter_add"])
    assert found.answer == "crashed"
    assert "batch_size=auto, J.gram_diag(): RuntimeError" in found.details
    assert judge(CASES["batch_softmax"]).answer == "refused"


def test_judge_sees_changed_data_and_modules(monkeypatch):
    model_of = linnet.linearize

    def careless(model, *args):
        model.train()
        return model_of(model, *args)

    monkeypatch.setattr(linnet, "linearize", careless)
    assert judge(CASES["scatter_add"]) == Verdict("wrong", "linnet changed the mode of a module of the user's")


def test_every_class_has_several_cases():
    kinds = [case.kind for case in CASES.values()]
    assert len(CASES) >= 150
    assert min(kinds.count(kind) for kind in set(kinds)) >= 8


def test_table_counts_answers_by_class():
    found = {"cdist_1": Verdict("right", ""), "cdist_2": Verdict("wrong", "off"), "force": Verdict("refused", "")}
    assert tabulate(found).splitlines()[2:] == [
        "| operations | 2 | 1 | 0 | 0 | 1 |",
        "| outputs are gradients | 1 | 0 | 1 | 0 | 0 |",
        "| total | 3 | 1 | 1 | 0 | 1 |",
    ]


def test_command_prints_what_happened(capsys):
    assert main(["scatter_add"]) == 0
    printed = capsys.readouterr().out
    assert "scatter_add (operations): right, expected right." in printed
    assert "| total | 1 | 1 | 0 | 0 | 0 |" in printed
