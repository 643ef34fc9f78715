"""A new head for a trained network, fitted to new labels on its features (Mu et al. 2020, equation 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet.data.batch import Batch, Source, leaves
from linnet.data.sources import as_source
from linnet.heads import features as cut
from linnet.heads import pooling
from linnet.heads.features import Cut
from linnet.heads.labels import Task, check_targets
from linnet.heads.pooling import Pool
from linnet.heads.readout import Penalty, Readout, fit_readout
from linnet.jacobian.linearization import linearize
from linnet.network.call_trace import Trace, trace
from linnet.network.copies import copy_sharing_parameters
from linnet.network.weight_watch import Watch

EXAMPLES = 2
"""Examples on which the network is looked at, and the new one checked."""


class Head(nn.Linear):
    """A fitted linear head.

    Attributes:
        classes_: The label of each output (of 0 and 1 where there is one output); None for regression.
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
        """Nothing: the readout gives all values, and the user's random numbers stay where they are."""


class Headed(nn.Module):
    """A network up to its features, and a head on them; what comes after the features is not run.

    Attributes:
        backbone: The network.
        head: From features (n, d) to outputs (n, c).
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, cut: Cut, pool: Pool) -> None:
        super().__init__()
        self.backbone, self.head, self.cut, self.pool = backbone, head, cut, pool

    @property
    def wrapped_forward(self) -> Callable[..., Any]:
        """Whose arguments these are; data is bound to them."""
        return self.backbone.forward

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """The features (n, d)."""
        raw = self.cut.read(self.backbone, args, kwargs)
        mask = pooling.mask_of(self.backbone.forward, args, kwargs)
        return pooling.vector(raw, self.pool, mask, str(self.cut))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.head(self.features(*args, **kwargs))

    def extra_repr(self) -> str:
        return f"features={str(self.cut)!r}, pool={self.pool!r}"


def attach_head(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    features: str | None = None,
    pool: Pool = "auto",
    task: Task = "auto",
    classes: Sequence[Any] | None = None,
    penalty: Penalty = "cv",
    folds: int = 5,
    batch_size: int = 256,
    seed: int = 0,
    progress: bool | None = None,
) -> nn.Module:
    r"""A copy of a trained network with a new head, fitted to new labels on the network's features.

    .. math:: g(x) = \bar\omega^\top f(x; \bar\theta) + b

    The copy is an ordinary module in eval mode, and the given one is untouched. Linearized with respect to its top
    layers and its head, it is the model of Mu et al. (2020, equation 2), activation and gradient features together:
    ``TangentClassifier(attach_head(model, X, y), top=k, inference="map", mean="zero")``, or with ``params=``. With
    ``mean="zero"`` both parts start from zero, and the head is the point of linearization and no more. Its labels
    are in the residuals of ``mean="network"``, where the evidence of the same labels finds next to nothing and keeps
    the network where it is; give a variance there, such as ``prior=0.1``. Of the priors "balanced" has done best, and
    with batch norm folded (`linnet.fold_batchnorm`): a ResNet-20 of CIFAR-10 with 300 labels of new data sets gains 7
    points of accuracy over the head alone, while the paper's scaling, ``prior="ntk"``, loses 4 with 100
    (``python -m experiments transfer``).

    Where the features are what the network's last layer is given, that layer is replaced in place. Otherwise the
    network becomes the ``backbone`` of a module that stops it at the features, without the layers that come later.

    Args:
        model: The trained network.
        X: Inputs of any kind that `linnet.linearize` takes.
        y: Labels (n,) of any kind, (n, c) of zeros and ones for several labels at once, or numbers for regression;
            None where the data carries them.
        features: None for what the last Linear that is called is given (for encoders that return a last hidden state,
            and for models with ``num_classes == 0``, for what they return); the name of a module for its output;
            ``"input of NAME"``; or ``"output"`` for what the model returns.
        pool: How features become one vector: "auto" averages maps (n, d, h, w) over positions ("spatial") and sequences
            (n, T, d) over tokens ("tokens"), of which those with ``attention_mask`` 0 do not count; "tokens" also takes
            maps (n, h, w, d); "cls" takes the first token, "flatten" everything; or a function from the tensor to
            (n, d).
        task: What y is: "auto" takes fractions for numbers and all else for labels; "classification", "multilabel",
            "regression".
        classes: The labels in the order of the outputs; by default those of y, sorted.
        penalty: Of the weights, on standardized features: "cv" (cross-validation; leave-one-out for regression),
            "evidence", or a number, :math:`\lambda` in :math:`\sum \ell + \lambda/2 \|W\|^2`.
        folds: Of cross-validation.
        batch_size: Examples per forward pass.
        seed: Of the folds.
        progress: False for no progress bar.

    Returns:
        The network, with a `Head` in it (`head_of` finds it): two classes have one output, the logit of the second;
        more classes one output each. The standardization is folded into its weight and bias.

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
    messages.check_module(model)
    messages.check_batch_size(batch_size, auto=False)
    pooling.check_pool(pool)
    source = as_source(X, model.forward)
    if y is not None:  # before the long pass
        check_targets(y, source.n, task)
    watch = Watch(model)
    found_at = _located(model, source, features, pool)
    lin = linearize(found_at.reader, "nothing")
    J = lin.jacobian(source, batch_size=batch_size, progress=progress)
    found = fit_readout(
        J.outputs().cpu().double().numpy(),
        J.targets() if y is None else y,
        task=task,
        classes=classes,
        penalty=penalty,
        folds=folds,
        seed=seed,
    )
    watch.check(contents=True)
    return _headed(model, found, found_at)


def put_head(
    model: nn.Module, X: Any, readout: Readout, *, features: str | None = None, pool: Pool = "auto"
) -> nn.Module:
    """A copy of a network with a head that is known: what `attach_head` made, from the weights of its `Head`.

    Args:
        model: The trained network.
        X: Inputs; the first few show where the features are.
        readout: The head's weight and bias, and what its outputs are.
        features: As `attach_head` was given it.
        pool: As `attach_head` was given it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
        >>> X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> head = head_of(attach_head(model, X, X[:, 0]))
        >>> weights = head.weight.detach().numpy(), head.bias.detach().numpy()
        >>> put_head(model, X[:2], Readout(*weights, head.task_, head.classes_, head.penalty_))(X).shape
        torch.Size([60, 1])
    """
    messages.check_module(model)
    pooling.check_pool(pool)
    return _headed(model, readout, _located(model, as_source(X, model.forward), features, pool))


@dataclass(frozen=True)
class _Place:
    """Where the features of a network are: the network up to them, and what both make of a few examples."""

    reader: _Reader
    seen: Trace
    example: Batch
    sample: Tensor


def _located(model: nn.Module, source: Source, features: str | None, pool: Pool) -> _Place:
    example = _example(model, source)
    seen = _seen(model, example)
    place = cut.found(model, seen) if features is None else cut.named(model, features)
    if place.name:
        cut.check_called(place, seen)
    cut.warn_if_not_head(place, seen)
    reader = _reader(model, place, pool, seen)
    with torch.no_grad():
        sample = reader(*example.args, **example.kwargs)
    return _Place(reader, seen, example, sample)


def _headed(model: nn.Module, readout: Readout, at: _Place) -> nn.Module:
    """The network with the head, after a look at what it makes of the examples."""
    head = Head(readout, str(at.reader.cut), dtype=at.sample.dtype, device=at.sample.device)
    new = _assembled(model, head, at.reader, at.seen)
    _check(new, head, at.sample, at.example)
    return new


def head_of(model: nn.Module) -> Head:
    """The head that `attach_head` has put into a network."""
    for module in model.modules():
        if isinstance(module, Head):
            return module
    raise ValueError(f"{type(model).__name__} has no head of linnet.attach_head.")


def _example(model: nn.Module, source: Source) -> Batch:
    """A few examples, on the model's device."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters: there is no trained network to take features from."
        )
    return next(iter(source.batches(min(EXAMPLES, source.n)))).to(first.device)


def _seen(model: nn.Module, example: Batch) -> Trace:
    try:
        return trace(model, example.args, example.kwargs)
    except (RuntimeError, TypeError) as error:
        inputs = leaves((example.args, example.kwargs), "the inputs")
        messages.explain_forward(error, inputs, dict(model.named_parameters()))
        raise


class _Reader(Headed):
    """The features themselves; its one parameter, on which they do not depend, lets linnet run it over data."""

    def __init__(self, backbone: nn.Module, cut: Cut, pool: Pool) -> None:
        super().__init__(backbone, nn.Identity(), cut, pool)
        first = next(backbone.parameters())
        self.nothing = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device))


def _reader(model: nn.Module, place: Cut, pool: Pool, seen: Trace) -> _Reader:
    """The network up to its features, sharing the parameters, checked on the example that was traced."""
    call = seen.calls_of(place.name)[0]
    raw = seen.output if not place.name else call.output if place.side == "output" else next(iter(call.args), None)
    chosen = pooling.resolve(pool, raw, str(place), after=call.module if place.side == "output" else None)
    shared = copy_sharing_parameters(model).eval()
    return _Reader(shared, place, chosen)


def _assembled(model: nn.Module, head: Head, reader: _Reader, seen: Trace) -> nn.Module:
    """A copy of the network with the head: in place of its last layer, or after the features."""
    new, place = copy.deepcopy(model), reader.cut
    plain = place.name and place.side == "input" and reader.pool == "none"
    if plain and cut.ends_with(place, seen):
        old = new.get_submodule(place.name)
        for name, module in list(new.named_modules(remove_duplicate=False)):
            if module is old:
                new.set_submodule(name, head)
        _tell(new, head)
        return new.eval()
    for name in place.later(seen):
        new.set_submodule(name, Skipped())
    return Headed(new, head, place, reader.pool).eval()


def _tell(model: Any, head: Head) -> None:
    """Tell a model of Hugging Face what its outputs are now, since its loss depends on it."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_labels") and hasattr(model, "num_labels"):
        config.num_labels = model.num_labels = head.out_features
        several = "multi_label_classification" if head.out_features == 1 else "single_label_classification"
        kinds = {"regression": "regression", "multilabel": "multi_label_classification", "classification": several}
        config.problem_type = kinds[head.task_]


class Skipped(nn.Module):
    """In place of a module that comes after the features."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return x


def _check(new: nn.Module, head: Head, sample: Tensor, example: Batch) -> None:
    """The new network makes of the example what the head makes of its features, (n, d)."""
    with torch.no_grad():
        expected = head(sample)
        got = messages.output_tensor(new(*example.args, **example.kwargs))
    tolerance = max(1e-6, 64 * torch.finfo(expected.dtype).eps)
    if got.shape != expected.shape or not messages.close(got, expected, tolerance):
        raise RuntimeError(
            f"With the new head, {type(new).__name__} does not compute the head of its features ({head.features_}). "
            "Name other features, such as features='output'."
        )
