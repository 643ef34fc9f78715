"""Reports: one HTML file about a fitted estimator, which opens offline. `write` makes the file.

`linnet.report.content` has the content of a report as plain data, and `render` makes a page from this content.
"""

from linnet.report.build import (
    NO_TEST,
    About,
    add_guess,
    assemble,
    compute_outputs,
    make_classes,
    make_numbers,
    score_outcome,
    softmax,
    to_array,
    write,
)
from linnet.report.content import Classes, Eigenvalues, Group, Item, Missing, Numbers, Points, Report
from linnet.report.examples import Inputs, show_inputs
from linnet.report.formatting import count, number, percent
from linnet.report.html.page import render, save
from linnet.report.verdicts import is_clearly_worse

__all__ = [
    "NO_TEST",
    "About",
    "Classes",
    "Eigenvalues",
    "Group",
    "Inputs",
    "Item",
    "Missing",
    "Numbers",
    "Points",
    "Report",
    "add_guess",
    "assemble",
    "compute_outputs",
    "count",
    "is_clearly_worse",
    "make_classes",
    "make_numbers",
    "number",
    "percent",
    "render",
    "save",
    "score_outcome",
    "show_inputs",
    "softmax",
    "to_array",
    "write",
]
