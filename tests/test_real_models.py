"""Networks as they are out there: MiniLM with sentences of SST-2, and a ResNet-20 with images of CIFAR-10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common.data import cifar10, word_pieces
from experiments.common.data import sst2 as sentences
from experiments.common.networks import minilm, resnet

WEIGHTS = common.DATA / "weights"


def needs(*names: str) -> None:
    missing = [name for name in names if not (common.DATA / name).exists()]
    if missing:
        pytest.skip(f"no {missing[0]} under {common.DATA}")


def against_autodiff(model: nn.Module, X: Any, params: Any, row: int) -> None:
    """One row of J, and its product with a vector, beside what torch's reverse mode gives in float64."""
    lin = linnet.linearize(model.double(), params)
    J = lin.jacobian(X)
    v = torch.randn(lin.p, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = torch.zeros(J.shape[0], dtype=torch.float64)
    u[row] = 1
    out = lin.module(**X) if isinstance(X, dict) else lin.module(X)
    parameters = dict(lin.module.named_parameters())
    gradient = torch.autograd.grad(out.flatten()[row], [parameters[name] for name in lin.theta])
    exact = torch.cat([g.flatten() for g in gradient])
    torch.testing.assert_close(J.T @ u, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))
    torch.testing.assert_close((J @ v)[row], exact @ v, rtol=1e-9, atol=0)


def test_minilm_adapts_to_sentiment(tmp_path: Path) -> None:
    needs("sst2/train.tsv", "weights/minilm_l6_h384_fp16.safetensors", "weights/minilm_vocab.txt")
    pytest.importorskip("transformers")
    texts, y = sentences(common.DATA, "train")
    short = [i for i, text in enumerate(texts) if len(text.split()) <= 8]  # for a quick test
    chosen = [i for i in short if y[i] == 0][:100] + [i for i in short if y[i] == 1][:100]
    train, test = chosen[::2], chosen[1::2]

    def tokens(index: list[int]) -> dict[str, Tensor]:
        ids, mask = word_pieces(WEIGHTS, [texts[i] for i in index])
        return {"input_ids": ids, "attention_mask": mask}

    labels = [["negative", "positive"][int(y[i])] for i in train]
    model = linnet.attach_head(minilm(WEIGHTS), tokens(train), labels, penalty=10.0)
    clf = linnet.TangentClassifier(model, ["head.*", "*layer.5.output.dense.*"], mean="zero", dtype="float32")
    clf.fit(tokens(train), labels)
    p = clf.predict_proba(tokens(test))
    assert p.isfinite().all() and torch.allclose(p.sum(1), torch.ones(len(test), dtype=p.dtype))
    truth = np.array(["negative", "positive"])[y[test].numpy()]
    assert (clf.predict(tokens(test)) == truth).mean() > 0.7  # chance is 0.5, and the head alone has 0.70
    mean, variance = clf.predict_logits(tokens(test))
    assert variance.isfinite().all() and mean.isfinite().all()
    clf.save(tmp_path / "minilm.safetensors")
    again = linnet.load(tmp_path / "minilm.safetensors", model)
    torch.testing.assert_close(again.predict_proba(tokens(test)), p, rtol=1e-6, atol=1e-6)
    against_autodiff(model, tokens(test[:2]), ["head.*", "*layer.5.*"], 1)


def test_a_resnet_adapts_to_other_classes(tmp_path: Path) -> None:
    needs("cifar10_test.npz", "weights/resnet20_cifar10.safetensors")
    x, y = cifar10(common.DATA, "test", count=160)
    kinds = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0])  # machines and animals: labels that it was not trained on
    names = ["machine", "animal"]
    labels = [names[int(kinds[i])] for i in y]
    model = linnet.fold_batchnorm(resnet(WEIGHTS, 20), x[:2])
    new = linnet.attach_head(model, x[:40], labels[:40], penalty=1.0)
    clf = linnet.TangentClassifier(new, ["linear.*", "layer3.2.*"], mean="zero", dtype="float32")
    clf.fit(x[:40], labels[:40])
    p = clf.predict_proba(x[40:])
    assert p.isfinite().all()
    assert (clf.predict(x[40:]) == np.array(labels[40:])).mean() > 0.8  # chance is 0.6
    clf.save(tmp_path / "resnet.safetensors")
    again = linnet.load(tmp_path / "resnet.safetensors", new)
    torch.testing.assert_close(again.predict_proba(x[40:]), p, rtol=1e-6, atol=1e-6)
    against_autodiff(resnet(WEIGHTS, 20), x[:2].double(), "layer3.2.*", 13)


def test_error_bars_of_a_resnet(tmp_path: Path) -> None:
    needs("cifar10_test.npz", "weights/resnet20_cifar10.safetensors")
    x, y = cifar10(common.DATA, "test", count=300)
    model = resnet(WEIGHTS, 20)
    la = linnet.Laplace(model, structure="kron", prior=1.0, params="linear.*", dtype="float32").fit(x[:200], y[:200])
    p = la.predict_proba(x[200:])
    assert (p.argmax(1) == y[200:]).float().mean() > 0.8
    la.save(tmp_path / "laplace.safetensors")
    again = linnet.load(tmp_path / "laplace.safetensors", model)
    torch.testing.assert_close(again.predict_proba(x[200:]), p, rtol=1e-6, atol=1e-6)
    noise = la.predict_proba(torch.randn(50, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert noise.max(1).values.mean() < p.max(1).values.mean()  # less sure about what is no image
