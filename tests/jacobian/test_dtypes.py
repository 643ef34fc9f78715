"""Networks in the dtypes that they have: half precision, several dtypes at once, and forwards that name a dtype."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import linnet
from linnet.network import CannotCast, Layout
from linnet.testing import Case, check_operator, dense_jacobian, zoo
from linnet.testing.case import net
from tests.support.adapters import Network

N, CHUNK = 3, 2
HALF = (torch.bfloat16, torch.float16)

CASES = [
    pytest.param(case, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, case in zoo().items()
    for dtype in HALF
]


def converted(data: object, dtype: torch.dtype) -> object:
    if isinstance(data, dict):
        return {key: converted(value, dtype) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(converted(value, dtype) for value in data)
    return data.to(dtype) if data.is_floating_point() else data


def convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def check_rows(J: Tensor, same: Tensor, exact: Tensor, layout: Layout, eps: float) -> None:
    """Rows beside those of reverse mode in the same dtype and in float64: as good as reverse mode, up to chance.

    Args:
        J: The rows in question.
        same: By reverse mode in the dtype of the network, example by example.
        exact: The same in float64.
        layout: Places of the parameters.
        eps: Rounding of the dtype.
    """
    J, same = J.double(), same.double()
    size = exact.norm()
    error = (same - exact).norm()
    assert (J - exact).norm() <= 2 * error
    assert (J - same).norm() <= 2 * error  # both are this far from the truth
    for name, where in layout.slices.items():
        # One parameter alone can be lucky, and where a gradient is zero by symmetry there is nothing but rounding.
        own = 4 * (same - exact)[:, where].norm() + eps * exact[:, where].norm() + eps**2 * size
        assert (J - exact)[:, where].norm() <= own, name


@pytest.mark.parametrize(("case", "dtype"), CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_half_precision_is_as_exact_as_reverse_mode(case: Case, dtype: torch.dtype) -> None:
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model = case.build().to(dtype)
    if convolves(model):
        pytest.skip("half-precision convolutions crash some CPUs")
    data = converted(case.data(N, 0), dtype)
    same = case.dense(model, data)
    exact = case.dense(copy.deepcopy(model).double(), converted(data, torch.float64))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "linnet's layer rules")
        lin = linnet.linearize(model, output=case.output)
        J = lin.jacobian(data, CHUNK)
        A = J.dense()
        assert A.dtype == J.dtype == lin.dtype == torch.float32
        check_rows(A, same, exact, lin.layout, torch.finfo(dtype).eps)
        V, U = torch.randn(lin.p, 2), torch.randn(len(A), 2)
        for product, reference in ((J @ V, A @ V), (J.T @ U, A.T @ U), (J.gram(), A @ A.T)):
            assert (product - reference).abs().max() <= 1e-5 * reference.abs().max()


MIXES = {
    "half base": (torch.bfloat16, torch.float32, torch.float32),
    "float16 base": (torch.float16, torch.float32, torch.float32),
    "half head": (torch.bfloat16, torch.float32, torch.bfloat16),
    "both halves": (torch.float16, torch.float32, torch.bfloat16),
    "half adapters": (torch.float32, torch.bfloat16, torch.float32),
    "double head": (torch.float32, torch.float32, torch.float64),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("engine", ["auto", "rows", "ghost", "autodiff"])
def test_selected_parameters_of_several_dtypes(mix: str, engine: str) -> None:
    dtypes = MIXES[mix]
    model = Network(6, *dtypes)
    X = torch.randn(7, 6, dtype=dtypes[0])
    before = {name: (t.dtype, t.data_ptr(), t._version) for name, t in model.named_parameters()}
    lin = linnet.linearize(model)
    assert [t.dtype for t in lin.theta.values()] == [*[dtypes[1]] * 4, *[dtypes[2]] * 2]
    assert lin.dtype == (torch.float64 if torch.float64 in dtypes[1:] else torch.float32)
    same, exact = dense_jacobian(model, X), dense_jacobian(copy.deepcopy(model).double(), X.double())
    J = lin.jacobian(X, CHUNK, engine=engine)
    A = J.dense()
    check_rows(A, same, exact, lin.layout, max(torch.finfo(dtype).eps for dtype in dtypes))
    check_operator(J, A, blocks=3, rtol=1e-5)
    assert {name: (t.dtype, t.data_ptr(), t._version) for name, t in model.named_parameters()} == before


def test_products_of_a_half_precision_base_are_products_of_one_matrix() -> None:
    """J^T u by reverse mode would sum over examples and round u to half precision."""
    model = Network(6, torch.bfloat16, torch.float32, torch.bfloat16)
    J = linnet.linearize(model).jacobian(torch.randn(40, 6, dtype=torch.bfloat16))
    u, v = torch.randn(J.shape[0]), torch.randn(J.shape[1])
    left, right = u @ (J @ v), (J.T @ u) @ v
    assert abs(left - right) <= 1e-5 * (u.norm() * (J @ v).norm())


def test_a_float32_head_on_a_half_precision_base_is_differentiated_in_float32() -> None:
    """Nothing that depends on the head is rounded to half precision, so both modes of autodiff serve."""
    model = Network(6, torch.bfloat16, torch.float32, torch.float32)
    X = torch.randn(7, 6, dtype=torch.bfloat16)
    lin = linnet.linearize(model, "head.*")
    A = lin.jacobian(X).dense()
    assert not lin.rules.differentiates_in_half
    features = torch.cat([model.body(X).float(), torch.ones(7, 1)], 1).detach()
    blocks = torch.stack([torch.block_diag(*row.expand(3, -1)) for row in features[:, :-1]])
    assert torch.allclose(A[:, :18], blocks.flatten(0, 1), rtol=1e-6)
    check_operator(lin.jacobian(X), A, blocks=3, rtol=1e-6)


NAMED = {
    "float": lambda m, x: m.head(m.a(x).float().tanh()),
    "to float32": lambda m, x: m.head(m.a(x.to(torch.float32)).tanh()),
    "through half": lambda m, x: m.head(m.a(x).tanh().half().float()),
    "new tensor": lambda m, x: m.head(torch.cat([m.a(x)[:, 1:], torch.ones(len(x), 1, dtype=torch.float32)], 1)),
    "through double": lambda m, x: m.head(m.a(x).double().exp().log1p().float()),
}
"""Forwards that name a dtype, of a float32 network."""


@pytest.mark.parametrize("name", NAMED)
def test_a_forward_that_names_a_dtype_runs_in_its_own(name: str) -> None:
    model = net(NAMED[name])()
    X = torch.randn(7, 4)
    lin = linnet.linearize(model)
    J = lin.jacobian(X, CHUNK)
    A, reference = J.dense(), dense_jacobian(model, X)
    eps = torch.finfo(torch.float16 if name == "through half" else torch.float32).eps
    assert (A - reference).norm() <= 8 * eps * reference.norm()
    check_operator(J, A, blocks=2, rtol=1e-5)


@pytest.mark.parametrize("name", ["float", "to float32", "through half"])
def test_a_network_that_cannot_be_cast_says_so(name: str) -> None:
    there = linnet.linearize(net(NAMED[name])()).to(torch.float64)
    for use in (lambda X: there(X), lambda X: there.jacobian(X).gram(), lambda X: there.jacobian(X).c):
        with pytest.raises(CannotCast, match=r"cannot be cast to torch.float64: .*dtype.* Use the network in its own"):
            use(torch.randn(5, 4))


def test_a_network_that_computes_something_else_when_cast_says_so() -> None:
    def scaled(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.a(x).tanh()) * (2.0 if x.dtype == torch.float64 else 1.0)

    lin, X = linnet.linearize(net(scaled)()), torch.randn(5, 4)
    assert lin.jacobian(X).gram().isfinite().all()
    with pytest.raises(CannotCast, match=r"its outputs are not those of the network itself\. .* names a dtype"):
        lin.to(torch.float64).jacobian(X).gram()
    # Around other weights the outputs are others, and nothing is to be compared.
    moved = {name: 2 * t for name, t in lin.to(torch.float64).theta.items()}
    assert lin.to(torch.float64).at(moved).jacobian(X).gram().isfinite().all()


def test_a_half_precision_network_that_is_cast_is_compared_within_its_rounding() -> None:
    case = zoo()["mlp"]
    model, X = case.build().bfloat16(), case.data(5, 0)
    A = case.dense(copy.deepcopy(model).double(), X)
    check_operator(linnet.linearize(model).to(torch.float64).jacobian(X), A, blocks=3)


def test_whole_numbers_for_a_cast_network_are_not_about_its_dtype() -> None:
    there = linnet.linearize(nn.Linear(3, 2)).to(torch.float64)
    with pytest.raises(RuntimeError) as caught:
        there(torch.ones(4, 3, dtype=torch.int64))
    assert not isinstance(caught.value, CannotCast)
    assert "whole numbers" in caught.value.__notes__[0]


class Allocations(TorchDispatchMode):
    """Notes the largest memory that an operation takes for a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16, torch.float32])
def test_the_frozen_base_is_shared_and_never_copied(base: torch.dtype) -> None:
    model = Network(1024, base, torch.float32, torch.float32)
    X = torch.randn(6, 1024, dtype=base)
    weight = model.body[0].base.weight
    # Checksums read 2^16 words of 8 bytes at once.
    assert weight.nbytes >= 2**21
    with Allocations() as seen:
        lin = linnet.linearize(model)
        J = lin.jacobian(X, 3)
        J.normal(torch.randn(lin.p, 2))
        J @ torch.randn(lin.p)
        J.T @ torch.randn(J.shape[0])
        J.gram()
        J.column_norms()
    assert seen.largest < weight.nbytes / 2
    shared = dict(lin.module.named_parameters())
    for name, t in model.named_parameters():
        assert shared[name].data_ptr() == t.data_ptr()


def peft_model(name: str, *, modules: list[str], head: str | None = None, **sizes: Any) -> nn.Module:
    """A Hugging Face model in bfloat16 with adapters by PEFT, which are float32."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config, kind = name.split(".")
    torch.manual_seed(0)
    base = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).bfloat16()
    options = peft.LoraConfig(r=2, target_modules=modules, modules_to_save=[head] if head else None, lora_dropout=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


TEXT: Any = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 16, "num_labels": 3, "pad_token_id": 0}
PEFT: dict[str, Any] = {
    "llama": lambda: peft_model(
        "LlamaConfig.LlamaForSequenceClassification",
        modules=["q_proj", "v_proj"],
        head="score",
        use_cache=False,
        **TEXT,
    ),
    "bert": lambda: peft_model(
        "BertConfig.BertForSequenceClassification", modules=["query", "value"], head="classifier", **TEXT
    ),
}


def sentences(n: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(9) < torch.randint(3, 10, (n, 1), generator=random)).long()
    return {"input_ids": torch.randint(1, 40, (n, 9), generator=random) * mask, "attention_mask": mask}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", PEFT)
def test_adapters_by_peft(name: str, checkpointing: bool) -> None:
    """A bfloat16 base, float32 adapters and a bfloat16 head, as PEFT makes them; dict inputs with masks."""
    model, X = PEFT[name]().eval(), sentences(7)
    if checkpointing:
        model.enable_input_require_grads()
        # The name since transformers 5.23, and the one before.
        renamed = hasattr(model, "activation_checkpointing_enable")
        enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
        enable({"use_reentrant": True})
    lin = linnet.linearize(model)
    assert all("lora" in key or "modules_to_save" in key for key in lin.theta)
    assert {t.dtype for t in lin.theta.values()} == {torch.float32, torch.bfloat16}
    J = lin.jacobian(X)
    A = J.dense()
    same, exact = dense_jacobian(model, X), dense_jacobian(copy.deepcopy(model).double(), X)
    check_rows(A, same, exact, lin.layout, torch.finfo(torch.bfloat16).eps)
    check_operator(J, A, blocks=3, rtol=1e-5)
    check_operator(J.cached(), A, blocks=3, rtol=1e-5)
    assert (sum(J.layer_grams().values()) - A @ A.T).abs().max() <= 1e-5 * (A @ A.T).abs().max()


def test_an_adapter_that_cannot_be_trained_is_refused_by_name() -> None:
    model = PEFT["bert"]().requires_grad_(False)
    with pytest.raises(ValueError, match=r"No parameter is selected.* Its adapter is frozen too .*is_trainable=True"):
        linnet.linearize(model)
    assert linnet.linearize(model, "*lora*").p > 0


MIXED = {
    "normalization": lambda m, x: m.head((h := m.a(x)) / h.square().mean(0).add(1e-2).sqrt()),
    "mean": lambda m, x: m.head((h := m.a(x).tanh()) + 0.5 * h.mean(0)),
    "largest": lambda m, x: m.head((h := m.a(x).tanh()) / h.abs().max()),
    "neighbor": lambda m, x: m.head((h := m.a(x).tanh()) + 0.3 * h.roll(1, 0)),
    "number": lambda m, x: m.head(m.a(x).tanh()) / len(x),
}
"""Networks whose examples interact."""


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("n", [2, 3, 9])
def test_examples_that_interact_are_refused_in_half_precision(name: str, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    J = linnet.linearize(net(MIXED[name])().to(dtype)).jacobian(torch.randn(n, 4, dtype=dtype))
    with pytest.raises(ValueError, match=r"other examples of its batch|mixes examples"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "linnet's layer rules")
        J.gram()


@pytest.mark.parametrize("dtype", HALF)
def test_kernels_that_round_with_the_number_of_examples_are_no_interaction(dtype: torch.dtype) -> None:
    """Half-precision kernels of a GPU: a bfloat16 Llama of 22 layers gives outputs 2 % apart."""

    def rounded(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.a(x).tanh()) * (1 + 0.02 * (len(x) % 3))

    model, X = net(rounded)(), torch.randn(11, 4)
    J = linnet.linearize(copy.deepcopy(model).to(dtype)).jacobian(X.to(dtype), 4)
    assert J.gram().shape == (22, 22)
    with pytest.raises(ValueError, match="other examples of its batch"):
        linnet.linearize(model).jacobian(X, 4).gram()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_deep_language_model_in_half_precision_is_not_refused(side: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    options = TEXT | {"num_hidden_layers": 16, "use_cache": False}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**options)).to(dtype)
    lin = linnet.linearize(model, ["model.layers.0.self_attn.*", "score.*"])
    for n, size in ((1, "auto"), (2, "auto"), (5, 2), (9, "auto")):
        X = sentences(n)
        if side == "left":
            X = {name: t.flip(1) for name, t in X.items()}
        J = lin.jacobian(X, size)
        assert J.gram_diag().isfinite().all()
        logits = model(**X).logits.detach().float()
        assert (J.outputs() - logits).abs().max() <= 0.08 * logits.abs().max()


@pytest.mark.parametrize("base", HALF)
def test_a_network_that_runs_only_under_autocast(base: torch.dtype) -> None:
    """A float32 head right behind a half-precision base, as training under autocast leaves it."""

    class Meeting(Network):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model, X = Meeting(6, base, torch.float32, torch.float32), torch.randn(7, 6, dtype=base)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(X)
    lin = linnet.linearize(model)
    with pytest.warns(
        UserWarning, match=r"runs only under torch\.autocast\. linnet runs the .*as in self\.head"
    ) as said:
        f = lin(X)
        J = lin.jacobian(X, 3)
        A = J.dense()
    assert len(said) == 1
    with torch.autocast("cpu", base):
        assert torch.equal(f, model(X).detach())
        same = dense_jacobian(model, X)
    exact = dense_jacobian(copy.deepcopy(model).double(), X.double())
    check_rows(A, same, exact, lin.layout, torch.finfo(base).eps)
    check_operator(J, A, blocks=3, rtol=1e-5)
    check_operator(lin.to(torch.float64).jacobian(X), exact, blocks=3)
    assert not torch.is_autocast_enabled("cpu")


def test_a_pass_in_bf16_leaves_no_trace_in_later_passes() -> None:
    """What autocast rounds was asked for, and says nothing about the network."""
    model, X = net(lambda m, x: m.head(m.a(x).tanh()))(), torch.randn(7, 4)
    lin = linnet.linearize(model)
    lin.jacobian(X, precision="bf16").gram()
    assert lin.rules.coarsest == torch.float32
    assert not lin.rules.differentiates_in_half
