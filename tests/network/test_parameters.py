"""Selecting parameters and laying them out in one vector."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet.network import Layout, checks, select


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a frozen layer and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.body.bias.requires_grad_(False)


# ------------------------------------------------------------------------------------------ select


def test_default_selects_trainable_parameters_in_order() -> None:
    model = Tied()
    selected = select(model)
    assert list(selected) == ["scale", "embed.weight", "body.weight"]
    assert selected["embed.weight"] is model.head.weight


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ("body.*", ["body.weight", "body.bias"]),  # frozen ones too
        ("body.bias", ["body.bias"]),
        ("*", ["scale", "embed.weight", "body.weight", "body.bias"]),
        ("head.*", ["embed.weight"]),  # a tied parameter by its second name
        (["body.weight", "scale"], ["scale", "body.weight"]),  # the model's order
        (("*.weight", "head.weight"), ["embed.weight", "body.weight"]),
        ("[be]*.weight", ["embed.weight", "body.weight"]),
    ],
)
def test_globs(params: str | list[str], names: list[str]) -> None:
    assert list(select(Tied(), params)) == names


def test_globs_mind_case() -> None:
    with pytest.raises(ValueError, match=r"params='BODY\.\*' matches none"):
        select(Tied(), "BODY.*")


def test_callable_is_asked_about_every_floating_parameter_once() -> None:
    asked: dict[str, Tensor] = {}

    def choose(name: str, tensor: Tensor) -> bool:
        assert name not in asked
        asked[name] = tensor
        return tensor.ndim == 1

    model = Tied()
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    assert list(select(model, choose)) == ["body.bias"]
    assert list(asked) == ["scale", "embed.weight", "body.weight", "body.bias"]


def test_a_name_with_a_bracket_is_found_as_it_is() -> None:
    model = nn.ParameterDict({"w[0]": torch.zeros(2), "w0": torch.zeros(3)})
    assert list(select(model, "w[0]")) == ["w[0]"]
    assert list(select(model, "w[01]")) == ["w0"]


def test_integer_parameters_are_never_selected() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("steps", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    assert list(select(model, "*")) == ["weight", "bias"]
    with pytest.raises(ValueError, match="params='steps' matches none of the model's 2 floating parameters"):
        select(model, "steps")


def test_nothing_selected_counts_parameters() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"the model has 2 parameters, 2 of them frozen\. Set requires_grad_"):
        select(model)
    with pytest.raises(ValueError, match=r"2 parameters, 0 of them frozen\. Name some with params="):
        select(nn.Linear(2, 2), lambda name, tensor: False)
    with pytest.raises(ValueError, match=r"2 parameters, 0 of them frozen"):
        select(nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match=r"0 parameters, 0 of them frozen\. There is nothing to linearize"):
        select(nn.ReLU())


def test_glob_without_match_suggests_names() -> None:
    with pytest.raises(ValueError, match=r"matches none.*nearest names: 'body\.weight'"):
        select(Tied(), "body.wieght")
    with pytest.raises(ValueError, match=r"It names a module; .* use 'body\.\*'"):
        select(Tied(), ["scale", "body"])
    with pytest.raises(ValueError, match=r"It names a module; .* use 'bod\?\.\*'"):
        select(Tied(), "bod?")
    with pytest.raises(ValueError, match=r"The parameters are 'scale', 'embed\.weight'"):
        select(Tied(), "####")


def test_a_module_without_parameters_is_not_suggested() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    with pytest.raises(ValueError, match=r"params='1' matches none of the model's 2 floating parameters\. The"):
        select(model, "1")


def test_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    fake = torch.empty(1, 1, device="cpu")
    model[1].weight = nn.Parameter(fake)

    class Elsewhere(nn.Parameter):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:1")

    model[1].weight = Elsewhere(fake)
    with pytest.raises(ValueError, match=r"'0\.weight' is on cpu and '1\.weight' on cuda:1\. Move it with"):
        select(model, "0.*")


def test_parameters_of_several_dtypes_keep_their_own() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    assert [t.dtype for t in select(model).values()] == [torch.float32] * 2 + [torch.float64] * 2


def test_unusable_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' has no shape yet \(a lazy module\)\. Call the model once"):
        select(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'weight' is on the meta device and has no values\. Load the weights"):
        select(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"differentiates real parameters; 'weight' is torch\.complex64"):
        select(nn.Linear(2, 2, dtype=torch.complex64))


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module; got a function\."):
        select(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got the class Linear\. Make a network of the class first"):
        select(nn.Linear)  # type: ignore[arg-type]
    for params in (3, [3], nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"params must be None .* a list of globs, or a callable"):
            select(nn.Linear(1, 1), params)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ layout


def test_layout_attributes() -> None:
    layout = Layout(select(Tied(), "*"))
    assert layout.names == ("scale", "embed.weight", "body.weight", "body.bias")
    assert layout.p == 1 + 15 + 9 + 3
    assert layout.offsets == {"scale": 0, "embed.weight": 1, "body.weight": 16, "body.bias": 25}
    assert layout.slices["body.weight"] == slice(16, 25)
    assert layout.shapes["embed.weight"] == (5, 3)
    assert layout.layers == {
        "scale": ["scale"],
        "embed": ["embed.weight"],
        "body": ["body.weight", "body.bias"],
    }


def test_layout_is_frozen_hashable_and_compares_shapes() -> None:
    a, b = (
        Layout({"x": torch.zeros(2), "y": torch.zeros(3)}),
        Layout({"x": torch.ones(2), "y": torch.ones(3)}),
    )
    assert a == b and hash(a) == hash(b)
    assert a != Layout({"y": torch.zeros(3), "x": torch.zeros(2)})
    assert a != Layout({"x": torch.zeros(2), "y": torch.zeros(3, 1)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.p = 3  # type: ignore[misc]


shapes = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(shapes=shapes, k=st.none() | st.integers(0, 3), seed=st.integers(0, 9))
def test_flatten_and_unflatten_are_inverse(shapes: list[list[int]], k: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = [] if k is None else [k]
    layout = Layout({f"p{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    tree = {
        f"p{i}": torch.randn(*shape, *columns, generator=generator) if [*shape, *columns] else torch.randn(())
        for i, shape in enumerate(shapes)
    }
    vector = layout.flatten(dict(reversed(tree.items())))
    assert vector.shape == (layout.p, *columns)
    back = layout.unflatten(vector)
    assert list(back) == list(tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor)
        rows = layout.shapes[name].numel()
        assert torch.equal(vector[layout.slices[name]], tensor.reshape(rows, *columns))


def test_flat_order_is_that_of_torch() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(Layout(select(model)).flatten(select(model)), expected)


def test_unflatten_gives_views_and_passes_gradients() -> None:
    layout = Layout({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    vector = torch.zeros(7)
    layout.unflatten(vector)["a"][0, 1] = 5
    assert vector[1] == 5
    grad = torch.func.grad(lambda v: layout.flatten(layout.unflatten(v)).square().sum())(torch.ones(7))
    assert torch.equal(grad, torch.full((7,), 2.0))
    many = torch.vmap(layout.flatten)({"a": torch.ones(4, 2, 2), "b": torch.ones(4, 3)})
    assert many.shape == (4, 7)


def test_layout_errors() -> None:
    layout = Layout({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    good = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match="at least one named tensor"):
        Layout({})
    with pytest.raises(ValueError, match=r"each of the layout's 2 names; missing 'b', unknown 'c'\."):
        layout.flatten({"a": good["a"], "c": good["b"]})
    with pytest.raises(
        ValueError, match=r"needs 'a' of shape \(2, 3\) or, for all names alike, \(2, 3, k\); got \(6,\)"
    ):
        layout.flatten({**good, "a": torch.zeros(6)})
    with pytest.raises(ValueError, match=r"'b' of shape \(4,\).*\(4, k\); got \(4,\), while 'a' has \(2, 3, 5\)"):
        layout.flatten({**good, "a": torch.zeros(2, 3, 5)})
    with pytest.raises(ValueError, match=r"'b'.*got \(4, 6\), while 'a' has \(2, 3, 5\)"):
        layout.flatten({"a": torch.zeros(2, 3, 5), "b": torch.zeros(4, 6)})
    for shape in ((9,), (9, 2), (10, 1, 1), ()):
        with pytest.raises(ValueError, match=r"p = 10 entries, so unflatten needs shape \(10,\) or \(10, k\); got"):
            layout.unflatten(torch.zeros(shape))


def test_tensors_of_several_dtypes_make_one_vector() -> None:
    """A bfloat16 number and a float32 number are both float32 numbers."""
    tree = {"a": torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16), "b": torch.tensor([1e-3])}
    flat = Layout(tree).flatten(tree)
    assert flat.dtype == torch.float32
    assert flat.tolist() == [1.0, 0.5, tree["b"].item()]


def test_layers_on_several_devices_need_a_model_that_moves_its_inputs_and_selected_parameters_on_one_device():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    every = {"below.weight": there, "top.weight": here}
    with pytest.raises(ValueError, match=r"the whole model on one device; 'below\.weight' is on meta and 'top"):
        checks.check_devices(every, {"top.weight": here}, dispatched=False)
    with pytest.raises(ValueError, match=r"all selected parameters on one device; .* Select parameters of one device"):
        checks.check_devices(every, every, dispatched=True)
    checks.check_devices(every, {"top.weight": here}, dispatched=True)


@pytest.mark.parametrize("places", [{"": "cpu"}, {"0": "cpu", "1": "cpu"}])
def test_a_model_with_a_device_map_is_the_model_without(places):
    accelerate = pytest.importorskip("accelerate")
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.ones(5, 3).double()
    plain = linnet.linearize(net).jacobian(x).gram()
    hooked = accelerate.dispatch_model(net, places, main_device="cpu", force_hooks=True)
    hooks = [module._hf_hook for module in hooked.modules()]
    torch.testing.assert_close(linnet.linearize(hooked).jacobian(x).gram(), plain, rtol=1e-12, atol=0)
    assert [module._hf_hook for module in hooked.modules()] == hooks


def test_weights_that_accelerate_keeps_elsewhere_are_refused_by_name():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=r"choose a device_map that offloads no weights to the CPU or disk"):
        linnet.linearize(accelerate.cpu_offload(nn.Linear(3, 2), execution_device=torch.device("cpu")))


def test_the_last_layer_by_its_role():
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3))
    assert list(select(body, "last_layer")) == ["3.weight", "3.bias"]
    frozen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).requires_grad_(False)
    assert list(select(frozen, "last_layer")) == ["1.weight"]
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    tied[1].weight = tied[0].weight
    assert list(select(tied, "last_layer")) == ["0.weight", "1.bias"]
    named = nn.ParameterDict({"last_layer": nn.Parameter(torch.ones(2)), "other": nn.Parameter(torch.ones(3, 3))})
    assert list(select(named, "last_layer")) == ["last_layer"]
    with pytest.raises(ValueError, match="needs a layer with a weight matrix, and the model has none"):
        select(nn.LayerNorm(3), "last_layer")


def test_a_state_dict_is_no_network():
    with pytest.raises(TypeError, match=r"got a state dict\. Make the network .*load_state_dict"):
        select(nn.Linear(2, 1).state_dict())
    with pytest.raises(TypeError, match="got a dict"):
        select({})
