"""Logistic regression on a device, against scikit-learn."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from experiments.common.logistic import fit_logistic, fit_probe
from tests.support.drawn import normal

N, D, C = 200, 30, 4
Z = normal(N, D) * torch.logspace(0, -2, D, dtype=torch.float64)
Y = (3 * Z @ normal(D, C, seed=1) + normal(N, C, seed=2)).argmax(1)
PENALTIES = torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64)


def reference(penalty: float, count: int = N) -> torch.Tensor:
    """Logits of scikit-learn's regression on the first examples, centered over classes."""
    found = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000).fit(Z[:count].numpy(), Y[:count].numpy())
    f = torch.as_tensor(found.decision_function(Z.numpy()))
    return f - f.mean(1, keepdim=True)


def test_all_penalties_at_once_are_the_regressions_of_scikit_learn():
    found = fit_logistic(Z, Y, PENALTIES, classes=C, tolerance=1e-8)
    assert bool(found.converged.all()) and found.steps < 500
    for f, penalty in zip(found.outputs(Z), PENALTIES.tolist(), strict=True):
        torch.testing.assert_close(f - f.mean(1, keepdim=True), reference(penalty), rtol=0, atol=1e-5)


def test_a_kernel_takes_the_same_steps_as_its_features():
    a = fit_logistic(Z, Y, PENALTIES, classes=C)
    b = fit_logistic(Z @ Z.T, Y, PENALTIES, classes=C, kernel=True)
    assert a.steps == b.steps
    torch.testing.assert_close(b.outputs(Z @ Z.T), a.outputs(Z), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", [False, True])
def test_examples_of_weight_zero_do_not_count(kernel):
    weight = (torch.arange(N) < 150).double()
    E = Z @ Z.T if kernel else Z
    found = fit_logistic(E, Y, PENALTIES[1:2], classes=C, kernel=kernel, weight=weight, tolerance=1e-8)
    (f,) = found.outputs(E)
    torch.testing.assert_close(f - f.mean(1, keepdim=True), reference(1.0, 150), rtol=0, atol=1e-5)


def test_steps_that_do_not_suffice_are_told():
    found = fit_logistic(Z, Y, PENALTIES, classes=C, tolerance=1e-12, steps=3)
    assert found.steps == 3 and not bool(found.converged.any())


def test_the_penalty_of_a_probe_is_chosen_by_held_out_examples():
    y = torch.arange(200) % 2
    E = torch.cat([normal(200, 3) + 2 * normal(2, 3, seed=1)[y], normal(200, 150, seed=5), torch.ones(200, 1)], 1)
    each = [fit_probe(E, y, penalties=(penalty,)) for penalty in (10.0, 0.1, 1e-6)]
    best = max(each, key=lambda probe: probe.held_out)
    found = fit_probe(E, y, penalties=(10.0, 0.1, 1e-6))
    assert found.held_out == best.held_out > min(probe.held_out for probe in each) and found.penalty == best.penalty
    # Without a spread of each, the unit of the features is free.
    a, b = (fit_probe(k * E, y, penalties=(1.0,), standardize=False) for k in (1, 100))
    torch.testing.assert_close(a.logits(E), b.logits(100 * E), rtol=1e-6, atol=1e-6)


def test_a_probe_on_a_kernel_is_the_one_on_features_without_spread():
    new = normal(20, D, seed=7)
    a = fit_probe(Z, Y, penalties=(1.0, 0.1), classes=C, standardize=False)
    b = fit_probe((Z + 3) @ (Z + 3).T, Y, penalties=(1.0, 0.1), classes=C, kernel=True)  # which is centered
    assert a.held_out == b.held_out and a.penalty == b.penalty
    torch.testing.assert_close(b.logits((new + 3) @ (Z + 3).T), a.logits(new), rtol=1e-6, atol=1e-6)
