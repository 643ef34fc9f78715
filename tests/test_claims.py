"""The claims of the papers: verdicts are computed from metrics, and each that did not come out has a reason."""

from __future__ import annotations

import math
import re

import pytest

from docs.tools.pages import ROOT
from experiments.__main__ import EXPERIMENTS
from experiments.claims import CLAIMS, PAPERS, counted, failed, judged, markdown, text
from experiments.claims_adapt import vi_behind
from experiments.claims_mu import (
    FEATURES,
    IMAGES,
    LINEAR,
    SAME,
    ntk_scaling,
    transfer_features,
    transfer_fine_tuning,
)
from experiments.verdicts import (
    NO,
    NOT_SHOWN,
    OPEN,
    VERDICTS,
    YES,
    Finding,
    Paper,
    ahead,
    below,
    every,
    of_error,
    paired,
    said,
    single,
    unpaired,
    within,
)

PAGE = ROOT / "docs" / "results.md"
UNWRITTEN = {"table 1": "Linearizing all layers"}  # where no experiment has run yet
REPRODUCES = re.compile(r"Maddox|Mu et al|Zhang|slides|talk")
FOUND = judged()


def interval(low: float, high: float) -> dict[str, float]:
    return {"mean": (low + high) / 2, "low": low, "high": high}


def names_of_reproductions() -> set[str]:
    return {name for name, said in EXPERIMENTS.items() if REPRODUCES.search(said) and "have none" not in said}


def test_every_experiment_of_a_paper_has_a_claim() -> None:
    assert names_of_reproductions() <= {claim.experiment for claim in CLAIMS}
    assert {claim.experiment for claim in CLAIMS} <= set(EXPERIMENTS)
    assert len(names_of_reproductions()) > 15


def test_every_paper_has_claims_and_none_is_said_twice() -> None:
    assert all(paper.claims for paper in PAPERS)
    assert len({(claim.paper, claim.said) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.said.endswith(".") and len(claim.said) < 100, claim.said
        assert "|" not in claim.said + claim.where


@pytest.mark.parametrize(
    ("low", "high", "above", "small"),
    [(0.5, 0.8, YES, YES), (-0.8, -0.5, NO, YES), (-0.5, 0.5, NOT_SHOWN, YES), (0.5, 2.0, YES, NOT_SHOWN)],
)
def test_an_interval_decides(low: float, high: float, above: str, small: str) -> None:
    assert ahead(interval(low, high)) == above
    assert within(interval(low, high), 1.0) == small
    assert below(interval(low + 3, high + 3), 3) == {YES: NO, NO: YES, NOT_SHOWN: NOT_SHOWN}[above]


def test_a_single_draw_shows_nothing() -> None:
    assert ahead(single(5.0)) == within(single(0.0), 1.0) == NOT_SHOWN
    assert said(single(5.0), 1) == "+5.0 (no interval)"
    assert (
        ahead(of_error({"mean": 5.0, "error": None}, 3)) == ahead(of_error({"mean": 5.0, "error": 0.1}, 1)) == NOT_SHOWN
    )


def test_several_parts() -> None:
    assert every([YES, YES]) == YES
    assert every([YES, NOT_SHOWN]) == NOT_SHOWN
    assert every([NOT_SHOWN, NO, YES]) == NO


def test_intervals_from_seeds_and_from_errors() -> None:
    assert paired({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 0.0, "c": 7.0}) == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "count": 2,
    }
    with pytest.raises(LookupError, match="in common"):
        paired({"a": 1.0}, {"b": 1.0})
    gap = unpaired({"mean": 2.0, "error": 0.3}, {"mean": 1.0, "error": 0.4}, 1000)
    assert gap["high"] - gap["mean"] == pytest.approx(0.5 * 1.962, rel=1e-3)


def made_up(metrics: object) -> Finding:
    """The one claim of a paper made for the test, judged by these metrics."""
    paper = Paper("Nobody 2000", "Nothing")

    @paper.claim("figure 1", "nothing", "The first is ahead of the second.")
    def look(metrics: object) -> Finding:
        gap = metrics["gap"]  # type: ignore[index]
        return Finding(said(gap), ahead(gap), "There were few.")

    return look.judge(metrics)  # type: ignore[arg-type]


def test_verdicts_follow_the_metrics() -> None:
    assert made_up({"gap": interval(1, 2)}) == Finding("+1.50 (+1.00 to +2.00)", YES, "")
    assert made_up({"gap": interval(-2, -1)}) == Finding("-1.50 (-2.00 to -1.00)", NO, "There were few.")
    assert made_up({"gap": interval(-1, 2)})[1:] == (NOT_SHOWN, "There were few.")
    assert made_up({}) == made_up(None) == Finding("no result yet", OPEN)


def test_a_defect_is_not_taken_for_a_missing_result() -> None:
    with pytest.raises(TypeError):
        made_up({"gap": {"mean": "many", "low": 1, "high": 2}})


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.claim.experiment}: {one.claim.said}")
def test_claims_on_the_committed_results(one: tuple) -> None:
    claim, finding = one
    assert finding.verdict in VERDICTS
    assert finding.numbers and "|" not in finding.numbers and "nan" not in finding.numbers.lower()
    assert bool(finding.why) == (finding.verdict in (NO, NOT_SHOWN)), f"{claim.said} came out {finding.verdict}: why?"
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
    assert transfer_features.judge({"parts": {"cpu": CPU, "deep": DEEP}})[:2] == (
        "to Fashion-MNIST and MNIST, points (cpu): 100 labels -10.0",
        NO,
    )
    assert transfer_features.judge({"parts": parts}) == Finding(
        "to Fashion-MNIST and MNIST, points (gpu): 1,000 labels +10.0, 10,000 labels +1.0", YES
    )
    assert transfer_features.judge({"parts": {"deep": DEEP}}).verdict == OPEN


def test_contenders_that_took_no_part_are_compared_where_they_did() -> None:
    parts = {"cpu": CPU, "gpu": GPU, "deep": DEEP}
    behind = vi_behind.judge({"parts": parts})
    assert behind.numbers == "MAP less VI, points (gpu): 1,000 labels +3.0 (-9.7 to +15.7)"
    assert behind.verdict == NOT_SHOWN and behind.why.startswith("Over 2 draws with up to 1,000 labels the two differ")
    tuned = transfer_fine_tuning.judge({"parts": parts})
    assert tuned.numbers == "less fine-tuning, points (gpu): 1,000 labels +0.0 (no interval), 10,000 labels -1.0"
    assert tuned.verdict == NO and tuned.why
    assert (
        ntk_scaling.judge({"parts": parts})
        == vi_behind.judge({"parts": {"cpu": CPU}})
        == Finding("no result yet", OPEN)
    )


def test_without_results_all_are_open(tmp_path) -> None:
    assert {one.finding for one in judged(tmp_path)} == {Finding("no result yet", OPEN)}
    assert failed(judged(tmp_path)) == []


def test_the_page_and_the_command_have_every_claim() -> None:
    assert "<!-- write: claims -->" in PAGE.read_text(encoding="utf-8")
    page, printed = markdown(FOUND), text(FOUND)
    assert counted(FOUND) in page and counted(FOUND) in printed
    table, reasons = page.split("## Where it did not come out")
    for claim, finding in FOUND:
        assert table.count(f"{claim.said} | {finding.numbers} |") == 1
        assert f"[{finding.verdict}] {claim.where}: {claim.said}" in printed
        assert (finding.why in reasons) if finding.why else (f"{claim.said} **" not in reasons)
    assert "first less second" in PAGE.read_text(encoding="utf-8")
