"""In which dtype an estimator runs the network, and in which dtype it adds up what the network gives.

The network runs in its own dtype: its weights are shared, and half precision stays half precision. Gram matrices,
curvatures, factors, evidence and posterior means are in float64, from rows of the Jacobian in the dtype of the network
(`linnet.Linearization.with_products`). Where that dtype is float32, features are off by about 1e-7. A small network in
float32 on a CPU is copied to float64 instead, because the copy costs little and its features are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linnet._common import free_memory
from linnet.network import Autocast, CannotCast

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian, Linearization

SMALL = 2**26
"""Bytes of float32 weights up to which a CPU runs a network in float64 by default: digits against time and memory."""

NAMES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of an estimator.

    Attributes:
        network: The dtype of a copy of the network; None runs the network as it is.
        products: The dtype of products with the Jacobian, of solves and of what is fitted.
    """

    network: torch.dtype | None
    products: torch.dtype

    def apply(self, lin: Linearization) -> Linearization:
        """The linearization in these dtypes; floating inputs are cast to the network's dtype, or its first layer's."""
        if self.network is not None:
            lin = lin.to(self.network)
        elif len(_floats(lin.given)) == 1:
            lin = lin.with_network(replace(lin.network, cast=lin.model_dtype))
        else:
            lin = lin.with_network(replace(lin.network, autocast=Autocast(adapts=True)))
        return lin.with_products(self.products)

    def meta(self) -> dict[str, str]:
        """For a file."""
        return {"dtype": "own" if self.network is None else _name(self.network), "products": _name(self.products)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Dtypes:
        """The inverse of `meta`. Files of earlier versions have one dtype for the network and for products."""
        network = NAMES.get(meta["dtype"])
        products = meta.get("products", meta["dtype"])
        return cls(network, NAMES[products])


def parse_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype of a setting: None for "auto"; "float32" and "float64" may come as a ``torch.dtype`` too."""
    if isinstance(dtype, str) and dtype in ("auto", *NAMES):
        return NAMES.get(dtype)
    if isinstance(dtype, torch.dtype) and dtype in NAMES.values():
        return dtype
    raise ValueError(f"dtype must be 'auto', 'float32' or 'float64'; got {dtype!r}.")


def choose_dtypes(model: nn.Module, dtype: Any) -> Dtypes:
    """The dtypes of an estimator for a setting ``dtype``.

    Args:
        model: The network.
        dtype: "float32" or "float64" for a copy of the network; "auto" runs the network as it is, or where the network
            is small, in float32 and on a CPU, in float64.

    >>> choose_dtypes(nn.Linear(2, 1), "auto")
    Dtypes(network=torch.float64, products=torch.float64)
    >>> choose_dtypes(nn.Linear(2, 1).to(torch.bfloat16), "auto")
    Dtypes(network=None, products=torch.float64)
    >>> choose_dtypes(nn.Linear(2, 1), "float32")
    Dtypes(network=torch.float32, products=torch.float64)
    """
    given = parse_dtype(dtype)
    device = next(model.parameters()).device
    products = torch.float64 if has_fast_float64(device) else torch.float32
    if given is not None:
        return Dtypes(given, torch.promote_types(products, given))
    size = sum(t.nbytes for t in model.parameters())
    small = device.type == "cpu" and size <= SMALL and _floats(model) == {torch.float32}
    return Dtypes(torch.float64 if small else None, products)


def make_jacobian(model: nn.Module, dtype: Any, make: Callable[[Dtypes], Jacobian]) -> Jacobian:
    """The Jacobian of the training data in the dtypes of an estimator.

    A network whose forward names a dtype, as ``x.float()`` does, cannot be cast. The first examples show that, and
    "auto" then runs the network as it is.

    Args:
        model: The network.
        dtype: The setting, as for `choose_dtypes`.
        make: Linearizes the network in given dtypes, and makes the Jacobian.
    """
    chosen = choose_dtypes(model, dtype)
    J = make(chosen)
    if dtype != "auto" or chosen.network is None:
        return J
    try:
        _ = J.c
    except CannotCast:
        return make(replace(chosen, network=None))
    return J


def can_copy(model: nn.Module) -> bool:
    """Whether a copy of the network in float64 is quick on its device, and fits half of the free memory."""
    first = next(model.parameters())
    size = 8 * sum(t.numel() for t in model.parameters())
    return has_fast_float64(first.device) and size <= free_memory(first.device) // 2


def has_fast_float64(device: torch.device) -> bool:
    """Whether float64 costs no more than about twice float32: on CPUs and on GPUs made for computing."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


def _floats(model: nn.Module) -> set[torch.dtype]:
    """Dtypes of the floating parameters of a network."""
    return {t.dtype for t in model.parameters() if t.is_floating_point()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
