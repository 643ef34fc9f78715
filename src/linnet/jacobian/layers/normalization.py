"""Rules of normalization layers."""

from __future__ import annotations

from math import prod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock
from linnet.jacobian.cuda import triton_kernels
from linnet.jacobian.layers.rule import (
    Args,
    Known,
    Kwargs,
    LayerCall,
    Rule,
    Slots,
    named,
    tensors_of,
)


class Norm(Rule):
    """A normalized input times a weight plus a bias, per channel (axis 1) or over the last axes."""

    channels = True

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        n, c = g.shape[:2]
        out: list[ColumnBlock] = []
        for role, slot in slots.items():
            h = g * x[:, None] if role == "weight" else g
            if self.channels:
                part = h.flatten(4).sum((2, 4)) if h.ndim > 4 else h.sum(2)
            else:
                part = h.reshape(n, c, -1, prod(slot.shape)).sum(2)
            out.append(DenseBlock([slot.range], [part]))
        return out


@final
class BatchNorm(Norm):
    functions = (F.batch_norm,)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        names = ("input", "mean", "var", "weight", "bias", "training", "momentum", "eps")
        renamed = {{"running_mean": "mean", "running_var": "var"}.get(k, k): v for k, v in kwargs.items()}
        a = named(names, args, renamed)
        if a.get("training", False) or a["mean"] is None:
            raise ValueError(
                "A batch norm layer uses the statistics of the batch (train mode, or no running statistics), so "
                "examples are not independent and the Jacobian has no rows. Use running statistics "
                "(track_running_stats=True and model.eval()), or replace it by GroupNorm or LayerNorm."
            )
        conf = {"mean": a["mean"], "var": a["var"], "eps": a.get("eps", 1e-5)}
        return LayerCall(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        mean, var = call.conf["mean"].to(x.dtype), call.conf["var"].to(x.dtype)
        n, c, r, channels = g.shape[:4]
        x, g = x.reshape(n, r, channels, -1), g.reshape(n, c, r, channels, -1)
        if x.is_cuda:  # whose backward pass below wants a weight
            scale = (var + call.conf["eps"]).rsqrt()
            if r == 1 and triton_kernels.available(x):
                pairs = [triton_kernels.channel_sums(x[:, 0], g[:, j, 0], mean) for j in range(c)]
            else:
                x = x - mean[:, None]
                pairs = [((g[:, j] * x).sum((1, 3)), g[:, j].sum((1, 3))) for j in range(c)]
            pairs = [(weight * scale, bias) for weight, bias in pairs]
        else:
            # One backward pass of a batch norm that has (example, channel) as its channels; two sums in one reading.
            flat = x.reshape(1, n * r * channels, -1)
            many = mean.repeat(n * r), var.repeat(n * r)
            pairs = []
            for j in range(c):
                args = (g[:, j].reshape(flat.shape), flat, None, *many, None, None, False, call.conf["eps"])
                _, *sums = torch.ops.aten.native_batch_norm_backward(*args, [False, True, True])
                weight, bias = (t.view(n, r, channels).sum(1) if r > 1 else t.view(n, channels) for t in sums)
                pairs.append((weight, bias))
        parts = {
            role: sums[0][:, None] if c == 1 else torch.stack(sums, 1)
            for role, sums in zip(("weight", "bias"), zip(*pairs, strict=True), strict=True)
        }
        return [DenseBlock([slot.range], [parts[role]]) for role, slot in slots.items()]


@final
class LayerNorm(Norm):
    functions = (F.layer_norm, torch.layer_norm)
    channels = False

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        a = named(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
        conf = {"shape": tuple(a["normalized_shape"]), "eps": a.get("eps", 1e-5)}
        return LayerCall(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: LayerCall, x: Tensor) -> Tensor:
        return F.layer_norm(x, call.conf["shape"], None, None, call.conf["eps"])


@final
class RMSNorm(Norm):
    functions = (F.rms_norm, torch.rms_norm)
    channels = False

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        a = named(("input", "normalized_shape", "weight", "eps"), args, kwargs)
        # Without eps torch takes the epsilon of the input's own dtype, which a wider capture must repeat.
        eps = torch.finfo(a["input"].dtype).eps if a.get("eps") is None else a["eps"]
        conf = {"shape": tuple(a["normalized_shape"]), "eps": eps}
        return LayerCall(a["input"], tensors_of(weight=a.get("weight")), conf)

    def prepare(self, call: LayerCall, x: Tensor) -> Tensor:
        return F.rms_norm(x, call.conf["shape"], None, call.conf["eps"])


@final
class GroupNorm(Norm):
    functions = (F.group_norm, torch.group_norm)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        a = named(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
        conf = {"groups": a["num_groups"], "eps": a.get("eps", 1e-5)}
        return LayerCall(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: LayerCall, x: Tensor) -> Tensor:
        return F.group_norm(x, call.conf["groups"], None, None, call.conf["eps"])


@final
class InstanceNorm(Norm):
    functions = (F.instance_norm,)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        names = ("input", "running_mean", "running_var", "weight", "bias", "own", "momentum", "eps")
        renamed = {{"use_input_stats": "own"}.get(k, k): v for k, v in kwargs.items()}
        a = named(names, args, renamed)
        if a["input"].ndim < 3:
            return None
        conf = {key: a.get(key) for key in ("running_mean", "running_var")}
        conf |= {"own": a.get("own", True), "eps": a.get("eps", 1e-5)}
        return LayerCall(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: LayerCall, x: Tensor) -> Tensor:
        conf = call.conf
        if conf["own"]:
            return F.instance_norm(x, None, None, None, None, True, 0.0, conf["eps"])
        mean, var = conf["running_mean"].to(x.dtype), conf["running_var"].to(x.dtype)
        return F.batch_norm(x, mean, var, None, None, False, 0.0, conf["eps"])
