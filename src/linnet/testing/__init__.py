"""The contract every operator meets, and a zoo of tiny models to hold it on.

A new operator, layer rule or engine is right when `check_operator` is silent about it on the whole zoo:

    >>> from linnet.linalg.matrices import Matrix
    >>> from linnet.testing import check_operator, zoo
    >>> case = zoo()["mlp"]
    >>> dense = case.dense(case.build(), case.data(4, 0))
    >>> check_operator(Matrix(dense), dense, blocks=3)

`check_model` runs every proof of linnet on a network of your own, and prints what it found:

    >>> import torch
    >>> from linnet.testing import check_model
    >>> from torch import nn
    >>> print(check_model(nn.Linear(2, 1), torch.eye(2), quiet=True).ok)
    True

`linnet.testing.hostile` has unusual networks, to which only right numbers or an error by name are honest answers, and
`linnet.testing.fuzz` makes random ones. Both are commands too: `python -m linnet.testing.hostile` and
`python -m linnet.testing.fuzz --count 1000`.
"""

from __future__ import annotations

from linnet.testing.architectures import zoo
from linnet.testing.case import Case, call, dense_jacobian
from linnet.testing.contract import check_operator
from linnet.testing.model import Findings, check_model

__all__ = ["Case", "Findings", "call", "check_model", "check_operator", "dense_jacobian", "zoo"]
