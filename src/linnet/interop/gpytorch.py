r"""The tangent kernel of a network as a GPyTorch kernel, :math:`k(x, x') = J(x) \, S \, J(x')^\top`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import needs_extra, without_scripting_warnings
from linnet.jacobian import Jacobian, Linearization, TangentFeatures, linearize, needs_grad
from linnet.network import Output, Params
from linnet.probability import PriorSpec, prior_variances

with needs_extra("gpytorch", "linnet.interop.gpytorch"), without_scripting_warnings():
    from gpytorch.kernels import Kernel
    from linear_operator import to_linear_operator
    from linear_operator.operators import LinearOperator as LazyMatrix

__all__ = ["TangentGram", "TangentKernel"]


class TangentKernel(Kernel):
    r"""The kernel of a linearized network, for any GPyTorch model.

    The kernel has no hyperparameters and no scale: wrap it in ``ScaleKernel``. The network's weights are constants; the
    Gaussian process never trains them. A network with c > 1 outputs gives c rows for each input, example by example, as
    ``MultitaskMultivariateNormal`` expects them. With a zero or constant mean this is the finite neural tangent kernel;
    for the linearized network, model ``y - lin(x)``.

    ``kernel.double()``, also as part of ``model.double()``, takes the kernel to float64; the network itself does not
    change. Inputs are (..., n, d): let a network of images begin with ``nn.Unflatten``. The kernel remembers the
    Jacobians of the last few inputs, and in training mode their kernel matrices, so steps on hyperparameters cost no
    pass.

    Gradients with respect to inputs come from torch.func, with one row of p numbers for each input that requires a
    gradient. GPyTorch joins training and test inputs in one tensor, so its predictions differentiate both. To optimize
    candidates, `linnet.interop.botorch.TangentModel` takes less work.

    Args:
        model: A module, or a `linnet.Linearization` (then without ``params`` and ``output``).
        params: Selected parameters, as for `linnet.linearize`.
        output: Function from the module's output to (n, c), as for `linnet.linearize`.
        prior: S: "unit" or "shared" (ones; ScaleKernel has the scale), "ntk", a variance, variances by layer glob, or
            a tensor (p,).
        max_dense: Kernel matrices of up to ``max_dense ** 2`` entries are tensors. A larger one is a `TangentGram`,
            which gives products for GPyTorch's conjugate gradients.

    Example:
        >>> from gpytorch.kernels import ScaleKernel
        >>> kernel = ScaleKernel(TangentKernel(nn.Linear(3, 1), prior="ntk"))
        >>> kernel(torch.ones(4, 3), torch.zeros(5, 3)).shape
        torch.Size([4, 5])
    """

    def __init__(
        self,
        model: nn.Module | Linearization,
        params: Params = None,
        *,
        output: Output | None = None,
        prior: PriorSpec | Tensor = "unit",
        max_dense: int = 10_000,
    ) -> None:
        super().__init__()
        self.max_dense = max_dense
        self._prior, lin = prior, as_linearization(model, params, output)
        self._features = TangentFeatures(lin, prior_variances(lin, prior))

    @property
    def lin(self) -> Linearization:
        """The linearized network."""
        return self._features.lin

    @property
    def variances(self) -> Tensor:
        """S, (p,)."""
        return self._features.variance

    @property
    def dtype(self) -> torch.dtype:
        return self.lin.dtype

    @property
    def device(self) -> torch.device:
        return self.lin.device

    @property
    def is_stationary(self) -> bool:
        return False

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """c."""
        return self._features.outputs_per_input(x1)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor | LazyMatrix:
        """The kernel of inputs (..., n, d) and (..., m, d): (..., n c, m c), or its diagonal (..., n c).

        Args:
            x1: The first inputs.
            x2: The second inputs; as many as the first for a diagonal.
            diag: Whether to give only the diagonal.
            last_dim_is_batch: Not supported: the network takes all d numbers.
            params: None are known.
        """
        if last_dim_is_batch:
            raise NotImplementedError(
                f"TangentKernel passes all {x1.shape[-1]} numbers of an input to the network, so it has no "
                "last_dim_is_batch. Call the kernel without it."
            )
        return self._diagonal(x1, x2) if diag else self._matrix(x1, x2)

    def _diagonal(self, x1: Tensor, x2: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        a, b = self._pair(x1.expand(*batch, -1, -1), x2.expand(*batch, -1, -1))
        if a is b and not isinstance(a, Tensor):
            return a.gram_diag(scale=self.variances).view(*batch, -1)
        count = batch.numel() * x1.shape[-2]
        return self._features.blocks(a, b, count).diagonal(dim1=-2, dim2=-1).reshape(*batch, -1)

    def _matrix(self, x1: Tensor, x2: Tensor) -> Tensor | LazyMatrix:
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        c = self.num_outputs_per_input(x1, x2)
        rows, columns = x1.shape[-2] * c, x2.shape[-2] * c
        x1, x2 = _collapse(x1), _collapse(x2)
        if x1.ndim == 2 and x2.ndim == 2:
            return self._single(x1, x2).expand(*batch, rows, columns)
        if x1.ndim > 2 and x2.ndim > 2:
            a, b = self._pair(x1.expand(*batch, -1, -1), x2.expand(*batch, -1, -1))
            return self._features.blocks(a, b, batch.numel()).reshape(*batch, rows, columns)
        a, b = self._pair(x1, x2)  # one of the two is the same for the whole batch
        K = self._features.cross(a, b) if x2.ndim == 2 else self._features.cross(b, a)
        K = K.view(*(x1 if x2.ndim == 2 else x2).shape[:-2], -1, K.shape[1])
        return (K if x2.ndim == 2 else K.mT).expand(*batch, rows, columns)

    def _single(self, x1: Tensor, x2: Tensor) -> Tensor | LazyMatrix:
        """The kernel of (n, d) and (m, d), dense where it is small or differentiable in the inputs."""
        large = len(x1) * len(x2) * self.num_outputs_per_input(x1, x2) ** 2 > self.max_dense**2
        if not large and _is_same(x1, x2) and not needs_grad(x1):
            return self._features.gram(x1, keep=self.training)
        a, b = self._pair(x1, x2)
        if large and isinstance(a, Jacobian) and isinstance(b, Jacobian):
            return TangentGram(self.variances, left=a, right=b)
        return self._features.cross(a, b)

    def _pair(self, x1: Tensor, x2: Tensor) -> tuple[Any, Any]:
        """Features of both, flattened; the same object for inputs that are the same."""
        a = self._features.of(x1.reshape(-1, x1.shape[-1]))
        return (a, a) if _is_same(x1, x2) else (a, self._features.of(x2.reshape(-1, x2.shape[-1])))

    def _apply(self, fn: Any, recurse: bool = True) -> TangentKernel:
        # module.double() and module.to(...) reach the network here, because it is no submodule.
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if probe.device != self.device:
            raise RuntimeError(
                f"The network of this TangentKernel is on {self.device} and cannot be moved to {probe.device}. Move it "
                "there before the kernel is made."
            )
        if probe.dtype != self.dtype:
            lin = self.lin.to(probe.dtype)
            self._features = TangentFeatures(lin, prior_variances(lin, self._prior))
        super()._apply(fn, recurse)
        return self


class TangentGram(LazyMatrix):
    """``J S J'^T``, (n c, m c), as an operator that gives products, for GPyTorch where the matrix would be large.

    Args:
        variances: S, (p,).
        left: J.
        right: J'; the same object for a symmetric matrix.
        batch: Batch dimensions over which the matrix is repeated.

    Example:
        >>> J = linearize(nn.Linear(2, 1)).jacobian(torch.ones(4, 2))
        >>> K = TangentGram(torch.ones(3), left=J, right=J)
        >>> K @ torch.ones(4)
        tensor([12., 12., 12., 12.])
    """

    def __init__(self, variances: Tensor, *, left: Jacobian, right: Jacobian, batch: tuple[int, ...] = ()) -> None:
        super().__init__(variances, left=left, right=right, batch=tuple(batch))
        # GPyTorch's backward passes rebuild the operator with arguments that require gradients.
        self.S, self.left, self.right, self.batch = variances.detach(), left, right, tuple(batch)

    def _like(self, left: Jacobian, right: Jacobian, batch: tuple[int, ...]) -> TangentGram:
        return TangentGram(self.S, left=left, right=right, batch=batch)

    def _size(self) -> torch.Size:
        return torch.Size((*self.batch, self.left.shape[0], self.right.shape[0]))

    def _transpose_nonbatch(self) -> TangentGram:
        return self._like(self.right, self.left, self.batch)

    def _unsqueeze_batch(self, dim: int) -> TangentGram:
        return self._like(self.left, self.right, (*self.batch[:dim], 1, *self.batch[dim:]))

    def _expand_batch(self, batch_shape: tuple[int, ...]) -> TangentGram:
        return self._like(self.left, self.right, tuple(batch_shape))

    def _permute_batch(self, *dims: int) -> TangentGram:
        return self._like(self.left, self.right, tuple(self.batch[d] for d in dims))

    def _matmul(self, rhs: Tensor) -> Tensor:
        # Columns of a batch of right-hand sides (..., m c, k) go through the two passes together.
        if rhs.ndim == 1:
            return self._matmul(rhs[:, None])[..., 0]
        columns = rhs.movedim(-2, 0)
        out = self.left @ (self.S[:, None] * (self.right.T @ columns.flatten(1)))
        out = out.view(-1, *columns.shape[1:]).movedim(0, -2)
        return out.expand(*torch.broadcast_shapes(self.batch, out.shape[:-2]), -1, -1)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[None]:
        return (None,)  # a constant of the Gaussian process

    def _diagonal(self) -> Tensor:
        if self.left is self.right:
            return self.left.gram_diag(scale=self.S).expand(*self.batch, -1)
        return super()._diagonal()

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        # Only the examples that occur: pivoted Cholesky asks for one row at a time.
        c = self.left.c
        rows, row = torch.unique(row_index // c, return_inverse=True)
        columns, column = torch.unique(col_index // c, return_inverse=True)
        K = self.left.subset(rows).gram(self.right.subset(columns), scale=self.S)
        return K[row * c + row_index % c, column * c + col_index % c]

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LazyMatrix:
        batch = torch.empty(self.batch, device="meta")[batch_indices].shape
        left, right = _subset(self.left, row_index), _subset(self.right, col_index)
        if left is None or right is None:  # the index tears outputs of an example apart
            rows = torch.arange(self.shape[-2], device=self.device)[row_index]
            columns = torch.arange(self.shape[-1], device=self.device)[col_index]
            return to_linear_operator(self._get_indices(rows[:, None], columns).expand(*batch, -1, -1))
        same = self.left is self.right and left.index.equal(right.index)
        return self._like(left, left if same else right, batch)

    def to_dense(self) -> Tensor:
        K = self.left.gram(None if self.left is self.right else self.right, scale=self.S)
        return K.expand(*self.batch, -1, -1)


def as_linearization(model: nn.Module | Linearization, params: Params, output: Output | None) -> Linearization:
    """The given linearization, or the linearization of the given module."""
    if not isinstance(model, Linearization):
        return linearize(model, params, output)
    if params is not None or output is not None:
        raise ValueError(
            "A Linearization has its parameters and its output already. Pass params= and output= to linnet.linearize, "
            "or pass the module."
        )
    return model


def _is_same(x1: Tensor, x2: Tensor) -> bool:
    """Whether the features of x1 serve for x2. Equal inputs that need gradients are not the same."""
    constant = not needs_grad(x1) and not needs_grad(x2)
    return x1 is x2 or (constant and x1.shape == x2.shape and torch.equal(x1, x2))


def _collapse(x: Tensor) -> Tensor:
    """(n, d) where x is a batch of equal copies without gradients, as GPyTorch makes of training inputs; else x."""
    if x.ndim == 2 or needs_grad(x):
        return x
    flat = x.flatten(0, -3)
    return flat[0] if torch.equal(flat, flat[:1].expand_as(flat)) else x


def _subset(J: Jacobian, index: Any) -> Jacobian | None:
    """The examples whose rows an index takes; None where it takes only some rows of an example."""
    rows = torch.arange(J.shape[0])[index if isinstance(index, slice) else index.cpu()]
    if rows.numel() == 0 or rows.numel() % J.c:
        return None
    by_example = rows.view(-1, J.c)
    whole = by_example[:, :1] // J.c * J.c + torch.arange(J.c)
    return J.subset(whole[:, 0] // J.c) if by_example.equal(whole) else None
