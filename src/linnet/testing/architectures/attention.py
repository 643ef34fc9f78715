"""Attention: torch's own modules, a ViT, windows, shared latents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Case, Net, case, net, normal, parameter, tokens, weight


class Attention(nn.Module):
    """Self-attention from one fused projection and `scaled_dot_product_attention`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, class token, learned positions, blocks, a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 8, 2, stride=2)
        self.token, self.position = parameter(1, 1, 8), parameter(1, 10, 8)
        self.blocks = nn.Sequential(Block(8, 2), Block(8, 2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def windows(m: Any, x: Tensor) -> Tensor:
    """Attention inside 2 x 2 windows of a 4 x 4 grid: the layers see (n * 4, 4, d)."""
    n = len(x)
    h = m.embed(x.movedim(1, 3)).roll((1, 1), (1, 2))
    h = h.view(n, 2, 2, 2, 2, 6).transpose(2, 3).reshape(n * 4, 4, 6)
    h = m.block(h).view(n, 2, 2, 2, 2, 6).transpose(2, 3).reshape(n, 16, 6)
    return m.head(h.square().mean(1))


def ask(m: Any, x: Tensor) -> Tensor:
    """Learned latents ask the inputs: their projection is one call that all examples share."""
    q = m.query(m.norm(m.latents))
    weights = torch.softmax(q @ m.key(x).transpose(1, 2), 2)
    return m.head(torch.tanh(weights @ m.value(x))).flatten(1)


class Memory(nn.Module):
    """Torch's attention from a sequence x to another one z of the same or another width."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        value = z[:, :, : self.attention.vdim].tanh()
        return self.head(self.attention(x, z, value, need_weights=False)[0].square().mean(1))


def self_attention(*, batch_first: bool = True, weights: bool = False, **options: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        y = x + m.attention(x, x, x, need_weights=weights)[0]
        return m.head(torch.tanh(y).mean(1 if batch_first else 0))

    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
    return Net(forward, attention=attention, head=nn.Linear(4, 3))


def encoder(*, batch_first: bool, norm_first: bool = False) -> nn.Module:
    """Torch's encoder of two layers; without batch_first it sees (T, n, d)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.encoder(m.embed(x) if batch_first else m.embed(x).transpose(0, 1))
        return m.head(h.mean(1 if batch_first else 0))

    layer = nn.TransformerEncoderLayer(6, 2, 8, activation="gelu", batch_first=batch_first, norm_first=norm_first)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Net(forward, embed=nn.Linear(4, 6), encoder=body, head=nn.Linear(6, 3))


def masked_encoder() -> nn.Module:
    """Token 0 is padding: masked in the attention and in the mean."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        pad = ids[:, :] == 0
        pad[:, 0] = False
        h = m.layer(m.embed(ids), src_key_padding_mask=pad)
        return m.head(h.masked_fill(pad[:, :, None], 0.0).sum(1))

    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return Net(forward, embed=nn.Embedding(5, 6), layer=layer, head=nn.Linear(6, 3))


def decoder() -> nn.Module:
    """Torch's decoder layer under a causal mask, attending to its own embedding."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=h.device, dtype=h.dtype)
        return m.head(m.layer(h, h.tanh(), tgt_mask=mask)[:, -1])

    layer = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True)
    return Net(forward, embed=nn.Linear(4, 6), layer=layer, head=nn.Linear(6, 3))


def memory(width: int) -> Any:
    return lambda n, seed: (normal(3, 4)(n, seed), normal(5, width)(n, seed + 1))


SEQUENCE = normal(5, 4)
LATENTS: Any = {"latents": weight(3, 6), "norm": lambda: nn.LayerNorm(6), "query": (6, 6), "key": (4, 6)}

CASES: list[Case] = [
    case("vit", ViT, normal(2, 6, 6)),
    case("windows", net(windows, embed=(3, 6), block=lambda: Block(6, 2), head=(6, 3)), normal(3, 4, 4)),
    case("latents", net(ask, **LATENTS, value=(4, 6), head=(6, 2)), SEQUENCE),
    case("attention", self_attention, SEQUENCE),
    case("attention_weights", lambda: self_attention(weights=True), SEQUENCE),
    case("attention_time_first", lambda: self_attention(batch_first=False), SEQUENCE),
    case("attention_no_bias", lambda: self_attention(bias=False), SEQUENCE),
    case("attention_bias_kv", lambda: self_attention(add_bias_kv=True, add_zero_attn=True), SEQUENCE),
    case("attention_cross", Memory, memory(4)),
    case("attention_cross_widths", lambda: Memory(kdim=6, vdim=5), memory(6)),
    case("transformer_encoder", lambda: encoder(batch_first=True), SEQUENCE),
    case("transformer_encoder_time_first", lambda: encoder(batch_first=False, norm_first=True), SEQUENCE),
    case("transformer_encoder_masked", masked_encoder, tokens(5, 6)),
    case("transformer_decoder", decoder, SEQUENCE),
]
