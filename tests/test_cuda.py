"""The zoo on a GPU: float64 against the dense Jacobian made on the CPU, float32 and tf32 within rounding."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import linnet
from linnet._common import arithmetic, memory
from linnet.inference.mode import adam
from linnet.probability import Categorical
from linnet.testing import check_operator, zoo

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch says where the first product of a process is one of autograd's.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

CASES = zoo()
TOLERANCES = {"highest": 1e-5, "products": 1e-3, "high": 5e-3, "bf16": 5e-2}


@pytest.mark.parametrize("name", CASES)
def test_zoo_in_float64(name: str) -> None:
    case = CASES[name]
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model, data = case.build(), case.data(5, 0)
    dense = case.dense(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fallbacks are tested on the CPU
        J = linnet.linearize(model.cuda(), output=case.output).jacobian(data, 2)
        # Llama's rotary embedding is float32, and so differs between the devices the reference and J are made on.
        # Weight norm differs by 2e-8 from its dense Jacobian made on the CPU; why is not established.
        check_operator(J, dense.cuda(), blocks=J.c, rtol=1e-6 if name in ("hf_llama", "weight_norm") else 1e-8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("precision", "tolerance"), list(TOLERANCES.items()))
@pytest.mark.parametrize("name", ["resnet", "unet", "convnext", "batch_norm2d", "densenet"])
def test_precisions(name: str, precision: str, tolerance: float, layout: torch.memory_format) -> None:
    case = CASES[name]
    model, data = case.build(), case.data(6, 0)
    exact = linnet.linearize(model, output=case.output).jacobian(data)
    single = case.build().float().cuda().to(memory_format=layout)
    x = data.float().cuda().to(memory_format=layout)
    J = linnet.linearize(single, output=case.output).jacobian(x, 4, precision=precision)
    V = torch.randn(exact.shape[1], 18, dtype=torch.float64)
    pairs = {
        "J V": (J @ V.float().cuda(), exact @ V),
        "J^T J V": (J.normal(V.float().cuda()), exact.normal(V)),
        "gram": (J.gram(), exact.gram()),
        "column norms": (J.column_norms(), exact.column_norms()),
    }
    for what, (found, reference) in pairs.items():
        error = (found.double().cpu() - reference).norm() / reference.norm()
        assert error < tolerance, f"{what}: {error:.1e}"


def test_precision_of_products_leaves_the_network_in_float32() -> None:
    case = CASES["resnet"]
    J = linnet.linearize(case.build().float().cuda(), output=case.output).jacobian(case.data(6, 0).float().cuda(), 4)
    coarse = J.in_precision("products")
    for op in (coarse, coarse.cached()):
        torch.testing.assert_close(op.outputs(), J.outputs(), rtol=0, atol=0)
        V = torch.randn(J.shape[1], 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        error = float((op @ V - J @ V).norm() / (J @ V).norm())
        assert 1e-6 < error < 1e-3


def test_precision_leaves_flags_as_they_were() -> None:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [place.fp32_precision for place in places], torch.backends.cuda.matmul.allow_tf32
    for precision in ("highest", "products", "high"):
        with arithmetic(precision, torch.device("cuda")):
            wanted = "ieee" if precision == "highest" else "tf32"
            assert [place.fp32_precision for place in places] == [wanted] * 2
        after = [place.fp32_precision for place in places], torch.backends.cuda.matmul.allow_tf32
        assert after == before


@pytest.mark.parametrize("structure", ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"])
def test_laplace_is_the_same_as_on_the_cpu(structure: str) -> None:
    def made(device: str) -> tuple[linnet.Laplace, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3),
                torch.nn.BatchNorm2d(4),
                torch.nn.Tanh(),
                torch.nn.Flatten(),
                torch.nn.Linear(64, 3),
            )
        X = torch.randn(30, 1, 6, 6, generator=generator)
        y = torch.randint(3, (30,), generator=generator)
        la = linnet.Laplace(model.eval().to(device), structure=structure, rank=8, size=20, dtype="float64")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is not trained
            la.fit(X.to(device), y.to(device))
        return la, X.to(device)

    (one, X), (two, x) = made("cpu"), made("cuda")
    close = {"rtol": 1e-5, "atol": 1e-6, "check_device": False}
    torch.testing.assert_close(two.predict_proba(x).cpu(), one.predict_proba(X), **close)
    torch.testing.assert_close(two.predict(x, return_cov=True)[1].cpu(), one.predict(X, return_cov=True)[1], **close)
    assert two.log_evidence() == pytest.approx(one.log_evidence(), rel=1e-5)
    assert two.sample(x, 3).device.type == "cuda"
    assert two.joint_log_likelihood(x, two._y, 2, draws=50) < 0


@pytest.mark.parametrize("origin", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["regressor", "weights", "classifier", "embedding", "kron", "samples"])
def test_files_go_from_one_device_to_the_other(tmp_path: Path, kind: str, origin: str) -> None:
    def network() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()

    def said(estimator: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == "embedding":
            return estimator.kernel(x)
        return torch.cat([part.flatten() for part in estimator.predict(x, return_std=True)])

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(20, 2, dtype=torch.float64, generator=generator)
    made = {
        "regressor": lambda m: linnet.TangentRegressor(m, dtype="float64"),
        "weights": lambda m: linnet.TangentRegressor(m, dtype="float64", solver="weight"),
        "classifier": lambda m: linnet.TangentClassifier(m, dtype="float64", inference="laplace"),
        "embedding": lambda m: linnet.FisherEmbedding(m, 4),
        "kron": lambda m: linnet.Laplace(m, "regression", "kron", dtype="float64", prior=1.0),
        "samples": lambda m: linnet.Laplace(m, "regression", "samples", dtype="float64", prior=1.0),
    }[kind](network().to(origin))
    targets = (y[:, 0] > 0).long() if kind == "classifier" else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not trained
        made.fit(x.to(origin), targets.to(origin))
    made.save(tmp_path / "a.safetensors")
    other = "cuda" if origin == "cpu" else "cpu"
    again = linnet.load(tmp_path / "a.safetensors", network().to(other))
    if kind == "classifier":
        found, wanted = again.predict_proba(x.to(other)), made.predict_proba(x.to(origin))
    else:
        found, wanted = said(again, x.to(other)), said(made, x.to(origin))
    assert found.device.type == other
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-6, atol=1e-8)


def test_a_share_of_the_memory_is_kept_to():
    device = torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        assert 0 < memory.free_memory(device) <= 0.05 * torch.cuda.mem_get_info()[1]
        assert memory.find_dense_budget("auto", device) <= 0.9 * 0.05 * torch.cuda.mem_get_info()[1]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert memory.free_memory(device) > 0.05 * torch.cuda.mem_get_info()[1]


def test_what_fits_memory_twice_is_kept_as_one_chunk() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).cuda()
    stored = rows(net, torch.randn(100, 3, device="cuda")).cached()
    assert len(stored.passes.chunks.pieces) == 1  # type: ignore[attr-defined]


def rows(net: torch.nn.Module, X: torch.Tensor, **settings: Any) -> linnet.Jacobian:
    return linnet.linearize(net).jacobian(X, progress=False, **settings)


@pytest.mark.parametrize("worth", [0, 2**29])
@pytest.mark.parametrize("k", [1, 3])
def test_own_convolutions_in_float32(monkeypatch: pytest.MonkeyPatch, worth: int, k: int) -> None:
    from benchmarks.models import ResNet18
    from linnet.jacobian.cuda import float32_convolution

    monkeypatch.setattr(float32_convolution, "WORTH", worth)
    torch.manual_seed(0)
    net, X = ResNet18(7).eval().cuda(), torch.randn(6, 3, 32, 32).cuda()
    V = torch.randn(sum(p.numel() for p in net.parameters()), k).cuda()
    exact = rows(copy.deepcopy(net).double(), X.double())
    wanted = [exact @ V.double(), exact.normal(V.double()), exact.gram()]
    for engine in ("auto", "autodiff", "rows"):
        J = rows(net, X, engine=engine)
        for op in (J, J.steady()):
            for found, reference in zip((op @ V, op.normal(V), op.gram()), wanted, strict=True):
                # A ReLU may be on the other side of its kink.
                assert (found.double() - reference).norm() < 1e-3 * reference.norm()


def test_steady_passes_are_the_same_in_all_chunks() -> None:
    from benchmarks.models import ResNet18

    torch.manual_seed(0)
    net, X = ResNet18(7).eval().cuda(), torch.randn(300, 3, 32, 32).cuda()
    wanted = rows(net, X).steady()
    V = torch.randn(wanted.shape[1], 2).cuda()
    f, product, few = wanted.outputs(), wanted.normal(V), torch.arange(20)
    K = wanted.subset(few).gram()
    for size in (1, 7, 128):
        J = rows(net, X, batch_size=size).steady()
        assert (J.outputs() - f).abs().max() <= 1e-6 * f.abs().max()
        assert (J.normal(V) - product).norm() < 2e-5 * product.norm()
        assert (J.in_precision("products").subset(few).gram() - K).norm() < 1e-4 * K.norm()


@pytest.mark.parametrize("size", [8, 30])
@pytest.mark.parametrize("form", ["as read", "activations", "factors"])
def test_steps_of_adam(form: str, size: int) -> None:
    from benchmarks.models import ResNet

    x = torch.randn(30, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def trained(device: str) -> Any:
        torch.manual_seed(0)
        net = ResNet(1).double().eval().to(device)
        J = linnet.linearize(net, ["layer3.*", "linear.*"]).jacobian(x.to(device), progress=False)
        J = {"factors": J.cached, "activations": J.above_frozen}.get(form, lambda: J)()
        y, variance = torch.arange(30) % J.c, torch.linspace(0.1, 1.0, J.shape[1], dtype=torch.float64)
        given: dict[str, Any] = {"likelihood": Categorical(), "training": adam.Training(7, size, 0.01)}
        return adam.train_by_adam(J, y.to(device), variance=variance.to(device), progress=False, **given)

    found, wanted = trained("cuda"), trained("cpu")
    assert (found.mode.u.cpu() - wanted.mode.u).norm() < 1e-6 * wanted.mode.u.norm()
    assert found.path == pytest.approx(wanted.path, rel=1e-8)
