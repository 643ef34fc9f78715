"""The evidence and its maximum: against dense densities, finite differences, and searches from many starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from linnet.inference import Choice, SolverSettings
from linnet.inference.evidence.gaussian import (
    KernelSpectrum,
    KernelTask,
    choose_by_kernels,
    choose_by_moments,
    choose_one,
    decompose,
    dense_floor,
    exact_spectrum,
    join_spectra,
    kernel_terms,
    moment_terms,
    weight_spectrum,
)
from linnet.inference.gaussian.iterative import lanczos_spectrum
from tests.support.drawn import normal

START = Choice((1.0, 1.0), (1.0,), math.nan)


def density(r: Tensor, Sigma: Tensor) -> float:
    """``log N(r | 0, Sigma)``."""
    mean = torch.zeros_like(r)
    return float(torch.distributions.MultivariateNormal(mean, Sigma).log_prob(r))


def data(m: int = 30, q: int = 50, *, scale: float = 0.5, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (m, q) whose lengths fall off, and residuals drawn from the model with this scale and noise."""
    Phi = normal(m, q, seed=seed) / torch.arange(1, q + 1)
    r = scale**0.5 * (Phi @ normal(q, seed=seed + 1)) + noise**0.5 * normal(m, seed=seed + 2)
    return Phi, r


def brute(fn: Callable[[list[float]], float], count: int) -> float:
    """The largest value of a function of ``count`` logarithms, by local searches from many starts."""
    starts = 6 * torch.rand(8, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 4
    found = [
        minimize(lambda x: -fn(x), x0, method="L-BFGS-B", bounds=[(-25, 15)] * count, options={"ftol": 1e-14}).fun
        for x0 in starts.numpy()
    ]
    return -min(found)


# Spectra.


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_spectra_give_the_density(shape: tuple[int, int]) -> None:
    Phi, r = data(*shape)
    K = Phi @ Phi.T
    exact = exact_spectrum(K, r)
    weight = weight_spectrum(decompose(Phi.T @ Phi, Phi.T @ r), norm2=float(r @ r), m=len(r))
    for s, v in [(1.0, 1.0), (0.01, 3.0), (20.0, 0.1)]:
        want = density(r, s * K + v * torch.eye(len(r)).double())
        assert exact.log_evidence(s, v) == pytest.approx(want, rel=1e-10)
        assert weight.log_evidence(s, v) == pytest.approx(want, rel=1e-10)
    assert exact.m == len(r)
    assert weight.m == pytest.approx(len(r), rel=1e-12)
    assert float(weight.energies.sum()) == pytest.approx(float(r @ r), rel=1e-12)


def test_the_rounded_eigenvalues_of_a_singular_kernel_count_as_zero() -> None:
    Phi = torch.ones(6, 1, dtype=torch.float64)
    found = exact_spectrum(Phi @ Phi.T, normal(6))
    assert float(found.nodes.min()) >= 0
    assert float(found.nodes.max()) == pytest.approx(6)
    small = weight_spectrum(decompose(torch.full((3, 3), 2.0).double(), torch.full((3,), 1.0).double()), norm2=5.0, m=9)
    assert int((small.nodes > 0).sum()) == 1


def test_log_evidences_of_tasks_add_up() -> None:
    spectra = []
    for seed in (0, 10, 20):
        Phi, r = data(10 + seed, seed=seed)
        spectra.append(exact_spectrum(Phi @ Phi.T, r))
    both = join_spectra(spectra)
    assert both.log_evidence(0.3, 0.2) == pytest.approx(sum(s.log_evidence(0.3, 0.2) for s in spectra), rel=1e-12)
    assert choose_one(both).log_evidence <= sum(choose_one(s).log_evidence for s in spectra) + 1e-9


def test_lanczos_spectrum_is_close_to_the_exact_one() -> None:
    Phi, r = data(200, 60)
    K = Phi @ Phi.T
    exact = exact_spectrum(K, r)
    found = lanczos_spectrum(lambda V: K @ V, r, SolverSettings(probes=64), steps=70)
    assert found.m == pytest.approx(200, rel=1e-10)
    assert float(found.energies.sum()) == pytest.approx(float(r @ r), rel=1e-10)
    for s, v in [(0.5, 0.1), (5.0, 0.01), (0.01, 1.0)]:
        # The fit is exact, since 70 steps exhaust the 60 directions; the log determinant is estimated by 64 probes:
        # each has a variance of 2 |log(1 + s K / v)|_F^2, and three standard errors are allowed.
        logs = torch.log1p(s * exact.nodes / v)
        error = 0.5 * 3 * float(2 * logs.square().sum()) ** 0.5 / 64**0.5
        assert abs(found.log_evidence(s, v) - exact.log_evidence(s, v)) < error
    chosen, wanted = choose_one(found), choose_one(exact)
    lost = wanted.log_evidence - exact.log_evidence(chosen.scales[0], chosen.noise[0])
    assert 0 <= lost + 1e-9 < 0.2


# One scale and one noise.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [1e-3, 0.1, 10.0])
def test_best_is_the_global_maximum(seed: int, noise: float) -> None:
    Phi, r = data(25, 40, noise=noise, seed=100 * seed)
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    found = choose_one(spectrum)
    assert found.log_evidence == pytest.approx(spectrum.log_evidence(found.scales[0], found.noise[0]), rel=1e-10)
    want = brute(lambda x: spectrum.log_evidence(math.exp(x[0]), math.exp(x[1])), 2)
    assert found.log_evidence >= want - 1e-7
    kept = choose_one(spectrum, scale=0.5)
    assert kept.scales == (0.5,)
    assert kept.log_evidence >= brute(lambda x: spectrum.log_evidence(0.5, math.exp(x[0])), 1) - 1e-7
    kept = choose_one(spectrum, noise=noise)
    assert kept.noise == (noise,)
    assert kept.log_evidence >= brute(lambda x: spectrum.log_evidence(math.exp(x[0]), noise), 1) - 1e-7
    assert kept.log_evidence <= found.log_evidence + 1e-9


def test_what_is_given_is_kept() -> None:
    Phi, r = data()
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    found = choose_one(spectrum, scale=0.7, noise=0.2)
    assert found == Choice((0.7,), (0.2,), spectrum.log_evidence(0.7, 0.2))


def test_the_best_is_a_stationary_point() -> None:
    Phi, r = data(noise=0.3)
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    found = choose_one(spectrum)
    s, v = found.scales[0], found.noise[0]
    at = spectrum.log_evidence(s, v)
    for a, b in [(1.001, 1.0), (0.999, 1.0), (1.0, 1.001), (1.0, 0.999), (1.001, 1.001)]:
        assert 0 < at - spectrum.log_evidence(s * a, v * b) < 1e-3
    assert list(found.path) == sorted(found.path)


def test_without_signal_everything_is_noise() -> None:
    # Residuals orthogonal to every feature.
    Phi = torch.eye(20, 4, dtype=torch.float64)
    r = torch.cat([torch.zeros(4), torch.ones(16)]).double()
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    found = choose_one(spectrum)
    assert found.noise[0] == pytest.approx(0.8, rel=1e-3)
    assert found.scales[0] < 1e-6
    assert choose_one(spectrum, noise=1.0).scales[0] < 1e-6


def test_interpolation_takes_the_least_noise_that_rounding_leaves() -> None:
    Phi, _ = data(20, 5)
    r = Phi @ normal(5, seed=3)
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    found = choose_one(spectrum, floor=1e-12)
    assert found.noise[0] < 1e-12 * found.scales[0] * float(spectrum.nodes.max())
    # The scale is that of the five weights, whatever the noise was kept from.
    assert found.scales[0] == pytest.approx(float(normal(5, seed=3).square().mean()), rel=1e-3)


def test_a_floor_that_matters_is_said() -> None:
    Phi, _ = data(20, 5)
    r = Phi @ normal(5, seed=3)
    spectrum = exact_spectrum(Phi @ Phi.T, r)
    with pytest.warns(UserWarning, match=r"less noise than can be told from none.*dtype='float64'"):
        choose_one(spectrum, floor=1e-5)
    with pytest.warns(UserWarning, match="less noise than can be told from none"):
        choose_one(spectrum, scale=1.0, floor=1e-5)
    with pytest.warns(UserWarning, match="less noise than can be told from none"):
        choose_one(exact_spectrum(Phi @ Phi.T, 1e6 * r), noise=1e-3, floor=1e-5)
    problem = KernelTask({"a": (Phi @ Phi.T).float()}, r.float(), torch.zeros(20, dtype=torch.long))
    with pytest.warns(UserWarning, match="less noise than can be told from none"):
        choose_by_kernels([problem], start=Choice((1.0,), (1.0,), math.nan))


def test_one_noise_of_several_that_stops_at_its_floor_is_said() -> None:
    Phi, output = normal(40, 3, seed=1), torch.arange(40) % 2
    r = Phi @ normal(3, seed=2) + output * normal(40, seed=3)
    task = KernelTask({"a": (Phi @ Phi.T).float()}, r.float(), output)
    with pytest.warns(UserWarning, match="less noise than can be told from none"):
        found = choose_by_kernels([task], scales=(1.0,), start=Choice((1.0,), (1.0, 1.0), math.nan))
    assert found.noise[0] < 1e-2 and found.noise[1] > 0.1


def test_the_floor_grows_with_the_rows() -> None:
    eps = torch.finfo(torch.float32).eps
    assert dense_floor(300, torch.float32) == 4 * 300 * eps
    assert dense_floor(2, torch.float32) == 4 * 16 * eps


def test_targets_on_the_mean_are_refused() -> None:
    spectrum = exact_spectrum(torch.eye(3).double(), torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"equal the mean function exactly.*Give noise="):
        choose_one(spectrum)
    assert choose_one(spectrum, scale=1.0, noise=1.0).log_evidence == pytest.approx(
        density(torch.zeros(3).double(), 2 * torch.eye(3).double())
    )


def test_a_kernel_of_zero_has_no_scale() -> None:
    spectrum = exact_spectrum(torch.zeros(3, 3).double(), torch.ones(3).double())
    with pytest.raises(ValueError, match="no selected parameter moves the outputs"):
        choose_one(spectrum)
    assert choose_one(spectrum, scale=1.0).noise == (1.0,)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.floats(-6, 6))
def test_units_do_not_matter(seed: int, unit: float) -> None:
    Phi, r = data(12, 20, noise=0.5, seed=seed)
    factor = 10.0**unit
    one, other = choose_one(exact_spectrum(Phi @ Phi.T, r)), choose_one(exact_spectrum(Phi @ Phi.T, factor * r))
    assert other.log_evidence == pytest.approx(one.log_evidence - 12 * math.log(factor), abs=1e-7)
    assert other.noise[0] == pytest.approx(one.noise[0] * factor**2, rel=1e-4)


# Several scales and noises.


def problem(seed: int = 0, *, scales: tuple[float, ...] = (0.5, 0.05), noise: tuple[float, ...] = (0.1,)) -> KernelTask:
    m = 24
    output = torch.arange(m) % len(noise)
    features = [normal(m, 7 + i, seed=seed + i) for i in range(len(scales))]
    r = torch.tensor(noise, dtype=torch.float64)[output].sqrt() * normal(m, seed=seed + 50)
    for i, (Phi, s) in enumerate(zip(features, scales, strict=True)):
        r = r + s**0.5 * (Phi @ normal(Phi.shape[1], seed=seed + 60 + i))
    return KernelTask({f"layer{i}": Phi @ Phi.T for i, Phi in enumerate(features)}, r, output)


def sigma(p: KernelTask, s: list[float], v: list[float]) -> Tensor:
    total = sum(a * K for a, K in zip(s, p.parts.values(), strict=True))
    return total + torch.diag(torch.tensor(v, dtype=torch.float64)[p.output])


def gradient(p: KernelTask, s: Sequence[float], v: Sequence[float]) -> tuple[float, list[float], list[float]]:
    """The log evidence and its derivatives; minus infinity where there is none."""
    try:
        terms = kernel_terms(p, s, v)
    except ArithmeticError:
        return -math.inf, [0.0] * len(s), [0.0] * len(v)
    return terms.value, [slope.value for slope in terms.scales], [slope.value for slope in terms.noise]


def test_gradients_are_those_of_finite_differences() -> None:
    p = problem(noise=(0.1, 0.4, 2.0))
    s, v = [0.3, 0.2], [0.2, 0.3, 0.5]
    value, ds, dv = gradient(p, s, v)
    assert value == pytest.approx(density(p.r, sigma(p, s, v)), rel=1e-10)
    h = 1e-5
    for i, slope in enumerate([*ds, *dv]):
        moved = []
        for sign in (1, -1):
            x = [*s, *v]
            x[i] *= math.exp(sign * h)
            moved.append(gradient(p, x[:2], x[2:])[0])
        assert slope == pytest.approx((moved[0] - moved[1]) / (2 * h), rel=1e-6, abs=1e-8)


def test_a_matrix_that_is_not_positive_definite_has_no_evidence() -> None:
    p = KernelTask({"a": -torch.eye(3).double()}, torch.ones(3).double(), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ArithmeticError, match=r"not positive definite in its precision\. Give more noise"):
        kernel_terms(p, [1.0], [0.5])


@pytest.mark.parametrize("noise", [(0.1,), (0.05, 1.0)])
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_best_dense_is_the_global_maximum(seed: int, noise: tuple[float, ...]) -> None:
    p = problem(seed, noise=noise)
    shared = choose_one(exact_spectrum(sum(p.parts.values()), p.r))
    start = Choice(shared.scales * 2, shared.noise * len(noise), shared.log_evidence)
    found = choose_by_kernels([p], start=start)
    assert found.log_evidence == pytest.approx(density(p.r, sigma(p, found.scales, found.noise)), rel=1e-9)
    assert found.log_evidence >= shared.log_evidence - 1e-9
    count = len(noise)
    want = brute(lambda x: gradient(p, [math.exp(t) for t in x[:2]], [math.exp(t) for t in x[2:]])[0], 2 + count)
    assert found.log_evidence >= want - 1e-5


def test_best_dense_keeps_what_is_given() -> None:
    p = problem(noise=(0.1, 0.5))
    start = Choice((1.0, 1.0), (1.0, 1.0), math.nan)
    scaled = choose_by_kernels([p], start=start, noise=(0.1, 0.5))
    assert scaled.noise == (0.1, 0.5)
    want = brute(lambda x: gradient(p, [math.exp(t) for t in x], (0.1, 0.5))[0], 2)
    assert scaled.log_evidence >= want - 1e-5
    noisy = choose_by_kernels([p], start=start, scales=(0.5, 0.05))
    assert noisy.scales == (0.5, 0.05)
    want = brute(lambda x: gradient(p, (0.5, 0.05), [math.exp(t) for t in x])[0], 2)
    assert noisy.log_evidence >= want - 1e-5
    both = choose_by_kernels([p], start=start, scales=(0.5, 0.05), noise=(0.1, 0.5))
    assert both.log_evidence == pytest.approx(gradient(p, (0.5, 0.05), (0.1, 0.5))[0])
    free = choose_by_kernels([p], start=start)
    assert free.log_evidence >= max(scaled.log_evidence, noisy.log_evidence)


def test_a_layer_without_signal_is_switched_off() -> None:
    p = problem(scales=(0.5, 0.0))
    found = choose_by_kernels([p], start=START)
    assert found.scales[0] > 0.1
    assert found.scales[1] < 0.02 * found.scales[0]


def test_a_signal_in_one_layer_is_found_from_a_start_without_any() -> None:
    # Nearly all of the shared kernel is a layer that explains nothing, so that the best shared scale is zero.
    quiet, loud = torch.eye(24, 12, dtype=torch.float64), normal(24, 3, seed=2)
    r = torch.cat([torch.zeros(12), normal(12, seed=5)]).double() * 0.1
    loud[:12] = 0
    r = r + loud @ torch.tensor([1.0, -1.0, 1.0]).double()
    p = KernelTask({"quiet": 100 * quiet @ quiet.T, "loud": 1e-3 * loud @ loud.T}, r, torch.zeros(24, dtype=torch.long))
    shared = choose_one(exact_spectrum(sum(p.parts.values()), r))
    found = choose_by_kernels([p], start=Choice(shared.scales * 2, shared.noise, shared.log_evidence))
    assert found.log_evidence > shared.log_evidence + 5


def test_tasks_share_their_hyperparameters() -> None:
    problems = [problem(seed) for seed in (0, 300)]
    found = choose_by_kernels(problems, start=START)

    def total(x: list[float]) -> float:
        s, v = [math.exp(t) for t in x[:2]], [math.exp(x[2])]
        return sum(gradient(p, s, v)[0] for p in problems)

    assert found.log_evidence >= brute(total, 3) - 1e-5


def test_several_hyperparameters_when_interpolation_is_possible() -> None:
    Phi = [normal(20, 3, seed=i) for i in range(2)]
    r = Phi[0] @ normal(3, seed=5) + Phi[1] @ normal(3, seed=6)
    p = KernelTask({"a": Phi[0] @ Phi[0].T, "b": Phi[1] @ Phi[1].T}, r, torch.zeros(20, dtype=torch.long))
    shared = choose_one(exact_spectrum(sum(p.parts.values()), r), floor=dense_floor(len(r), r.dtype))
    found = choose_by_kernels([p], start=Choice(shared.scales * 2, shared.noise, math.nan))
    assert found.log_evidence >= shared.log_evidence
    trace = sum(s * float(K.diagonal().sum()) for s, K in zip(found.scales, p.parts.values(), strict=True))
    assert torch.finfo(torch.float64).eps * trace < found.noise[0] < 1e-12 * trace
    # Given enough noise to leave room for it, the scales are those of the weights.
    for scale, seed in zip(choose_by_kernels([p], start=START, noise=(1e-9,)).scales, (5, 6), strict=True):
        assert scale == pytest.approx(float(normal(3, seed=seed).square().mean()), rel=1e-3)


@pytest.mark.parametrize("noise", [(0.1,), (0.05, 1.0)])
@pytest.mark.parametrize("fixed", [{}, {"noise": 1}, {"scales": 1}])
def test_weight_space_finds_what_function_space_finds(noise: tuple[float, ...], fixed: dict[str, int]) -> None:
    tasks, problems = [], []
    sizes = [7, 8]
    group = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    for seed in (0, 400):
        p = problem(seed, noise=noise)
        Phi = torch.cat([normal(24, q, seed=seed + i) for i, q in enumerate(sizes)], 1)
        problems.append(p)
        moments = []
        for i in range(len(noise)):
            part, r = Phi[p.output == i], p.r[p.output == i]
            moments.append((part.T @ part, part.T @ r, float(r @ r), len(r)))
        tasks.append(moments)
    start = Choice((1.0, 1.0), (1.0,) * len(noise), math.nan)
    given: dict[str, tuple[float, ...]] = {}
    if "noise" in fixed:
        given["noise"] = noise
    if "scales" in fixed:
        given["scales"] = (0.5, 0.05)
    dense = choose_by_kernels(problems, start=start, **given)
    weight = choose_by_moments(tasks, group, start=start, **given)
    assert weight.log_evidence == pytest.approx(dense.log_evidence, abs=1e-7)
    assert weight.scales == pytest.approx(dense.scales, rel=1e-2)
    assert weight.noise == pytest.approx(dense.noise, rel=1e-3)


def test_gradients_in_weight_space() -> None:
    # With no step to make, the search is an evaluation: the end of a search is a stationary point in every direction.
    p = problem(noise=(0.1, 0.5))
    Phi = torch.cat([normal(24, q, seed=i) for i, q in enumerate([7, 8])], 1)
    moments = []
    for i in range(2):
        part, r = Phi[p.output == i], p.r[p.output == i]
        moments.append((part.T @ part, part.T @ r, float(r @ r), len(r)))
    group = torch.repeat_interleave(torch.arange(2), torch.tensor([7, 8]))
    found = choose_by_moments([moments], group, start=Choice((1.0, 1.0), (1.0, 1.0), math.nan))
    _, ds, dv = gradient(p, found.scales, found.noise)
    assert max(map(abs, [*ds, *dv])) < 1e-2
    at = choose_by_moments([moments], group, start=START, scales=(0.3, 0.2), noise=(0.2, 0.4))
    assert at.log_evidence == pytest.approx(gradient(p, (0.3, 0.2), (0.2, 0.4))[0], rel=1e-10)


def test_weight_space_with_one_scale() -> None:
    Phi, r = data(40, 10)
    moments = [(Phi.T @ Phi, Phi.T @ r, float(r @ r), 40)]
    found = choose_by_moments([moments], None, start=Choice((1.0,), (1.0,), math.nan))
    assert found.log_evidence == pytest.approx(choose_one(exact_spectrum(Phi @ Phi.T, r)).log_evidence, abs=1e-7)


def test_a_spectrum_is_what_it_says() -> None:
    one = torch.ones(2, dtype=torch.float64)
    spectrum = KernelSpectrum(3 * one, 2 * one, one, 5 * one)
    want = -0.5 * (4 * math.log(2 * 3 + 0.5) + 10 / (2 * 1 + 0.5) + 4 * math.log(2 * math.pi))
    assert spectrum.log_evidence(2.0, 0.5) == pytest.approx(want)


# Floors of the search.


def interpolated(rows: tuple[int, ...], unit: float = 1.0) -> list[tuple[list[Tensor], Tensor]]:
    """Features of two scales and residuals without noise, for each task."""
    found = []
    for i, m in enumerate(rows):
        Phi = [unit * normal(m, 3, seed=10 * i + j) for j in range(2)]
        found.append((Phi, Phi[0] @ normal(3, seed=5) + Phi[1] @ normal(3, seed=6)))
    return found


def searched(tasks: list[tuple[list[Tensor], Tensor]], space: str, **given: Any) -> Choice:
    """Two scales and one noise, from a start in the middle."""
    start = Choice((1.0, 1.0), (float(tasks[0][1].square().mean()),), math.nan)
    if space == "function":
        problems = [
            KernelTask({str(j): A @ A.T for j, A in enumerate(Phi)}, r, torch.zeros(len(r), dtype=torch.long))
            for Phi, r in tasks
        ]
        return choose_by_kernels(problems, start=start, **given)
    whole = [(torch.cat(Phi, 1), r) for Phi, r in tasks]
    moments = [[(A.T @ A, A.T @ r, float(r @ r), len(r))] for A, r in whole]
    return choose_by_moments(moments, torch.arange(6) // 3, start=start, **given)


@pytest.mark.parametrize("space", ["function", "weight"])
@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("rows", [(20,), (20, 40), (40, 20)])
def test_noise_stops_at_its_share_of_the_largest_trace(space: str, unit: float, rows: tuple[int, ...]) -> None:
    tasks = interpolated(rows, unit)
    found = searched(tasks, space, scales=(1.0, 1.0))
    traces = [max(float(Phi[j].square().sum()) for Phi, _ in tasks) for j in range(2)]
    assert found.noise[0] == pytest.approx(dense_floor(max(rows), torch.float64) * sum(traces), rel=1e-6)
    assert found.scales == (1.0, 1.0)


@pytest.mark.parametrize("space", ["function", "weight"])
def test_scales_stop_where_a_given_noise_would_be_rounding(space: str) -> None:
    [(Phi, r)] = interpolated((20,))
    found = searched([(Phi, 1e8 * r)], space, noise=(1e-4,))
    assert found.noise == (1e-4,)
    for scale, A in zip(found.scales, Phi, strict=True):
        share = scale * 16 * torch.finfo(torch.float64).eps * 2 * float(A.square().sum()) / 1e-4
        assert share == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("space", ["function", "weight"])
def test_an_assumed_noise_is_part_of_what_is_maximized(space: str) -> None:
    """At the maximum of log p - a / (2 v) the derivative of the evidence is -a / (2 v); half of it is floored."""
    tasks, a = interpolated((30,)), 0.7
    found = searched(tasks, space, assumed=(a,))
    [(Phi, r)] = tasks
    p = KernelTask({str(j): A @ A.T for j, A in enumerate(Phi)}, r, torch.zeros(30, dtype=torch.long))
    value, ds, dv = gradient(p, found.scales, found.noise)
    assert dv[0] == pytest.approx(-a / (2 * found.noise[0]), rel=1e-4)
    assert ds == pytest.approx([0.0, 0.0], abs=1e-3)
    assert found.log_evidence == pytest.approx(value, rel=1e-8)
    assert found.floored == (True,)
    noisy = [(Phi, r + 3 * normal(30, seed=8))]
    assert searched(noisy, space, assumed=(1e-9,)).floored == (False,)


def test_scales_are_sought_again_where_noise_stops() -> None:
    """They are close to those of the weights, and not where the noise was kept from them."""
    found = searched(interpolated((60,)), "function")
    for scale, seed in zip(found.scales, (5, 6), strict=True):
        assert 0.5 < scale / float(normal(3, seed=seed).square().mean()) < 2


@pytest.mark.parametrize("rows", [20, 60])
def test_the_search_does_not_stop_early_where_noise_does(rows: int) -> None:
    """A scale that is too large falls although another scale, and the noise, lie at their bounds."""
    [(Phi, r)] = interpolated((rows,))
    p = KernelTask({str(j): A @ A.T for j, A in enumerate(Phi)}, r, torch.zeros(rows, dtype=torch.long))
    shared = choose_one(exact_spectrum(sum(p.parts.values()), r), floor=dense_floor(rows, r.dtype))
    found = choose_by_kernels([p], start=Choice(shared.scales * 2, shared.noise, math.nan))
    assert found.log_evidence > shared.log_evidence + 0.5  # 0.08 where the search stopped at its first step
    whole = torch.cat(Phi, 1)
    moments = [(whole.T @ whole, whole.T @ r, float(r @ r), rows)]

    def value(*scales: float) -> float:  # in weight space, where rounding is small
        return moment_terms(moments, torch.arange(6) // 3, scales, found.noise).value

    grid = [value(a, found.scales[1]) for a in torch.logspace(-2, 1, 61).tolist()]
    # The search sees a kernel that rounds by eps of its norm. Beside so little noise, rounding with random signs moves
    # the two terms of the evidence by half of this each.
    K = sum(scale * part for scale, part in zip(found.scales, p.parts.values(), strict=True))
    rounding = rows**0.5 * torch.finfo(r.dtype).eps * float(torch.linalg.matrix_norm(K, 2)) / found.noise[0]
    assert rounding < 0.5
    assert value(*found.scales) >= max(grid) - rounding


def test_a_start_with_too_little_noise_bounds_no_scale() -> None:
    features = [normal(20, 15, seed=i) for i in range(2)]
    r = features[0] @ normal(15, seed=5) + 0.3 * features[1] @ normal(15, seed=6) + 0.5 * normal(20, seed=7)
    p = KernelTask({str(i): A @ A.T for i, A in enumerate(features)}, 30 * r, torch.zeros(20, dtype=torch.long))
    assert max(choose_by_kernels([p], start=Choice((1.0, 1.0), (1e-13,), math.nan)).scales) > 5
