"""An interrupted decomposition goes on with the same data and weights only, to the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import linnet
from linnet._common import Checkpoint
from linnet.data import Batch, Source, as_source
from linnet.linalg import low_rank

N = 60


def inputs() -> Tensor:
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


class Mapped(Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.x[i], i


class InOrder(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x)


def padded(items: list[Any]) -> Tensor:
    return torch.stack([x for x, _ in items])


DATA: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "dict": lambda x: {"input": x},
    "TensorDataset": lambda x: TensorDataset(x, torch.arange(N)),
    "Dataset": Mapped,
    "IterableDataset": InOrder,
    "DataLoader": lambda x: DataLoader(Mapped(x), batch_size=7),
    "DataLoader with a collate_fn": lambda x: DataLoader(Mapped(x), batch_size=7, collate_fn=padded),
    "DataLoader in order": lambda x: DataLoader(InOrder(x), batch_size=7),
}


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model.eval()


def fit(data: Any, file: Path, model: nn.Module | None = None, **options: Any) -> linnet.FisherEmbedding:
    options = {"method": "krylov", "dtype": "float64", "block": 4, "progress": False, **options}
    return linnet.FisherEmbedding(model or net(), 3, checkpoint=file, **options).fit(data)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that stays after the fit, as after an interruption."""
    monkeypatch.setattr(Checkpoint, "remove", lambda self: None)
    return tmp_path / "state"


@pytest.mark.parametrize("kernel", ["nfk", "ntk"])
@pytest.mark.parametrize("kind", DATA)
def test_one_changed_example_anywhere_is_refused(kind: str, kernel: str, file: Path) -> None:
    first = fit(DATA[kind](inputs()), file, kernel=kernel)
    again = fit(DATA[kind](inputs()), file, kernel=kernel)
    np.testing.assert_allclose(np.asarray(again.eigenvalues_), np.asarray(first.eigenvalues_), rtol=1e-9)
    probed = torch.linspace(0, N - 1, 8).round().long().tolist()
    for i in (1, 31, N - 2):
        assert i not in probed  # examples on which the operators were compared are not enough
        x = inputs()
        x[i, 2] = torch.nextafter(x[i, 2], torch.tensor(torch.inf))
        with pytest.raises(ValueError, match="the data have changed since it was written, if only in one number"):
            fit(DATA[kind](x), file, kernel=kernel)
    swapped = inputs()
    swapped[[1, 2]] = swapped[[2, 1]]
    with pytest.raises(ValueError, match="belongs to another computation"):
        fit(DATA[kind](swapped), file, kernel=kernel)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_a_changed_frozen_weight_or_buffer_is_refused(name: str, file: Path) -> None:
    fit(inputs(), file)
    model = net()
    model.state_dict()[name].view(-1)[3] *= 1 + 1e-6
    with pytest.raises(ValueError, match="the weights have changed since it was written"):
        fit(inputs(), file, model)


def test_other_statistics_of_the_same_data_are_refused(file: Path) -> None:
    J = linnet.linearize(net().double()).jacobian(inputs().double())
    z = torch.ones(J.shape[1], dtype=torch.float64)
    low_rank(J.centered(z), 2, method="krylov", block=3, checkpoint=file)
    low_rank(J.centered(z), 2, method="krylov", block=3, checkpoint=file)
    with pytest.raises(ValueError, match=r"its operator has other rows.*data or the statistics have changed"):
        low_rank(J.centered(1.1 * z), 2, method="krylov", block=3, checkpoint=file)


def test_checksums_of_a_dataset_take_no_pass_of_their_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linnet.Jacobian, "cached_if_fits", lambda J: J)  # with a checkpoint every step reads the data
    seen = []
    for path in (None, file):
        data = Mapped(inputs())
        fit(data, path)
        seen.append(data.reads)
    assert seen[1] - seen[0] <= 3 * N // 2  # rows of eight examples, and nothing that is known already


# The checksums of sources.


@pytest.mark.parametrize("kind", DATA)
def test_checksums_of_parts_add_up_whatever_was_read(kind: str) -> None:
    model = nn.Linear(4, 1)
    whole = as_source(DATA[kind](inputs()), model)
    parts = [as_source(DATA[kind](inputs()), model).code(a, b) for a, b in ((0, 17), (17, 18), (18, N))]
    assert whole.code() == sum(parts) % 2**64
    for _ in whole.batches(9):
        pass
    assert whole.code() == sum(parts) % 2**64
    assert 0 <= whole.code() < 2**64


def test_every_part_of_an_example_counts() -> None:
    def coded(**changes: Any) -> int:
        given = {"x": inputs(), "ids": torch.arange(N), "labels": torch.arange(N) % 2} | changes
        return as_source(given, lambda x, ids: None).code()

    one = torch.arange(N)
    one[7] = 8
    codes = [
        coded(),
        coded(ids=one),
        coded(labels=torch.zeros(N)),
        coded(x=inputs().double()),
        coded(x=inputs().flip(0)),
    ]
    assert len(set(codes)) == len(codes)


def test_texts_count() -> None:
    model = nn.Linear(1, 1)
    a, b = (as_source({"input": torch.zeros(2, 1), "y": ["a", text]}, model) for text in "bc")
    assert isinstance(a, Source) and isinstance(next(iter(a.batches(2))), Batch)
    assert a.code() != b.code()
