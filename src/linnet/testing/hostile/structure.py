"""Unusual structures that must come out right: outputs, adapters, parametrizations, tied parts, transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from linnet.testing.case import Net, parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, normal, tokens

add = Register("unusual structures")


class Outputs(nn.Module):
    """Outputs in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        if self.kind == "dict":
            return {"other": self.b(h), "wanted": self.head(h)}
        if self.kind == "tuple":
            return self.b(h), self.head(h)
        if self.kind == "late_tuple":
            return self.head(h), [self.b(h)] * (1 + int((x[:, 0] > 0).any()))
        return {"parts": [self.head(h), {"b": self.b(h)}]}


add("dict_output", functools.partial(Outputs, "dict"), normal(4), output=lambda raw: raw["wanted"])
add("tuple_output", functools.partial(Outputs, "tuple"), normal(4), output=lambda raw: raw[1])
add("tuple_output_both", functools.partial(Outputs, "tuple"), normal(4), output=lambda raw: torch.cat(raw, 1))
add("tuple_output_of_several_lengths", functools.partial(Outputs, "late_tuple"), late(4), output=lambda raw: raw[0])
add(
    "nested_output",
    functools.partial(Outputs, "nested"),
    normal(4),
    output=lambda raw: raw["parts"][0] * raw["parts"][1]["b"][:, :2],
)
add(
    "vector_output",
    lambda: Net(lambda m, x: m.head(m.a(x).tanh())[:, 0], a=nn.Linear(4, 5), head=nn.Linear(5, 1)),
    normal(4),
)
add(
    "squeezed_output",
    lambda: Net(lambda m, x: m.head(m.a(x).tanh()).squeeze(), a=nn.Linear(4, 5), head=nn.Linear(5, 1)),
    normal(4),
    expects="either",
)
add("constant_output", lambda: Net(lambda m, x: torch.cat([m.head(x), x[:, :1]], 1), head=nn.Linear(4, 2)), normal(4))
add(
    "output_without_parameters_late",
    lambda: Net(lambda m, x: torch.where(x[:, :1] > 0, x[:, :2], m.head(x)), head=nn.Linear(4, 2)),
    late(4),
)
add("views_of_one_output", lambda: Net(lambda m, x: m.head(x).expand(-1, 3), head=nn.Linear(4, 1)), normal(4))


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


for name, function, width in (
    ("layer_norm", layer_norm, 5),
    ("rms_norm", rms_norm, 5),
    ("weight_standardization", weight_standardized, 5),
    ("cosine", cosine, 4),
):
    add(
        f"own_{name}",
        functools.partial(
            lambda f, w: Net(f, a=nn.Linear(4, 5), gain=parameter(5), head=nn.Linear(w, 2)), function, width
        ),
        normal(4),
    )


# Parametrizations.
class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + w.T


class Pruned(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * (w.abs() > 0.2)


def parametrized(kind: str) -> nn.Module:
    first: nn.Module = nn.Linear(4, 4)
    if kind == "weight_norm":
        first = weight_norm(first)
    elif kind == "spectral_norm":
        first = spectral_norm(first)
    elif kind == "orthogonal":
        first = orthogonal(first)
    elif kind == "symmetric":
        parametrize.register_parametrization(first, "weight", Symmetric())
    elif kind == "two":
        parametrize.register_parametrization(first, "weight", Symmetric())
        parametrize.register_parametrization(first, "weight", Pruned())
    elif kind == "pruned":
        prune.l1_unstructured(first, "weight", 4)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2))


for kind in ("weight_norm", "spectral_norm", "orthogonal", "symmetric", "two", "pruned"):
    add(
        f"parametrized_{kind}",
        functools.partial(parametrized, kind),
        normal(4),
        expects="either" if kind == "pruned" else "right",
    )
add(
    "parametrized_convolution",
    lambda: nn.Sequential(weight_norm(nn.Conv2d(1, 2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
    normal(1, 4, 4),
)


# Tied parts and adapters.
def tied_embedding() -> nn.Module:
    model: Any = Net(
        lambda m, x: m.out(m.mix(m.table(x).mean(1)).tanh()),
        table=nn.Embedding(6, 4),
        mix=nn.Linear(4, 4),
        out=nn.Linear(4, 6, bias=False),
    )
    model.out.weight = model.table.weight
    return model


def tied_module() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.ReLU(), layer, nn.Linear(4, 2))


def tied_scaled() -> nn.Module:
    return Net(
        lambda m, x: m.head(F.linear(m.a(x).tanh(), m.a.weight[:, :4].T @ m.a.weight)),
        a=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


class Adapter(nn.Module):
    """A low-rank adapter of a frozen layer, merged or beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.base, self.head = kind, nn.Linear(4, 4), nn.Linear(4, 2)
        self.base.requires_grad_(False)
        self.down, self.up = parameter(2, 4), parameter(4, 2)
        self.gain = parameter(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "merged":
            h = F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        elif self.kind == "beside":
            h = self.base(x) + x @ self.down.T @ self.up.T
        elif self.kind == "scaled":
            w = self.base.weight + self.up @ self.down
            h = F.linear(x, self.gain[:, None] * w / w.norm(dim=1, keepdim=True))
        elif self.kind == "late":
            h = self.base(x) + (x[:, :1] > 0) * (x @ self.down.T @ self.up.T)
        else:
            h = self.base(x * self.gain) + torch.einsum("ij,jk,nk->ni", self.up, self.down, x)
        return self.head(h.tanh())


add("tied_embedding", tied_embedding, tokens(6, 3))
add("tied_module", tied_module, normal(4))
add("tied_products", tied_scaled, normal(4))
for kind in ("merged", "beside", "scaled", "late", "einsum"):
    add(f"adapter_{kind}", functools.partial(Adapter, kind), late(4))


# Quantization-aware networks.
def fake_quantized(m: Any, x: Tensor) -> Tensor:
    w = m.a.weight
    q = torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -8, 7)
    return m.head(F.linear(x, q, m.a.bias).tanh())


def fake_quantized_activation(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.fake_quantize_per_tensor_affine(m.a(x), 0.2, 0, -8, 7))


def ste_weight(m: Any, x: Tensor) -> Tensor:
    w = m.a.weight
    return m.head(F.linear(x, w + (w.sign() * w.abs().mean() - w).detach(), m.a.bias).tanh())


def ste_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h + ((4 * h).round() / 4 - h).detach())


def learned_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) / m.step.exp()
    return m.head((h + (h.round() - h).detach()).clamp(-4, 3) * m.step.exp())


for name, function in (
    ("fake_quantized_weight", fake_quantized),
    ("fake_quantized_activation", fake_quantized_activation),
    ("straight_through_weight", ste_weight),
    ("straight_through_activation", ste_activation),
    ("learned_step_size", learned_step),
):
    add(
        name,
        functools.partial(
            lambda f: Net(f, a=nn.Linear(4, 5), head=nn.Linear(5, 2), step=nn.Parameter(torch.tensor(-1.0))), function
        ),
        normal(4),
    )


# Weights made by networks, and memories.
def hypernetwork(m: Any, x: Tensor) -> Tensor:
    w = m.make(m.code).view(5, 4)
    return m.head(F.linear(x, w).tanh())


def hypernetwork_by_example(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.einsum("nij,nj->ni", m.make2(x).view(-1, 5, 4), x).tanh())


def memory(m: Any, x: Tensor) -> Tensor:
    attention = (m.a(x) @ m.keys.T).softmax(1)
    return m.head(attention @ m.keys)


def field(m: Any, x: Tensor) -> Tensor:
    """A learned table, read at places that the data gives, between its entries."""
    place = x[:, :2].sigmoid() * 3
    low = place.floor().long().clamp(max=2)
    part = place - low
    a = m.grid[low[:, 0], low[:, 1]] * (1 - part[:, :1]) + m.grid[low[:, 0] + 1, low[:, 1]] * part[:, :1]
    return m.head(a * part[:, 1:] + m.a(x))


add(
    "hypernetwork", lambda: Net(hypernetwork, code=parameter(3), make=nn.Linear(3, 20), head=nn.Linear(5, 2)), normal(4)
)
add(
    "hypernetwork_by_example",
    lambda: Net(hypernetwork_by_example, make2=nn.Linear(4, 20), head=nn.Linear(5, 2)),
    normal(4),
)
add("memory", lambda: Net(memory, a=nn.Linear(4, 5), keys=parameter(6, 5), head=nn.Linear(5, 2)), normal(4))
add("learned_field", lambda: Net(field, grid=parameter(4, 4, 5), a=nn.Linear(4, 5), head=nn.Linear(5, 2)), normal(4))
add(
    "parameter_of_batch_shape",
    lambda: Net(
        lambda m, x: m.head(m.a(x)) + m.w.mean(0)[:2], a=nn.Linear(4, 5), w=parameter(13, 5), head=nn.Linear(5, 2)
    ),
    normal(4),
)
add(
    "vocabulary_of_batch_size",
    lambda: Net(lambda m, x: m.head(m.table(x).sum(1)), table=nn.Embedding(13, 13), head=nn.Linear(13, 2)),
    tokens(13, 13),
)
add("square_of_batch_size", lambda: nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13)), normal(13))
add(
    "scalar_parameter",
    lambda: Net(
        lambda m, x: m.head(x) * m.scale.exp() + m.shift,
        head=nn.Linear(4, 2),
        scale=nn.Parameter(torch.tensor(0.3)),
        shift=nn.Parameter(torch.tensor(0.1)),
    ),
    normal(4),
)
add("unused_parameter", lambda: Net(lambda m, x: m.head(x), head=nn.Linear(4, 2), idle=nn.Linear(3, 3)), normal(4))
add(
    "single_float32",
    lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    lambda: draw(13, 4).float(),
    dtype=torch.float32,
    rtol=1e-4,
)
add(
    "cdist_float32",
    lambda: Net(
        lambda m, x: m.head(torch.cdist(m.a(x), m.w)), a=nn.Linear(4, 3), w=parameter(5, 3), head=nn.Linear(5, 2)
    ),
    lambda: draw(13, 4).float(),
    dtype=torch.float32,
    rtol=1e-4,
)


add(
    "no_gradient",
    lambda: Net(
        lambda m, x: torch.cat([(m.head(x) > 0).to(x.dtype), m.a(x)], 1), a=nn.Linear(4, 1), head=nn.Linear(4, 2)
    ),
    normal(4),
)
add(
    "not_a_number_late",
    lambda: Net(lambda m, x: m.head((-x[:, :1]).sqrt() * m.a(x)), a=nn.Linear(4, 5), head=nn.Linear(5, 2)),
    late(4),
    expects="refused",
)
add(
    "slope_without_end_late",
    lambda: Net(
        lambda m, x: m.head(torch.where(x > 0, 0.0, (x * m.w).abs().clamp(min=0).sqrt())),
        w=parameter(4),
        head=nn.Linear(4, 2),
    ),
    lambda: draw(13, 4) * (torch.arange(13) < 6)[:, None],
    expects="either",
)
add(
    "graph_module",
    lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))),
    normal(4),
)
add(
    "traced_module",
    lambda: torch.jit.trace(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.ones(3, 4)),
    normal(4),
    expects="either",
)


# Hugging Face.
def hugging_face(kind: str) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2ForSequenceClassification,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTForImageClassification,
    )

    if kind == "bert":
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=12,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                max_position_embeddings=8,
            )
        )
    if kind == "gpt2":
        return GPT2ForSequenceClassification(
            GPT2Config(
                vocab_size=12,
                n_positions=8,
                n_embd=8,
                n_layer=1,
                n_head=2,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=1,
            )
        )
    if kind == "vit":
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                image_size=4,
                patch_size=2,
                num_channels=1,
            )
        )
    return T5ForConditionalGeneration(
        T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


add(
    "hugging_face_bert",
    functools.partial(hugging_face, "bert"),
    lambda: {"input_ids": integers(12, 12, 4), "attention_mask": _padding()},
    needs="transformers",
)
add(
    "hugging_face_gpt2",
    functools.partial(hugging_face, "gpt2"),
    lambda: {"input_ids": integers(11, 12, 4) + 1},
    needs="transformers",
)
add(
    "hugging_face_vit",
    functools.partial(hugging_face, "vit"),
    lambda: {"pixel_values": draw(12, 1, 4, 4)},
    needs="transformers",
)
add(
    "hugging_face_t5",
    functools.partial(hugging_face, "t5"),
    lambda: {"input_ids": integers(11, 12, 4) + 1, "decoder_input_ids": integers(11, 12, 2)},
    output=lambda raw: raw.logits[:, -1, :3],
    needs="transformers",
)


def _padding() -> Tensor:
    lengths = torch.tensor([4] * 5 + [2, 3, 4, 2, 1, 3, 4])
    return (torch.arange(4) < lengths[:, None]).long()


CASES: list[Hostile] = add.cases
