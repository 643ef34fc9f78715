"""Files that earlier versions wrote load and give the answers they gave then.

`files/before_rooms` has one file of each kind of estimator and posterior, and `answers.json` with what each estimator
said. `python tests/_estimator/test_earlier_files.py FOLDER` writes such a folder with the version at hand.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet._common import files

FOLDER = Path(__file__).parents[1] / "files" / "before_rooms"


def exact(*shape: int, step: int) -> Tensor:
    """Numbers that every machine has to the bit."""
    return ((torch.arange(torch.Size(shape).numel()) * step % 17 - 8).view(*shape) / 16).double()


X, NEW, Y = exact(12, 3, step=7), exact(4, 3, step=5), exact(12, 2, step=3)
LABELS = (Y[:, 0] > 0).long()


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(exact(*p.shape, step=5 + 2 * i))
    return model


def regressor(**options: Any) -> Any:
    return linnet.TangentRegressor(network(), progress=False, **options).fit(X, Y)


def classifier(**options: Any) -> Any:
    return linnet.TangentClassifier(network(), progress=False, **{"prior": 1.0, **options}).fit(X, LABELS)


def laplace(structure: str, **options: Any) -> Any:
    return linnet.Laplace(network(), "classification", structure, prior=0.5, progress=False, **options).fit(X, LABELS)


def embedding(**options: Any) -> Any:
    return linnet.FisherEmbedding(network(), 2, progress=False, **options).fit(X)


CASES: dict[str, Callable[[], Any]] = {
    "regressor_function": lambda: regressor(solver="function"),
    "regressor_weight": lambda: regressor(solver="weight", noise=0.125, prior=1.0),
    "regressor_samples": lambda: regressor(solver="cg-weight", samples=4, noise=0.125, prior=1.0),
    "regressor_layerwise": lambda: regressor(prior="layerwise", noise="per-output"),
    "classifier_map": lambda: classifier(inference="map"),
    "classifier_laplace": lambda: classifier(inference="laplace"),
    "classifier_weight": lambda: classifier(inference="laplace", solver="weight"),
    "classifier_vi": lambda: classifier(inference="vi"),
    "classifier_meanfield": lambda: classifier(inference="vi", family="meanfield"),
    "classifier_lowrank": lambda: classifier(inference="vi", family="lowrank"),
    "laplace_full": lambda: laplace("full"),
    "laplace_function": lambda: laplace("function"),
    "laplace_kron": lambda: laplace("kron"),
    "laplace_ekfac": lambda: laplace("ekfac"),
    "laplace_diag": lambda: laplace("diag"),
    "laplace_lowrank": lambda: laplace("lowrank", rank=4),
    "laplace_subnetwork": lambda: laplace("subnetwork", size=8),
    "laplace_samples": lambda: laplace("samples", samples=16),
    "laplace_regression": lambda: linnet.Laplace(
        network(), "regression", "kron", noise=0.125, prior=1.0, progress=False
    ).fit(X, Y),
    "embedding_fisher": lambda: embedding(),
    "embedding_ntk": lambda: embedding(kernel="ntk", method="exact"),
}


def answers(estimator: Any) -> dict[str, list[Any]]:
    """What an estimator says about new inputs."""
    if isinstance(estimator, linnet.FisherEmbedding):
        found = {"transform": estimator.transform(NEW), "eigenvalues": estimator.eigenvalues_}
    elif isinstance(estimator, linnet.TangentClassifier):
        mean, variance = estimator.predict_logits(NEW)
        found = {"probabilities": estimator.predict_proba(NEW), "mean": mean, "variance": variance}
    else:
        mean, std = estimator.predict(NEW, return_std=True)
        found = {"mean": mean, "std": std}
    return {name: np.asarray(value).tolist() for name, value in found.items()}


@pytest.mark.filterwarnings("ignore:The network is far from a mode", "ignore:.*is not trained")
@pytest.mark.parametrize("case", CASES)
def test_a_file_of_an_earlier_version_answers_as_before(case: str) -> None:
    expected = json.loads((FOLDER / "answers.json").read_text(encoding="utf-8"))[case]
    found = answers(linnet.load(FOLDER / f"{case}.safetensors", network()))
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-8, atol=1e-10, err_msg=name)


def test_a_file_that_does_not_say_how_far_the_prior_was_narrowed(tmp_path: Path) -> None:
    whole = FOLDER / "laplace_diag.safetensors"
    kind = files.describe(whole).kind
    tensors, meta = files.load(whole, kind=kind)
    del meta["state"]["narrowed"]
    files.save(tmp_path / "la", tensors, meta, kind=kind)
    assert linnet.load(tmp_path / "la", network()).narrowed_ == 1.0


def test_there_is_a_file_for_each_case() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.safetensors")) == sorted(CASES)


def make(folder: Path) -> None:
    """Write the files and the answers with the version at hand."""
    folder.mkdir(parents=True)
    found = {}
    for case, fit in CASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator = fit()
        estimator.save(folder / f"{case}.safetensors")
        found[case] = answers(estimator)
        print(case, type(getattr(estimator, "posterior_", None)).__name__)
    (folder / "answers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
