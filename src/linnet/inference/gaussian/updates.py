"""What a Gaussian fit can be asked for later: more data, leave-one-out, influence, the path of gradient flow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import LOG_2PI
from linnet.inference.gaussian.closed_form import check_conditioning
from linnet.inference.problem import Fit, Noise, Task
from linnet.jacobian.jacobian import Jacobian
from linnet.linalg.cholesky import cholesky_, cholesky_solve, solve_lower, solve_upper
from linnet.linalg.matrices import Stack
from linnet.linalg.operator import LinearOperator
from linnet.probability.posteriors import FunctionPosterior, Posterior, SamplePosterior, WeightPosterior


def extend(task: Task, fit: Fit, new: Task) -> tuple[Task, Fit]:
    """The task and fit with more observations, hyperparameters kept."""
    rows = new.noise.rows(fit.choice.noise)
    noise = Noise(
        torch.cat([task.noise.base, new.noise.base]),
        torch.cat([task.noise.group, new.noise.group]),
        task.noise.count,
        fit.choice.noise,
    )
    r, S = torch.cat([task.r, new.r]), fit.variance
    posterior = fit.posterior
    if isinstance(posterior, FunctionPosterior):
        added = new.J.cached()
        root, top = rows.rsqrt(), posterior.factor
        # [[C, 0], [T^T, C2]]: T = C^-1 L^T K12 L2 and C2 C2^T = M22 - T^T T.
        T = posterior.half(added) * root
        M = root[:, None] * added.gram(scale=S) * root
        M.diagonal().add_(1)
        check_conditioning(M)
        M -= T.T @ T
        m, q = len(task.r), len(new.r)
        C = top.new_zeros(m + q, m + q)
        C[:m, :m], C[m:, :m], C[m:, m:] = top, T.T, cholesky_(M)
        J: LinearOperator = Stack([task.J if isinstance(task.J, Stack) else posterior.J, added])
        roots = torch.cat([posterior.root, root])
        half = solve_lower(C, (roots * r)[:, None])
        alpha = roots * solve_upper(C, half)[:, 0]
        delta = S * (J.T @ alpha)
        log_det = 2 * float(C.diagonal().log().sum() - roots.log().sum())
        value = -0.5 * (float(half.square().sum()) + log_det + len(r) * LOG_2PI)
        grown: Posterior = FunctionPosterior(J, S, delta, root=roots, factor=C)
    elif isinstance(posterior, WeightPosterior):
        d, C, weight = S.sqrt(), posterior.factor, 1 / rows
        H, u = C @ C.T, torch.where(d > 0, posterior.delta / d, 0.0)
        b = H @ u + d * (new.J.T @ (weight * new.r))
        H += d[:, None] * new.J.normal(torch.diag(d), weight)
        check_conditioning(H)
        C = cholesky_(0.5 * (H + H.T))
        u = cholesky_solve(C, b)
        delta, J = d * u, Stack([task.J, new.J])
        rows = torch.cat([fit.noise_rows, rows])
        left = r - J @ delta
        alpha = left / rows
        log_det = 2 * float(C.diagonal().log().sum()) + float(rows.log().sum())
        value = -0.5 * (float((left * alpha).sum() + u @ u) + log_det + len(r) * LOG_2PI)
        grown = WeightPosterior(S, delta, factor=C)
    else:
        raise NotImplementedError(
            f"condition extends a factorization, and the solver {fit.solver!r} has none. Fit again with all the data, "
            "or use solver='function' or 'weight'."
        )
    whole = Task(J, r, noise, torch.cat([task.base, new.base]))
    changed = replace(fit, posterior=grown, noise_rows=noise.rows(fit.choice.noise), alpha=alpha, log_evidence=value)
    return whole, changed


def precisions(task: Task, fit: Fit) -> Tensor:
    """The diagonal blocks of ``(K + noise)^-1``, one for each example, (n, c, c)."""
    n, c = task.base.shape
    posterior = fit.posterior
    if isinstance(posterior, FunctionPosterior):
        out, C = task.r.new_empty(n, c, c), posterior.factor
        step = max(1, 2048 // c) * c
        for start in range(0, n * c, step):
            stop = min(start + step, n * c)
            eye = C.new_zeros(n * c - start, stop - start)
            eye.diagonal().copy_(posterior.root[start:stop])
            # The columns of C^-1 L begin where the unit vector does.
            T = solve_lower(C[start:, start:], eye).T.reshape(-1, c, n * c - start)
            out[start // c : stop // c] = T @ T.mT
        return out
    if isinstance(posterior, WeightPosterior):
        B = 1 / fit.noise_rows.view(n, c)
        T = (task.J @ posterior.W).view(n, c, -1)
        return torch.diag_embed(B) - B[:, :, None] * (T @ T.mT) * B[:, None, :]
    raise _dense_only("Leave-one-out predictions and influence", fit)


def smoother(task: Task, fit: Fit, J: Jacobian) -> Tensor:
    """A (m c, n c) with ``A r`` the shift of the posterior mean at the inputs of J: ``K(X*, X) (K + noise)^-1``."""
    posterior = fit.posterior
    if isinstance(posterior, FunctionPosterior):
        T = solve_upper(posterior.factor, posterior.half(J))
        return (posterior.root[:, None] * T).T
    if isinstance(posterior, WeightPosterior):
        return (task.J @ (posterior.W @ (J @ posterior.W).T)).T / fit.noise_rows
    raise _dense_only("Influence", fit)


def flow(task: Task, fit: Fit) -> Any:
    """The displacement (p,) of gradient flow as a function of time, in the smaller of the two spaces."""
    rows, p = task.J.shape
    d = fit.variance.sqrt()
    if isinstance(fit.posterior, SamplePosterior):
        raise _dense_only("The path of gradient flow", fit)
    if rows <= p:
        eigenvalues, Q = torch.linalg.eigh(task.J.gram(scale=fit.variance))
        along = Q.T @ task.r
        return _Flow(task.J, fit.variance, eigenvalues, Q, along)
    G = d[:, None] * task.J.normal(torch.diag(d))
    eigenvalues, Q = torch.linalg.eigh(0.5 * (G + G.T))
    return _Flow(None, d, eigenvalues, Q, Q.T @ (d * (task.J.T @ task.r)))


@dataclass(frozen=True)
class _Flow:
    J: Any
    scale: Tensor
    eigenvalues: Tensor
    Q: Tensor
    along: Tensor

    def __call__(self, t: float) -> Tensor:
        top = float(self.eigenvalues[-1].clamp_min(0))
        # Directions without an eigenvalue do not move the outputs; rounding would blow them up for large t.
        real = self.eigenvalues > len(self.eigenvalues) * torch.finfo(self.scale.dtype).eps * top
        rate = torch.where(real, self.eigenvalues, 1.0)
        phi = torch.where(real, -torch.expm1(-t * rate) / rate, 0.0)
        moved = self.Q @ (phi * self.along)
        return self.scale * (moved if self.J is None else self.J.T @ moved)


def _dense_only(what: str, fit: Fit) -> NotImplementedError:
    return NotImplementedError(
        f"{what} need a dense solver, and this fit used {fit.solver!r}. Use solver='function' or 'weight', or fewer "
        "examples."
    )
