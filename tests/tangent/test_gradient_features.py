"""Top layers adapt: what is frozen runs once, convolutions multiply, the mode by passes, labels."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import linnet
from linnet import metrics
from linnet.inference.mode import by_passes, newton
from linnet.jacobian import Jacobian
from linnet.jacobian.blocks import base
from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.passes import Pass
from linnet.linalg import draw_landmarks, nystrom_preconditioner
from linnet.probability import Bernoulli, Categorical
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal
from tests.support.residual import RESIDUAL, Residual, close, images

# Convolutions multiplied by convolutions.

CONVOLUTIONS = {
    "plain": (nn.Conv2d(3, 4, 3, padding=1), (3, 5, 6)),
    "stride and dilation": (nn.Conv2d(2, 4, 3, stride=2, dilation=2, padding=2, bias=False), (2, 9, 8)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "uneven padding": (nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 5)),
    "one dimension": (nn.Conv1d(2, 3, 3, padding=1), (2, 7)),
    "three dimensions": (nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("temporary", [2**26, 1])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_convolutions_multiply_without_rows(name, k, uses, temporary, last, monkeypatch):
    monkeypatch.setattr(base, "TEMPORARY", temporary)
    monkeypatch.setattr(Convolution, "channels_last", lambda self, g: last and len(self.kernel) == 2)
    layer, shape = CONVOLUTIONS[name]
    model = double(Pooled(layer, uses))
    x = normal(4, *shape)
    dense = dense_jacobian(model, x)
    for J in (
        linnet.linearize(model).jacobian(x, engine="bilinear"),
        linnet.linearize(model).jacobian(x, engine="bilinear").cached(),
        linnet.linearize(model).jacobian(x).cached(),
    ):
        V, U = normal(dense.shape[1], k), normal(dense.shape[0], k)
        close(J @ V, dense @ V)
        close(J.T @ U, dense.T @ U)
        close(J.normal(V), dense.T @ (dense @ V))
        close(J.gram(), dense @ dense.T)


def test_kept_convolutions_have_their_channels_last():
    model, x = double(Pooled(nn.Conv2d(3, 4, 3, padding=1), 1)), normal(4, 3, 5, 6)
    dense = dense_jacobian(model, x)
    V = normal(dense.shape[1], 1)
    for dtype, shapes in ((torch.float32, [(4, 1, 5, 6, 3), (4, 5, 1, 5, 6, 4)]), (torch.float64, [(4, 1, 3, 5, 6)])):
        J = linnet.linearize(copy.deepcopy(model).to(dtype)).jacobian(x.to(dtype), engine="bilinear").cached()
        held = [t.shape for piece in J.passes.chunks.pieces for _, tensors in piece.blocks for t in tensors]
        assert all(shape in held for shape in shapes)
        close((J @ V.to(dtype)).double(), dense @ V, 1e-9 if dtype == torch.float64 else 1e-5)
        close(J.normal(V.to(dtype)).double(), dense.T @ (dense @ V), 1e-9 if dtype == torch.float64 else 1e-5)


class Pooled(nn.Module):
    """A convolution, used once or more for each example, and a head on its mean."""

    def __init__(self, conv: nn.Module, uses: int) -> None:
        super().__init__()
        self.conv, self.head, self.uses = conv, nn.Linear(conv.out_channels, 5), uses

    def forward(self, x: Tensor) -> Tensor:
        all_of_them = torch.stack([x * (1 + i) for i in range(self.uses)], 1).flatten(0, 1)
        h = torch.tanh(self.conv(all_of_them)).unflatten(0, (-1, self.uses))
        return self.head(h.flatten(3).mean((1, 3)))


# What is frozen.


class Encoder(nn.Module):
    """Tokens, positions that all examples share, transformer layers, masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.word(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=mask == 0)
        weight = mask[:, :, None].to(h.dtype)
        return self.head((h * weight).sum(1) / weight.sum(1))


def cases() -> dict[str, tuple[nn.Module, object, list[str]]]:
    mask = torch.ones(6, 5)
    mask[::2, 3:] = 0
    tokens = {"ids": torch.arange(30).view(6, 5) % 11, "mask": mask}
    mlp = nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    return {
        "residual": (double(Residual()), images(6)[0], RESIDUAL),
        "encoder": (double(Encoder(), seed=1).eval(), tokens, ["layers.1.*", "head.*"]),
        "sequential": (double(mlp), normal(6, 3), ["2.*", "4.*"]),
        "activation": (double(mlp), normal(6, 3), ["4.*"]),
    }


def counted(model: nn.Module, name: str) -> list[int]:
    """Batch sizes that a module is called with; the copies that linnet makes count too."""
    sizes: list[int] = []
    model.get_submodule(name).register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    return sizes


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("disk", [False, True])
def test_passes_start_above_the_frozen_layers(name, disk, tmp_path):
    model, data, params = cases()[name]
    J = linnet.linearize(model, params).jacobian(data)
    above = J.above_frozen(folder=tmp_path if disk else None)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    V, U = normal(J.shape[1], 2), normal(J.shape[0], 2)
    for A, B in ((J, above), (J.cached(), above.cached())):
        close(B @ V, A @ V)
        close(B.T @ U, A.T @ U)
        close(B.normal(V), A.normal(V))
        close(B.normal(V[:, 0]), A.normal(V[:, 0]))
        close(B.gram(), A.gram())
        close(B.outputs(), A.outputs())
        index = torch.tensor([4, 0, 3])
        close(B.subset(index) @ V, A.subset(index) @ V)
    close(above.layer_grams()[params[-1].removesuffix(".*")], J.layer_grams()[params[-1].removesuffix(".*")])
    small, other = (next(iter(A.minibatches(2, seed=3))) for A in (above, J))
    close(small @ V, other @ V)
    assert "with activations" in str(above.plan)


def test_the_backbone_runs_once():
    model, x, params = cases()["residual"]
    sizes = counted(model, "blocks.0.one")
    J = linnet.linearize(model, params).jacobian(x)
    for kept in (J.above_frozen(), J.cached()):
        sizes.clear()
        kept.normal(normal(J.shape[1]))
        kept.gram()
        kept.outputs()
        kept.subset(torch.tensor([1, 2])).T @ normal(20)
        assert kept.n == 6 and sum(sizes) == 0
    J.normal(normal(J.shape[1]))  # which tries on a few examples what the model can do
    sizes.clear()
    J.normal(normal(J.shape[1]))
    assert sizes == [6]  # as it is read: one forward pass, none again for the product


def test_activations_are_what_the_rest_reads():
    model, x, params = cases()["residual"]
    above = linnet.linearize(model, params).jacobian(x).above_frozen()
    assert [tuple(t.shape) for t in above._source.tensors] == [(6, 4, 6, 6)]  # not the stem's, nor the first block's
    assert above.cached().above_frozen().shape == above.shape


def test_nothing_is_recorded_below_the_selected_layers():
    model, x, params = cases()["residual"]
    seen: list[bool] = []
    model.blocks[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    J = linnet.linearize(model, params).jacobian(x)
    J.normal(normal(J.shape[1]))
    J.gram()
    assert seen and not any(seen)
    assert all(p.requires_grad for p in model.parameters())  # the model itself is as it was


def test_frozen_weights_that_change_are_noticed():
    model, x, params = cases()["residual"]
    above = linnet.linearize(model, params).jacobian(x).above_frozen()
    with torch.no_grad():
        model.stem.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"stem\.weight"):
        above.gram_diag()


def test_what_cannot_be_kept_is_said():
    model, x, params = cases()["residual"]
    with pytest.raises(ValueError, match="nothing to keep: no module with parameters is called before"):
        linnet.linearize(model).jacobian(x).above_frozen()
    J = linnet.linearize(model, params).jacobian(x)
    with pytest.raises(MemoryError, match=r"takes 6,912 bytes, 1,152 for each of 6 examples, and 100 are available"):
        J.above_frozen(memory=100)

    class Hidden(nn.Module):
        """What a frozen module leaves behind as an attribute is read later."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Leaves(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)) + self.one.left

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.left = nn.Linear(3, 3), 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            self.left = h.sum(1, keepdim=True).detach()
            return h

    J = linnet.linearize(double(Hidden()), "two.*").jacobian(normal(5, 3))
    with pytest.raises(ValueError, match="depends on more than what modules return"):
        J.above_frozen()
    assert J.cached_if_fits().cache_size > 0


def test_fitting_keeps_activations_where_factors_do_not_fit(monkeypatch):
    model, (x, y) = double(Residual()), images(30)
    given = {"params": RESIDUAL, "inference": "map", "prior": 0.1, "solver": "cg-weight"}
    whole = linnet.TangentClassifier(model, **given).fit(x, y)

    def refuse(self, memory="auto"):
        raise MemoryError

    monkeypatch.setattr(Jacobian, "cached", refuse)
    sizes = counted(model, "blocks.0.one")
    clf = linnet.TangentClassifier(model, **given).fit(x, y)
    close(clf.posterior_.delta, whole.posterior_.delta, rtol=1e-4)
    assert sizes.count(30) == 1
    assert clf.passes_ > 3


# The mode by passes.


def test_passes_to_the_optimum():
    x, y = images(150)
    model = linnet.attach_head(double(Residual()), x, y, penalty=1.0)
    J = linnet.linearize(model, RESIDUAL).jacobian(x).cached()
    variance, likelihood, f = torch.full((J.shape[1],), 0.05).double(), Categorical(), J.outputs()
    Phi = J.scaled(variance.sqrt())
    index = draw_landmarks(J.n, 30, torch.Generator().manual_seed(0))
    P = nystrom_preconditioner(Phi, landmarks=J.subset(index).scaled(variance.sqrt()), weight=likelihood.curvature(f))
    given = {"variance": variance, "mean": f, "likelihood": likelihood}
    found = newton.pass_space(J, y, **given, solve=P.solve, tolerance=1e-4).checked()
    assert found.gradient <= 1e-4 and found.passes <= 30
    exact = newton.function_space(J.gram(scale=variance), y, mean=f, likelihood=likelihood, tolerance=1e-10)
    assert found.objective == pytest.approx(exact.objective, rel=1e-6)
    tight = newton.pass_space(J, y, **given, solve=P.solve, tolerance=1e-9).checked()
    close(tight.f, exact.f, rtol=1e-6)
    close(tight.alpha, likelihood.residual(tight.f, y).flatten())


def test_every_pass_is_counted(monkeypatch):
    model, (x, y) = double(Residual()), images(40)
    J = linnet.linearize(model, RESIDUAL).jacobian(x)
    passes = []
    pieces = Pass.pieces
    monkeypatch.setattr(Pass, "pieces", lambda self, *a, **k: passes.append(a[0]) or pieces(self, *a, **k))
    ones = torch.ones(J.shape[1]).double()
    mode = newton.pass_space(J, y, variance=ones, mean=J.outputs(), likelihood=Categorical(), tolerance=1e-4)
    assert mode.passes == len(passes) and set(passes) == {"fused"}
    again = newton.pass_space(
        J, y, variance=ones, mean=J.outputs(), likelihood=Categorical(), tolerance=1e-4, start=mode.u
    )
    assert again.passes == 2 and again.iterations == 0  # at zero, for the reference, and at the start


def test_one_pass_where_the_gram_fits():
    model, (x, y) = double(Residual()), images(30)
    sizes = counted(model, "blocks.0.one")
    clf = linnet.TangentClassifier(model, RESIDUAL, inference="map", prior="ntk").fit(x, y)
    assert clf.solver_ in ("function", "weight") and clf.passes_ == 1
    assert sizes.count(30) == 1 and clf.mode_.gradient <= 1e-6


# The top blocks.


def test_top_blocks_and_the_head():
    model, (x, y) = double(Residual()), images(40)
    by_name = linnet.TangentClassifier(model, RESIDUAL, prior=0.1).fit(x, y)
    clf = linnet.TangentClassifier(model, top=1, prior=0.1).fit(x, y)
    assert list(clf.lin_.theta) == list(by_name.lin_.theta) and clf.top_ == 1
    close(clf.posterior_.delta, by_name.posterior_.delta)
    moved = clf.apply().blocks[2].one.weight.detach() - model.blocks[2].one.weight.detach()
    close(moved, clf.delta_["blocks.2.one.weight"])
    assert set(clf.layer_relevance_) == {"blocks.2.one", "blocks.2.two", "linear"}
    assert list(linnet.TangentClassifier(model, top=0, prior=0.1).fit(x, y).lin_.theta) == [
        "linear.weight",
        "linear.bias",
    ]
    reg = linnet.TangentRegressor(model, top=2).fit(x, normal(40, 10))
    assert reg.top_ == 2 and "blocks.1.one.weight" in reg.lin_.theta and "stem.weight" not in reg.lin_.theta
    assert reg.set_params(top=None).fit(x[:5], normal(5, 10)).top_ is None and reg.lin_.p > 200


def test_top_by_the_evidence(tmp_path):
    model, (x, y) = double(Residual()), images(25)
    trials = {k: linnet.TangentClassifier(model, top=k).fit(x, y).log_evidence_ for k in (1, 2, 3)}
    clf = linnet.TangentClassifier(model, top="evidence", inference="map").fit(x, y)
    path = clf.top_path_
    assert path is not None
    assert path == pytest.approx({k: trials[k] for k in path})
    assert clf.top_ == max(path, key=path.__getitem__) and clf.top == "evidence" and clf.inference == "map"
    falls = [path[k + 1] <= path[k] for k in range(1, len(path))]
    assert not any(falls[:-1]) and (len(path) == 3 or falls[-1])
    clf.save(tmp_path / "it")
    again = linnet.load(tmp_path / "it", model)
    assert again.top_ == clf.top_ and again.top_path_ == path
    close(again.predict_proba(x), clf.predict_proba(x))
    reg = linnet.TangentRegressor(model, top="evidence").fit(x, normal(25, 10))
    assert reg.top_path_[reg.top_] == reg.log_evidence_ == max(reg.top_path_.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 1, "params": "linear.*"}, "params= and top= both say which parameters adapt"),
        ({"top": "evidence", "params": "linear.*"}, "params= and top= both say which parameters adapt"),
        ({"top": "most"}, "top must be a number of blocks or 'evidence'; got 'most'"),
        ({"top": True}, "top must be a number of blocks or 'evidence'; got True"),
        ({"top": -1}, "top must be a number of blocks or 'evidence'; got -1"),
        ({"top": 4}, "The model has 3 blocks below its head"),
    ],
)
@pytest.mark.parametrize("door", [linnet.TangentClassifier, linnet.TangentRegressor])
def test_top_refuses(given, message, door):
    x, y = images(20)
    y = y if door is linnet.TangentClassifier else normal(20, 10)
    with pytest.raises(ValueError, match=message):
        door(double(Residual()), **given).fit(x, y)


def test_top_needs_a_network_and_one_task():
    with pytest.raises(ValueError, match="top= chooses blocks of a trained network"):
        linnet.TangentClassifier(top=1).fit(normal(10, 3), torch.arange(10) % 2)
    with pytest.raises(ValueError, match="goes neither with fit_tasks"):
        linnet.TangentRegressor(double(Residual()), top="evidence").fit_tasks([(images(5)[0], normal(5, 10))])


# Several labels at once.


def labels(n: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = double(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)))
    x = normal(n, 4)
    return model, x, (x[:, :3] + 0.3 * normal(n, 3, seed=1) > 0.2).long()


@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
def test_labels_are_independent_bernoullis(inference, solver, tmp_path):
    model, x, y = labels(60)
    clf = linnet.TangentClassifier(model, inference=inference, prior="ntk", solver=solver).fit(x, y)
    J = linnet.linearize(model).jacobian(x)
    K = J.gram(scale=clf.prior_variance_)
    mode = newton.function_space(K, y.double(), mean=J.outputs(), likelihood=Bernoulli(), tolerance=1e-9)
    close(clf.mode_.f, mode.f, rtol=1e-4)
    p = clf.predict_proba(x)
    assert p.shape == (60, 3) and bool(((p > 0) & (p < 1)).all())
    assert clf.predict(x).equal((p > 0.5).long())
    assert float((clf.predict(x) == y).double().mean()) > 0.85
    if inference == "map":
        close(p, torch.sigmoid(clf.mode_.f), rtol=1e-5)
    assert metrics.mean_average_precision(p, y) > 0.9
    clf.save(tmp_path / "it")
    close(linnet.load(tmp_path / "it", model).predict_proba(x), p)
    assert clf.predict_proba(x.numpy()).shape == (60, 3)


def test_labels_by_adam():
    model, x, y = labels(80)
    given = {"inference": "map", "prior": 0.3}
    exact = linnet.TangentClassifier(model, **given).fit(x, y)
    clf = linnet.TangentClassifier(model, **given, solver="adam", minibatch=16).fit(x, y)
    assert clf.mode_.objective == pytest.approx(exact.mode_.objective, rel=1e-2)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda y: 2 * y, ValueError, "targets 0 or 1; example"),
        (lambda y: y[:, :2], ValueError, r"Bernoulli needs targets of shape \(20, 3\)"),
        (lambda y: y.double().masked_fill(y == 1, float("nan")), ValueError, "must not be NaN"),
        (lambda y: y[:10], ValueError, "20 examples need labels of shape"),
        (lambda y: np.array([["a", "b", "c"]] * 20), TypeError, "must be zeros and ones; got an array of U1"),
        (lambda y: 0.5 * y.double(), ValueError, "targets 0 or 1; example"),
    ],
)
def test_labels_that_are_neither(bad, error, message):
    model, x, y = labels(20)
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        warnings.simplefilter("error")
        linnet.TangentClassifier(model).fit(x, bad(y))


def test_mean_average_precision():
    p, y = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)), (normal(50, 4) > 0.5).long()
    expected = np.mean([average_precision_score(y[:, j], p[:, j]) for j in range(4)])
    assert metrics.mean_average_precision(p, y) == pytest.approx(expected, rel=1e-12)
    assert metrics.mean_average_precision(p.numpy(), y.bool().numpy()) == pytest.approx(expected, rel=1e-12)
    assert metrics.mean_average_precision(y.double(), y) == 1.0
    with pytest.raises(ValueError, match=r"Labels \[1\] have no example"):
        metrics.mean_average_precision(p[:, :2], torch.stack([y[:, 0], 0 * y[:, 1]], 1))
    with pytest.raises(ValueError, match=r"must both have shape \(n, c\); got \(50, 4\) and \(50,\)"):
        metrics.mean_average_precision(p, y[:, 0])
    with pytest.raises(ValueError, match="labels must be zeros and ones"):
        metrics.mean_average_precision(p, 2 * y)


def test_a_stale_preconditioner_is_renewed(monkeypatch):
    """Labels that a network can be sure of leave another curvature than the start has."""
    x, y = images(120)
    made = []
    sketch = by_passes.sketch
    monkeypatch.setattr(by_passes, "sketch", lambda *given, **how: made.append(how["rank"]) or sketch(*given, **how))
    how = {"params": RESIDUAL, "solver": "cg-weight", "mean": "zero", "prior": 100.0, "tolerance": 1e-6}
    model = linnet.attach_head(double(Residual()), x, y, penalty=1.0)
    renewed = linnet.TangentClassifier(model, **how).fit(x, y)
    assert made and renewed.passes_ > 0
    count = len(made)
    kept = linnet.TangentClassifier(model, preconditioner="nystrom", **how).fit(x, y)
    assert len(made) == count  # asked for by name, and left alone
    close(renewed.decision_function(x), kept.decision_function(x), rtol=1e-3)
    assert renewed.passes_ < kept.passes_
