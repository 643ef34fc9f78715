"""What each layer knows: per-example gradients of its parameters from its input and its output's gradient.

To add a layer: write a rule (`linnet.jacobian.layers.rule`), list it in `RULES`, add a case to
``tests/jacobian/layers/test_rule.py``. Whether a rule is right for a model at hand is checked against autodiff on the
first batch (`linnet.jacobian.rule_selection`), so a rule may be simple and refuse (return None) what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linnet.jacobian.layers.convolution import Conv, ConvTranspose
from linnet.jacobian.layers.elementwise import Add, Expand, Mul
from linnet.jacobian.layers.embedding import Embedding
from linnet.jacobian.layers.linear import Addmm, Linear, Matmul
from linnet.jacobian.layers.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from linnet.jacobian.layers.rule import LayerCall, Rule

__all__ = ["RULES", "LayerCall", "Rule"]

RULES: dict[Callable[..., Any], Rule] = {
    function: rule
    for rule in (
        Linear(),
        Matmul(),
        Addmm(),
        Conv(),
        ConvTranspose(),
        BatchNorm(),
        LayerNorm(),
        RMSNorm(),
        GroupNorm(),
        InstanceNorm(),
        Embedding(),
        Add(),
        Mul(),
        Expand(),
    )
    for function in rule.functions
}
"""Torch function to the rule that reads its calls."""
