"""The rule of embedding tables."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.layers.rule import (
    Args,
    Known,
    Kwargs,
    LayerCall,
    Rule,
    Slots,
    named,
)


@final
class Embedding(Rule):
    """``F.embedding(ids, table)``."""

    functions = (F.embedding,)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        a = named(names, args, kwargs)
        if a.get("max_norm") is not None or a.get("scale_grad_by_freq"):
            return None
        padding = a.get("padding_idx")
        if padding is not None and padding < 0:
            padding += a["weight"].shape[0]
        return LayerCall(a["input"], {"weight": a["weight"]}, {"padding": padding})

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        if slots["weight"].swapped:
            return []
        ids = x.reshape(x.shape[0], -1)
        if call.conf["padding"] is not None:
            ids = ids.masked_fill(ids == call.conf["padding"], -1)
        g = g.reshape(*g.shape[:2], -1, g.shape[-1])
        return [EmbeddingBlock(ids, g, slots["weight"].range)]
