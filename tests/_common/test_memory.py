"""How much memory a computation may take."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from linnet._common import check_fits, find_budget, find_dense_budget, format_bytes, free_memory

CPU = torch.device("cpu")


def test_budgets_are_as_given_or_parts_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    assert (free_memory(CPU), find_budget("auto", CPU), find_dense_budget("auto", CPU)) == (2**20, 2**18, 2**19)
    assert find_budget(1e6, CPU) == find_dense_budget(1e6, CPU) == 1_000_000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    assert find_budget("auto", CPU) == 2**30  # larger chunks are no faster
    for of in (find_budget, find_dense_budget):
        with pytest.raises(ValueError, match="memory must be a number of bytes or 'auto'; got 'much'"):
            of("much", CPU)


def test_free_memory_of_a_gpu_counts_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    share = [1.0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: share[0])
    device = torch.device("cuda", 0)
    assert free_memory(device) == 100 + (70 - 30)
    assert (find_budget("auto", device), find_dense_budget("auto", device)) == (70, 126)
    share[0] = 0.125  # of the total, 30 of which are taken
    assert free_memory(device) == 125 - 30
    share[0] = 0.01
    assert free_memory(device) == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    check_fits(2**20, "auto", CPU, what="It", instead="Use less")
    with pytest.raises(MemoryError, match=r"It takes 2.0 MiB, and 1.0 MiB are free. Use less.$"):
        check_fits(2**21, "auto", CPU, what="It", instead="Use less")
    with pytest.raises(MemoryError, match=r"It takes 2.0 MiB, and memory= allows 1000 B."):
        check_fits(2**21, 1000, CPU, what="It", instead="Use less")


def test_bytes_for_a_reader() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 2**42)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "4096.0 GiB",
    ]
