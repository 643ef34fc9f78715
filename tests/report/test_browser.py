"""Reports in a real browser: nothing is asked for from outside, nothing overflows, everything can be seen."""

from __future__ import annotations

import shutil

import pytest

from linnet.report import save
from tests.support import report_cases as cases

playwright = pytest.importorskip("playwright.sync_api", reason="the tests of reports in a browser need playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome is installed to open reports with")

FLAGS = [
    "--no-sandbox",  # runs as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
VISIBLE = """
() => [...document.querySelectorAll('table, figure, svg, img, .tiles > div, .checks li, dl, pre, h1, h2')].map(e => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  return [e.tagName, box.width, box.height, style.visibility, style.display, box.left, box.right];
})
"""
TEXT = """
() => [...document.querySelectorAll('p, td, th, dt, dd, figcaption, svg text, h1, h2, h3, li, small, b')]
  .filter(e => e.textContent.trim()).map(e => {
    let back = e;
    while (back && getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
    const style = getComputedStyle(e);
    return [e.textContent.slice(0, 40), e instanceof SVGElement ? style.fill : style.color,
            getComputedStyle(back || document.body).backgroundColor, e.getBoundingClientRect().height];
  })
"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG 2 defines it."""
    parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    r, g, b = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("kind", ["pictures", "texts", "rows", "embedding", "empty"])
def test_at_every_width_in_light_and_dark(browser, tmp_path, kind):
    path = tmp_path / "report.html"
    save(path, cases.empty() if kind == "empty" else cases.report(kind))
    address = path.as_uri()
    seen = {}
    for scheme in ("light", "dark"):
        for width, height in ((390, 844), (1280, 800)):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            problems, asked = [], []
            page.on("console", lambda message, to=problems: to.append(message.text))
            page.on("pageerror", lambda error, to=problems: to.append(str(error)))
            page.on("request", lambda request, to=asked: to.append(request.url))
            page.goto(address)
            assert problems == []
            assert [url for url in asked if not url.startswith("data:")] == [address]
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            boxes = page.evaluate(VISIBLE)
            assert len(boxes) > 3
            for tag, wide, high, visibility, display, left, right in boxes:
                assert wide > 0 and high > 0 and visibility == "visible" and display != "none", tag
                if tag != "TABLE":  # these scroll by themselves
                    assert left >= 0 and right <= width + 1, tag
            assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            for text, color, back, high in page.evaluate(TEXT):
                assert high > 0 or width < 600, text  # the phone leaves one headline out
                light, dark = sorted((luminance(color), luminance(back)), reverse=True)
                assert (light + 0.05) / (dark + 0.05) > 3, (scheme, text, color, back)
            seen[scheme, width] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            context.close()
    assert luminance(seen["light", 390]) > 0.5 > 0.1 > luminance(seen["dark", 390])


def test_the_first_screen_says_what_how_good_and_whether_to_trust_it(browser, tmp_path):
    save(tmp_path / "report.html", cases.report("pictures"))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    bottom = page.evaluate("document.querySelector('.checks').getBoundingClientRect().bottom")
    assert bottom <= 800
    page.close()


def test_what_users_name_runs_nothing(browser, tmp_path):
    from dataclasses import replace

    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    report = cases.report("texts")
    report = replace(report, lede=evil, facts={evil: evil}, relevance={evil: 1.0}, scores={evil: {"accuracy": 1.0}})
    save(tmp_path / "report.html", report)
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    assert "owned" not in page.title() and len([url for url in asked if not url.startswith("data:")]) == 1
    assert evil in page.inner_text(".lede")
    page.close()
