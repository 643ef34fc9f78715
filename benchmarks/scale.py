"""Today's models: passes, Gram matrices and estimators beside a training step of the same network.

The networks have random weights. In the passes every network gives one output per example: the log-sum-exp of the class
logits. A training step is a plain forward and backward pass in the selected parameters, in the same precision. Memory
is the peak above what the model, its data, V and the result occupy.
"""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks import scale_estimators
from benchmarks.timing import machine, milliseconds, synchronize
from linnet._common import Precision, arithmetic

K = 16
PARTS = (2, 4, 8)
"""Into how many chunks the examples are cut, to see what memory costs in time."""

Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """A network, its examples, and the precisions in which both run.

    Attributes:
        build: Makes the network on the CPU or on the device.
        inputs: Makes the examples.
        precisions: Precisions of the passes.
        parts: The products that are timed: "pass", "column", "gram".
    """

    build: Callable[[torch.device], nn.Module]
    inputs: Callable[[torch.device], Inputs]
    precisions: tuple[Precision, ...] = ("highest",)
    parts: tuple[str, ...] = ("pass", "column", "gram")


class LoRA(nn.Module):
    """A frozen linear layer plus the product of two small matrices.

    Args:
        base: The frozen layer.
        rank: Columns of the first matrix.
        dtype: Dtype of the two matrices; None for the dtype of the layer.
    """

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind = {"dtype": dtype or base.weight.dtype, "device": base.weight.device}
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, rank, bias=False, **kind), None
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **kind)
        nn.init.normal_(self.lora_B.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return self.base(x) + low.to(x.dtype)


def add_lora(model: nn.Module, rank: int, names: tuple[str, ...]) -> nn.Module:
    """The model with its linear layers of these names adapted, and everything else frozen."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in names:
                setattr(module, name, LoRA(child, rank))
    return model


def _images(n: int, side: int, device: torch.device) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)


def _tokens(n: int, length: int, vocabulary: int, device: torch.device) -> Inputs:
    ids = torch.randint(1, vocabulary, (n, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def _resnet50(device: torch.device, classes: int = 1000) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=classes)).to(device)


def _vit_b16(device: torch.device) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)).to(device)


def _gpt2(device: torch.device) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(GPT2Config(num_labels=2, pad_token_id=0)).to(device)


def llama(device: torch.device, size: str, rank: int, names: tuple[str, ...], classes: int = 2) -> nn.Module:
    """A Llama with random weights and LoRA: "1.1B" or "7B" in bf16, or "tiny" in float32 for a CPU."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = {
        "tiny": (128, 352, 8, 4, 4),
        "1.1B": (2048, 5632, 22, 32, 4),
        "7B": (4096, 11008, 32, 32, 32),
    }[size]
    width, inner, layers, heads, shared = shape
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=2000 if size == "tiny" else 32000,
        num_labels=classes,
        pad_token_id=0,
        dtype=dtype,
    )
    with torch.device(device):
        model = LlamaForSequenceClassification(config).to(dtype)
    return add_lora(model, rank, names)


ATTENTION = ("q_proj", "v_proj")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOBS = {
    "resnet-50": Job(_resnet50, partial(_images, 64, 224), ("high", "highest")),
    "vit-b16": Job(_vit_b16, partial(_images, 64, 224), ("high", "highest")),
    "gpt2": Job(_gpt2, partial(_tokens, 32, 128, 50257), ("high", "highest")),
    "llama-1.1b": Job(
        partial(llama, size="1.1B", rank=8, names=ATTENTION), partial(_tokens, 32, 256, 32000), ("highest",)
    ),
    "llama-7b": Job(partial(llama, size="7B", rank=16, names=LINEAR), partial(_tokens, 16, 256, 32000), ("highest",)),
}
SMALL = {
    "resnet-50": Job(_resnet50, partial(_images, 4, 64), ("highest",)),
    "gpt2": Job(_gpt2, partial(_tokens, 4, 32, 50257), ("highest",)),
    "llama-tiny": Job(
        partial(llama, size="tiny", rank=8, names=ATTENTION), partial(_tokens, 16, 64, 2000), ("highest",)
    ),
}
"""Sizes for a CPU."""


def output(raw: Any) -> Tensor:
    """One number per example."""
    return raw.logits.logsumexp(-1)


def n_of(x: Inputs) -> int:
    """The number of examples."""
    return len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))


def _call(model: nn.Module, x: Inputs) -> Any:
    return model(**x) if isinstance(x, dict) else model(x)


def step(model: nn.Module, x: Inputs) -> None:
    """A plain forward and backward pass in the parameters that ask for a gradient."""
    model.zero_grad(set_to_none=True)
    output(_call(model, x)).sum().backward()


def peak(run: Callable[[], object], device: str) -> float:
    """GiB that a run needs at most above what is there before; nan on a CPU."""
    if not device.startswith("cuda"):
        return float("nan")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def time_passes(name: str, job: Job, precision: Precision, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds, ratios and memory of one network in one precision."""
    torch.manual_seed(0)
    place = torch.device(device)
    model = job.build(place).eval()
    x = job.inputs(place)
    p = sum(t.numel() for t in model.parameters() if t.requires_grad)
    with arithmetic(precision, place):
        J = linnet.linearize(model, output=output).jacobian(x, precision=precision, progress=False)
        V = torch.randn(p, K, device=place)
        contenders = {
            "step": partial(step, model, x),
            "pass": partial(J.normal, V),
            "column": partial(J.normal, V[:, :1].contiguous()),
            "gram": J.gram,
        }
        contenders = {key: run for key, run in contenders.items() if key == "step" or key in job.parts}
        # A GPU records chunks during the second and the third pass.
        times = milliseconds(contenders, device, rounds=rounds, warmup=3)
        plan, recorded = str(J.plan), J.network_chunks().replays.recorded
        del J, contenders
        smaller = [time_in_parts(model, x, V, precision, device, rounds, parts) for parts in PARTS]
        memory = {"step": peak(partial(step, model, x), device)}
        model.zero_grad(set_to_none=True)
        lin = linnet.linearize(model, output=output)
        entries = {"pass": V.numel(), "column": p, "gram": n_of(x) ** 2}
        for key in job.parts:
            result = entries[key] * V.element_size() / 2**30
            memory[key] = peak(partial(four_times, lin, x, V, precision, key), device) - result
        peer = time_curvlinops(model, x, V[:, :1].contiguous(), device)
    ratios = {key: times[key] / times["step"] for key in job.parts}
    for found in smaller:
        found |= {"time / step": found["ms"] / times["step"], "memory / step": found["memory_gib"] / memory["step"]}
    result = {"network": name, "precision": precision, "p": p, "ms": times, "memory_gib": memory, "ratios": ratios}
    more = {"recorded chunks": recorded, "pass in parts": smaller, "curvlinops column": peer, "plan": plan}
    return result | more


def time_in_parts(
    model: nn.Module, x: Inputs, V: Tensor, precision: Precision, device: str, rounds: int, parts: int
) -> dict[str, Any]:
    """A pass whose chunks hold a part of the examples: less memory, for more launches and more passes over V."""
    lin, size = linnet.linearize(model, output=output), max(1, n_of(x) // parts)
    J = lin.jacobian(x, batch_size=size, precision=precision, progress=False)
    found = milliseconds({"pass": partial(J.normal, V)}, device, rounds=rounds, warmup=3)
    del J
    memory = peak(partial(four_times, lin, x, V, precision, "pass", batch_size=size), device)
    return {"parts": parts, "ms": found["pass"], "memory_gib": memory - V.numel() * V.element_size() / 2**30}


class _Output(nn.Module):
    """A network that returns the one number per example."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Inputs) -> Tensor:
        return output(_call(self.model, x))[:, None]


def time_curvlinops(model: nn.Module, x: Inputs, V: Tensor, device: str) -> dict[str, Any] | None:
    """One column by curvlinops' `GGNLinearOperator`: milliseconds, or why it does not run; None where it is not there.

    The loss is half the summed square of the outputs, so that the product is ``J^T J V``.
    """
    try:
        from curvlinops import GGNLinearOperator  # type: ignore[import-not-found]
    except ImportError:
        return None
    wrapped = _Output(model)
    params = [t for t in wrapped.parameters() if t.requires_grad]
    n = n_of(x)
    data = [(x, torch.zeros(n, 1, device=V.device, dtype=params[0].dtype))]
    try:
        given = {"check_deterministic": False, "num_data": n, "batch_size_fn": lambda _: n}
        G = GGNLinearOperator(wrapped, nn.MSELoss(reduction="sum"), params, data, **given)
        run = partial(G.__matmul__, V.to(params[0].dtype))
        return {"ms": milliseconds({"column": run}, device, rounds=2)["column"]}
    except Exception as error:  # another library: whatever it raises is the finding
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        model.zero_grad(set_to_none=True)


def four_times(
    lin: linnet.Linearization,
    x: Inputs,
    V: Tensor,
    precision: Precision,
    part: str,
    *,
    batch_size: int | str = "auto",
) -> None:
    """A new Jacobian and four passes: what a GPU records of the first passes counts too."""
    J = lin.jacobian(x, batch_size=batch_size, precision=precision, progress=False)
    for _ in range(4):
        J.gram() if part == "gram" else J.normal(V if part == "pass" else V[:, :1])


def profile(name: str, job: Job, precision: Precision, device: str, part: str) -> str:
    """A table of the kernels of one pass."""
    torch.manual_seed(0)
    place = torch.device(device)
    model, x = job.build(place).eval(), job.inputs(place)
    p = sum(t.numel() for t in model.parameters() if t.requires_grad)
    with arithmetic(precision, place):
        J = linnet.linearize(model, output=output).jacobian(x, precision=precision, progress=False)
        V = torch.randn(p, K, device=place)
        runs: dict[str, Callable[[], object]] = {
            "pass": partial(J.normal, V),
            "column": partial(J.normal, V[:, :1].contiguous()),
            "gram": J.gram,
            "step": partial(step, model, x),
        }
        for _ in range(2):
            runs[part]()
        synchronize(device)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.startswith("cuda"):
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as seen:
            runs[part]()
            synchronize(device)
    key = "self_cuda_time_total" if device.startswith("cuda") else "self_cpu_time_total"
    return seen.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=70)


def estimators(device: str, only: str) -> Iterator[tuple[str, Any]]:
    """Name and figures of each measurement of estimators; a name comes again with more figures."""
    cuda, place = device.startswith("cuda"), torch.device(device)
    if only in ("all", "estimators", "laplace"):
        for rows in scale_estimators.laplace(device, *(() if cuda else (256, 64))):
            yield "laplace", rows
    if only in ("all", "estimators", "outputs"):
        yield "outputs", scale_estimators.outputs(device)
    if only in ("all", "estimators", "adapters"):
        size, vocabulary = ("1.1B", 32000) if cuda else ("tiny", 2000)
        model, x = llama(place, size, 8, ATTENTION).eval(), _tokens(64, 64, vocabulary, place)
        yield "adapters", scale_estimators.adapters(model, x, device, 2, partial(step, model, x))
    if only in ("all", "estimators", "kron"):
        size, vocabulary, n, length = ("7B", 32000, 1000, 256) if cuda else ("tiny", 2000, 32, 32)
        model = llama(place, size, 16, LINEAR, classes=4).eval()
        yield "kron", scale_estimators.kron(model, _tokens(n, length, vocabulary, place), device, 4)


def run(device: str, out: Path | None, rounds: int, only: str, *, table: str | None = None) -> None:
    """Measure what is asked for, beside what was measured before on such a machine; print each, and write JSON."""
    results: dict[str, Any] = {} if out is None or not out.exists() else json.loads(out.read_text())
    if results.get("machine") != machine(device):
        results = {"machine": machine(device), "passes": []}
    print(results["machine"], flush=True)
    for name, job in (JOBS if device.startswith("cuda") else SMALL).items():
        if only not in ("all", "passes", name):
            continue
        for precision in job.precisions:
            if table is not None:
                print(name, precision, profile(name, job, precision, device, table), flush=True)
                continue
            try:
                found = time_passes(name, job, precision, device, rounds)
            except (RuntimeError, ValueError, TypeError) as error:
                traceback.print_exc()
                found = {"network": name, "precision": precision, "error": str(error)}
            others = [one for one in results["passes"] if (one["network"], one["precision"]) != (name, precision)]
            results["passes"] = [*others, found]
            if "ms" in found:
                ratios = "  ".join(f"{key} {value:.2f}" for key, value in found["ratios"].items())
                memory = "  ".join(f"{key} {value:.1f}" for key, value in found["memory_gib"].items())
                memory += "".join(
                    f"  in {one['parts']} parts: time {one['time / step']:.2f}, memory {one['memory / step']:.2f}"
                    for one in found["pass in parts"]
                )
                memory += f"  curvlinops: {found['curvlinops column']}"
                print(
                    f"{name:11} {precision:8} step {found['ms']['step']:8.1f} ms  {ratios}  GiB: {memory}", flush=True
                )
            _keep(results, out, device)
    if table is None:
        for name, figures in estimators(device, only):
            results[name] = figures
            print(name, json.dumps(figures), flush=True)
            _keep(results, out, device)


def _keep(results: dict[str, Any], out: Path | None, device: str) -> None:
    """Write what is known, and free memory for the next network."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
