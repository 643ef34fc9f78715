"""Random networks and operations, against reverse mode, example by example."""

import pytest
import torch

from linnet.testing import fuzz

COUNT = 200


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_network(seed):
    wrong = fuzz.check(seed)
    assert not wrong, wrong


def test_a_seed_gives_one_network():
    a, b = fuzz.make_fuzzed(7), fuzz.make_fuzzed(7)
    assert str(a) == str(b)
    assert torch.equal(a.model(a.data), b.model(b.data))


def test_networks_use_every_step():
    used = {name.partition("(")[0] for seed in range(COUNT) for name in fuzz.make_fuzzed(seed).model.names}
    assert {"linear", "conv2d", "conv1d", "embedding", "attention", "lstm", "again", "transposed", "scatter"} <= used
    assert len(used) > 50


def test_command_tells_how_to_see_a_wrong_product_again(capsys, monkeypatch):
    monkeypatch.setattr(fuzz, "RTOL", -1.0)
    assert fuzz.main(["--count", "1", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "To see this again: python -m linnet.testing.fuzz --count 1 --seed 3" in printed
    assert "1 networks, 1 wrong" in printed
