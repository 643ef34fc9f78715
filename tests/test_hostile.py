"""Hostile networks: right numbers or an error by name, never a wrong number in silence."""

import pytest

from linnet.testing.hostile import Verdict, cases, main, table, verdict

CASES = cases()


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_no_wrong_number_in_silence(case):
    if case.needs is not None:
        pytest.importorskip(case.needs)
    found = verdict(case)
    assert found.answer != "wrong", f"{case.kind}: {found.details}"
    assert found.meets(case), f"{case.kind}: {found.answer} instead of {case.expects}: {found.details}"


def test_every_class_has_several_cases():
    kinds = [case.kind for case in CASES.values()]
    assert len(CASES) >= 150
    assert min(kinds.count(kind) for kind in set(kinds)) >= 8


def test_table_counts_answers_by_class():
    found = {"cdist_1": Verdict("right", ""), "cdist_2": Verdict("wrong", "off"), "force": Verdict("refused", "")}
    assert table(found).splitlines()[2:] == [
        "| operations | 2 | 1 | 0 | 0 | 1 |",
        "| outputs are gradients | 1 | 0 | 1 | 0 | 0 |",
        "| total | 3 | 1 | 1 | 0 | 1 |",
    ]


def test_command_prints_what_happened(capsys):
    assert main(["scatter_add"]) == 0
    printed = capsys.readouterr().out
    assert "scatter_add (operations): right, expected right." in printed
    assert "| total | 1 | 1 | 0 | 0 | 0 |" in printed
