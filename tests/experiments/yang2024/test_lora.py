"""Adapters are float32 beside a frozen network of any precision, and a small version of the experiment runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.__main__ import main
from experiments.common.networks import minilm
from experiments.yang2024 import lora
from tests.support.quick_runs import run_quick

pytest.importorskip("transformers")

WORDS = ["good", "great", "fun", "warm", "dull", "bad", "awful", "cold"]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data in the layout of the data folder: a small encoder with random weights, and sentences."""
    from transformers import BertConfig, BertModel

    where = tmp_path_factory.mktemp("data")
    (where / "weights").mkdir()
    (where / "sst2").mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (where / "weights" / "minilm_vocab.txt").write_text("\n".join(vocabulary) + "\n")
    sizes = {**SIZES, "vocab_size": len(vocabulary)}
    (where / "weights" / "minilm_l6_h384_fp16.json").write_text(json.dumps(sizes))
    torch.manual_seed(0)
    net = BertModel(BertConfig(**sizes), add_pooling_layer=False)
    for t in net.parameters():
        torch.nn.init.normal_(t, std=0.3)
    tensors = {name: t.half().contiguous() for name, t in net.state_dict().items() if t.is_floating_point()}
    save_file(tensors, where / "weights" / "minilm_l6_h384_fp16.safetensors")
    random = torch.Generator().manual_seed(0)
    for part, n in {"train": 60, "dev": 44}.items():
        labels = (torch.arange(n) % 2).tolist()
        # Words 0 to 3 are good, words 4 to 7 bad.
        rows = [(torch.randint(4, (6,), generator=random) + 4 * (1 - label)).tolist() for label in labels]
        lines = [f"{' '.join(WORDS[i] for i in row)}\t{label}" for row, label in zip(rows, labels, strict=True)]
        (where / "sst2" / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    return where


@pytest.mark.parametrize("installed", [True, False], ids=["peft", "own"])
@pytest.mark.parametrize("dtype", lora.PRECISIONS.values(), ids=str)
def test_adapters_are_float32_and_start_at_the_network(
    folder: Path, dtype: torch.dtype, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        pytest.importorskip("peft")
    else:
        monkeypatch.setitem(sys.modules, "peft", None)
    net = minilm(folder / "weights").to(dtype)
    adapted = lora.adapt(net, 0)
    trained = {name: t for name, t in adapted.named_parameters() if t.requires_grad}
    assert len(trained) == 2 * 2 * SIZES["num_hidden_layers"] and all("lora_" in name for name in trained)
    assert {t.dtype for t in trained.values()} == {torch.float32}
    assert {t.dtype for name, t in adapted.named_parameters() if name not in trained} == {dtype}
    assert all(not t.any() for name, t in trained.items() if "lora_B" in name)
    ids = torch.arange(1, 13).view(2, 6)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        torch.testing.assert_close(adapted(**given).last_hidden_state, net(**given).last_hidden_state, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_head_reads_float32_features(folder: Path, dtype: torch.dtype) -> None:
    net = minilm(folder / "weights")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    f = []
    for kind in (torch.float32, dtype):
        model = lora.SentenceClassifier(lora.adapt(net.to(kind), 0), SIZES["hidden_size"]).eval()
        model.head = torch.nn.Identity()
        with torch.no_grad():
            f.append(model(ids, mask))
            alone = model(ids[1:, :4], mask[1:, :4])[0]
        torch.testing.assert_close(alone, f[-1][1], rtol=0, atol=16 * torch.finfo(kind).eps)
    assert f[1].dtype == torch.float32
    # Each of the layers rounds a few times.
    bound = 8 * SIZES["num_hidden_layers"] * torch.finfo(dtype).eps
    assert (f[1] - f[0]).norm() <= bound * f[0].norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The evidence of these 4 labels")  # rounding decides whether they tell anything
def test_lora_runs(folder: Path, tmp_path: Path) -> None:
    record = run_quick(tmp_path, "lora", "--data", str(folder))
    assert set(record["results"]) == set(lora.PRECISIONS)
    for table in record["results"].values():
        assert list(table) == list(lora.METHODS)
        assert all(0 <= one["ece"]["mean"] <= 1 and one["seconds"] > 0 for one in table.values())
        # One logit: neither a temperature nor error bars change its sign.
        right = table[lora.TUNED]["accuracy"]["mean"]
        assert all(table[m]["accuracy"]["mean"] == right for m in (lora.COOLED, lora.LAPLACE, lora.VALIDATED))
    (kept,) = record["parts"].values()
    assert all(list(draws) == ["draw 0"] for draws in kept.values())
    # Without draws nothing is measured, and what is kept is shown.
    again = run_quick(tmp_path, "lora", "--data", str(folder), "--seeds", "0")
    assert again["results"] == record["results"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--labels", "61"], "has 60 labels, and 10 are needed; got --labels 61"),
        (["--test", "45"], "has 44 development sentences; got --test 45"),
        (["--seeds", "0"], "No runs are kept of '20 labels, 40 test sentences'"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, words: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        main(["lora", "--quick", "--data", str(folder), "--out", str(tmp_path), *words])
