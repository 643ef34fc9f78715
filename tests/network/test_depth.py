"""Which parameters are the top of a network, over the zoo and the networks of the benchmarks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import linnet
from benchmarks.models import ResNet, VisionTransformer, WideResNet, mlp
from linnet.network import block_names, select, top_blocks
from linnet.network.depth import find_call_order
from linnet.testing import Case, zoo
from linnet.testing.case import Net


def built(case: Case) -> nn.Module:
    if case.needs is not None:
        pytest.importorskip(case.needs)
    return case.build()


@pytest.mark.parametrize("case", zoo().values(), ids=str)
@pytest.mark.parametrize("called", [False, True], ids=["registered", "called"])
def test_tops_grow_from_the_head_to_all_blocks(case: Case, called: bool) -> None:
    model = built(case)
    example = case.data(2, 0) if called else None
    names = block_names(model, example=example)
    assert len(set(names)) == len(names)
    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    before: set[str] = set()
    for k in range(len(names) + 1):
        try:
            globs = top_blocks(model, k, example=example)
        except ValueError as error:
            assert k == 0 and "Nothing comes after" in str(error)
            continue
        now = set(select(model, globs))
        assert before <= now
        if not tied:
            assert before < now
            assert not k or any(name.startswith(f"{names[-k]}.") for name in now - before)
        before = now


@pytest.mark.parametrize(
    ("model", "k", "expected"),
    [
        (ResNet(3), 0, ["linear.*"]),
        (ResNet(3), 1, ["layer3.2.*", "linear.*"]),
        (ResNet(3), 4, ["layer2.2.*", "layer3.*", "linear.*"]),
        (ResNet(1), 2, ["layer2.*", "layer3.*", "linear.*"]),
        (WideResNet(16, 1), 2, ["groups.2.*", "bn.*", "fc.*"]),
        (WideResNet(16, 1), 3, ["groups.1.1.*", "groups.2.*", "bn.*", "fc.*"]),
        (VisionTransformer(dim=12, depth=3), 2, ["blocks.1.*", "blocks.2.*", "norm.*", "head.*"]),
        (mlp(), 1, ["4.*", "6.*"]),
        (nn.Linear(2, 3), 0, ["*"]),
    ],
)
def test_known_networks(model: nn.Module, k: int, expected: list[str]) -> None:
    assert top_blocks(model, k) == expected


def test_the_globs_are_what_linearize_takes() -> None:
    model = ResNet(1)
    lin = linnet.linearize(model, top_blocks(model, 1))
    assert lin.jacobian(torch.zeros(2, 3, 32, 32)).shape == (20, lin.p)
    assert {name.split(".")[0] for name in lin.theta} == {"layer3", "linear"}


def test_all_blocks_of_a_resnet() -> None:
    assert block_names(ResNet(2)) == [f"layer{stage}.{i}" for stage in (1, 2, 3) for i in (0, 1)]


class Stage(nn.Module):
    """A stage that is a module of its own, as in hierarchical transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.down = nn.Linear(4, 4)


class Mixer(nn.Module):
    """A block made of two sublayers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Sub(), Other()])


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)


class Other(Sub):
    pass


def test_inner_stacks_count_and_sublayers_do_not() -> None:
    model = nn.Sequential(Stage(), Stage(), nn.Linear(4, 2))
    assert block_names(model) == [f"{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)]
    assert top_blocks(model, 1) == ["1.blocks.1.*", "1.down.*", "2.*"]


def test_parts_of_one_layer_stay_together() -> None:
    for name in ("attention", "weight_norm", "layer_norm_images"):
        case = zoo()[name]
        assert len(block_names(case.build())) == 1, name


def crossed() -> Net:
    """Registered top first; one layer is never called."""
    return Net(
        lambda m, x: m.top(m.norm(m.bottom(x))),
        top=nn.Linear(4, 2),
        norm=nn.LayerNorm(4),
        bottom=nn.Linear(3, 4),
        spare=nn.Linear(4, 2),
    )


def test_an_example_gives_the_order_of_calls() -> None:
    model, x = crossed(), torch.zeros(1, 3)
    assert find_call_order(model, x) == {"": 0, "bottom": 1, "norm": 2, "top": 3}
    assert top_blocks(model, 0) == ["spare.*"]
    assert top_blocks(model, 0, example=x) == ["top.*"]
    assert top_blocks(model, 1, example=x) == ["top.*", "norm.*", "bottom.*"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_example_leaves_the_mode_and_takes_tuples_and_dicts() -> None:
    cases: list[tuple[str, Any]] = [("two_inputs", tuple), ("dict_inputs", dict)]
    for name, kind in cases:
        case = zoo()[name]
        model, example = case.build().train(), case.data(2, 0)
        assert isinstance(example, kind)
        assert top_blocks(model, 0, example=example) == ["head.*"]
        assert all(module.training for module in model.modules())


def test_names_with_brackets_are_escaped() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"[a]": nn.Linear(2, 2)}), nn.Linear(2, 2))
    assert set(select(model, top_blocks(model, 1))) == {"1.[a].weight", "1.[a].bias", "2.weight", "2.bias"}


def test_own_parameters_of_a_module_that_is_not_chosen_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    model = nn.Sequential(nn.Linear(2, 2), Scaled())
    assert top_blocks(model, 0) == ["1.inner.*"]
    assert top_blocks(model, 1) == ["*"]
    assert top_blocks(model, 0, example=torch.zeros(1, 2)) == ["1.inner.*"]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"3 blocks below its head: '0', '2', '4'.*0 to 3.*got 4"):
        top_blocks(mlp(), 4)
    with pytest.raises(ValueError, match="0 blocks below its head"):
        top_blocks(nn.Linear(2, 2), 1)
    for k in (-1, 1.0, True):
        with pytest.raises(ValueError, match="number of blocks"):
            top_blocks(mlp(), k)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        top_blocks("model", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no floating parameters"):
        top_blocks(nn.ReLU(), 0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False)
    with pytest.raises(ValueError, match=r"Nothing comes after the last block, 'layers.1'"):
        top_blocks(encoder, 0)
