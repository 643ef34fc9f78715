"""Weights that change after they were linearized are refused wherever they are used, stamped or written."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import linnet
from linnet._common import checksums, files
from linnet.heads import attach_head
from linnet.network import Watch
from linnet.testing import check_operator, dense_jacobian

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, 0])
LABELS = (X[:, 0] > 0).long()


def net(*, outputs: int = 1) -> nn.Module:
    """A network with a frozen layer and with buffers, in its own dtype throughout."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, outputs)).double()
    model[0].weight.requires_grad_(False)
    return model.eval()


def through_data(model: nn.Module) -> None:
    model[3].weight.data.mul_(1.5)


def frozen(model: nn.Module) -> None:
    model[0].weight.data.mul_(-1)


def statistics(model: nn.Module) -> None:
    model[1].running_mean.data.add_(0.5)


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(X.double()).square().sum().backward()
    optimizer.step()


def assigned(model: nn.Module) -> None:
    model.load_state_dict({key: t + 0.5 for key, t in model.state_dict().items()}, assign=True)


def replaced(model: nn.Module) -> None:
    model[3] = copy.deepcopy(model[3])
    model[3].bias.data.add_(1.0)


CHANGES = [through_data, frozen, statistics, trained, assigned, replaced]


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(request) -> Callable[[nn.Module], None]:
    return request.param


def estimators(model: nn.Module) -> dict[str, Any]:
    two = {"dtype": "float64", "progress": False}
    return {
        "regressor": lambda: linnet.TangentRegressor(model, noise=0.1, prior=1.0, **two).fit(X, Y),
        "weight space": lambda: linnet.TangentRegressor(model, noise=0.1, prior=1.0, solver="weight", **two).fit(X, Y),
        "classifier": lambda: linnet.TangentClassifier(model, inference="map", prior=1.0, **two).fit(X, LABELS),
        "laplace": lambda: linnet.Laplace(model, "regression", noise=0.1, prior=1.0, **two).fit(X, Y),
        "embedding": lambda: linnet.FisherEmbedding(model, 2, score=linnet.scores.energy(), **two).fit(X),
    }


KINDS = ["regressor", "weight space", "classifier", "laplace", "embedding"]
REFUSED = r"(Parameter|Buffer) '.*' has changed since the model was linearized"


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_and_no_answer_after_a_change(kind: str, change, tmp_path: Path) -> None:
    model = net()
    fitted = estimators(model)[kind]()
    path = tmp_path / "a.safetensors"
    fitted.save(path)
    before = path.read_bytes()
    change(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        fitted.save(path)
    assert path.read_bytes() == before
    with pytest.raises(RuntimeError, match=REFUSED):
        fitted.transform(X) if kind == "embedding" else fitted.predict(X)
    with pytest.raises(ValueError, match="was fitted around other weights"):
        linnet.load(path, model)
    if kind in ("regressor", "weight space", "classifier"):
        with pytest.raises(RuntimeError, match=REFUSED):
            fitted.apply()
        with pytest.raises(RuntimeError, match=REFUSED):
            fitted.to_module()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_has_the_checksum_of_the_weights_of_the_fit(kind: str, tmp_path: Path) -> None:
    model, other = net(), net()
    through_data(other)
    fitted = estimators(model)[kind]()
    fitted.set_params(model=other)  # for a later fit
    fitted.save(tmp_path / "a.safetensors")
    assert files.describe(tmp_path / "a.safetensors").meta["base"] == files.fingerprint(model.state_dict())
    if hasattr(fitted, "apply"):
        assert torch.equal(fitted.apply()[0].weight, model[0].weight)
        moved = model[3].weight.detach() + fitted.delta_["3.weight"]
        torch.testing.assert_close(fitted.apply()[3].weight.detach(), moved)


def test_what_a_loaded_estimator_stands_on_is_watched_too(tmp_path: Path) -> None:
    model = net()
    estimators(model)["regressor"]().save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", model)
    frozen(model)
    with pytest.raises(RuntimeError, match=r"Parameter '0\.weight'"):
        again.predict(X)


@pytest.mark.parametrize(
    "asked",
    [
        lambda la: la.tune(),
        lambda la: la.log_evidence(prior=2.0),
        lambda la: la.sample(X),
        lambda la: la.predict(X.double().requires_grad_(), return_std=True),
    ],
    ids=["tune", "log_evidence", "sample", "with a graph"],
)
def test_laplace_asks_before_it_answers(asked) -> None:
    model = net()
    la = estimators(model)["laplace"]()
    through_data(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        asked(la)


@pytest.mark.parametrize(
    "asked",
    [lambda reg: reg.loo_, lambda reg: reg.path(X, 1.0), lambda reg: reg.condition(X, Y), lambda reg: reg.sample(X)],
    ids=["loo_", "path", "condition", "sample"],
)
def test_a_regressor_asks_before_it_answers(asked) -> None:
    model = net()
    reg = estimators(model)["regressor"]()
    through_data(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        asked(reg)


class ChangesOnTheWay(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Reading the examples changes a weight, once the network has been linearized."""

    def __init__(self, model: nn.Module, at: int) -> None:
        self.model, self.at, self.count = model, at, 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.count += 1
        if self.count == self.at:
            through_data(self.model)
        return X[i].double(), Y[i]


def test_a_fit_ends_with_the_weights_that_it_began_with() -> None:
    model = net()
    fits = [
        lambda data: linnet.TangentRegressor(model, noise=0.1, prior=1.0, solver="weight").fit(data),
        lambda data: linnet.TangentClassifier(model, inference="map", prior=1.0).fit(data, LABELS),
        lambda data: linnet.Laplace(model, "regression", noise=0.1, prior=1.0).fit(data),
        lambda data: linnet.FisherEmbedding(model, 2, score=linnet.scores.energy(), dtype="float64").fit(data),
        lambda data: attach_head(model, data, features="2"),
    ]
    for fit in fits:
        with pytest.raises(RuntimeError, match=REFUSED):
            fit(ChangesOnTheWay(model, at=10))


def test_linearizations_refuse_what_the_counts_of_changes_miss(change) -> None:
    model = net()
    lin = linnet.linearize(model)
    for use in (lin, lin.jacobian, lambda x: lin.to(torch.float32)):
        use(X.double())
    change(model)
    for use in (lin, lin.jacobian, lambda x: lin.to(torch.float32)):
        with pytest.raises(RuntimeError, match=REFUSED):
            use(X.double())


def test_training_mode_is_named_for_buffers() -> None:
    model = net().train()
    lin = linnet.linearize(model)
    model(X.double())
    with pytest.raises(RuntimeError, match=r"Buffer '1\..*' .* use model.eval\(\)"):
        lin.jacobian(X.double())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_adapted_module_refuses_later_training(dtype: str) -> None:
    model = net()
    module = linnet.TangentRegressor(model, noise=0.1, prior=1.0, dtype=dtype).fit(X, Y).to_module()
    x = X.to(module.delta.dtype)
    module(x)
    through_data(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        module(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_keep_their_own_watch(copied) -> None:
    model = net()
    fitted = estimators(model)["regressor"]()
    other, before = copied(fitted), fitted.predict(X)
    through_data(model)
    assert torch.equal(other.predict(X), before)
    through_data(other.model)
    with pytest.raises(RuntimeError, match=REFUSED):
        other.predict(X)


def test_tables_that_are_no_part_of_the_state_may_grow() -> None:
    model = net()
    model.register_buffer("table", torch.zeros(2), persistent=False)
    watch = Watch(model)
    model.table = torch.zeros(5)
    watch.check(contents=True)


# The checksums.

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("count", [1, 7, 64, 3 * 2**16 + 5])
def test_one_changed_entry_changes_the_checksum(dtype: torch.dtype, count: int) -> None:
    random = torch.Generator().manual_seed(0)
    t = torch.randint(0, 2, (count,), generator=random).to(dtype)
    before = checksums.tensor_code(t)
    for i in {0, count // 2, count - 1}:
        other = t.clone()
        other[i] = 1 - other[i].to(torch.complex64 if dtype.is_complex else torch.int64)
        assert checksums.tensor_code(other) != before
    assert checksums.tensor_code(t.clone()) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.neg, lambda t: 2 * t, lambda t: t.flip(0), lambda t: t.roll(1)])
def test_changes_of_all_entries_change_the_checksum(dtype: torch.dtype, of) -> None:
    for seed in range(20):
        t = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert checksums.tensor_code(t) != checksums.tensor_code(of(t))
        signs = t.sign()  # two values only
        assert checksums.tensor_code(signs) != checksums.tensor_code(of(signs))


def test_rows_are_told_apart_wherever_they_lie_in_memory() -> None:
    base = torch.arange(60, dtype=torch.bfloat16)
    t = base[1:57].view(8, 7)
    codes = checksums.row_codes(t)
    assert len(set(codes.tolist())) == 8
    assert torch.equal(codes, checksums.row_codes(t.clone()))
    assert torch.equal(codes[::2], checksums.row_codes(t[::2]))
    wide = torch.randn(3, 2**16 + 3, generator=torch.Generator().manual_seed(0))
    each = [int(checksums.row_codes(row[None])) for row in wide]
    assert checksums.row_codes(wide).tolist() == each


def test_checksums_of_parts_add_up() -> None:
    codes = checksums.row_codes(torch.randn(11, 3))
    parts = checksums.combine_codes(codes[:4]) + checksums.combine_codes(codes[4:], 4)
    assert checksums.combine_codes(codes) == parts % 2**64
    assert checksums.combine_codes(codes) != checksums.combine_codes(codes.flip(0))


class Checkpointed(nn.Module):
    """A network that computes its middle again in the backward pass, or does not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.c, self.reentrant = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2), reentrant

    def middle(self, h: Tensor) -> Tensor:
        return self.b(h).sin()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        plain = self.reentrant is None
        return self.c(self.middle(h) if plain else checkpoint(self.middle, h, use_reentrant=self.reentrant))


@pytest.mark.parametrize("engine", ["auto", "rows", "autodiff"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_left_out(reentrant: bool, engine: str) -> None:
    """What is computed again after the pass would be computed with the weights of the module."""
    model, x = Checkpointed(reentrant).double(), torch.randn(5, 3, dtype=torch.float64)
    plain = Checkpointed(None).double()
    plain.load_state_dict(model.state_dict())
    lin = linnet.linearize(model)
    check_operator(lin.jacobian(x, 2, engine=engine), dense_jacobian(plain, x), blocks=2)
    moved = {name: t + 0.3 for name, t in lin.theta.items()}
    plain.load_state_dict(moved)
    check_operator(lin.at(moved).jacobian(x, 2, engine=engine), dense_jacobian(plain, x), blocks=2)
    model(x).sum().backward()  # the module itself goes on as before
    plain.load_state_dict(model.state_dict())
    plain(x).sum().backward()
    assert torch.allclose(model.b.weight.grad, plain.b.weight.grad)
