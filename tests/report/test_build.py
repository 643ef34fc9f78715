"""Reports: the page from plain data, and the data from fitted estimators."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.report import (
    Classes,
    Inputs,
    Missing,
    Numbers,
    count,
    number,
    percent,
    render,
    show_inputs,
    softmax,
    verdicts,
)
from linnet.report.build import group_by_confidence
from linnet.report.content import Evidence
from linnet.report.formatting import explain
from linnet.report.html.figures import compute_wilson, draw_error_by_std
from linnet.report.html.svg import Plot, Scale, h, join, make_scale
from tests.support import report_cases as cases
from tests.support.command_cases import diabetes, done, networks, pictures
from tests.support.drawn import double, normal

EVIL = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags with their attributes, text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def tags(self, name):
        return [attributes for tag, attributes in self.found if tag == name]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


# The page.


@pytest.mark.parametrize("kind", ["pictures", "texts", "rows", "embedding"])
def test_all_parts_are_there(kind):
    report = cases.report(kind)
    page = Page(render(report))
    ids = [section.get("id") for section in page.tags("section")]
    if kind == "embedding":
        assert ids == ["inside", "record"]
    else:
        assert ids == ["quality", "linear", "examples", "inside", "record"]
        assert "Can I trust it?" in page.text and page.text.count("Is it better than the network alone?") == 1
        assert "log evidence" in page.text and "2 (chosen)" in page.text
        assert "6 others" in page.text  # of 30 layers
    for part in (report.title, report.lede, report.kind, "linnet 9.9.9", "torch 2.13.0", "Plan", "features.0"):
        assert part in page.text
    assert [tag for tag in ("script", "iframe", "object", "form") if page.tags(tag)] == []
    outside = [
        a for _, a in page.found for k, v in a.items() if k in ("src", "href") and not str(v).startswith("data:")
    ]
    assert outside == []
    assert all(svg.get("aria-label") and svg.get("viewbox") for svg in page.tags("svg"))
    assert not re.search(r"\bnan\b|\binf\b|None", page.text)
    assert render(report) == render(cases.report(kind))


@pytest.mark.parametrize(("kind", "names"), [("rows", ("rmse", "nll", "coverage")), ("pictures", ("nll", "ece"))])
def test_metrics_have_their_names_of_the_console(kind, names):
    text = Page(render(cases.report(kind))).text
    for name in names:
        assert f"{explain(name, regression=kind == 'rows').title} {name} " in text


def test_the_command_and_the_seed():
    report = cases.report("rows")
    page = Page(render(report))
    assert report.record["command"] in page.text
    assert "seed 3" in page.text and "device cpu" in page.text
    assert "adapter.safetensors, metrics.json" in page.text


def test_examples_by_what_they_are():
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    shown = {kind: Page(render(cases.report(kind))) for kind in ("pictures", "texts", "rows")}
    addresses = [image["src"] for image in shown["pictures"].tags("img")]
    assert len(addresses) == 24 and all(src.startswith("data:image/png;base64,") for src in addresses)
    picture = Image.open(io.BytesIO(base64.b64decode(addresses[0].partition(",")[2])))
    assert picture.size == (7, 9) and picture.mode == "RGB"
    assert len(shown["texts"].tags("blockquote")) == 24 and shown["texts"].tags("img") == []
    assert "column_7" in shown["rows"].text and "column_8" not in shown["rows"].text  # the first eight
    assert "no. 1" in shown["rows"].text or "no. 2" in shown["rows"].text


def test_what_users_name_is_escaped():
    told = cases.classes(names=(EVIL, "b", "c"))
    report = cases.report("texts")
    inputs = Inputs([EVIL] * 60, texts=[EVIL] * 60)
    groups = group_by_confidence(told, inputs)
    page = render(
        replace(
            report,
            title=EVIL,
            lede=EVIL,
            kind=EVIL,
            outcome=told,
            scores={EVIL: {EVIL: 1.0}},
            examples=groups,
            influence=replace(groups[0], title=EVIL, note=EVIL),
            relevance={EVIL: 1.0},
            evidence=Evidence([1.0, 2.0], 2.0, scales={EVIL: 1.0}),
            facts={EVIL: EVIL},
            record={"command": EVIL, "versions": {EVIL: EVIL}, EVIL: EVIL},
            files=[EVIL],
            linear=Missing(EVIL),
        )
    )
    rows = cases.report("rows")
    evil_rows = replace(
        rows,
        outcome=cases.numbers(names=(EVIL,)),
        examples=group_by_confidence(cases.numbers(names=(EVIL, "b")), replace(cases.rows(), columns=[EVIL] * 12)),
    )
    for text in (
        page,
        render(evil_rows),
        render(
            replace(
                cases.report("pictures"),
                examples=group_by_confidence(told, replace(cases.pictures(), names=[EVIL] * 60)),
            )
        ),
    ):
        found = Page(text)
        assert "<script" not in text and found.tags("script") == []
        assert not [a for _, a in found.found if any(name.startswith("on") for name in a)]
        assert EVIL in " ".join(found.words) or EVIL in found.text
        assert [a["src"] for a in found.tags("img") if not a["src"].startswith("data:")] == []


def test_what_is_left_out_says_why():
    page = Page(render(cases.empty()))
    for name in ("scores", "linear", "examples", "influence", "spectrum", "relevance", "evidence", "plan"):
        assert f"no {name} here" in page.text
    assert page.text.count("left out.") >= 8
    assert "Not tested" in page.text and page.tags("svg") == []


def test_a_policy_forbids_everything_from_outside():
    (policy,) = [m for m in Page(render(cases.report())).tags("meta") if "http-equiv" in m]
    assert policy["content"].startswith("default-src 'none'") and "script-src" not in policy["content"]


def test_the_style_sheet_fits_the_page():
    """Every rule finds something to style, figures stand side by side, and legends explain colors that are drawn."""

    def classes(markup: str) -> set[str]:
        return {name for found in re.findall(r'class="([^"]*)"', markup) for name in found.split()}

    used: set[str] = set()
    for kind, rows in {"pictures": 3, "texts": 3, "rows": 3, "embedding": 1}.items():
        head, _, body = render(cases.report(kind)).partition("</style>")
        used |= classes(body)
        before, *blocks = body.split('<div class="figures">')
        assert len(blocks) == rows and "<figure>" not in before
        for figure in re.findall(r"<figure>.*?</figure>", body, re.DOTALL):
            legend, _, plot = figure.partition("<svg")
            colors = re.findall(r'<span><i class="key ([^"]*)">', legend)
            assert legend.count("<span>") == len(colors) and set(colors) <= classes(plot)
    style = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", head.partition("<style>")[2])
    known = set(re.findall(r"\.([a-z]+)\b", style))
    assert len(known) > 40 and known - used == {"intro", "missing"}  # of reports without data


def test_markup():
    assert (
        h("p", "<", None, False, 0, [h("b", 1.50), "&"], class_="a", hidden=None)
        == '<p class="a">&lt;0<b>1.5</b>&amp;</p>'
    )
    assert h("img", src='"') == '<img src="&quot;">'
    assert join([join(["<"]), "<"]) == "&lt;&lt;"


# Numbers in words, axes.


@pytest.mark.parametrize(
    ("x", "text"), [(0.0, "0"), (12.34, "12.3"), (0.5, "0.5"), (9.999, "10"), (99999.0, "100,000"), (2.5e-6, "2.5e-6")]
)
def test_numbers(x, text):
    assert number(x).replace("\u2212", "-") == text
    assert number(-x).replace("\u2212", "-") == ("0" if x == 0 else f"-{text}")


def test_words():
    assert number(float("nan")) == "not a number" and percent(float("inf")) == "∞"
    assert percent(0.12345, 0) == "12 %" and count(2, "example") == "2 examples"
    assert explain("nll", regression=True) != explain("nll", regression=False)
    assert explain("new", regression=False).title == "new"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7.3), (1e-6, 3e-6), (100, 100.4), (-1e7, 1e7)])
def test_axes_have_a_few_round_marks_that_differ(low, high):
    axis = Scale(low, high, "")
    marks = axis.marks()
    assert 3 <= len(marks) <= 7 and min(marks) >= low - 1e-12 and max(marks) <= high * (1 + 1e-9)
    assert len({axis.text(mark) for mark in marks}) == len(marks)


def test_numbers_beside_an_axis_have_room():
    """A character has about eight units at the size of a phone."""
    for low, high in ((0.0, 1.0), (-320.0468, -320.0462)):
        axis = Scale(low, high, "")
        plot = Plot(axis, axis, "")
        assert plot.left - 8 >= 8 * max(len(axis.text(mark)) for mark in axis.marks())
        assert plot.place(low, low)[0] == plot.left


def test_axes_hold_their_values():
    axis = make_scale([3.0, 3.0, 3.0], "")
    assert axis.low < 3 < axis.high
    assert make_scale([1.0, 5.0], "", zero=True).low == 0
    low, high = compute_wilson(0.5, 4)
    assert 0 < low < 0.5 < high < 1 and compute_wilson(0.0, 4)[0] == 0


# Can it be trusted?


def answers(report):
    return {check.question.split()[0] + check.question.split()[1]: check for check in verdicts.check_report(report)}


def test_better_or_worse():
    report = cases.report("rows")
    good = np.zeros((50, 1))
    y = np.random.default_rng(0).normal(size=(50, 1))
    told = Numbers(y + 0.1, good + 1, y, [""], y + 2 + 0.1 * y)
    assert answers(replace(report, outcome=told))["Isit"].state == "good"
    worse = replace(told, mean=told.before, before=told.mean)
    assert answers(replace(report, outcome=worse))["Isit"].state == "bad"
    same = replace(told, before=told.mean)
    assert answers(replace(report, outcome=same))["Isit"].answer == "The same predictions"
    chance = replace(
        told, before=y + 0.1 * np.sign(np.arange(50) % 2 - 0.5)[:, None] * np.linspace(0.5, 1.5, 50)[:, None]
    )
    assert answers(replace(report, outcome=chance))["Isit"].state == "fair"
    assert "Isit" not in answers(replace(report, outcome=replace(told, before=None)))


def test_calibration():
    report, random = cases.report("rows"), np.random.default_rng(0)
    y = random.normal(size=(400, 1))
    for std, state, answer in (
        (1.0, "good", "Yes"),
        (0.3, "bad", "Error bars are too narrow"),
        (4.0, "bad", "Error bars are too wide"),
    ):
        found = answers(replace(report, outcome=Numbers(0 * y, 0 * y + std, y, [""])))["Isits"]
        assert (found.state, found.answer) == (state, answer)
    sure = np.full((400, 2), 0.05) + np.array([0.9, 0.0])
    for share, answer in ((0.95, "Yes"), (0.6, "Its confidence is too high"), (1.0, "Its confidence is too low")):
        labels = (np.arange(400) >= share * 400).astype(int)
        found = answers(replace(report, outcome=Classes(sure, labels, ["a", "b"])))["Isits"]
        assert found.answer == answer


@pytest.mark.parametrize(("error", "answer"), [(0.05, "Yes"), (0.3, "Roughly"), (0.9, "No")])
@pytest.mark.parametrize("drawn", [0, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_linear(error, answer, drawn, whole):
    report = replace(cases.report("rows"), linear=cases.linear(error, drawn=drawn, whole=whole))
    found = answers(report)["Isthe"]
    assert found.answer == answer and (f"posterior ({drawn})" in found.why) == bool(drawn)
    assert ("apply()" in found.why) == (whole and not drawn and error < 0.5)
    text = Page(render(report)).text
    assert ("f(x; θ₀) + J" in text) == whole
    assert ("Here 4 such weights were drawn" in text) == (drawn == 4)
    assert ("The model is the change alone" in text) == (not drawn and not whole)
    assert ("you can write the weights into the network (apply())" in text) == (not drawn and whole)


def test_probabilities_of_outputs_are_computed_in_float64():
    f = torch.tensor([[0.1, -20.3, 3.7], [0.0, 700.0, -700.0]])
    np.testing.assert_allclose(softmax(f), f.double().softmax(1).numpy(), rtol=1e-15)
    one = softmax(f[:, 1:2])
    np.testing.assert_allclose(one[:, 0], 1 / (1 + np.exp(f[:, 1].double().numpy())), rtol=1e-15)
    np.testing.assert_allclose(one[:, 1], 1 / (1 + np.exp(-f[:, 1].double().numpy())), rtol=1e-15)


def test_tiles_are_four_and_the_last_says_what_follows():
    def tiles(report):
        found = re.findall(
            r'<p class="name">(.*?)</p><p class="value">(.*?)</p><p class="quiet">(.*?)</p>', render(report)
        )
        return found[:4]

    facts = {"one": "1", "two": "2", "three": "3"}
    report = replace(cases.report("rows"), facts=facts)
    assert [tile[0] for tile in tiles(report)][3:] == ["one"] and tiles(report)[3][1:] == ("1", "two: 2")
    assert tiles(report)[0][2] == "network as it was: 2.1"
    alone = replace(report, scores=None, outcome=None)
    assert tiles(alone) == [("one", "1", ""), ("two", "2", ""), ("three", "3", "")]
    assert tiles(replace(report, facts={"one": "1"}))[3] == ("one", "1", "")


def test_error_bars_that_are_all_alike_are_not_grouped():
    told = cases.numbers()
    assert draw_error_by_std(replace(told, std=np.ones_like(told.std))) is None
    page = Page(render(replace(cases.report("rows"), outcome=replace(told, std=np.ones_like(told.std)))))
    assert "All error bars have about the same width" in page.text


# What examples look like.


def test_inputs():
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    X = torch.arange(24.0).view(2, 1, 3, 4)
    shown = show_inputs(X, names=["a", "b"]).show(1)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.picture.partition(",")[2]))))
    assert shown.name == "b" and pixels.shape == (3, 4) and pixels.max() == 255  # stretched over both pictures
    assert show_inputs(X / 24).show(0).picture != show_inputs(X).show(0).picture  # within 0 and 1 as they are
    large = show_inputs(np.zeros((1, 3, 500, 100))).show(0).picture
    assert Image.open(io.BytesIO(base64.b64decode(large.partition(",")[2]))).size[1] <= 128
    row = show_inputs(np.arange(6).reshape(2, 3), columns=("a", "b", "c")).show(1)
    assert row.cells == [("a", "3"), ("b", "4"), ("c", "5")] and row.name == "no. 2"
    long = show_inputs({"ids": torch.zeros(1, 2)}, texts=["word " * 200]).show(0)
    assert len(long.text) <= 282 and long.text.endswith("…")
    assert show_inputs({"ids": torch.zeros(1, 2)}).show(0).cells == ()
    assert show_inputs(None).show(4).name == "no. 5"


# From estimators.


def network(outputs: int = 1) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)))


X, Z = normal(40, 3, seed=1), normal(30, 3, seed=2)


def text_of(tmp_path, estimator, *args, **more):
    linnet.report.write(tmp_path / "r.html", estimator, *args, **more)
    return Page((tmp_path / "r.html").read_text()).text


def test_a_regressor(tmp_path):
    reg = linnet.TangentRegressor(network(), noise=0.01, seed=5).fit(X, X[:, 0].sin())
    text = text_of(tmp_path, reg, Z, Z[:, 0].sin(), train=(X, X[:, 0].sin()), columns=("a", "b", "c"), title="Sines")
    for part in (
        "Sines",
        "without the example, exactly",
        "Which directions matter",
        "Which layers adapt",
        "real network",
        "Is it better than the network alone?",
        "seed 5",
        "device cpu",
        f"torch {torch.__version__}",
    ):
        assert part in text
    assert "left out." not in text
    first = (tmp_path / "r.html").read_bytes()
    linnet.report.write(
        tmp_path / "r.html", reg, Z, Z[:, 0].sin(), train=(X, X[:, 0].sin()), columns=("a", "b", "c"), title="Sines"
    )
    assert (tmp_path / "r.html").read_bytes() == first


def test_examples_of_the_test_data_have_the_names_of_their_columns(tmp_path):
    reg = linnet.TangentRegressor(network(), noise=0.01).fit(X, X[:, 0].sin())
    text = text_of(tmp_path, reg, Z, Z[:, 0].sin(), columns=("height", "weight", "age"))
    assert "height" in text and "age" in text


@pytest.mark.filterwarnings("ignore:The network is far from a mode")
def test_a_model_of_counts(tmp_path):
    y = (X[:, 0] > 0).double() + 2
    for found in (linnet.TangentGLM(network(), "poisson"), linnet.Laplace(network(), "poisson", prior=0.1)):
        told = linnet.report.build.predict_outcome(found.fit(X, y), Z, y[:30], ["visits"])
        predict = found.predict_mean if isinstance(found, linnet.Laplace) else found.predict
        mean, std = predict(Z, return_std=True, noise=True)
        np.testing.assert_allclose(told.mean[:, 0], mean, rtol=1e-9)
        np.testing.assert_allclose(told.std[:, 0], std, rtol=1e-9)
        assert told.target[:, 0].tolist() == y[:30].tolist() and told.names == ["visits"] and told.before is None


def test_samples_rank_no_examples(tmp_path):
    reg = linnet.TangentRegressor(network(), noise=0.01, prior=1.0, variance="samples", solver="cg-weight")
    text = text_of(tmp_path, reg.fit(X, X[:, 0].sin()), Z, Z[:, 0].sin(), train=(X, X[:, 0].sin()))
    assert "known from samples only, and their noise would decide the order" in text


def test_without_test_data_examples_are_left_out_in_turn(tmp_path):
    reg = linnet.TangentRegressor(network(), noise=0.01).fit(X, X[:, 0].sin())
    text = text_of(tmp_path, reg, train=(X, X[:, 0].sin()))
    assert "Each training example is predicted from all other examples" in text and "left-out training examples" in text
    text = text_of(tmp_path, reg)
    assert "There are no test data" in text and "pass train=(X, y)" in text


def test_a_classifier(tmp_path):
    y, labels = (X[:, 0] > 0).long(), ["no", "yes"]
    clf = linnet.TangentClassifier(network(2), inference="laplace").fit(X, y)
    text = text_of(tmp_path, clf, Z, (Z[:, 0] > 0).long(), train=(X, y), names=labels)
    for part in ("When it says 80 %", "to first order", "no", "yes", "same class", "Which layers adapt"):
        assert part in text
    mode = linnet.TangentClassifier(network(2), inference="map", mean="zero").fit(X, y)
    text = text_of(tmp_path, mode, Z, (Z[:, 0] > 0).long(), train=(X, y))
    assert "A mode has no posterior" in text and "same class" not in text
    with pytest.raises(ValueError, match="labels that the estimator does not know: 7"):
        linnet.report.write(tmp_path / "r.html", clf, Z[:1], [7])


def test_a_laplace_approximation(tmp_path):
    y = (X[:, 0] > 0).long()
    la = linnet.Laplace(network(2), prior=0.1, structure="kron").fit(X, y)
    text = text_of(tmp_path, la, Z, (Z[:, 0] > 0).long(), train=(X, y))
    for part in ("weights drawn from the posterior (4)", "no layer adapts", "to first order"):
        assert part in text
    la = linnet.Laplace(network(), "regression", "samples", prior=0.1, noise=3.0).fit(X, X[:, 0])
    text = text_of(tmp_path, la, Z, Z[:, 0], train=(X, X[:, 0]))
    assert "known from samples only" in text and "The same predictions" in text


def test_several_numbers_and_several_labels(tmp_path):
    reg = linnet.TangentRegressor(network(2), noise=0.01).fit(X, X[:, :2])
    text = text_of(tmp_path, reg, Z, Z[:, :2], names=["left", "right"])
    assert "Predictions of left" in text and "Predictions of right" in text
    both = linnet.TangentClassifier(network(2), inference="laplace").fit(X, (X[:, :2] > 0).long())
    assert "one label for each example, but these data have several" in text_of(
        tmp_path, both, Z, (Z[:, :2] > 0).long()
    )


def test_refused(tmp_path):
    reg = linnet.TangentRegressor(network(), noise=0.01).fit(X, X[:, 0])
    with pytest.raises(ValueError, match="give both X and y, or neither"):
        linnet.report.write(tmp_path / "r.html", reg, Z)
    with pytest.raises(TypeError, match="needs a fitted TangentRegressor, TangentClassifier or Laplace"):
        linnet.report.write(tmp_path / "r.html", network())
    assert list(tmp_path.iterdir()) == []


# From commands.


def test_of_a_run(tmp_path):
    nets = networks(tmp_path)
    train, test = diabetes(tmp_path)
    for name in ("one", "two"):
        files = {"train": train, "test": test, "out": tmp_path / name}
        done("adapt", model=f"{nets}:numbers", **files, target="y", standardize=True, seed=5)
    one, two = (Page((tmp_path / name / "report.html").read_text()) for name in ("one", "two"))
    for part in ("A network adapted to predict y", "60 rows of 4 columns", "bmi", "seed 5", "network as it was", "s5"):
        assert part in one.text
    words = [word for word in one.words if word.strip()]
    at = next(i for i, word in enumerate(words) if word.startswith("no. "))
    row = test.read_text().splitlines()[int(words[at].removeprefix("no. "))].split(",")
    # As they stand in the file, not standardized; behind prediction, truth and their distance.
    assert words[at + 4 : at + 8] == [number(float(cell)) for cell in row[:4]]
    same = [re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+", "", page.text) for page in (one, two)]
    assert same[0] == same[1]


def test_of_a_run_with_pictures(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    nets, folder = networks(tmp_path), pictures(tmp_path / "images")
    (folder / "across" / "0.png").rename(folder / "across" / "<b>evil<b>.png")
    line = ["--model", f"{nets}:images", "--gray", "--pixel-mean", "0.5", "--pixel-std", "0.2"]
    done("adapt", *line, "--train", folder, "--test", folder, "--inference", "laplace", "--out", tmp_path / "run")
    text = (tmp_path / "run" / "report.html").read_text()
    page = Page(text)
    assert len(page.tags("img")) >= 18 and "<b>evil" not in text and "across/<b>evil<b>.png" in page.text
    with Image.open(folder / "down" / "1.png") as image:
        own = base64.b64encode(_png(image)).decode()
    assert any(own in image["src"] for image in page.tags("img"))  # as it was before it was made fit for the network
    done("embed", *line, "--data", folder, "--components", "3", "--out", tmp_path / "vectors")
    page = Page((tmp_path / "vectors" / "report.html").read_text())
    assert "What the embedding sees" in page.text and len(page.tags("img")) == 18 and "Component 3" in page.text


def _png(image):
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def test_what_the_fit_warned_of_is_said(tmp_path):
    train, _ = diabetes(tmp_path)
    line = ["uncertainty", "--model", f"{networks(tmp_path)}:numbers", "--train", train, "--target", "y"]
    said = done(*line, "--prior", "1", "--out", tmp_path / "run")
    assert "Note: The network is far from a mode" in " ".join(said.split())
    page = Page((tmp_path / "run" / "report.html").read_text())
    assert "Did linnet warn of anything?" in page.text and "The network is far from a mode" in page.text


def test_a_report_that_fails_does_not_take_the_run_with_it(tmp_path, monkeypatch):
    nets = networks(tmp_path)
    train, _ = diabetes(tmp_path)

    def broken(*args, **more):
        raise RuntimeError("out of ink")

    monkeypatch.setattr("linnet.cli.run_report.assemble", broken)
    said = done("adapt", "--model", f"{nets}:numbers", "--train", train, "--target", "y", "--out", tmp_path / "run")
    assert "The report could not be made (RuntimeError: out of ink)." in " ".join(said.split())
    assert (tmp_path / "run" / "adapter.safetensors").is_file() and not (tmp_path / "run" / "report.html").exists()


# The edges of what can be drawn.


@pytest.mark.parametrize("n", [1, 2, 3, 25])
@pytest.mark.parametrize("kind", ["pictures", "rows"])
def test_few_examples(kind, n):
    told = cases.numbers(n) if kind == "rows" else cases.classes(n)
    inputs = cases.rows(n) if kind == "rows" else cases.pictures(n)
    text = render(replace(cases.report(kind), outcome=told, examples=group_by_confidence(told, inputs)))
    drawn = coordinates(text)
    assert "nan" not in Page(text).text and np.isfinite(drawn).all() and len(drawn) > 500


def coordinates(text):
    """All numbers of marks in figures."""
    single = re.findall(r' (?:x|y|x1|y1|x2|y2|cx|cy|r)="([^"]+)"', text)
    lines = " ".join(re.findall(r' points="([^"]+)"', text)).replace(",", " ").split()
    return [float(x) for x in [*single, *lines]]


def test_numbers_without_any_spread():
    one = np.ones((30, 1))
    told = Numbers(one, one, one, [""], one)
    flat = replace(cases.linear(), step=np.zeros(9), real=np.zeros(9), error=0.0)
    spectrum = replace(cases.report().spectrum, values=np.array([1e-6, 0.0]))
    evidence = Evidence([2.0] * 5, 2.0)
    text = render(replace(cases.report("rows"), outcome=told, linear=flat, spectrum=spectrum, evidence=evidence))
    assert np.isfinite(coordinates(text)).all() and len(coordinates(text)) > 300
    nothing = replace(spectrum, values=np.zeros(3))
    assert "Which directions matter" not in render(replace(cases.report("rows"), spectrum=nothing))


def test_sure_and_wrong():
    told = Classes(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1]), ["a", "b"], np.array([[0.0, 1.0]] * 2))
    page = Page(render(replace(cases.report(), outcome=told, scores={"this model": {"nll": float("inf")}})))
    assert "∞" in page.text and "inf" not in page.text.replace("influential", "")


def test_many_targets_and_many_layers():
    told = cases.numbers(names=("a", "b", "c", "d", "e", "f"))
    text = Page(render(replace(cases.report("rows"), outcome=told))).text
    assert "Predictions of d" in text and "Predictions of e" not in text and "2 more targets" in text
    plan = replace(cases.PLAN, lines=cases.PLAN.lines * 20)
    assert "and 36 more layers" in Page(render(replace(cases.report(), plan=plan))).text
