"""Docstrings as the site shows them: formulas of reStructuredText become Markdown's, doctests code."""

from __future__ import annotations

import re
from typing import Any

import griffe

DISPLAYED = re.compile(r"^( *)\.\. math::[ ]*(.*)\n((?:\1 +\S.*\n?|[ ]*\n(?=\1 +\S))*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]*)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)  # griffe knows the plural
DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)  # outside of a section


class Markdown(griffe.Extension):
    """Rewrites the docstring of every object that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    r"""A docstring with its formulas in dollars and its doctests in fences.

    >>> markdown("A.\n\n.. math:: a\n          + b\n\nWith :math:`a`.\n")
    'A.\n\n$$\na\n+ b\n$$\n\nWith $a$.\n'
    """

    def displayed(found: re.Match[str]) -> str:
        indent, first, rest = found.groups()
        lines = [line.strip() for line in [first, *rest.splitlines()] if line.strip()]
        return "".join(f"{indent}{line}\n" for line in ["$$", *lines, "$$"])

    text = DISPLAYED.sub(displayed, text.rstrip("\n") + "\n")
    text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}```\n", text)
    return EXAMPLE.sub("Examples:", INLINE.sub(r"$\1$", text))
