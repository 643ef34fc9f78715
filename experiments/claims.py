"""Every claim of the papers on which method is ahead of which, and what our numbers say of it.

``python -m experiments.claims`` prints them. Verdicts are computed from results/NAME/metrics.json each time.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import common
from experiments.allingham2023 import claims as slides
from experiments.damianou2020 import claims as talk
from experiments.judge import NO, NOT_SHOWN, VERDICTS, YES, Claim, Finding, Paper, judge, metrics_of
from experiments.maddox2021 import claims as maddox
from experiments.mu2020 import claims as mu
from experiments.ritter2018 import claims as ritter
from experiments.zhang2022 import claims as zhang

PAPERS = (maddox.PAPER, mu.PAPER, zhang.PAPER, slides.PAPER, talk.PAPER, ritter.PAPER)
TITLES = ["claim", "ours", "verdict"]


class Judged(NamedTuple):
    """A claim of a paper and what our numbers say."""

    paper: Paper
    claim: Claim
    finding: Finding


def judge_all(folder: Path = common.RESULTS) -> list[Judged]:
    """All claims with what the results in a folder say."""
    names = {claim.experiment for paper in PAPERS for claim in paper.claims}
    known = {name: metrics_of(name, folder) for name in names}
    return [Judged(p, claim, judge(claim, known[claim.experiment])) for p in PAPERS for claim in p.claims]


def count_verdicts(found: Sequence[Judged]) -> str:
    """`3 claims: 1 yes, 1 no, 1 not shown, 0 open`."""
    counts = Counter(one.finding.verdict for one in found)
    return f"{len(found)} claims: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


def find_failed(found: Sequence[Judged]) -> list[Judged]:
    """Those that did not come out."""
    return [one for one in found if one.finding.verdict in (NO, NOT_SHOWN)]


def overview(found: Sequence[Judged]) -> str:
    """One table of all papers with their verdicts, and a picture of each paper."""
    titles = ["paper", *VERDICTS, "picture"]
    rows = []
    for paper in PAPERS:
        counts = Counter(one.finding.verdict for one in found if one.paper is paper)
        file = f"assets/results/{paper.picture}.png"
        picture = f'[![Figure of {paper.picture}]({file}){{ width="420" }}]({file})'
        rows.append([paper.authors, *(str(counts[verdict]) for verdict in VERDICTS), picture])
    return "\n".join(common.line_of(row) for row in (titles, ["---"] * len(titles), *rows))


def markdown(found: Sequence[Judged]) -> str:
    """A table for each paper, and below them the reasons of what did not come out."""
    parts = [f"{count_verdicts(found)}."]
    for paper in PAPERS:
        rows = [
            [_sentence(claim), finding.numbers, _shown(finding.verdict)] for p, claim, finding in found if p is paper
        ]
        table = "\n".join(common.line_of(row) for row in (TITLES, ["---"] * len(TITLES), *rows))
        parts += [f"### {paper.authors}", f"*{paper.title}.*", table]
    limited = [one for one in found if one.finding.verdict == YES and one.finding.why]
    for title, some, name in (
        ("Where it did not come out", find_failed(found), "reasons"),
        ("What a yes leaves open", limited, "limits"),
    ):
        parts.append(f"## {title}")
        for paper in PAPERS:
            own = [(claim, finding) for p, claim, finding in some if p is paper]
            lines = [f"- {_sentence(c)} **{finding.verdict.capitalize()}.** {finding.why}" for c, finding in own]
            parts += [f"### {paper.authors}: {name}", "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def text(found: Sequence[Judged]) -> str:
    """The same for a terminal."""
    lines = [count_verdicts(found)]
    for paper in PAPERS:
        lines += ["", f"{paper.authors}: {paper.title}"]
        for _, claim, finding in (one for one in found if one.paper is paper):
            lines.append(f"  [{finding.verdict}] {claim.where}: {claim.said}")
            lines += textwrap.wrap(finding.numbers, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
            lines += textwrap.wrap(finding.why, 110, initial_indent="    > ", subsequent_indent="    > ")
    return "\n".join(lines)


def _shown(verdict: str) -> str:
    return verdict if verdict == YES else f"**{verdict}**"


def _sentence(claim: Claim) -> str:
    return f"*{claim.where[:1].upper()}{claim.where[1:]}.* {claim.said}"


if __name__ == "__main__":
    print(text(judge_all()))
