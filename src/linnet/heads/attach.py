"""A new head for a trained network, fitted to new labels on its features (Mu et al. 2020, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from linnet._common import messages
from linnet._estimator import Counted, find_labeled, leave_out_ignored, leave_out_weightless
from linnet.data import as_source
from linnet.heads.features import Pool, check_pool
from linnet.heads.network import Head, NetworkWithHead, SkippedModule, assemble, locate
from linnet.heads.readout import Penalty, Task, check_targets, fit_readout
from linnet.jacobian import linearize
from linnet.network import Watch, checks

# Networks that users have pickled name the first three here.
__all__ = ["Head", "NetworkWithHead", "SkippedModule", "attach_head"]


def attach_head(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    features: str | None = None,
    pool: Pool = "auto",
    task: Task = "auto",
    classes: Sequence[Any] | None = None,
    ignore_index: int | None = -100,
    penalty: Penalty = "cv",
    folds: int = 5,
    batch_size: int = 256,
    seed: int = 0,
    progress: bool | None = None,
    sample_weight: Any = None,
) -> nn.Module:
    r"""A copy of a trained network with a new head, fitted to new labels on the network's features.

    .. math:: g(x) = \bar\omega^\top f(x; \bar\theta) + b

    The copy is an ordinary module in eval mode, and the given network is untouched. Linearized with respect to its top
    layers and its head, the copy is the model of Mu et al. (2020, equation 2), activation and gradient features
    together: ``TangentClassifier(attach_head(model, X, y), top=k, inference="map", mean="zero")``, or with
    ``params=``. With ``mean="zero"`` both parts start from zero, and the head is only the point of linearization.
    With ``mean="network"`` the residuals are those of a head that has seen the same labels: the evidence then finds
    next to nothing to learn and keeps the network as it is. Give a variance there, such as ``prior=0.1``. The prior
    "balanced" has done best, with batch norm folded (`linnet.fold_batchnorm`): a ResNet-20 of CIFAR-10 with 300 labels
    of new data sets gains 7 points of accuracy over the head alone, while the paper's scaling, ``prior="ntk"``, loses
    4 with 100 labels (``python -m experiments transfer``).

    Where the features are the input of the network's last layer, the head takes the place of that layer. Otherwise
    the network becomes the ``backbone`` of a module that stops it at the features, without the later layers.

    Args:
        model: The trained network.
        X: Inputs of any kind that `linnet.linearize` takes.
        y: Labels (n,) of any kind, (n, c) of zeros and ones for several labels at once, or numbers for regression;
            None where the data carries them.
        features: Where the features are. None takes the input of the last Linear that is called; for encoders that
            return a last hidden state, and for models with ``num_classes == 0``, it takes their output. The name of a
            module takes its output, ``"input of NAME"`` its input, and ``"output"`` what the model returns.
        pool: How features become one vector. "auto" averages maps (n, d, h, w) over positions ("spatial") and sequences
            (n, T, d) over tokens ("tokens"); tokens with ``attention_mask`` 0 do not count. "tokens" also takes maps
            (n, h, w, d). "cls" takes the first token, "flatten" all numbers. Or a function from the tensor to (n, d).
        task: Kind of y: "classification", "multilabel" or "regression". "auto" takes fractions for numbers and all
            else for labels.
        classes: The labels in the order of the outputs; by default the labels of y, sorted.
        ignore_index: Label of examples that count for nothing, as in torch, for labels that are integers; None for no
            such label.
        penalty: Ridge penalty on the weights of standardized features: "cv" (cross-validation; leave-one-out for
            regression), "evidence", or a number, :math:`\lambda` in :math:`\sum \ell + \lambda/2 \|W\|^2`.
        folds: Number of folds of the cross-validation.
        batch_size: Examples per forward pass.
        seed: Seed of the folds.
        progress: False for no progress bar.
        sample_weight: How many times each example counts, (n,): it multiplies the loss of the example. With "cv", an
            example is held out as a whole, whatever its weight.

    Returns:
        The network with a `Head` in it, which `head_of` finds. Two classes have one output, the logit of the second
        class; more classes have one output each. The standardization is folded into weight and bias.

    Example:
        >>> import torch
        >>> from linnet.heads import head_of
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
        >>> X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> new = attach_head(model, X, ["high" if x[0] > 0 else "low" for x in X])
        >>> new, head_of(new).classes_.tolist()
        (Sequential(
          (0): Linear(in_features=4, out_features=16, bias=True)
          (1): Tanh()
          (2): Head(in_features=16, out_features=1, bias=True)
        ), ['high', 'low'])
        >>> model[2].out_features
        10
    """
    model = checks.check_module(model)
    messages.check_batch_size(batch_size, auto=False)
    check_pool(pool)
    X, weight, counted = leave_out_weightless(X, sample_weight, model.forward)
    y = counted.take(y)
    source = as_source(X, model.forward)
    if y is not None:  # before the long pass
        X, y, weight = _without_ignored(X, y, weight, check_targets(y, source.n, task), ignore_index)
        source = as_source(X, model.forward)
    watch = Watch(model)
    view = locate(model, source, features, pool)
    J = linearize(view.reader, "nothing").jacobian(source, batch_size=batch_size, progress=progress)
    found = J.outputs().cpu().double().numpy()
    if y is None:
        y = J.targets()
        found, y, weight = _without_ignored(found, y, weight, check_targets(y, source.n, task), ignore_index)
    readout = fit_readout(
        found,
        y,
        task=task,
        classes=classes,
        penalty=penalty,
        folds=folds,
        seed=seed,
        weight=None if weight is None else weight.numpy(),
    )
    watch.check(contents=True)
    return assemble(model, readout, view)


def _without_ignored(
    X: Any, y: Any, weight: Tensor | None, targets: tuple[np.ndarray, str], ignore_index: int | None
) -> tuple[Any, Any, Tensor | None]:
    """Inputs, targets and weights, without the examples whose class is to be ignored; ``targets`` come from
    `check_targets`."""
    labels, kind = targets
    found = leave_out_ignored(X, y, labels, ignore_index) if kind == "classification" else None
    if found is None:
        return X, y, weight
    return *found, Counted(len(labels), find_labeled(labels, ignore_index)).take(weight)
