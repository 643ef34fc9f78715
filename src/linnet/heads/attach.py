"""A new head for a trained network, fitted to new labels on its features (Mu et al. 2020, equation 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet._estimator import leave_out_ignored
from linnet.data import Batch, Source, as_source, leaves
from linnet.heads.features import (
    FeatureLocation,
    Pool,
    check_pool,
    choose_pool,
    find_location,
    find_mask,
    parse_location,
    pool_features,
)
from linnet.heads.readout import Penalty, Readout, Task, check_targets, fit_readout
from linnet.jacobian import linearize
from linnet.network import Trace, Watch, checks, copy_sharing_parameters, trace


class Head(nn.Linear):
    """A fitted linear head.

    Attributes:
        classes_: The label of each output; where there is one output, the labels of 0 and 1; None for regression.
        task_: "classification", "multilabel" or "regression".
        penalty_: The ridge penalty on the weights of standardized features, one number or one for each output.
        features_: Where the features come from, as `attach_head` takes it.
    """

    def __init__(self, readout: Readout, features: str, *, dtype: torch.dtype, device: torch.device) -> None:
        c, d = readout.weight.shape
        super().__init__(d, c, dtype=dtype, device=device)
        with torch.no_grad():
            self.weight.copy_(torch.as_tensor(readout.weight))
            self.bias.copy_(torch.as_tensor(readout.bias))
        self.classes_, self.task_ = readout.classes, readout.task
        self.penalty_, self.features_ = readout.penalty, features

    def reset_parameters(self) -> None:
        """Do nothing: the readout gives all values, and the user's random numbers stay where they are."""


class NetworkWithHead(nn.Module):
    """A network up to its features, and a head on them. The modules after the features do not run.

    Attributes:
        backbone: The network.
        head: Maps features (n, d) to outputs (n, c).
        location: Where the features are.
        pool: How features become one vector.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, location: FeatureLocation, pool: Pool) -> None:
        super().__init__()
        self.backbone, self.head, self.location, self.pool = backbone, head, location, pool

    @property
    def wrapped_forward(self) -> Callable[..., Any]:
        """The forward whose arguments this forward takes. Data is bound to them."""
        return self.backbone.forward

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """The features (n, d)."""
        raw = self.location.read(self.backbone, args, kwargs)
        return pool_features(raw, self.pool, find_mask(self.backbone.forward, args, kwargs), str(self.location))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.head(self.features(*args, **kwargs))

    def extra_repr(self) -> str:
        return f"features={str(self.location)!r}, pool={self.pool!r}"


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

    Returns:
        The network with a `Head` in it, which `head_of` finds. Two classes have one output, the logit of the second
        class; more classes have one output each. The standardization is folded into weight and bias.

    Example:
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
    source = as_source(X, model.forward)
    if y is not None:  # before the long pass
        X, y = _without_ignored(X, y, check_targets(y, source.n, task), ignore_index)
        source = as_source(X, model.forward)
    watch = Watch(model)
    view = _locate(model, source, features, pool)
    J = linearize(view.reader, "nothing").jacobian(source, batch_size=batch_size, progress=progress)
    found = J.outputs().cpu().double().numpy()
    if y is None:
        y = J.targets()
        found, y = _without_ignored(found, y, check_targets(y, source.n, task), ignore_index)
    readout = fit_readout(
        found,
        y,
        task=task,
        classes=classes,
        penalty=penalty,
        folds=folds,
        seed=seed,
    )
    watch.check(contents=True)
    return _assemble(model, readout, view)


def _without_ignored(X: Any, y: Any, targets: tuple[np.ndarray, str], ignore_index: int | None) -> tuple[Any, Any]:
    """Inputs and targets, without the examples whose class is to be ignored; ``targets`` come from `check_targets`."""
    labels, kind = targets
    found = leave_out_ignored(X, y, labels, ignore_index) if kind == "classification" else None
    return (X, y) if found is None else found


def put_head(
    model: nn.Module, X: Any, readout: Readout, *, features: str | None = None, pool: Pool = "auto"
) -> nn.Module:
    """A copy of a network with a known head: the network that `attach_head` made, from the weights of its `Head`.

    Args:
        model: The trained network.
        X: Inputs; the first few show where the features are.
        readout: The head's weight and bias, and the meaning of its outputs.
        features: The same as for `attach_head`.
        pool: The same as for `attach_head`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
        >>> X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> head = head_of(attach_head(model, X, X[:, 0]))
        >>> weights = head.weight.detach().numpy(), head.bias.detach().numpy()
        >>> put_head(model, X[:2], Readout(*weights, head.task_, head.classes_, head.penalty_))(X).shape
        torch.Size([60, 1])
    """
    model = checks.check_module(model)
    check_pool(pool)
    return _assemble(model, readout, _locate(model, as_source(X, model.forward), features, pool))


def head_of(model: nn.Module) -> Head:
    """The head that `attach_head` has put into a network."""
    for module in model.modules():
        if isinstance(module, Head):
            return module
    raise ValueError(f"{type(model).__name__} has no head of linnet.attach_head.")


class _FeatureReader(NetworkWithHead):
    """The network up to its features. Its one parameter lets linnet run it over data; the features ignore it."""

    def __init__(self, backbone: nn.Module, location: FeatureLocation, pool: Pool) -> None:
        super().__init__(backbone, nn.Identity(), location, pool)
        first = next(backbone.parameters())
        self.nothing = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device))


@dataclass(frozen=True)
class _View:
    """What two examples show of a network."""

    reader: _FeatureReader  # the network up to its features
    trace: Trace  # calls of the whole network
    example: Batch  # the examples
    sample: Tensor  # the features of the examples


def _locate(model: nn.Module, source: Source, features: str | None, pool: Pool) -> _View:
    """Find the features of a network on two examples; the reader shares the network's parameters."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters: there is no trained network to take features from."
        )
    example = next(iter(source.batches(min(2, source.n)))).to(first.device)
    try:
        seen = trace(model, example.args, example.kwargs)
    except (RuntimeError, TypeError) as error:
        inputs = leaves((example.args, example.kwargs), "the inputs")
        checks.explain_forward(error, inputs, dict(model.named_parameters()))
        raise
    location = find_location(model, seen) if features is None else parse_location(model, features)
    if location.name:
        location.check_called(seen)
    location.warn_if_not_at_end(seen)
    call = seen.calls_of(location.name)[0]
    is_output = location.side == "output"
    raw = seen.output if not location.name else call.output if is_output else next(iter(call.args), None)
    chosen = choose_pool(pool, raw, str(location), after=call.module if is_output else None)
    reader = _FeatureReader(copy_sharing_parameters(model).eval(), location, chosen)
    with torch.no_grad():
        return _View(reader, seen, example, reader(*example.args, **example.kwargs))


def _assemble(model: nn.Module, readout: Readout, view: _View) -> nn.Module:
    """A copy of the network with the head: in place of its last layer, or after the features. Its outputs are checked.

    The new network must give on the examples what the head gives on their features.
    """
    location, pool, sample = view.reader.location, view.reader.pool, view.sample
    head = Head(readout, str(location), dtype=sample.dtype, device=sample.device)
    new = copy.deepcopy(model)
    if location.name and location.side == "input" and pool == "none" and location.is_at_end(view.trace):
        old = new.get_submodule(location.name)
        for name, module in list(new.named_modules(remove_duplicate=False)):
            if module is old:
                new.set_submodule(name, head)
        _update_config(new, head)
    else:
        for name in location.find_later(view.trace):
            new.set_submodule(name, SkippedModule())
        new = NetworkWithHead(new, head, location, pool)
    new.eval()
    with torch.no_grad():
        expected = head(sample)
        got = checks.output_tensor(new(*view.example.args, **view.example.kwargs))
    tolerance = max(1e-6, 64 * torch.finfo(expected.dtype).eps)
    if got.shape != expected.shape or not checks.close(got, expected, tolerance):
        raise RuntimeError(
            f"With the new head, {type(new).__name__} does not compute the head of its features ({head.features_}). "
            "Name other features, such as features='output'."
        )
    return new


def _update_config(model: Any, head: Head) -> None:
    """Tell a Hugging Face model what its outputs are now: its loss depends on that."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_labels") and hasattr(model, "num_labels"):
        config.num_labels = model.num_labels = head.out_features
        several = "multi_label_classification" if head.out_features == 1 else "single_label_classification"
        kinds = {"regression": "regression", "multilabel": "multi_label_classification", "classification": several}
        config.problem_type = kinds[head.task_]


class SkippedModule(nn.Module):
    """Stands in place of a module that comes after the features."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return x
