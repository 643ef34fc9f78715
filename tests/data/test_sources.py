"""Data of every kind becomes the same batches."""

from __future__ import annotations

import gc
import warnings
from collections import UserDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from linnet.data import Batch, Source, as_source, as_writable
from linnet.data.batch import find_bad_row
from linnet.data.datasets import checksum

N = 11
# Python 3.12 says this whenever a worker process is forked.
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def images(n: int = N) -> Tensor:
    return torch.arange(3.0 * n).reshape(n, 3)


def forward(x: Tensor) -> Tensor:
    return x


class Pairs(Dataset[Any]):
    """A map-style dataset of (x, y); ``salt`` changes what it gives."""

    def __init__(self, n: int = N) -> None:
        self.x, self.salt = images(n), 0.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + (self.salt if i == 7 else 0), i


class Items(Dataset[Any]):
    """Any examples."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Stream(IterableDataset[Any]):
    """The same examples in order."""

    def __init__(self, n: int = N) -> None:
        self.n, self.salt = n, 0.0

    def __iter__(self) -> Iterator[Any]:
        return ((x + (self.salt if i == 7 else 0), i) for i, x in enumerate(images(self.n)))


def pad(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Pads every batch to its longest example, whose length is its index plus one."""
    xs = [torch.full((i + 1,), float(i)) for _, i in items]
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([i for _, i in items])


KINDS: dict[str, Any] = {
    "tensors": lambda: (images(), torch.arange(N)),
    "list": lambda: [images(), torch.arange(N)],
    "arrays": lambda: (images().numpy(), np.arange(N)),
    "named tuple": lambda: namedtuple("Pair", "x y")(images(), torch.arange(N)),
    "tensor dataset": lambda: TensorDataset(images(), torch.arange(N)),
    "dataset": Pairs,
    "stacked": lambda: StackDataset(images(), torch.arange(N)),
    "examples": lambda: [Pairs()[i] for i in range(N)],
    "stream": Stream,
    "loader": lambda: DataLoader(Pairs(), batch_size=4),
    "loader, one by one": lambda: DataLoader(Pairs()),
    "loader, one batch": lambda: DataLoader(Pairs(), batch_size=100),
    "loader, a worker": lambda: DataLoader(Pairs(), batch_size=4, num_workers=1),
    "loader, batch sampler": lambda: DataLoader(
        Pairs(), batch_sampler=BatchSampler(SequentialSampler(Pairs()), 4, False)
    ),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
    "loader of whole batches": lambda: DataLoader(
        [[images()[a:b], torch.arange(a, b)] for a, b in ((0, 6), (6, N))],  # type: ignore[arg-type]
        batch_size=None,
    ),
}


@FORKS
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_batches(name: str) -> None:
    source = as_source(KINDS[name](), forward)
    assert source.n == N
    assert source.kind
    for size in (3, 11, 100):
        batches = list(source.batches(size))
        assert [b.start for b in batches] == [sum(b.n for b in batches[:i]) for i in range(len(batches))]
        assert max(b.n for b in batches) <= size
        assert all(len(b.args) == 1 and not b.kwargs for b in batches)
        assert torch.equal(torch.cat([b.args[0] for b in batches]), images())
        assert torch.equal(torch.cat([b.rest for b in batches]), torch.arange(N))
        assert torch.equal(torch.cat([b.index for b in batches]), torch.arange(N))


@pytest.mark.parametrize("name", [name for name in KINDS if "worker" not in name])
def test_every_kind_gives_any_range(name: str) -> None:
    source = as_source(KINDS[name](), forward)
    for start, stop in ((0, 5), (5, 11), (3, 4), (2, 9), (6, 6), (11, 11)):
        batches = list(source.batches(2, start, stop))
        got = torch.cat([torch.empty(0, dtype=torch.int64), *(b.rest for b in batches)])
        assert got.tolist() == list(range(start, stop))
        assert [i for b in batches for i in b.index.tolist()] == got.tolist()
        assert all(b.n <= 2 for b in batches)


@pytest.mark.parametrize("name", [name for name in KINDS if "worker" not in name])
def test_subset_keeps_the_positions(name: str) -> None:
    source = as_source(KINDS[name](), forward)
    index = torch.tensor([9, 0, 7, 7, 3])
    if not source.by_position:
        with pytest.raises(TypeError, match=r"data that is read in order \(.*in order\)\. Use tensors, arrays, or"):
            source.subset(index)
        return
    chosen = source.subset(index)
    assert chosen.n == 5 and chosen.kind.startswith("5 of 11 examples, ")
    batches = list(chosen.batches(2))
    assert [(b.start, b.n) for b in batches] == [(0, 2), (2, 2), (4, 1)]
    assert [b.rest.tolist() for b in batches] == [[9, 0], [7, 7], [3]]
    assert [b.index.tolist() for b in batches] == [[9, 0], [7, 7], [3]]
    assert torch.equal(torch.cat([b.args[0] for b in batches]), images()[index])
    assert [b.index.tolist() for b in chosen.batches(2, 1, 4)] == [[0, 7], [7]]
    again = chosen.subset(torch.tensor([4, 0]))
    assert [b.index.tolist() for b in again.batches(5)] == [[3, 9]]
    assert [b.rest.tolist() for b in again.batches(5)] == [[3, 9]]


@FORKS
def test_workers_serve_parts_and_subsets() -> None:
    source = as_source(KINDS["loader, a worker"](), forward)
    assert source.kind == "DataLoader of Pairs, by position, workers: 1"
    assert [b.rest.tolist() for b in source.batches(4, 3, 6)] == [[3], [4, 5]]
    assert [b.rest.tolist() for b in source.subset(torch.tensor([5, 2])).batches(4)] == [[5, 2]]


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 9), size=st.integers(1, 10), cut=st.integers(1, 10), data=st.data())
def test_splitting_never_changes_the_examples(n: int, size: int, cut: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    source = as_source({"x": images(n), "y": torch.arange(n)}, forward)
    parts = [part for batch in source.batches(size, start, stop) for part in batch.split(cut)]
    assert all(1 <= part.n <= min(size, cut) for part in parts)
    assert [i for part in parts for i in part.index.tolist()] == list(range(start, stop))
    assert [i for part in parts for i in part.rest["y"].tolist()] == list(range(start, stop))


# ------------------------------------------------------------------------------------------- batches


def test_in_memory_batches_are_views() -> None:
    x, array = images(), np.ones((N, 2))
    batches = list(as_source((x, array), forward).batches(4))
    assert [b.args[0].data_ptr() for b in batches] == [x[i].data_ptr() for i in (0, 4, 8)]
    assert [b.rest.data_ptr() for b in batches] == [array[i:].ctypes.data for i in (0, 4, 8)]
    assert batches[0].rest.dtype == torch.float64


def test_read_only_and_reversed_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", images().numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = as_source(mapped, forward)
        assert torch.equal(next(source.batches(N)).args[0], images())
        assert as_source([(row,) for row in mapped], forward).n == N
        assert next(as_source([(row,) for row in mapped], forward).batches(2)).n == 2
    assert torch.equal(next(as_source(images().numpy()[::-1], forward).batches(N)).args[0], images().flip(0))


def test_read_only_arrays_leave_the_warnings_of_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images().numpy()
    x.flags.writeable = False
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(warnings, "catch_warnings", None)  # which changes the filters of all threads
        assert next(as_source(x, forward).batches(N)).args[0].data_ptr() == x.ctypes.data
        for item in ((x[0], 1.0), [x[0], 1.0], {"x": x[0], "y": 1.0}):
            found.append(next(as_source(Items([item] * 3), forward).batches(3)))
    for batch in found:
        assert torch.equal((batch.args or tuple(batch.kwargs.values()))[0], images()[:1].expand(3, -1))
    held = as_writable({"x": x, "names": ["a"]})
    del x
    gc.collect()
    assert torch.equal(torch.from_numpy(held["x"]), images())  # the view holds the memory


def test_batch_moves_and_keeps_what_has_no_examples() -> None:
    data = {"x": images(), "scale": torch.tensor(2.0), "none": None, "flag": True, "names": ["a"] * N}
    source = as_source(data, lambda x, scale, none, flag, names: x)
    batch = next(source.batches(4)).to("meta")
    assert batch.kwargs["x"].is_meta and batch.kwargs["x"].shape == (4, 3)
    assert batch.kwargs["scale"].is_meta and batch.kwargs["scale"].ndim == 0
    assert batch.kwargs["none"] is None and batch.kwargs["flag"] is True
    assert batch.kwargs["names"] == ["a"] * 4
    taken = next(source.subset(torch.tensor([2, 1])).batches(4))
    assert taken.kwargs["names"] == ["a"] * 2 and taken.kwargs["scale"] == 2.0


def test_a_copy_to_a_gpu_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, bool]] = []

    def to(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        asked.append((device, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "to", to)
    batch = Batch((torch.zeros(2),), {}, torch.zeros(2), start=0, n=2)
    batch.to("cuda")
    batch.to("cpu")
    assert asked == [("cuda", True)] * 2 + [("cpu", False)] * 2


def test_nested_containers_are_cut_everywhere() -> None:
    data = {"x": images(), "past": [(images(), images()), {"k": images()}]}
    batch = list(as_source(data, lambda x, past: x).batches(8))[1]
    assert batch.kwargs["past"][0][1].shape == (3, 3)
    assert torch.equal(batch.kwargs["past"][1]["k"], images()[8:])


def test_a_source_is_returned_as_it_is() -> None:
    source = as_source(images(), forward)
    assert isinstance(source, Source)
    assert as_source(source, forward) is source


def test_ranges_and_indices_are_checked() -> None:
    source = as_source(images(), forward)
    with pytest.raises(ValueError, match="size of at least 1; got 0"):
        source.batches(0)
    for start, stop in ((-1, 3), (4, 3), (0, 12)):
        with pytest.raises(ValueError, match=rf"11 examples, so batches needs .* got {start}, {stop}\."):
            source.batches(2, start, stop)
    with pytest.raises(TypeError, match=r"int64 tensor of shape \(m,\); got torch.bool \(11,\)\. For a mask use"):
        source.subset(torch.ones(N, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"int64 tensor of shape \(m,\); got a list"):
        source.subset([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one example; got an empty index"):
        source.subset(torch.empty(0, dtype=torch.int64))
    for bad in (-1, 11):
        with pytest.raises(IndexError, match=rf"positions 0 to 10; got {bad}\."):
            source.subset(torch.tensor([0, bad]))
        with pytest.raises(IndexError, match="positions 0 to 1; got"):
            source.subset(torch.tensor([1, 5])).subset(torch.tensor([0, bad]))


# ----------------------------------------------------------------------------------------- arguments


def bound(data: Any, fn: Any) -> tuple[int, list[str], Any]:
    """How many positional arguments, which keywords, and the rest as lists."""
    batch = next(as_source(data, fn).batches(N))
    rest = batch.rest
    if isinstance(rest, tuple):
        rest = len(rest)
    elif isinstance(rest, dict):
        rest = sorted(rest)
    elif isinstance(rest, Tensor):
        rest = "tensor"
    return len(batch.args), sorted(batch.kwargs), rest


X = images()


@pytest.mark.parametrize(
    ("fn", "data", "expected"),
    [
        (lambda x: x, X, (1, [], None)),
        (lambda x: x, (X,), (1, [], None)),
        (lambda x: x, (X, X), (1, [], "tensor")),
        (lambda x: x, (X, X, X), (1, [], 2)),
        (lambda x, mask: x, (X, X), (2, [], None)),
        (lambda x, mask: x, (X, X, X), (2, [], "tensor")),
        (lambda x=None, mask=None: x, (X, X), (1, [], "tensor")),
        (lambda x, mask=None: x, (X, X), (1, [], "tensor")),
        (lambda *args: args, (X, X, X), (3, [], None)),
        (lambda x, *args: x, (X, X), (1, [], "tensor")),
        (lambda x, /: x, (X, X), (1, [], "tensor")),
        (nn.Linear(3, 2), (X, X), (1, [], "tensor")),
        (nn.Linear(3, 2).forward, X, (1, [], None)),
        (nn.Bilinear(3, 3, 2), (X, X), (2, [], None)),
        (lambda x: x, {"x": X}, (0, ["x"], None)),
        (lambda x: x, {"x": X, "labels": X, "idx": X}, (0, ["x"], ["idx", "labels"])),
        (lambda x, labels=None: x, {"x": X, "labels": X}, (0, ["labels", "x"], None)),
        (lambda x, *, mask=None: x, {"x": X, "mask": X}, (0, ["mask", "x"], None)),
        (lambda x, **more: x, {"x": X, "other": X, "y": X}, (0, ["other", "x"], ["y"])),
        (lambda x: x, UserDict(x=X, target=X), (0, ["x"], ["target"])),
        (torch.add, (X, X), (2, [], None)),  # written in C, without a signature
        (forward, StackDataset(x=X, y=X), (0, ["x"], ["y"])),
        (forward, DataLoader(StackDataset(x=X, y=X), batch_size=N), (0, ["x"], ["y"])),  # type: ignore[arg-type]
    ],
)
def test_the_signature_decides_what_is_passed(fn: Any, data: Any, expected: Any) -> None:
    assert bound(data, fn) == expected


def test_hugging_face_batches() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(2 * N).reshape(N, 2)
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids, "label": ids[:, 0]})

    def bert(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> None: ...

    assert bound(batch, bert) == (0, ["attention_mask", "input_ids"], ["label"])
    with pytest.raises(TypeError, match=r"found none\. Convert lists of numbers .* return_tensors='pt'"):
        as_source(transformers.BatchEncoding({"input_ids": [[1, 2], [3, 4]]}), bert)


@pytest.mark.parametrize(
    "make",
    [
        lambda pairs: ({"ids": images(), "mask": torch.ones(N)}, torch.arange(N)),
        lambda pairs: pairs,
        lambda pairs: Items(pairs),
        lambda pairs: DataLoader(Items(pairs), batch_size=4),
    ],
    ids=["in memory", "examples", "dataset", "loader"],
)
def test_a_dict_of_arguments_beside_its_target(make: Any) -> None:
    pairs = [({"ids": x, "mask": torch.tensor(1.0)}, i) for i, x in enumerate(images())]
    batches = list(as_source(make(pairs), lambda ids, mask=None: ids).batches(3))
    assert all(not b.args and list(b.kwargs) == ["ids", "mask"] for b in batches)
    assert torch.equal(torch.cat([b.kwargs["ids"] for b in batches]), images())
    assert torch.equal(torch.cat([b.rest for b in batches]), torch.arange(N))


class Taking(nn.Module):
    """A forward with labels, as Hugging Face models have it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, ids: Any, labels: Any = None) -> Any:
        return ids


def test_labels_of_a_hugging_face_model_are_targets() -> None:
    settings = {"is_encoder_decoder": False, "id2label": {0: "a", 1: "b"}}
    data = {"ids": images(), "labels": torch.arange(N)}
    (batch,) = as_source(data, Taking(SimpleNamespace(**settings))).batches(100)
    assert list(batch.kwargs) == ["ids"] and torch.equal(batch.rest["labels"], torch.arange(N))
    # An encoder-decoder makes inputs of the labels, and other models may do with them what they like.
    for config in (SimpleNamespace(**settings | {"is_encoder_decoder": True}), None):
        (batch,) = as_source(data, Taking(config)).batches(100)
        assert list(batch.kwargs) == ["ids", "labels"] and batch.rest is None


def test_a_dict_that_the_forward_takes_whole_stays_one_argument() -> None:
    given = ({"ids": images()}, torch.arange(N))
    for forward_of_dicts in (lambda batch: batch, lambda batch, **settings: batch):
        (batch,) = as_source(given, forward_of_dicts).batches(100)
        assert len(batch.args) == 1 and torch.equal(batch.args[0]["ids"], images()) and not batch.kwargs
        assert torch.equal(batch.rest, torch.arange(N))
    (batch,) = as_source((*given, torch.ones(N)), lambda **arguments: arguments).batches(100)
    assert list(batch.kwargs) == ["ids"] and len(batch.rest) == 2


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match=r"requires 2 arguments \(x, mask\); the data has 1\. Give a tuple of 2"):
        as_source(X, lambda x, mask: x)
    with pytest.raises(TypeError, match=r"takes \(mask\) by keyword only\. Give the data as a dict"):
        as_source((X, X), lambda x, *, mask: x)
    with pytest.raises(TypeError, match=r"takes arguments by keyword only\. Give the data as a dict"):
        as_source(X, lambda *, x=None: x)
    with pytest.raises(TypeError, match=r"accepts the keys 'x', 'mask'; the data also has 'msk'\. Remove or"):
        as_source({"x": X, "msk": X}, lambda x, mask=None: x)
    with pytest.raises(TypeError, match=r"requires 'x', 'mask'; the data has the keys 'x'\. Add 'mask'"):
        as_source({"x": X, "y": X}, lambda x, mask: x)
    with pytest.raises(TypeError, match=r"accepts the keys \(none\); the data also has 'x'"):
        as_source({"x": X}, lambda x, /: x)


# --------------------------------------------------------------------------------------- wrong data


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="item 0 of the data has 11 and item 1 of the data has 10"):
        as_source((X, X[1:]), forward)
    with pytest.raises(ValueError, match="'x' of the data has 11 and 'k' of item 1 of 'past' of the data has 3"):
        as_source({"x": X, "past": [X, {"k": X[:3]}]}, lambda x, past: x)
    with pytest.raises(ValueError, match="item 0 of the data has 4 and item 1 of the data has 3"):
        list(as_source(DataLoader(Pairs(), batch_size=4, collate_fn=lambda b: (X[:4], X[:3])), forward).batches(4))


@pytest.mark.parametrize(
    "data",
    [X[:0], np.zeros((0, 2)), Pairs(0), Stream(0), DataLoader(Stream(0)), DataLoader(Pairs(0)), {"x": X[:0]}],
    ids=["tensor", "array", "dataset", "stream", "loader of a stream", "loader", "dict"],
)
def test_empty_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"at least one example; the data \(.+\) is empty"):
        as_source(data, forward)


def test_data_without_a_tensor_is_refused() -> None:
    for data in ([1.0, 2.0], [[1.0], [2.0]], ["a", "b"], (), [], {}, {"x": None}, torch.tensor(3.0)):
        with pytest.raises(TypeError, match=r"at least one tensor or array .* found none"):
            as_source(data, forward)


def test_unknown_data_is_refused() -> None:
    class Frame:
        iloc = None

        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            return i

        def to_numpy(self) -> None: ...

    class NoLength(Dataset[int]):
        def __getitem__(self, i: int) -> int:
            return i

    with pytest.raises(TypeError, match=r"got a generator\. It can be read only once: give a Dataset"):
        as_source((x for x in X), forward)
    with pytest.raises(TypeError, match=r"got a Frame\. Convert it with data\.to_numpy\(\)"):
        as_source(Frame(), forward)
    with pytest.raises(TypeError, match=r"item 0 of the data is a Frame\. Use its to_numpy\(\)"):
        as_source((Frame(), X), forward)
    with pytest.raises(TypeError, match=r"got a NoLength\. A map-style Dataset also needs __len__"):
        as_source(NoLength(), forward)
    with pytest.raises(TypeError, match=r"got an int\. Convert it with torch\.as_tensor"):
        as_source(3, forward)
    with pytest.raises(TypeError, match=r"got a str\. Convert"):
        as_source("abc", forward)
    with pytest.raises(TypeError, match=r"item 1 of the data is an object\. Convert it with torch\.as_tensor"):
        as_source((X, object()), forward)
    with pytest.raises(TypeError, match=r"the data has layout torch\.sparse_coo\. Use tensor\.to_dense\(\)"):
        as_source(X.to_sparse(), forward)


def test_arrays_that_torch_does_not_know_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the data is an array of dtype object: stack equal shapes"):
        as_source(np.array([None, 1]), forward)
    with pytest.raises(TypeError, match=r"'x' of the data is an array of dtype <U1: convert it"):
        as_source({"x": np.array(["a"])}, forward)
    for dtype in (np.longdouble, ">f4", "datetime64[s]"):
        with pytest.raises(TypeError, match=r"arrays of native numbers; the data is an array of dtype"):
            as_source(np.zeros(3, dtype=dtype), forward)


# -------------------------------------------------------------------------------------------- finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_first_bad_example_is_named(value: float, dtype: torch.dtype) -> None:
    x = images().to(dtype)
    x[8, 0] = x[5, 2] = value
    with pytest.raises(ValueError, match=r"example 5 has NaN or infinity in item 0 of the inputs\. Clean it"):
        as_source((x, x), forward)
    with pytest.raises(ValueError, match=r"example 5 has NaN or infinity in 'x' of the inputs"):
        as_source({"x": x}, forward)
    assert as_source((images(), x), forward).n == N  # targets are not inputs


def test_sums_that_overflow_are_not_bad() -> None:
    x = torch.full((4, 3), torch.finfo(torch.float32).max)
    assert find_bad_row(x) is None
    assert as_source(x.half().clamp(max=65504), forward).n == 4
    x[3, 1] = torch.inf
    assert [find_bad_row(x, block=block) for block in (1, 3, 4, 7, 100)] == [3] * 5
    assert find_bad_row(torch.zeros(3, 0)) is None


@pytest.mark.parametrize("name", ["dataset", "stream", "loader", "loader of a stream"])
def test_streamed_inputs_are_checked(name: str) -> None:
    data = KINDS[name]()
    getattr(data, "dataset", data).salt = torch.nan
    with pytest.raises(ValueError, match="example 7 has NaN or infinity in item 0 of the inputs"):
        list(as_source(data, forward).batches(4))


def test_a_subset_names_the_position_in_the_full_data() -> None:
    data = Pairs()
    data.salt = torch.inf
    with pytest.raises(ValueError, match="example 7 has NaN or infinity"):
        list(as_source(data, forward).subset(torch.tensor([1, 7])).batches(4))


# --------------------------------------------------------------------------------- the same every pass


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dataset", "Example 7"),
        ("stream", "Example 7"),
        ("loader", "Example 7"),
        ("loader of a stream", "Examples 4 to 7"),
    ],
)
def test_data_that_changes_is_caught(name: str, what: str) -> None:
    data = KINDS[name]()
    source = as_source(data, forward)
    list(source.batches(4))
    list(source.batches(3))  # another size is no change
    list(source.batches(3, 2, 9))
    getattr(data, "dataset", data).salt = 1.0
    assert len(list(source.batches(4, 0, 4))) == 1  # these have not changed
    with pytest.raises(RuntimeError, match=rf"{what} changed between two passes .* seed random transforms"):
        list(source.batches(4))
    with pytest.raises(RuntimeError, match=f"{what} changed"):
        list(source.batches(2, 6, 9))


@pytest.mark.parametrize("name", ["dataset", "loader"])
def test_a_subset_is_compared_with_full_passes(name: str) -> None:
    data = KINDS[name]()
    source = as_source(data, forward)
    list(source.batches(4))
    getattr(data, "dataset", data).salt = 1.0
    with pytest.raises(RuntimeError, match="Example 7 changed"):
        list(source.subset(torch.tensor([3, 7])).batches(2))


def test_targets_count_too() -> None:
    class Relabelled(Pairs):
        def __getitem__(self, i: int) -> tuple[Tensor, Any]:
            return self.x[i], {"name": "b" if self.salt and i == 2 else "a", "y": np.float64(i)}

    data = Relabelled()
    source = as_source(data, forward)
    assert next(source.batches(3)).rest["name"] == ["a"] * 3
    data.salt = 1.0
    with pytest.raises(RuntimeError, match="Example 2 changed"):
        list(source.batches(3))


def test_a_random_collate_is_caught() -> None:
    def mask(items: list[Any]) -> Tensor:
        return torch.stack([x for x, _ in items]) * torch.rand(len(items), 1)

    source = as_source(DataLoader(Pairs(), batch_size=4, collate_fn=mask), forward)
    list(source.batches(4, 0, 8))
    with pytest.raises(RuntimeError, match="Examples 0 to 3 changed"):
        list(source.batches(4))


@pytest.mark.parametrize("kind", ["dataset", "stream", "loader of a stream"])
@pytest.mark.parametrize(("n", "found"), [(12, "more than that"), (9, "only 9"), (0, "only 0")])
def test_a_pass_of_another_length_is_caught(kind: str, n: int, found: str) -> None:
    data = KINDS[kind]()
    source = as_source(data, forward)
    inner = getattr(data, "dataset", data)
    inner.n, inner.x = n, images(n)
    # A loader's last batch of another length is a batch that changed.
    last = {12: "Examples 8 to 11 changed", 9: "Example 8 changed"} if kind == "loader of a stream" else {}
    with pytest.raises(RuntimeError, match=last.get(n, f"had 11 examples at first and {found} in a later pass")):
        list(source.batches(4))


def test_a_stream_that_ends_before_the_range_is_caught() -> None:
    data = Stream()
    source = as_source(data, forward)
    data.n = 5
    with pytest.raises(RuntimeError, match="had 11 examples at first and only 5"):
        list(source.batches(2, 3, 8))


def test_reading_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = as_source(Pairs(), forward)
    list(source.batches(4))
    list(source.subset(torch.tensor([1])).batches(1))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------- loaders


@pytest.mark.parametrize(
    "loader",
    [
        lambda d: DataLoader(d, shuffle=True, batch_size=None),
        lambda d: DataLoader(d, sampler=RandomSampler(d, replacement=True)),
        lambda d: DataLoader(d, sampler=RandomSampler(d, num_samples=3)),
        lambda d: DataLoader(d, sampler=SubsetRandomSampler([1, 2])),
        lambda d: DataLoader(d, sampler=WeightedRandomSampler([0.5] * N, 3)),
        lambda d: DataLoader(d, sampler=DistributedSampler(d, 2, 0, shuffle=False)),
    ],
)
def test_samplers_are_refused_by_name(loader: Any) -> None:
    built = loader(Pairs())
    inner = getattr(built.batch_sampler, "sampler", built.sampler)
    remedy = "shards the data itself" if isinstance(inner, DistributedSampler) else "same order every pass"
    with pytest.raises(ValueError, match=rf"{remedy}.*uses a {type(inner).__name__}\. Build it with"):
        as_source(built, forward)


def test_a_loader_that_shuffles_is_read_in_the_order_of_its_dataset() -> None:
    plain = as_source(DataLoader(Pairs(), batch_size=3), forward)
    for loader in (
        DataLoader(Pairs(), batch_size=3, shuffle=True),
        DataLoader(Pairs(), batch_sampler=BatchSampler(RandomSampler(Pairs()), 3, False)),
    ):
        with pytest.warns(UserWarning, match="DataLoader shuffles.*in the order of the dataset"):
            source = as_source(loader, forward)
        assert source.n == plain.n and source.by_position
        for ours, theirs in zip(source.batches(3), plain.batches(3), strict=True):
            assert torch.equal(ours.args[0], theirs.args[0])
    with pytest.raises(ValueError, match="drop_last"):
        as_source(DataLoader(Pairs(), batch_size=4, shuffle=True, drop_last=True), forward)


def test_other_shuffling_samplers_are_found_out() -> None:
    class Coin(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(N).tolist())

        def __len__(self) -> int:
            return N

    with pytest.raises(ValueError, match="asked twice, the DataLoader's BatchSampler gave two orders"):
        as_source(DataLoader(Pairs(), sampler=Coin()), forward)


def test_workers_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"built with in_order=False\. Build it with in_order=True"):
        as_source(DataLoader(Pairs(), num_workers=1, in_order=False), forward)


def test_drop_last_is_refused_where_it_drops() -> None:
    with pytest.raises(ValueError, match=r"drop_last=True drops 3 of 11 examples\. Build it with drop_last=False"):
        as_source(DataLoader(Pairs(), batch_size=4, drop_last=True), forward)
    with pytest.raises(ValueError, match="drops 3 of 11 examples"):
        as_source(DataLoader(Pairs(), batch_sampler=BatchSampler(SequentialSampler(Pairs()), 4, True)), forward)
    with pytest.raises(ValueError, match="drop_last=True may drop examples"):
        as_source(DataLoader(Stream(), batch_size=4, drop_last=True), forward)
    assert as_source(DataLoader(Pairs(12), batch_size=4, drop_last=True), forward).n == 12


def test_a_fixed_sampler_gives_its_order() -> None:
    order = [4, 2, 9, 0, 1]
    source = as_source(DataLoader(Pairs(), sampler=order, batch_size=2), forward)
    assert source.n == 5
    assert [b.rest.tolist() for b in source.batches(2)] == [[4, 2], [9, 0], [1]]
    assert [b.rest.tolist() for b in source.batches(2, 1, 4)] == [[2], [9, 0]]
    assert [b.rest.tolist() for b in source.subset(torch.tensor([4, 2])).batches(2)] == [[1, 9]]


def test_a_part_is_padded_as_in_the_full_pass() -> None:
    source = as_source(DataLoader(Pairs(), batch_size=4, collate_fn=pad), forward)
    assert [b.args[0].shape[1] for b in source.batches(4)] == [4, 8, 11]
    assert [b.args[0].shape for b in source.batches(4, 5, 7)] == [(2, 8)]


def test_the_loader_itself_is_left_as_it_was() -> None:
    loader = DataLoader(Pairs(), batch_size=4, collate_fn=pad)
    source = as_source(loader, forward)
    list(source.batches(4))
    assert loader.collate_fn is pad
    assert [len(y) for _, y in loader] == [4, 4, 3]


def test_a_loader_with_its_own_loop_is_used_as_it_is() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            for x, y in super().__iter__():
                yield 2 * x, y

    source = as_source(Doubling(Pairs(), batch_size=4), forward)
    assert not source.by_position
    assert torch.equal(torch.cat([b.args[0] for b in source.batches(3)]), 2 * images())


def test_a_collate_that_changes_the_count_is_refused() -> None:
    loader = DataLoader(Pairs(), batch_size=4, collate_fn=lambda items: images(8))
    with pytest.raises(ValueError, match=r"collate_fn made a batch of 8 from the 4 examples that begin at example 0"):
        list(as_source(loader, forward).batches(4))


def test_examples_that_do_not_stack_are_refused() -> None:
    ragged = [(torch.zeros(i + 1), i) for i in range(3)]
    with pytest.raises(TypeError, match=r"cannot be stacked into a batch: .* DataLoader with a collate_fn that pads"):
        list(as_source(ragged, forward).batches(2))
    with pytest.raises(TypeError, match=r"Field 'x' of the Dataset's examples is a list of numbers.*with_format"):
        as_source([{"x": [1, 2]}, {"x": [3, 4]}], forward)
    with pytest.raises(TypeError, match="cannot be stacked into a batch"):
        as_source([(object(),)], forward)


# ------------------------------------------------------------------------------- data that may change


class Noisy(Pairs):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + torch.rand(3), i


@FORKS
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_may_change_is_drawn_anew_in_every_pass(workers: int) -> None:
    """Workers get their seeds from one generator, which goes on from pass to pass; the global one is left alone."""
    loader: Any = DataLoader(Noisy(), batch_size=4, num_workers=workers)
    source = as_source(loader, forward).changing()
    assert source.changes
    state = torch.get_rng_state()
    first, second = (torch.cat([batch.args[0] for batch in source.batches(4, 0, 8)]) for _ in range(2))
    assert bool((first != second).any(1).all())
    assert not workers or torch.equal(state, torch.get_rng_state())


def test_a_streams_lists_of_numbers_are_refused() -> None:
    class Lists(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ({"x": [1.0, 2.0], "y": i} for i in range(3))

    with pytest.raises(TypeError, match="Field 'x' of the Dataset's examples is a list of numbers"):
        as_source(Lists(), forward)


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_a_checksum_counts_shapes_values_and_order(kind: Any) -> None:
    codes = [checksum(kind(shape)) for shape in ((2, 3), (3, 2), (6,), (1, 6))]
    assert len(set(codes)) == 4
    one = kind(2) + 1
    assert len({checksum(value) for value in ((one, kind(2)), (kind(2), one), {"a": one}, {"b": one}, one)}) == 5


def test_batches_are_joined_leaf_by_leaf() -> None:
    """Tensors along their examples, strings in a row, and what has no examples once."""

    class Named(Pairs):
        def __getitem__(self, i: int) -> Any:
            return self.x[i], {"name": f"n{i}", "pair": (i, -i)}

    whole = next(as_source(Named(), forward).batches(N))
    joined = Batch.join(list(as_source(Named(), forward).batches(4)), 3)
    assert (joined.start, joined.n) == (3, N) and joined.index.tolist() == list(range(N))
    assert joined.rest["name"] == whole.rest["name"] == [f"n{i}" for i in range(N)]
    for mine, theirs in zip(joined.rest["pair"], whole.rest["pair"], strict=True):
        assert mine.tolist() == theirs.tolist()
