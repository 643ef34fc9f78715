"""Labels as users give them: text, names of outputs, and numbers that are no labels."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import linnet
from linnet import Laplace, TangentClassifier
from linnet._estimator import find_better_order, find_output_names
from tests.support.laplace_cases import CLASSES, NEW, NUMBERS, X, net

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")
NAMES = np.array(["ash", "birch", "cedar"])
TEXT = NAMES[CLASSES.numpy()]


@pytest.mark.parametrize("structure", ["full", "function", "kron", "diag"])
def test_laplace_takes_labels_that_are_text(tmp_path, structure):
    model = net(3)
    by_number = Laplace(model, structure=structure).fit(X, CLASSES)
    by_name = Laplace(model, structure=structure, classes=NAMES).fit(X, TEXT)
    torch.testing.assert_close(by_name.predict_proba(NEW), by_number.predict_proba(NEW), rtol=1e-9, atol=0.0)
    assert by_name.classes_.tolist() == NAMES.tolist() and by_number.classes_.tolist() == [0, 1, 2]
    best = by_number.predict_proba(NEW).argmax(1)
    assert by_name.predict_label(NEW).tolist() == NAMES[best].tolist()
    assert by_number.predict_label(NEW).tolist() == best.tolist()
    one, other = (la.joint_log_likelihood(X, y) for la, y in ((by_name, TEXT), (by_number, CLASSES)))
    assert one == pytest.approx(other, rel=1e-9)
    by_name.save(tmp_path / "la")
    loaded = linnet.load(tmp_path / "la", model)
    assert loaded.predict_label(NEW).tolist() == by_name.predict_label(NEW).tolist()


def test_forgetting_and_attribution_by_labels_that_are_text():
    model = net(3)
    by_number = Laplace(model, structure="full").fit(X, CLASSES)
    by_name = Laplace(model, structure="full", classes=NAMES).fit(X, TEXT)
    fewer = by_name.forget(X[:3], TEXT[:3])
    expected = by_number.forget(X[:3], CLASSES[:3])
    torch.testing.assert_close(fewer.predict_proba(NEW), expected.predict_proba(NEW), rtol=1e-9, atol=0.0)
    assert fewer.classes_.tolist() == NAMES.tolist()
    found, known = (linnet.attribution(la, NEW, y[:6], of="loss") for la, y in ((by_name, TEXT), (by_number, CLASSES)))
    torch.testing.assert_close(found, known, rtol=1e-9, atol=0.0)


def test_classes_name_the_outputs():
    turned = Laplace(net(3), structure="full", classes=["cedar", "birch", "ash"]).fit(X, TEXT)
    expected = Laplace(net(3), structure="full").fit(X, 2 - CLASSES)
    torch.testing.assert_close(turned.predict_proba(NEW), expected.predict_proba(NEW), rtol=1e-9, atol=0.0)
    whole = Laplace(net(3), structure="full", classes=[7, 5, 3], ignore_index=-1)
    labels = torch.tensor([7, 5, 3])[CLASSES]
    labels[4] = -1
    found = whole.fit(X, labels)
    kept = torch.arange(len(X)) != 4
    expected = Laplace(net(3), structure="full").fit(X[kept], CLASSES[kept])
    torch.testing.assert_close(found.predict_proba(NEW), expected.predict_proba(NEW), rtol=1e-9, atol=0.0)
    assert set(found.predict_label(NEW).tolist()) <= {3, 5, 7}
    data = TensorDataset(X, torch.tensor([7, 5, 3])[CLASSES])
    again = Laplace(net(3), structure="full", classes=[7, 5, 3]).fit(data)
    expected = Laplace(net(3), structure="full").fit(X, CLASSES)
    torch.testing.assert_close(again.predict_proba(NEW), expected.predict_proba(NEW), rtol=1e-9, atol=0.0)


def test_one_logit_and_ensembles_name_their_classes():
    two = np.array(["no", "yes"])[(X[:, 0] > 0).long().numpy()]
    la = Laplace(net(1), structure="full", classes=["no", "yes"]).fit(X, two)
    p = la.predict_proba(NEW)
    assert la.predict_label(NEW).tolist() == np.array(["no", "yes"])[p.argmax(1)].tolist()
    both = Laplace([net(3), net(3, seed=1)], structure="full", classes=NAMES).fit(X, TEXT)
    assert both.predict_label(NEW).tolist() == NAMES[both.predict_proba(NEW).argmax(1)].tolist()


def test_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="which output is which"):
        Laplace(net(3)).fit(X, np.where(TEXT == "ash", "ash", "birch"))
    with pytest.raises(ValueError, match="Labels pine are not among the classes"):
        la = Laplace(net(3), structure="full", classes=NAMES).fit(X, TEXT)
        la.joint_log_likelihood(X, np.where(TEXT == "ash", "pine", TEXT))
    with pytest.raises(TypeError, match=r"likelihood=.classification.*likelihood=.regression."):
        Laplace(net(1), "regression").fit(X, TEXT)
    labels = (X[:, :3] > 0).long()
    several = Laplace(net(3), structure="full").fit(X, labels)
    with pytest.raises(ValueError, match=r"predict_label is for one class.*predict_proba"):
        several.predict_label(NEW)
    with pytest.raises(ValueError, match=r"predict_label.*predict for numbers"):
        Laplace(net(2), "regression", structure="full").fit(X, NUMBERS).predict_label(NEW)


@pytest.mark.parametrize("make", [Laplace, TangentClassifier])
def test_numbers_with_fractions_are_no_labels(make):
    said = "Pass likelihood='regression'" if make is Laplace else "linnet.TangentRegressor"
    for y in (NUMBERS[:, 0], NUMBERS[:, 0].numpy()):
        with pytest.raises(ValueError, match=rf"numbers with fractions, such as .* needs labels\. {said}"):
            make(net(1)).fit(X, y)


class Ends(nn.Module):
    """A network with a softmax or a sigmoid at its end."""

    def __init__(self, outputs: int, end: nn.Module) -> None:
        super().__init__()
        self.body, self.end = net(outputs), end

    def forward(self, x):
        return self.end(self.body(x))


@pytest.mark.parametrize("make", [Laplace, TangentClassifier])
@pytest.mark.parametrize(
    ("outputs", "end", "remedy"), [(3, nn.Softmax(-1), "torch.log"), (1, nn.Sigmoid(), "torch.logit")]
)
def test_probabilities_in_place_of_logits_are_said(make, outputs, end, remedy):
    y = CLASSES if outputs == 3 else (CLASSES > 0).long()
    with pytest.warns(UserWarning, match=rf"look like probabilities of a .*output={remedy}"):
        make(Ends(outputs, end)).fit(X, y)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The network is far from a mode")
        mended = make(Ends(outputs, end), output=getattr(torch, remedy.removeprefix("torch."))).fit(X, y)
        make(Ends(outputs, nn.LogSoftmax(-1) if outputs == 3 else nn.Identity())).fit(X, y)
    plain = make(copy.deepcopy(net(outputs))).fit(X, y)
    if outputs == 1:  # the logit of a sigmoid is its input
        torch.testing.assert_close(mended.predict_proba(NEW), plain.predict_proba(NEW), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_quantiles_of_the_prediction(level):
    from scipy.stats import norm

    for estimator, y in (
        (linnet.TangentRegressor(net(2)), NUMBERS),
        (Laplace(net(2), "regression", structure="full"), NUMBERS),
        (linnet.TangentRegressor([net(2), net(2, seed=1)]), NUMBERS),
    ):
        fitted = estimator.fit(X, y)
        for noise in (True, False):
            mean, std = fitted.predict(NEW, return_std=True, noise=noise)
            low, high = fitted.predict_interval(NEW, level, noise=noise)
            width = norm.ppf(0.5 + level / 2) * std
            torch.testing.assert_close(low, mean - width, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(high, mean + width, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1; got 95"):
        fitted.predict_interval(NEW, 95)
    with pytest.raises(TypeError, match=r"for numbers, and TangentClassifier .*predict_proba"):
        TangentClassifier(net(3), inference="laplace").fit(X, CLASSES).predict_interval(NEW)


def test_words_without_an_order_are_refused():
    with pytest.raises(ValueError, match=r"labels are words such as '(ash|birch|cedar)'.* which output is which"):
        Laplace(net(3), structure="diag").fit(X, TEXT)


class Config:
    def __init__(self, names):
        self.id2label = dict(enumerate(names))


@pytest.mark.parametrize("names", [["cedar", "birch", "ash"], ["ash", "birch", "cedar"]])
def test_the_names_of_a_hugging_face_model_are_the_order(names):
    model, plain = net(3), net(3)
    model.config = Config(names)
    la = Laplace(model, structure="diag").fit(X, TEXT)
    expected = Laplace(plain, structure="diag", classes=names).fit(X, TEXT)
    assert la.classes_.tolist() == names
    torch.testing.assert_close(la.predict_proba(NEW), expected.predict_proba(NEW))
    clf = linnet.TangentClassifier(model, inference="map").fit(X, TEXT)
    known = linnet.TangentClassifier(plain, inference="map", classes=names).fit(X, TEXT)
    assert clf.classes_.tolist() == names
    torch.testing.assert_close(torch.as_tensor(clf.predict_proba(NEW)), torch.as_tensor(known.predict_proba(NEW)))


def test_names_of_outputs():
    def find(names, count=2):
        model = net(2)
        model.config = Config(names)
        return find_output_names(model, count)

    assert find(["a", "b"]) == ["a", "b"]
    assert (
        find(["a", "b"], 3) is find(["LABEL_0", "LABEL_1"]) is find(["a", "a"]) is find_output_names(net(2), 2) is None
    )
    model = net(2)
    model.config = Config(["other", "names"])  # labels that the model does not know keep their order
    clf = linnet.TangentClassifier(model, inference="map").fit(X, np.array(["no", "yes"])[(X[:, 0] > 0).long().numpy()])
    assert clf.classes_.tolist() == ["no", "yes"]


def test_numbers_of_outputs_may_stand_for_names():
    by_number = Laplace(net(3), structure="diag", classes=list(NAMES)).fit(X, CLASSES)
    by_name = Laplace(net(3), structure="diag", classes=list(NAMES)).fit(X, TEXT)
    torch.testing.assert_close(by_number.predict_proba(NEW), by_name.predict_proba(NEW))
    assert by_number.predict_label(NEW).tolist() == by_name.predict_label(NEW).tolist()
    with pytest.raises(ValueError, match=r"Labels \[1, 2, 3\] are not among classes="):
        Laplace(net(3), structure="diag", classes=list(NAMES)).fit(X, CLASSES + 1)


@pytest.mark.parametrize(("count", "n"), [(2, 40), (3, 40), (10, 200)])
def test_a_better_order_is_found_where_it_is_clear(count, n):
    random = np.random.default_rng(0)
    labels = random.integers(count, size=n)
    order = np.roll(np.arange(count), 1)  # output j has the label order[j]
    output = np.argsort(order)[labels]
    wrong = random.random(n) < 0.2
    output[wrong] = random.integers(count, size=wrong.sum())
    assert find_better_order(output, labels, count) == order.tolist()
    assert find_better_order(labels, labels, count) is None
    assert find_better_order(output[:count], labels[:count], count) is None  # too few
    for seed in range(200):  # outputs that know nothing
        guess = np.random.default_rng(seed).integers(count, size=n)
        assert find_better_order(guess, labels, count) is None


@pytest.mark.parametrize("names", [["yes", "no"], ["b", "c", "a"]])
def test_a_classifier_says_that_the_outputs_have_another_order(names):
    torch.manual_seed(0)
    inputs, model = torch.randn(90, 3).double(), torch.nn.Linear(3, 1 if len(names) == 2 else 3).double()
    with torch.no_grad():
        f = model(inputs)
    output = (f[:, 0] > 0).long() if len(names) == 2 else f.argmax(1)
    labels = np.array(names)[output.numpy()]
    assert set(labels.tolist()) == set(names)
    with pytest.warns(UserWarning, match=rf"agree with the labels in the order \{names}".replace("]", r"\]")):
        linnet.TangentClassifier(model, inference="map", prior=1.0).fit(inputs, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linnet.TangentClassifier(model, inference="map", prior=1.0, classes=names).fit(inputs, labels)
        linnet.TangentClassifier(model, inference="map", prior=1.0).fit(inputs, np.array(sorted(names))[output.numpy()])


class Squashed(nn.Module):
    """A network whose `forward` ends in a sigmoid, so that no module is one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1).double()

    def forward(self, x):
        return torch.sigmoid(self.inner(x))


def test_a_sigmoid_that_is_no_module():
    X = torch.randn(30, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = (X[:, 0] > 0).long()
    model = Squashed()
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([[4.0, 0.0]]))
        model.inner.bias.zero_()
    with pytest.warns(UserWarning, match=r"probabilities of a sigmoid.*output=torch.logit"):
        linnet.Laplace(model, prior=0.1).fit(X, y)
