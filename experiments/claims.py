"""Every claim of the papers on which method is ahead of which, and what our numbers say of it.

``python -m experiments.claims`` prints them. Verdicts are computed from results/NAME/metrics.json each time: yes or no
where the 95 % interval is on one side, not shown where it contains zero or there is one draw, open where there is no
result yet.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import claims_adapt, claims_networks, claims_probes, common
from experiments.claims_maddox import MADDOX
from experiments.claims_mu import MU
from experiments.claims_slides import SLIDES, TALK
from experiments.claims_zhang import ZHANG
from experiments.verdicts import NO, NOT_SHOWN, VERDICTS, YES, Claim, Finding, metrics_of

PAPERS = (MADDOX, MU, ZHANG, SLIDES, TALK)
MODULES = (claims_networks, claims_adapt, claims_probes)
"""They add to papers that are made elsewhere, and have to be imported for it."""

CLAIMS: tuple[Claim, ...] = tuple(claim for paper in PAPERS for claim in paper.claims)
TITLES = ["claim", "ours", "verdict"]


class Judged(NamedTuple):
    """A claim and what our numbers say."""

    claim: Claim
    finding: Finding


def judged(folder: Path = common.RESULTS) -> list[Judged]:
    """All claims with what the results in a folder say."""
    known = {name: metrics_of(name, folder) for name in {claim.experiment for claim in CLAIMS}}
    return [Judged(claim, claim.judge(known[claim.experiment])) for claim in CLAIMS]


def counted(found: Sequence[Judged]) -> str:
    """`3 claims: 1 yes, 1 no, 1 not shown, 0 open`."""
    counts = Counter(one.finding.verdict for one in found)
    return f"{len(found)} claims: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}"


def failed(found: Sequence[Judged]) -> list[Judged]:
    """Those that did not come out."""
    return [one for one in found if one.finding.verdict in (NO, NOT_SHOWN)]


def by_paper(found: Sequence[Judged]) -> list[tuple[str, str, list[Judged]]]:
    """Authors, title and claims of each paper."""
    return [(p.authors, p.title, [one for one in found if one.claim.paper == p.authors]) for p in PAPERS]


def markdown(found: Sequence[Judged]) -> str:
    """A table for each paper, and below them the reasons of what did not come out."""
    parts = [f"{counted(found)}."]
    for authors, title, own in by_paper(found):
        rows = [[_sentence(claim), finding.numbers, _shown(finding.verdict)] for claim, finding in own]
        parts += [f"### {authors}", f"*{title}.*", _table(rows)]
    parts.append("## Where it did not come out")
    for authors, _, own in by_paper(failed(found)):
        lines = [f"- {_sentence(claim)} **{finding.verdict.capitalize()}.** {finding.why}" for claim, finding in own]
        parts += [f"### {authors}: reasons", "\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def text(found: Sequence[Judged]) -> str:
    """The same for a terminal."""
    lines = [counted(found)]
    for authors, title, own in by_paper(found):
        lines += ["", f"{authors}: {title}"]
        for claim, finding in own:
            lines.append(f"  [{finding.verdict}] {claim.where}: {claim.said}")
            lines += textwrap.wrap(finding.numbers, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
            lines += textwrap.wrap(finding.why, 110, initial_indent="    > ", subsequent_indent="    > ")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(common.line_of(row) for row in (TITLES, ["---"] * len(TITLES), *rows))


def _shown(verdict: str) -> str:
    return verdict if verdict == YES else f"**{verdict}**"


def _sentence(claim: Claim) -> str:
    return f"*{claim.where[:1].upper()}{claim.where[1:]}.* {claim.said}"


if __name__ == "__main__":
    print(text(judged()))
