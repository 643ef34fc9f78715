"""Questions to a fit that come later: more data, less data, leave-one-out, influence, the path of gradient flow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import LOG_2PI
from linnet.inference.problem import Fit, Noise, Task
from linnet.jacobian import Jacobian
from linnet.linalg import LinearOperator, Stack
from linnet.probability import KernelPosterior


def extend(task: Task, fit: Fit, new: Task) -> tuple[Task, Fit]:
    """The task and fit with more observations, hyperparameters kept; for a fit by a dense solver."""
    whole = join(task, new, fit)
    rows = whole.noise.rows(fit.choice.noise)
    grown = fit.posterior.extended(task.J, new.J, whole.r, rows)
    value = fit.log_evidence - 0.5 * (grown.energy + len(new.r) * LOG_2PI) + new.noise.repeat_evidence(fit.choice.noise)
    found = replace(fit, posterior=grown.posterior, noise_rows=rows, alpha=grown.alpha, log_evidence=value)
    return replace(whole, J=grown.J), found


def join(task: Task, new: Task, fit: Fit) -> Task:
    """Both tasks as one, with the noise that was found."""
    noise = Noise(
        torch.cat([task.noise.base, new.noise.base]),
        torch.cat([task.noise.group, new.noise.group]),
        task.noise.count,
        fit.choice.noise,
        weight=_join_weights(task.noise, new.noise),
    )
    whole = Stack([*(task.J.parts if isinstance(task.J, Stack) else [task.J]), new.J])
    return Task(whole, torch.cat([task.r, new.r]), noise, torch.cat([task.base, new.base]))


def take(task: Task, examples: Tensor) -> Task:
    """The task of some examples (m,), in rising order."""
    n, c = task.base.shape
    at = examples.to(task.r.device)
    rows = (at[:, None] * c + torch.arange(c, device=at.device)).flatten()
    noise, weight = task.noise, task.noise.weight
    weight = None if weight is None else weight[rows]
    weight = None if weight is None or bool((weight == 1).all()) else weight
    noise = replace(noise, base=noise.base[rows], group=noise.group[rows], weight=weight)
    return Task(_take_parts(task.J, examples, n), task.r[rows], noise, task.base[at])


def _take_parts(J: Any, examples: Tensor, n: int) -> LinearOperator:
    parts, start = list[Jacobian](), 0
    for part in _list_parts(J):
        index = examples[(examples >= start) & (examples < start + part.n)].cpu() - start
        if len(index):
            parts.append(part if len(index) == part.n else part.subset(index))
        start += part.n
    assert start == n
    return parts[0] if len(parts) == 1 else Stack(parts)


def _list_parts(J: Any) -> list[Any]:
    """The Jacobians of a stack, of which parts may be stacks."""
    return [one for part in J.parts for one in _list_parts(part)] if isinstance(J, Stack) else [J]


def reduce(task: Task, fit: Fit, kept: Tensor) -> tuple[Task, Fit]:
    """The task and fit without some observations, hyperparameters kept; for a fit by a dense solver.

    Args:
        task: The observations.
        fit: Their fit. A fit that averages stays an average where only later observations go.
        kept: The examples that stay, (m,), in rising order.
    """
    n, c = task.base.shape
    out = torch.ones(n, dtype=torch.bool)
    out[kept.cpu()] = False
    rest, gone = take(task, kept), take(task, out.nonzero()[:, 0])
    if isinstance(fit.posterior, KernelPosterior):
        return _reduce_average(fit, fit.posterior, rest)
    rows = (kept.to(task.r.device)[:, None] * c + torch.arange(c, device=task.r.device)).flatten()
    left = fit.posterior.reduced(rest.J, rows, gone.J, task.r, fit.noise_rows)
    value = fit.log_evidence + 0.5 * (left.energy + len(gone.r) * LOG_2PI)
    value -= gone.noise.repeat_evidence(fit.choice.noise)
    found = replace(
        fit, posterior=left.posterior, noise_rows=fit.noise_rows[rows], alpha=left.alpha, log_evidence=value
    )
    return replace(rest, noise=replace(rest.noise, value=fit.choice.noise)), found


def _reduce_average(fit: Fit, posterior: KernelPosterior, rest: Task) -> tuple[Task, Fit]:
    """Back to the average, and then on with the later observations that stay.

    The columns of the later observations come after those of the average, which are zero in the later rows: the average
    stands in the first rows and columns as it was.
    """
    average = fit.average
    assert average is not None
    c, rows = rest.base.shape[1], average.rows
    start, k = rows // c, posterior.R.shape[1] - (len(posterior.R) - rows)
    first = take(rest, torch.arange(start))
    first = replace(first, noise=replace(first.noise, value=fit.choice.noise))
    R, signs = posterior.R[:rows, :k].clone(), posterior.signs[:k].clone()
    found = KernelPosterior(first.J, posterior.prior_variance, average.delta, R=R, signs=signs)
    noise, value = first.noise.rows(fit.choice.noise), average.log_evidence
    fit = replace(fit, posterior=found, noise_rows=noise, alpha=average.alpha, log_evidence=value)
    part: Any
    for part in rest.J.parts[1:] if isinstance(rest.J, Stack) else ():
        first, fit = extend(first, fit, take(rest, torch.arange(start, start + part.n)))
        start += part.n
    return first, fit


def _join_weights(first: Noise, second: Noise) -> Tensor | None:
    """The weights of the rows of both; None where each row counts once."""
    if first.weight is None and second.weight is None:
        return None
    both = [torch.ones_like(x.base) if x.weight is None else x.weight for x in (first, second)]
    return torch.cat(both)


def precisions(task: Task, fit: Fit) -> Tensor:
    """The diagonal blocks of ``(K + noise)^-1``, one for each example, (n, c, c)."""
    _check_factored("Leave-one-out predictions and influence", fit)
    return fit.posterior.precisions(task.J, fit.noise_rows, task.base.shape[1])


class LeftOut(NamedTuple):
    """Each example as all others predict it.

    Attributes:
        step: (n, c), the targets less their predictions.
        variance: (n, c), of an observation.
        score: (n,), the log density of the targets.
    """

    step: Tensor
    variance: Tensor
    score: Tensor


def leave_one_out(task: Task, noise: Tensor, alpha: Tensor, P: Tensor) -> LeftOut:
    """Predictions of each example from all others, in closed form.

    An example of weight w is left out w times, and its target is one observation.

    Args:
        task: The observations.
        noise: The variance of each observation over its weight, (n c,).
        alpha: ``(K + noise)^-1 r``, (n c,).
        P: The `precisions`, (n, c, c).
    """
    n, c = P.shape[:2]
    step = torch.linalg.solve(P, alpha.view(n, c, 1))[..., 0]
    C = torch.linalg.inv(P)  # of all w observations' average
    if task.noise.weight is not None:
        C = C + torch.diag_embed(((task.noise.weight - 1) * noise).view(n, c))
        P = torch.linalg.inv(C)
    energy = (step * (P @ step[..., None])[..., 0]).sum(1)
    score = 0.5 * (torch.linalg.slogdet(P)[1] - energy - c * LOG_2PI)
    return LeftOut(step, C.diagonal(dim1=1, dim2=2), score)


def smoother(task: Task, fit: Fit, J: Jacobian) -> Tensor:
    """A (m c, n c) with ``A r`` the shift of the posterior mean at the inputs of J: ``K(X*, X) (K + noise)^-1``."""
    _check_factored("Influence", fit)
    return fit.posterior.smoother(task.J, fit.noise_rows, J)


def estimate_rounding(task: Task, fit: Fit, eps: float) -> float:
    r"""How far rounding inside the network moves the posterior mean at new inputs, in posterior standard deviations.

    Rounding moves each row :math:`\phi_j` of ``Phi = J S^(1/2)`` by about :math:`\epsilon |\phi_j|`, in a random
    direction. To first order the mean at a row :math:`\phi_*` then moves by :math:`\phi_*^\top H^{-1} E^\top \alpha`,
    where E holds those errors. :math:`|H^{-1/2} \phi_*|` is the posterior standard deviation, and no eigenvalue of H is
    below one:

    .. math:: |\phi_*^\top H^{-1} E^\top \alpha| \le \mathrm{std}_* \, |E^\top \alpha|, \qquad
              |E^\top \alpha|^2 \approx \epsilon^2 \sum_j K_{jj} \alpha_j^2

    Little noise makes :math:`\alpha` large. The size of the kernel beside the noise does not matter otherwise.

    Args:
        task: The observations.
        fit: Their fit.
        eps: The relative rounding of a row.
    """
    squares = task.J.gram_diag(scale=fit.variance) * fit.alpha.square()
    return eps * float(squares.sum().sqrt())


def flow(task: Task, fit: Fit) -> Any:
    """The displacement (p,) of gradient flow as a function of time, in the smaller of the two spaces."""
    rows, p = task.J.shape
    d, w = fit.variance.sqrt(), task.noise.weight
    _check_factored("The path of gradient flow", fit)
    if rows <= p:
        root = torch.ones_like(task.r) if w is None else w.sqrt()
        eigenvalues, Q = torch.linalg.eigh(root[:, None] * task.J.gram(scale=fit.variance) * root)
        return _Flow(task.J, fit.variance, eigenvalues, root[:, None] * Q, Q.T @ (root * task.r))
    G = d[:, None] * task.J.normal(torch.diag(d), w)
    eigenvalues, Q = torch.linalg.eigh(0.5 * (G + G.T))
    return _Flow(None, d, eigenvalues, Q, Q.T @ (d * (task.J.T @ (task.r if w is None else w * task.r))))


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


def _check_factored(what: str, fit: Fit) -> None:
    if not fit.posterior.factored:
        raise NotImplementedError(
            f"{what} need a dense solver, and this fit used {fit.solver!r}. Use solver='function' or 'weight', or "
            "fewer examples."
        )
