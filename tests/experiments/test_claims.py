"""The claims of the papers: verdicts are computed from metrics, and each that did not come out has a reason."""

from __future__ import annotations

import math
import re

import pytest

from docs.tools.pages import ROOT
from experiments.__main__ import EXPERIMENTS, describe
from experiments.claims import PAPERS, count_verdicts, find_failed, judge_all, markdown, overview, text
from experiments.judge import (
    NO,
    NOT_SHOWN,
    OPEN,
    VERDICTS,
    YES,
    Claim,
    Finding,
    Interval,
    ahead,
    below,
    combine,
    judge,
    pair,
    select,
    stored,
    unpair,
    widen,
    within,
)
from experiments.maddox2021.shifts import FIXED as LAST
from experiments.maddox2021.shifts import FIXED_LONGER as LONGER
from experiments.mu2020.claims import FEATURES, IMAGES, LINEAR, SAME

PAGE = ROOT / "docs" / "results.md"
UNWRITTEN = {"table 1": "Linearizing all layers"}  # where no experiment has run yet
REPRODUCES = re.compile(r"Maddox|Mu et al|Zhang|slides|talk")
FOUND = judge_all()
CLAIMS = [claim for paper in PAPERS for claim in paper.claims]


def claim_of(text: str) -> Claim:
    """The one claim that says so."""
    (found,) = (claim for claim in CLAIMS if text in claim.text)
    return found


TRANSFER = claim_of("Transferred to other data, gradient features are ahead")
FINE_TUNING = claim_of("they are slightly ahead of fine-tuning")
NTK = claim_of("With the NTK parametrization")
VI = claim_of("Variational inference is slightly behind")


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high)


def names_of_reproductions() -> set[str]:
    said = {name: describe(name) for name in EXPERIMENTS}
    return {name for name, text in said.items() if REPRODUCES.search(text) and "do not have" not in text}


def test_every_experiment_of_a_paper_has_a_claim() -> None:
    assert names_of_reproductions() <= {claim.experiment for claim in CLAIMS}
    assert {claim.experiment for claim in CLAIMS} <= set(EXPERIMENTS)
    assert len(names_of_reproductions()) > 15


def test_every_paper_has_claims_and_none_is_said_twice() -> None:
    assert all(paper.claims for paper in PAPERS)
    assert len({(paper.authors, claim.said) for paper in PAPERS for claim in paper.claims}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.said.endswith(".") and len(claim.said) < 100, claim.said
        assert "|" not in claim.said + claim.where


@pytest.mark.parametrize(
    ("low", "high", "above", "small"),
    [(0.5, 0.8, YES, YES), (-0.8, -0.5, NO, YES), (-0.5, 0.5, NOT_SHOWN, YES), (0.5, 2.0, YES, NOT_SHOWN)],
)
def test_an_interval_decides(low: float, high: float, above: str, small: str) -> None:
    assert combine(ahead(interval(low, high))) == above
    assert combine(within(1.0)(interval(low, high))) == small
    assert combine(below(3)(interval(low + 3, high + 3))) == {YES: NO, NO: YES, NOT_SHOWN: NOT_SHOWN}[above]


def test_a_single_draw_shows_nothing() -> None:
    assert combine([Interval(5.0)]) == combine(within(1.0)(Interval(0.0))) == NOT_SHOWN
    assert f"{Interval(5.0):+.1f}" == "+5.0 (no interval)"
    assert Interval.parse({"mean": 5.0, "low": None, "high": None}).mean == 5
    assert combine([widen(5.0, None, 3)]) == combine([widen(5.0, 0.1, 1)]) == NOT_SHOWN


def test_several_parts() -> None:
    yes, no, open_ = interval(1, 2), interval(-2, -1), interval(-1, 2)
    assert combine([yes, yes]) == YES
    assert combine([yes, open_]) == NOT_SHOWN
    assert combine([open_, no, yes]) == NO


def test_intervals_from_seeds_and_from_errors() -> None:
    assert pair({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 0.0, "c": 7.0}) == Interval(1.0, 1.0, 1.0, 2)
    with pytest.raises(LookupError, match="in common"):
        pair({"a": 1.0}, {"b": 1.0})
    gap = unpair({"mean": 2.0, "error": 0.3}, {"mean": 1.0, "error": 0.4}, 1000)
    assert gap.high - gap.mean == pytest.approx(0.5 * 1.962, rel=1e-3)
    assert interval(1, 2) - interval(0, 3) == Interval(0.0, -2, 2)


def test_paths_select_what_they_name() -> None:
    found = {"runs": {"a": {"x": [1, 2]}, "b": {"x": [3, 4]}, "c": {}}}
    assert select(found, "runs > * > x > *") == {"a, 0": 1, "a, 1": 2, "b, 0": 3, "b, 1": 4}
    assert select(found, "runs > ? > x") == [1, 2]
    with pytest.raises(LookupError):
        select(found, "runs > * > y")


def judge_gap(metrics: object) -> Finding:
    """The finding of a claim made for the test, judged by these metrics."""
    given = {"gap": stored("gap")}
    claim = Claim("nothing", "figure 1: The first is ahead.", given, "{gap:+.2f}", "There were {of > count}.")
    return judge(claim, metrics)  # type: ignore[arg-type]


def test_verdicts_follow_the_metrics() -> None:
    few = {"of": {"count": "few"}}
    assert judge_gap({"gap": interval(1, 2)}) == Finding("+1.50 (+1.00 to +2.00)", YES, "")
    assert judge_gap({"gap": interval(-2, -1), **few}) == Finding("-1.50 (-2.00 to -1.00)", NO, "There were few.")
    assert judge_gap({"gap": interval(-1, 2), **few})[1:] == (NOT_SHOWN, "There were few.")
    assert judge_gap({}) == judge_gap(None) == Finding("no result yet", OPEN)


def test_a_defect_is_not_taken_for_a_missing_result() -> None:
    with pytest.raises(TypeError):
        judge_gap({"gap": {"mean": "many", "low": 1, "high": 2}})


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.claim.experiment}: {one.claim.said}")
def test_claims_on_the_committed_results(one: tuple) -> None:
    _, claim, finding = one
    assert finding.verdict in VERDICTS
    assert finding.numbers and "|" not in finding.numbers and "nan" not in finding.numbers.lower()
    wanted = finding.verdict in (NO, NOT_SHOWN) or (finding.verdict == YES and bool(claim.limits))
    assert bool(finding.why) == wanted, f"{claim.said} came out {finding.verdict}: why?"
    if finding.verdict == OPEN:  # else a key of the metrics has been renamed
        assert claim.said.startswith(UNWRITTEN.get(claim.where, "nothing")), claim.said


# Claims on transfer, whose settings are kept side by side.


def kept(network: str, images: int, accuracies: dict[int, dict[str, list[float]]]) -> dict[str, object]:
    """A part of `transfer`: by labels and contender, the accuracy of each draw (NaN: it took no part in that)."""
    runs = {}
    for labels, by in accuracies.items():
        for draw in range(len(by[LINEAR])):
            contenders = {name: {"accuracy": x[draw]} for name, x in by.items() if not math.isnan(x[draw])}
            runs[f"MNIST, draw {draw}, {labels} labels"] = {"labels": labels, "seed": draw, "contenders": contenders}
    return {"settings": {"network": network, "blocks that adapt": 1, IMAGES: images}, "runs": runs}


CPU = kept("ResNet-20", 500, {100: {LINEAR: [0.5, 0.6], FEATURES: [0.4, 0.5], SAME: [0.6, 0.7]}})
DEEP = kept("ResNet-56", 10_000, {100: {LINEAR: [0.5, 0.6], FEATURES: [0.4, 0.5], f"{FEATURES}, vi": [0.1, 0.2]}})
GPU = kept(
    "ResNet-20",
    10_000,
    {
        1000: {LINEAR: [0.5, 0.6], FEATURES: [0.6, 0.7], f"{FEATURES}, vi": [0.58, 0.66], SAME: [0.6, math.nan]},
        10_000: {LINEAR: [0.8, 0.9, 0.7], FEATURES: [0.81, 0.91, 0.71], SAME: [0.82, 0.92, 0.72]},
    },
)


def test_claims_on_transfer_are_of_resnet20_with_the_most_test_images() -> None:
    parts = {"cpu": CPU, "gpu": GPU, "deep": DEEP}
    assert judge(TRANSFER, {"parts": {"cpu": CPU, "deep": DEEP}})[:2] == (
        "to Fashion-MNIST and MNIST, points (cpu): 100 labels -10.0",
        NO,
    )
    assert judge(TRANSFER, {"parts": parts}) == Finding(
        "to Fashion-MNIST and MNIST, points (gpu): 1,000 labels +10.0, 10,000 labels +1.0", YES
    )
    assert judge(TRANSFER, {"parts": {"deep": DEEP}}).verdict == OPEN


def test_contenders_that_took_no_part_are_compared_where_they_did() -> None:
    parts = {"cpu": CPU, "gpu": GPU, "deep": DEEP}
    behind = judge(VI, {"parts": parts})
    assert behind.numbers == "MAP less VI, points (gpu): 1,000 labels +3.0 (-9.7 to +15.7)"
    assert behind.verdict == NOT_SHOWN and behind.why.startswith("Over 2 draws with up to 1,000 labels the two differ")
    tuned = judge(FINE_TUNING, {"parts": parts})
    assert tuned.numbers == "less fine-tuning, points (gpu): 1,000 labels +0.0 (no interval), 10,000 labels -1.0"
    assert tuned.verdict == NO and tuned.why
    assert judge(NTK, {"parts": parts}) == judge(VI, {"parts": {"cpu": CPU}}) == Finding("no result yet", OPEN)


def test_without_results_all_are_open(tmp_path) -> None:
    assert {one.finding for one in judge_all(tmp_path)} == {Finding("no result yet", OPEN)}
    assert find_failed(judge_all(tmp_path)) == []


def test_the_page_and_the_command_have_every_claim() -> None:
    assert "<!-- write: claims -->" in PAGE.read_text(encoding="utf-8")
    page, printed = markdown(FOUND), text(FOUND)
    assert count_verdicts(FOUND) in page and count_verdicts(FOUND) in printed
    table, reasons = page.split("## Where it did not come out")
    for _, claim, finding in FOUND:
        assert table.count(f"{claim.said} | {finding.numbers} |") == 1
        assert f"[{finding.verdict}] {claim.where}: {claim.said}" in printed
        assert (finding.why in reasons) if finding.why else (f"{claim.said} **" not in reasons)
    assert "first less second" in PAGE.read_text(encoding="utf-8")


def test_a_yes_keeps_its_limits() -> None:
    claim = Claim(
        "x",
        "table: A is ahead.",
        {"gap": stored("gap")},
        "{gap:+.1f}",
        "why not",
        limits="one of {n}",
        facts={"n": lambda m: m["n"]},
    )
    assert judge(claim, {"gap": {"mean": 1.0, "low": 0.5, "high": 1.5}, "n": 3}) == Finding(
        "+1.0 (+0.5 to +1.5)", YES, "one of 3"
    )
    assert judge(claim, {"gap": {"mean": -1.0, "low": -1.5, "high": -0.5}, "n": 3}).why == "why not"
    page = markdown(FOUND)
    for one in FOUND:
        if one.finding.verdict == YES and one.claim.limits:
            assert one.finding.why in page.partition("## What a yes leaves open")[2]


def test_a_linearized_network_that_does_not_move_shows_nothing() -> None:
    def finding(scale: float) -> Finding:
        gap = {"mean": 0.0, "low": -0.001, "high": 0.001}
        method = {"less the network": gap, "standard error over test images": 0.1, "scale": scale}
        methods = {"network": {}, "linearized network, map": method}
        return judge(claim_of("The linearized network is nearly as accurate"), {"results": {"net": {"a, 1": methods}}})

    assert finding(0.1).verdict == YES
    assert finding(1e-6).verdict == NOT_SHOWN and "is the network" in finding(1e-6).why


@pytest.mark.parametrize(("behind", "verdict"), [(0.01, YES), (-0.01, NO)])
def test_more_epochs_bring_a_layer_there_only_where_it_was_behind(behind: float, verdict: str) -> None:
    claim = claim_of("Six times the epochs")
    spread = {"rmse": {"mean": 0.06}, "seconds": {"mean": 0.1}}
    long = {"rmse": {"mean": 0.06}, "seconds": {"mean": 2.0}}
    names = {"ntk": "finite NTK", "last": LAST, "longer": LONGER}
    runs = {
        f"seed {i}": {
            names["ntk"]: {"rmse": 0.06 + 0.001 * i},
            names["last"]: {"rmse": 0.06 + 0.001 * i + behind},
            names["longer"]: {"rmse": 0.06 + 0.001 * i},
        }
        for i in range(3)
    }
    metrics = {
        "parts": {"x": {"2012 to 2015": {"300 points": runs}}},
        "results": {"2012 to 2015": {"300": {names["ntk"]: spread, names["longer"]: long}}},
    }
    assert judge(claim, metrics).verdict == verdict


def test_processes_of_one_machine_are_no_devices() -> None:
    claim = claim_of("More devices speed")
    rows = [{"ranks": 2, "speedup": 1.9}]
    assert judge(claim, {"parts": {"ranks": {"rows": rows}}}).verdict == NOT_SHOWN
    assert judge(claim, {"parts": {"ranks": {"rows": [{"ranks": 2, "speedup": 1.1}]}}}).verdict == NO


def test_the_overview_counts_every_claim_once_and_shows_figures_that_exist():
    lines = overview(FOUND).splitlines()
    assert lines[0] == "| paper | yes | no | not shown | open | picture |"
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    assert len(cells) == len(PAPERS)
    for i, verdict in enumerate(VERDICTS, start=1):
        assert sum(int(row[i]) for row in cells) == sum(one.finding.verdict == verdict for one in FOUND)
    for paper, row in zip(PAPERS, cells, strict=True):
        assert row[0].startswith(paper.authors)
        assert paper.picture in row[5] and (ROOT / "results" / paper.picture / "figure.png").exists()
