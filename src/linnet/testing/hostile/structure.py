"""Unusual structures that must come out right: outputs, adapters, parametrizations, tied parts, transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from linnet.testing.architectures.transformers import make as hugging_face
from linnet.testing.case import parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, net, normal, tokens, weight

add = Register("unusual structures")


def scalar(value: float) -> Any:
    return lambda: nn.Parameter(torch.tensor(value))


# Outputs in a container.
def contain(function: Any) -> Any:
    """A network that returns a function of two outputs and the inputs."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x).tanh()
        return function(m.b(h), m.head(h), x)

    return net(forward, a=(4, 5), b=(5, 3), head=(5, 2))


add("dict_output", contain(lambda b, f, x: {"other": b, "wanted": f}), output=lambda raw: raw["wanted"])
add("tuple_output", contain(lambda b, f, x: (b, f)), output=lambda raw: raw[1])
add("tuple_output_both", contain(lambda b, f, x: (b, f)), output=lambda raw: torch.cat(raw, 1))
add(
    "tuple_output_of_several_lengths",
    contain(lambda b, f, x: (f, [b] * (1 + int((x[:, 0] > 0).any())))),
    late(4),
    output=lambda raw: raw[0],
)
add(
    "nested_output",
    contain(lambda b, f, x: {"parts": [f, {"b": b}]}),
    output=lambda raw: raw["parts"][0] * raw["parts"][1]["b"][:, :2],
)
add("vector_output", net(lambda m, x: m.head(m.a(x).tanh())[:, 0], a=(4, 5), head=(5, 1)))
add("squeezed_output", net(lambda m, x: m.head(m.a(x).tanh()).squeeze(), a=(4, 5), head=(5, 1)), expects="either")
add("constant_output", net(lambda m, x: torch.cat([m.head(x), x[:, :1]], 1), head=(4, 2)))
add(
    "output_without_parameters_late",
    net(lambda m, x: torch.where(x[:, :1] > 0, x[:, :2], m.head(x)), head=(4, 2)),
    late(4),
)
add("views_of_one_output", net(lambda m, x: m.head(x).expand(-1, 3), head=(4, 1)))


# Normalizations by hand.
def layer_norm(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head((h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-3).sqrt() * m.gain)


def rms_norm(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h * (h.square().mean(1, keepdim=True) + 1e-3).rsqrt() * m.gain)


def weight_standardized(m: Any, x: Tensor) -> Tensor:
    w = m.a.weight
    return m.head(F.linear(x, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True), m.a.bias) * m.gain)


def cosine(m: Any, x: Tensor) -> Tensor:
    return m.head(F.normalize(m.a(x), dim=1) @ F.normalize(m.a.weight, dim=1)) * m.gain[0]


for name, function in {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "weight_standardization": weight_standardized,
}.items():
    add(f"own_{name}", net(function, a=(4, 5), gain=weight(5), head=(5, 2)))
add("own_cosine", net(cosine, a=(4, 5), gain=weight(5), head=(4, 2)))


# Parametrizations.
class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.T


class Pruned(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * (w.abs() > 0.2)


def reparametrize(*parts: type[nn.Module]) -> Any:
    def change(layer: nn.Module) -> nn.Module:
        for part in parts:
            parametrize.register_parametrization(layer, "weight", part())
        return layer

    return change


def parametrized(change: Any) -> Any:
    return lambda: nn.Sequential(change(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


WAYS: dict[str, Any] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": orthogonal,
    "symmetric": reparametrize(Symmetric),
    "two": reparametrize(Symmetric, Pruned),
}
add.each(
    "parametrized_",
    parametrized,
    **WAYS,
)
add("parametrized_pruned", parametrized(lambda layer: prune.l1_unstructured(layer, "weight", 4)), expects="either")
add(
    "parametrized_convolution",
    lambda: nn.Sequential(weight_norm(nn.Conv2d(1, 2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
    normal(1, 4, 4),
)


# Tied parts and adapters.
def tied_embedding() -> nn.Module:
    parts: Any = {"table": partial(nn.Embedding, 6, 4), "mix": (4, 4), "out": partial(nn.Linear, 4, 6, bias=False)}
    model: Any = net(lambda m, x: m.out(m.mix(m.table(x).mean(1)).tanh()), **parts)()
    model.out.weight = model.table.weight
    return model


def tied_module() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.ReLU(), layer, nn.Linear(4, 2))


class Adapter(nn.Module):
    """A low-rank adapter of a frozen layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.base, self.head = function, nn.Linear(4, 4), nn.Linear(4, 2)
        self.base.requires_grad_(False)
        self.down, self.up = parameter(2, 4), parameter(4, 2)
        self.gain = parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x).tanh())


def scaled(m: Any, x: Tensor) -> Tensor:
    w = m.base.weight + m.up @ m.down
    return F.linear(x, m.gain[:, None] * w / w.norm(dim=1, keepdim=True))


add("tied_embedding", tied_embedding, tokens(6, 3))
add("tied_module", tied_module)
add(
    "tied_products",
    net(lambda m, x: m.head(F.linear(m.a(x).tanh(), m.a.weight[:, :4].T @ m.a.weight)), a=(4, 4), head=(4, 2)),
)
add.each(
    "adapter_",
    lambda function: partial(Adapter, function),
    late(4),
    merged=lambda m, x: F.linear(x, m.base.weight + m.up @ m.down, m.base.bias),
    beside=lambda m, x: m.base(x) + x @ m.down.T @ m.up.T,
    scaled=scaled,
    late=lambda m, x: m.base(x) + (x[:, :1] > 0) * (x @ m.down.T @ m.up.T),
    einsum=lambda m, x: m.base(x * m.gain) + torch.einsum("ij,jk,nk->ni", m.up, m.down, x),
)


# Quantization-aware networks.
def quantize_weight(m: Any, x: Tensor) -> Tensor:
    q = torch.fake_quantize_per_tensor_affine(m.a.weight, 0.1, 0, -8, 7)
    return m.head(F.linear(x, q, m.a.bias).tanh())


def pass_weight(m: Any, x: Tensor) -> Tensor:
    w = m.a.weight
    return m.head(F.linear(x, w + (w.sign() * w.abs().mean() - w).detach(), m.a.bias).tanh())


def pass_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h + ((4 * h).round() / 4 - h).detach())


def learn_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) / m.step.exp()
    return m.head((h + (h.round() - h).detach()).clamp(-4, 3) * m.step.exp())


add.each(
    "",
    lambda function: net(function, a=(4, 5), head=(5, 2), step=scalar(-1.0)),
    fake_quantized_weight=quantize_weight,
    fake_quantized_activation=lambda m, x: m.head(torch.fake_quantize_per_tensor_affine(m.a(x), 0.2, 0, -8, 7)),
    straight_through_weight=pass_weight,
    straight_through_activation=pass_activation,
    learned_step_size=learn_step,
)


# Weights made by networks, and memories.
def field(m: Any, x: Tensor) -> Tensor:
    """A learned table, read at places that the data gives, between its entries."""
    place = x[:, :2].sigmoid() * 3
    low = place.floor().long().clamp(max=2)
    part = place - low
    a = m.grid[low[:, 0], low[:, 1]] * (1 - part[:, :1]) + m.grid[low[:, 0] + 1, low[:, 1]] * part[:, :1]
    return m.head(a * part[:, 1:] + m.a(x))


add(
    "hypernetwork",
    net(lambda m, x: m.head(F.linear(x, m.make(m.code).view(5, 4)).tanh()), code=weight(3), make=(3, 20), head=(5, 2)),
)
add(
    "hypernetwork_by_example",
    net(
        lambda m, x: m.head(torch.einsum("nij,nj->ni", m.make2(x).view(-1, 5, 4), x).tanh()), make2=(4, 20), head=(5, 2)
    ),
)
add(
    "memory",
    net(lambda m, x: m.head((m.a(x) @ m.keys.T).softmax(1) @ m.keys), a=(4, 5), keys=weight(6, 5), head=(5, 2)),
)
add("learned_field", net(field, grid=weight(4, 4, 5), a=(4, 5), head=(5, 2)))
add(
    "parameter_of_batch_shape",
    net(lambda m, x: m.head(m.a(x)) + m.w.mean(0)[:2], a=(4, 5), w=weight(13, 5), head=(5, 2)),
)
add(
    "vocabulary_of_batch_size",
    net(lambda m, x: m.head(m.table(x).sum(1)), table=partial(nn.Embedding, 13, 13), head=(13, 2)),
    tokens(13, 13),
)
add("square_of_batch_size", lambda: nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13)), normal(13))
add(
    "scalar_parameter",
    net(lambda m, x: m.head(x) * m.scale.exp() + m.shift, head=(4, 2), scale=scalar(0.3), shift=scalar(0.1)),
)
add("unused_parameter", net(lambda m, x: m.head(x), head=(4, 2), idle=(3, 3)))


# Precision, and values that are not finite.
def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


SINGLE: Any = {"dtype": torch.float32, "rtol": 1e-4}
add("single_float32", plain, lambda: draw(13, 4).float(), **SINGLE)
add(
    "cdist_float32",
    net(lambda m, x: m.head(torch.cdist(m.a(x), m.w)), a=(4, 3), w=weight(5, 3), head=(5, 2)),
    lambda: draw(13, 4).float(),
    **SINGLE,
)
add("no_gradient", net(lambda m, x: torch.cat([(m.head(x) > 0).to(x.dtype), m.a(x)], 1), a=(4, 1), head=(4, 2)))
add("not_a_number_late", net(lambda m, x: m.head((-x[:, :1]).sqrt() * m.a(x))), late(4), expects="refused")
add(
    "slope_without_end_late",
    net(lambda m, x: m.head(torch.where(x > 0, 0.0, (x * m.w).abs().clamp(min=0).sqrt())), w=weight(4), head=(4, 2)),
    lambda: draw(13, 4) * (torch.arange(13) < 6)[:, None],
    expects="either",
)
add("graph_module", lambda: torch.fx.symbolic_trace(plain()))
add("traced_module", lambda: torch.jit.trace(plain(), torch.ones(3, 4)), expects="either")


# Hugging Face.
def padding() -> Tensor:
    lengths = torch.tensor([4] * 5 + [2, 3, 4, 2, 1, 3, 4])
    return (torch.arange(4) < lengths[:, None]).long()


gpt2: Any = dict(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2)
gpt2 |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
t5: Any = dict(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
sizes: Any = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
add(
    "hugging_face_bert",
    hugging_face("BertForSequenceClassification", "BertConfig", vocab_size=12, max_position_embeddings=8, **sizes),
    lambda: {"input_ids": integers(12, 12, 4), "attention_mask": padding()},
    needs="transformers",
)
add(
    "hugging_face_gpt2",
    hugging_face("GPT2ForSequenceClassification", "GPT2Config", **gpt2),
    lambda: {"input_ids": integers(11, 12, 4) + 1},
    needs="transformers",
)
add(
    "hugging_face_vit",
    hugging_face("ViTForImageClassification", "ViTConfig", image_size=4, patch_size=2, num_channels=1, **sizes),
    lambda: {"pixel_values": draw(12, 1, 4, 4)},
    needs="transformers",
)
add(
    "hugging_face_t5",
    hugging_face("T5ForConditionalGeneration", "T5Config", **t5),
    lambda: {"input_ids": integers(11, 12, 4) + 1, "decoder_input_ids": integers(11, 12, 2)},
    output=lambda raw: raw.logits[:, -1, :3],
    needs="transformers",
)

CASES: list[Hostile] = add.cases
