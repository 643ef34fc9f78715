"""Fine-tuning: the race of learning rates, temperatures, and losses that no example judges for itself."""

import copy
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from linnet.adaptation.fine_tuning import Runner, Tuning, _judge, fine_tune, measure_losses
from linnet.adaptation.network import ScaledNetwork, divide_outputs, find_temperature
from linnet.data import as_source
from linnet.likelihoods import Bernoulli, Categorical, Gaussian


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x - x * x  # not a number where the square overflows


def tuning(n: int = 60) -> tuple[nn.Module, Tuning]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    X = torch.randn(n, 3, dtype=torch.float64)
    y = (X[:, 0] * X[:, 1] > 0).long()
    return model, Tuning(
        as_source(X, model.forward), y, Categorical(), torch.arange(0, n - 20), torch.arange(n - 20, n), 0
    )


def test_the_start_and_the_random_numbers_stay_and_the_least_loss_is_kept():
    model, given = tuning(200)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    found = fine_tune(model, given, rates=(1e-2, 1e-3))
    assert found is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not found.network.training
    assert float(given.losses(found.network).mean()) < float(given.losses(model).mean())
    again = fine_tune(model, given, rates=(1e-2, 1e-3))
    assert again is not None and (again.rate, again.rounds) == (found.rate, found.rounds)
    assert torch.equal(again.losses, found.losses)


def test_no_network_where_no_rate_helps():
    model, given = tuning()
    with torch.no_grad():
        fitted = fine_tune(model, given, rates=(1e-2,))
        assert fitted is not None
    assert fine_tune(fitted.network, given, rates=(1e3,)) is None
    assert fine_tune(model, given, rates=(1e-2,), deadline=time.perf_counter() - 1) is None


def test_a_classifier_is_calibrated_on_held_out_examples_and_a_regression_is_not():
    model, given = tuning()
    sure = divide_outputs(model, 0.01)
    f = sure(next(given.source.batches(60)).args[0])[given.held]
    found = given.calibrate(sure)
    T = find_temperature(Categorical(), f.detach(), given.targets[given.held], least=1.0)
    assert isinstance(found, ScaledNetwork) and T > 1
    assert float(found.temperature) == pytest.approx(0.01 * T, rel=1e-12)
    assert replace(given, likelihood=Gaussian(1.0)).calibrate(sure) is sure


@pytest.mark.parametrize(("n", "steps"), [(10, 16), (32, 16), (40, 13 * 2), (2048, 64), (3000, 64)])
def test_a_round_has_16_to_64_steps(monkeypatch, n, steps):
    """Batches of 32 examples, and larger ones where there would be more than 64 of them."""
    model, given = tuning(n + 20)
    runner, sizes = Runner(model, 1e-3, 0), []
    step = runner.optimizer.step

    def count(closure):
        sizes.append(closure)
        return step(closure)

    monkeypatch.setattr(runner.optimizer, "step", count)
    assert runner.run(replace(given, part=torch.arange(n)))
    assert len(sizes) == steps and runner.rounds == 1 and len(runner.path) == 1


def test_rates_that_diverge_are_given_up():
    model, given = tuning()
    found = fine_tune(model, given, rates=(1e300, 1e-2))
    assert found is not None and found.rate == 1e-2
    assert fine_tune(model, given, rates=(1e300,)) is None
    runner = Runner(copy.deepcopy(model), 1e308, 0)
    assert runner.run(given) is False and runner.rounds == 0  # the loss of a step is no number
    model, given = tuning()
    X = next(iter(given.source.batches(60))).args[0].clone()
    X[-1] = 1e200  # held out: the outputs of this one example are no numbers
    model.insert(0, nn.Linear(3, 3, bias=False).double())
    model.insert(1, Square())
    given = replace(given, source=as_source(X, model.forward))
    assert Runner(copy.deepcopy(model), 1e-2, 0).run(given) is False
    assert fine_tune(model, given, rates=(1e-2,)) is None


@pytest.mark.parametrize(("n", "steps"), [(10, 16), (1000, 32), (5000, 64)])
def test_a_round_sees_few_examples_several_times_and_many_in_large_batches(n, steps):
    model, given = tuning(n + 20)
    runner, count = Runner(copy.deepcopy(model), 1e-4, 0), [0]

    def note(*_: object) -> None:
        count[0] += 1

    runner.optimizer.register_step_post_hook(note)
    assert runner.run(given) and (runner.rounds, runner.at) == (1, 1)
    assert count[0] == steps


def test_half_of_the_examples_chooses_for_the_other_half():
    every = torch.tensor([[0.0, 9.0, 0.0, 9.0], [5.0, 1.0, 5.0, 1.0]], dtype=torch.float64)
    # The even examples like the first round, which is bad for the odd ones, and the other way round.
    assert _judge(every).tolist() == [5.0, 9.0, 5.0, 9.0]


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(1.0)])
def test_losses_take_temperature_and_noise_from_the_other_half(likelihood):
    f = 3 * torch.randn(40, 3, dtype=torch.float64)
    y = torch.randint(3, (40,)) if isinstance(likelihood, Categorical) else torch.randn(40, 3, dtype=torch.float64)
    found = measure_losses(likelihood, f, y)
    for mine, others in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        if isinstance(likelihood, Categorical):
            T = find_temperature(likelihood, f[others], y[others], least=1.0)
            expected = -(f[mine] / T).log_softmax(1).gather(1, y[mine][:, None])[:, 0]
        else:
            noise = (y[others] - f[others]).square().mean(0)
            expected = -torch.distributions.Normal(f[mine], noise.sqrt()).log_prob(y[mine]).sum(1)
        torch.testing.assert_close(found[mine], expected, rtol=1e-9, atol=1e-12)


def test_temperatures_are_those_of_least_penalized_loss():
    f, y = 4 * torch.randn(50, 3, dtype=torch.float64), torch.randint(3, (50,))
    found = find_temperature(Categorical(), f, y)

    def loss(T: float) -> float:
        return 2 * math.log(T) ** 2 - float(Categorical().log_prob(f / T, y).sum())

    assert loss(found) <= min(loss(found * factor) for factor in (0.99, 1.01)) + 1e-9
    sure = torch.tensor([[5.0], [5.0]], dtype=torch.float64)
    assert find_temperature(Bernoulli(), sure, torch.ones(2, 1, dtype=torch.float64), least=1.0) == pytest.approx(
        1, rel=1e-3
    )


def test_temperatures_multiply():
    inner = nn.Linear(2, 3)
    twice = divide_outputs(divide_outputs(inner, 2.0), 3.0)
    assert isinstance(twice, ScaledNetwork) and twice.network is inner
    x = torch.randn(4, 2)
    torch.testing.assert_close(twice(x), inner(x) / 6)
