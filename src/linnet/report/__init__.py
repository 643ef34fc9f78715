"""Reports: one HTML file about a fitted estimator, which opens offline; `write` makes it.

`linnet.report.content` says what a report holds, as plain data; `render` makes a page of that.
"""

from linnet.report.build import About, assemble, write
from linnet.report.content import Report
from linnet.report.html.page import render, save

__all__ = ["About", "Report", "assemble", "render", "save", "write"]
