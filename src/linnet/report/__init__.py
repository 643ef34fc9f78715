"""Reports: one HTML file about a fitted estimator, which opens offline. `write` makes the file.

`linnet.report.content` has the content of a report as plain data, and `render` makes a page from this content.
"""

from linnet.report.build import About, assemble, write
from linnet.report.content import Report
from linnet.report.html.page import render, save

__all__ = ["About", "Report", "assemble", "render", "save", "write"]
