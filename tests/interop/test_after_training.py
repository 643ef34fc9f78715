"""Callbacks of trainers: the same fit as one made by hand after the training; metrics, files and refusals."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet import metrics
from linnet.interop.after_training import FitAfterTraining, list_metrics

lightning = pytest.importorskip("pytorch_lightning", exc_type=ImportError)
transformers = pytest.importorskip("transformers", exc_type=ImportError)

from linnet.interop.lightning import LaplaceCallback as LightningCallback  # noqa: E402
from linnet.interop.transformers import LaplaceCallback as TrainerCallback  # noqa: E402

torch.manual_seed(0)
X = torch.randn(48, 2)
Y = torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(48)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        f = self(x)
        return nn.functional.cross_entropy(f, y) if f.shape[1] > 1 else nn.functional.mse_loss(f[:, 0], y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.03)


def train(model: Net, callback: Any, targets: Tensor, **options: Any) -> Any:
    trainer = lightning.Trainer(
        **{"max_epochs": 20, "accelerator": "cpu", "logger": False, "callbacks": [callback], **QUIET, **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, and that the loader shuffles
        trainer.fit(model, DataLoader(TensorDataset(X, targets), batch_size=16, shuffle=True))
    return trainer


def test_lightning_leaves_the_fit_that_one_makes_by_hand(tmp_path):
    model = Net()
    callback = LightningCallback("regression", structure="full", prior=1.0, noise=0.1, save=tmp_path / "la.safetensors")
    train(model, callback, Y)
    by_hand = linnet.Laplace(model, "regression", "full", 1.0, noise=0.1).fit(X, Y)
    for a, b in zip(callback.laplace_.predict(X, return_std=True), by_hand.predict(X, return_std=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert callback.metrics_["log_evidence"] == pytest.approx(by_hand.largest_evidence_, rel=1e-6)
    again = linnet.load(tmp_path / "la.safetensors", model)
    torch.testing.assert_close(again.predict(X), by_hand.predict(X))


def test_lightning_logs_and_tests(tmp_path):
    kept: list[dict[str, float]] = []
    given = {"data": (X[:30], LABELS[:30]), "test": (X[30:], LABELS[30:]), "log_metrics": kept.append}
    callback = LightningCallback(structure="diag", network="body", **given)
    logger = lightning.loggers.CSVLogger(tmp_path)
    model = Net(3)
    train(model, callback, LABELS, logger=logger)
    assert callback.laplace_.model is model.body and callback.laplace_.lin_ is not None
    expected = metrics.classification(callback.laplace_.predict_proba(X[30:]), LABELS[30:])
    assert kept == [callback.metrics_]
    assert {name: kept[0][f"test_{name}"] for name in expected} == expected
    assert "laplace_test_nll" in (next(tmp_path.rglob("metrics.csv"))).read_text()


def test_a_file_of_a_loader(tmp_path):
    model = Net()
    callback = LightningCallback("regression", save=tmp_path / "la")
    train(model, callback, Y)
    assert callback.laplace_.structure_ == "kron"
    torch.testing.assert_close(linnet.load(tmp_path / "la", model).predict(X), callback.laplace_.predict(X))


def test_lightning_skips_trials_and_refuses_several_loaders():
    callback = LightningCallback("regression")
    train(Net(), callback, Y, fast_dev_run=True)
    assert not hasattr(callback, "laplace_")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[LightningCallback("regression")], **QUIET
    )
    loaders = {"a": DataLoader(TensorDataset(X, Y)), "b": DataLoader(TensorDataset(X, Y))}
    model = Net()
    model.training_step = lambda batch, batch_idx: model(batch["a"][0]).square().sum()  # type: ignore[method-assign]
    with warnings.catch_warnings(), pytest.raises(TypeError, match=r"are a dict, not one DataLoader\. Give data="):
        warnings.simplefilter("ignore")
        trainer.fit(model, loaders)


class Several:
    world_size = 2


def test_several_devices_are_refused_before_the_training():
    with pytest.raises(NotImplementedError, match="fits on one device, and this trainer has 2"):
        LightningCallback().setup(Several(), Net(), "fit")
    args = type("Args", (), {"world_size": 1, "n_gpu": 4})()
    with pytest.raises(NotImplementedError, match="fits on one device, and this training has 4"):
        TrainerCallback().on_train_begin(args, None, None)


class Texts(Dataset[Any]):
    """Token lists of several lengths, which the collator pads."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, 20, (3 + i % 4,), generator=generator) for i in range(24)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.rows[i], "labels": int(self.rows[i][0] > 9)}


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.stack([nn.functional.pad(e["input_ids"], (0, 6 - len(e["input_ids"]))) for e in examples])
    labels = torch.tensor([e["labels"] for e in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def make_bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **sizes)
    )


def make_trainer(folder: Any, model: Any, callback: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    given = {"train_dataset": Texts(), "data_collator": collate, **options}
    return transformers.Trainer(model, arguments, callbacks=[callback], **given)


def test_trainer_leaves_the_fit_that_one_makes_by_hand(tmp_path):
    model = make_bert()
    kept: list[dict[str, float]] = []
    callback = TrainerCallback(params="last_layer", structure="full", prior=0.5, log_metrics=kept.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        make_trainer(tmp_path, model, callback).train()
    batch = collate([Texts()[i] for i in range(24)])
    labels = batch.pop("labels")
    by_hand = linnet.Laplace(model, structure="full", prior=0.5, params="last_layer").fit(batch, labels)
    p, expected = callback.laplace_.predict_proba(batch), by_hand.predict_proba(batch)
    torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5)
    assert kept[0]["effective_dimension"] == pytest.approx(by_hand.effective_dimension_, rel=1e-3)


def test_trainer_needs_labels(tmp_path):
    def without(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collate(examples) if training else {"input_ids": torch.ones(1)}

    training = True
    callback = TrainerCallback()
    trainer = make_trainer(tmp_path, make_bert(), callback, data_collator=without)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = trainer.get_train_dataloader()
    training = False
    with pytest.raises(TypeError, match=r"must have 'labels', which are the targets; got input_ids"):
        callback.on_train_end(trainer.args, None, None, model=trainer.model, train_dataloader=loader)
    with pytest.raises(TypeError, match="NoneType, not a DataLoader"):
        callback.on_train_end(trainer.args, None, None, model=trainer.model)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": nn.Linear(1, 1)}, TypeError, "The trainer gives the model"),
        ({"structur": "kron"}, TypeError, "structur"),
        ({"test": X}, TypeError, "test must be inputs and targets"),
        ({"log_metrics": {}}, TypeError, "log_metrics must be a function"),
        ({"save": "none/la.safetensors"}, FileNotFoundError, "there is no folder none"),
        ({"save": "la.safetensors", "structure": "function"}, ValueError, "cannot hold those of a loader"),
    ],
)
def test_mistakes_are_told_before_the_training(options, error, text):
    with pytest.raises(error, match=text):
        FitAfterTraining("regression", **options)


def test_tests_of_labels_that_the_fit_does_not_know():
    callback = LightningCallback(structure="diag", test=(X, LABELS + 5))
    with pytest.raises(ValueError, match="Labels 5, 6, 7 are not among the classes"):
        callback._fit(Net(3), (X, LABELS))
    with pytest.raises(ValueError, match="known for classification and regression; got likelihood='poisson'"):
        LightningCallback("poisson", test=(X, LABELS))


def test_numbers_of_fits():
    two = nn.Linear(2, 2)
    targets = torch.stack([Y, Y], 1)
    reg = linnet.TangentRegressor(two, prior="layerwise", noise=[0.1, 0.2], mean="zero").fit(X, targets)
    found = list_metrics(reg)
    assert found["noise_0"] == pytest.approx(0.1) and found["noise_1"] == pytest.approx(0.2)
    assert found["log_evidence"] == pytest.approx(reg.log_evidence_)
    assert [name for name in found if name.startswith("prior_scale")]
    both = linnet.Laplace([Net(3).body, Net(3).body], structure="diag").fit(X, LABELS)
    assert list_metrics(both)["network_1_effective_dimension"] == both.members_[1].effective_dimension_


def test_loaders_of_hugging_face_bring_their_labels(tmp_path):
    model = make_bert().eval()
    batch = collate([Texts()[i] for i in range(24)])
    labels = batch.pop("labels")
    expected = linnet.Laplace(model, structure="diag", prior=0.5).fit(batch, labels)
    loader = DataLoader(Texts(), batch_size=5, collate_fn=collate)
    found = linnet.Laplace(model, structure="diag", prior=0.5).fit(loader)
    torch.testing.assert_close(found.predict_proba(loader), expected.predict_proba(batch), rtol=1e-4, atol=1e-5)
    rows = [{"input_ids": torch.randint(1, 20, (4,)), "labels": i % 2} for i in range(12)]
    listed = linnet.Laplace(model, structure="diag", prior=0.5).fit(rows)
    stacked = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    expected = linnet.Laplace(model, structure="diag", prior=0.5).fit(stacked, torch.arange(12) % 2)
    torch.testing.assert_close(listed.predict_proba(rows), expected.predict_proba(stacked), rtol=1e-4, atol=1e-5)
