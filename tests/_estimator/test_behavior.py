"""A file is refused around a network that has its weights and computes something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet._common import files
from linnet._estimator import behavior
from linnet.data import as_source

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, 0])
LABELS = (X[:, 0] > 0).long()


def net(activation: type[nn.Module] = nn.Tanh, eps: float = 1e-5, *, double: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5, eps=eps), activation(), nn.Linear(5, 1))
    return model.double() if double else model


def fit(kind: str, model: nn.Module, X: Any = X, **options: Any) -> Any:
    quiet = {"progress": False, **options}
    if kind == "regressor":
        return linnet.TangentRegressor(model, noise=0.1, prior=1.0, **quiet).fit(X, Y)
    if kind == "classifier":
        return linnet.TangentClassifier(model, inference="map", prior=1.0, **quiet).fit(X, LABELS)
    if kind == "laplace":
        return linnet.Laplace(model, "regression", "kron", noise=0.1, prior=1.0, **quiet).fit(X, Y)
    return linnet.FisherEmbedding(model, 2, score=linnet.scores.energy(), **quiet).fit(X)


KINDS = ["regressor", "classifier", "laplace", "embedding"]


def answer(estimator: Any, X: Any = X) -> Tensor:
    return estimator.transform(X) if hasattr(estimator, "transform") else estimator.predict(X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: net(nn.ReLU), r"has \(2\): Tanh\(\); this one has \(2\): ReLU\(\)"),
        (lambda: net(eps=1e-3), r"eps=1e-05.*this one has .*eps=0\.001"),
    ],
    ids=["ReLU for Tanh", "eps"],
)
def test_another_architecture_is_refused_by_name(kind: str, other, named: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = net()
    fitted = fit(kind, model)
    fitted.save(path)
    torch.testing.assert_close(answer(linnet.load(path, model)), answer(fitted))
    with pytest.raises(ValueError, match=f"computes something else with the same weights.*differ by .*{named}"):
        linnet.load(path, other())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_and_saved_again_is_checked_too(kind: str, tmp_path: Path) -> None:
    fit(kind, net()).save(tmp_path / "a.safetensors")
    linnet.load(tmp_path / "a.safetensors", net()).save(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="computes something else"):
        linnet.load(tmp_path / "b.safetensors", net(nn.ReLU))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_older_versions_load_as_they_did(kind: str, tmp_path: Path) -> None:
    fitted = fit(kind, net())
    fitted.save(tmp_path / "a.safetensors")
    held = files.describe(tmp_path / "a.safetensors")
    tensors, meta = files.load(tmp_path / "a.safetensors", kind=held.kind)
    old = {name: t for name, t in tensors.items() if not name.startswith(behavior.PREFIX)}
    del meta["behavior"]
    files.save(tmp_path / "old.safetensors", old, meta, kind=held.kind)
    again = linnet.load(tmp_path / "old.safetensors", net())
    torch.testing.assert_close(answer(again), answer(fitted))
    again.save(tmp_path / "new.safetensors")
    torch.testing.assert_close(answer(linnet.load(tmp_path / "new.safetensors", net())), answer(fitted))


def exact(*shape: int, step: int) -> Tensor:
    """Numbers that every machine has to the bit."""
    return (torch.arange(torch.Size(shape).numel()) * step % 17 - 8).view(*shape) / 16


@pytest.mark.filterwarnings("ignore:The network is far from a mode")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_an_older_version_wrote(kind: str) -> None:
    """The files were written before there was anything but a checksum of the weights in them."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(exact(*p.shape, step=5 + 2 * i))
    inputs, y, quiet = exact(12, 3, step=7), exact(12, step=3), {"prior": 1.0, "progress": False}
    path = Path(__file__).parents[1] / "files" / f"{kind}.safetensors"
    assert "behavior" not in files.describe(path).meta
    found = linnet.load(path, model)
    if kind == "regressor":
        again: Any = linnet.TangentRegressor(model, mean="network", noise=0.125, **quiet).fit(inputs, y)
    elif kind == "classifier":
        again = linnet.TangentClassifier(model, inference="map", **quiet).fit(inputs, (y > 0).long())
    elif kind == "laplace":
        again = linnet.Laplace(model, "regression", noise=0.125, **quiet).fit(inputs, y)
    else:
        score = linnet.scores.energy()
        again = linnet.FisherEmbedding(model, 2, score=score, dtype="float64", progress=False).fit(inputs)
    torch.testing.assert_close(answer(found, inputs), answer(again, inputs), rtol=1e-6, atol=1e-9)


class Reordered(nn.Module):
    """The same function with its sums in another order, as another device has them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for name, module in inner.named_children():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        first, norm, activation, last = self.children()
        h = x.flip(1) @ first.weight.flip(1).T + first.bias  # type: ignore[union-attr,operator,operator]
        h = activation(norm(h))
        return (h.flip(1)[:, None] * last.weight.flip(1)).sum(2) + last.bias  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("double", [False, True])
def test_rounding_is_no_other_architecture(dtype: str, double: bool, tmp_path: Path) -> None:
    data = X.double() if double else X
    fit("regressor", net(double=double), data, dtype=dtype).save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", Reordered(net(double=double)))
    assert again.predict(data).shape == (12,)


def test_another_output_function_is_refused(tmp_path: Path) -> None:
    fit("regressor", net(), output=lambda raw: raw).save(tmp_path / "a.safetensors")
    linnet.load(tmp_path / "a.safetensors", net(), output=lambda raw: raw)
    with pytest.raises(ValueError, match=r"Both print alike.*output="):
        linnet.load(tmp_path / "a.safetensors", net(), output=lambda raw: 2 * raw)


class Tokens(nn.Module):
    """Takes tokens, a mask and nested extras, by keyword."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 1)
        self.power = power

    def forward(self, ids: Tensor, mask: Tensor, extra: dict[str, Tensor], shift: float = 0.0) -> Tensor:
        h = (self.table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head((h + extra["x"]).tanh() ** self.power) + shift


class Remembering(nn.Linear):
    """Answers otherwise from its second pass on."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * (1.0 if self.passes == 1 else 2.0)


def test_networks_that_remember_their_passes_are_compared_as_they_were_at_first() -> None:
    lin = linnet.linearize(Remembering())
    inputs = behavior.draw_inputs(as_source(X, lin.module))
    lin.module(X)
    tensors, meta = behavior.record(lin, inputs)
    behavior.check("a.safetensors", linnet.linearize(lin.given), tensors, meta)


def test_inputs_are_drawn_the_same_whatever_was_drawn_before() -> None:
    for x in (torch.arange(40).view(4, 10), torch.randn(4, 10)):
        source = as_source(x, nn.Linear(10, 1))
        (first,), (second,) = behavior.draw_inputs(source).args, behavior.draw_inputs(source).args
        assert torch.equal(first, second)


def test_dicts_of_tokens_masks_and_nested_tensors(tmp_path: Path) -> None:
    ids = torch.randint(3, 20, (12, 6), generator=torch.Generator().manual_seed(0))
    data = {"ids": ids, "mask": (torch.arange(6) < 4).long().expand(12, 6), "extra": {"x": X[:, :1]}, "shift": 0.5}
    reg = linnet.TangentRegressor(Tokens(), noise=0.1, prior=1.0, solver="weight").fit(data, Y)
    reg.save(tmp_path / "a.safetensors")
    assert files.describe(tmp_path / "a.safetensors").meta["behavior"]["kwargs"]["dict"]["shift"] == {"value": 0.5}
    torch.testing.assert_close(linnet.load(tmp_path / "a.safetensors", Tokens()).predict(data), reg.predict(data))
    with pytest.raises(ValueError, match="Both print alike"):
        linnet.load(tmp_path / "a.safetensors", Tokens(power=2))


def test_tuples_and_datasets(tmp_path: Path) -> None:
    data = torch.utils.data.Subset(torch.utils.data.TensorDataset(X, Y), range(12))
    linnet.Laplace(net(), "regression", "diag", noise=0.1, prior=1.0).fit(data).save(tmp_path / "a.safetensors")
    linnet.load(tmp_path / "a.safetensors", net())
    with pytest.raises(ValueError, match="computes something else"):
        linnet.load(tmp_path / "a.safetensors", net(nn.ReLU))


@pytest.mark.parametrize("kind", ["laplace", "embedding"])
def test_no_training_example_is_in_the_file(kind: str, tmp_path: Path) -> None:
    fit(kind, net()).save(tmp_path / "a.safetensors")
    tensors, _ = files.load(tmp_path / "a.safetensors", kind=files.describe(tmp_path / "a.safetensors").kind)
    (held,) = (t for name, t in tensors.items() if name.startswith(f"{behavior.PREFIX}input"))
    assert held.shape == (2, 3) and held.dtype == X.dtype
    assert not bool((held[:, None] == X).any())
    assert bool((held >= X[:2].min()).all() and (held <= X[:2].max()).all())


class Particular(nn.Linear):
    """Refuses what it does not know."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool((x == x.round()).all()):
            raise RuntimeError("whole numbers only")
        return super().forward(x)


def test_a_network_that_refuses_random_inputs_is_saved_without_them(tmp_path: Path) -> None:
    model = Particular(3, 1)
    reg = linnet.TangentRegressor(model, noise=0.1, prior=1.0).fit(X.round(), Y)
    reg.save(tmp_path / "a.safetensors")
    assert files.describe(tmp_path / "a.safetensors").meta["behavior"] is None
    torch.testing.assert_close(
        linnet.load(tmp_path / "a.safetensors", model).predict(X.round()), reg.predict(X.round())
    )


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_the_size_of_outputs_whose_difference_is_the_score(shift: float) -> None:
    """Rounding is that of the largest number that the network returns, of either sign."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias += shift
    lin = linnet.linearize(model, output=lambda f: f[:, :1] - f[:, 1:])
    _, told = behavior.record(lin, behavior.draw_inputs(as_source(X, model.forward)))
    assert told is not None and 900 < told["size"] < 1100


def test_drawn_inputs_have_the_values_that_the_network_can_take() -> None:
    class Many(nn.Module):
        def forward(self, *args: Any) -> Any: ...

    given = (
        torch.tensor([[5, 9, 5], [9, 9, 30]]),
        torch.tensor([[True, False], [True, True]]),
        torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([[1 + 2j], [3 - 1j]]),
        torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16),
        torch.zeros(2, 0),
    )
    batch = behavior.draw_inputs(as_source(given, Many()))
    assert [t.dtype for t in batch.args] == [t.dtype for t in given]
    assert [t.shape for t in batch.args] == [t.shape for t in given]
    assert set(batch.args[0].flatten().tolist()) <= {5, 9, 30}
    assert torch.equal(batch.args[1], given[1]) and torch.equal(batch.args[2], given[2])
    assert bool(((batch.args[4] >= 0.5) & (batch.args[4] <= 2)).all())


class Halved(nn.Module):
    """A float32 network that rounds to float16 on its way, and differs by one such rounding on another device."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.shift = nn.Linear(3, 5), nn.Linear(5, 1), shift

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh().half().float()) + self.shift


def test_rounding_of_a_forward_that_names_a_dtype_is_no_other_architecture() -> None:
    lin = linnet.linearize(Halved())
    J = lin.jacobian(X)
    assert J.gram().isfinite().all()
    tensors, meta = behavior.record(lin, behavior.draw_inputs(J._source))
    assert meta is not None
    behavior.check("file", linnet.linearize(Halved(2**-11 * meta["size"])), tensors, meta)
    with pytest.raises(ValueError, match="computes something else"):
        behavior.check("file", linnet.linearize(Halved(0.1 * meta["size"])), tensors, meta)
