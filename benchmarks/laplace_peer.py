"""Jobs through laplace-torch, in an interpreter that has it: ``python -m benchmarks.laplace_peer FOLDER ...``.

Reads ``job.pt`` (weights and data) and ``job.json`` (what to do) from each folder, and writes ``found.pt`` and
``found.json`` there. It must not import linnet, which that interpreter need not have.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def network(name: str | list[int]) -> nn.Module:
    """The networks of the comparison; a list of widths is a tanh network."""
    if not isinstance(name, str):
        layers: list[nn.Module] = []
        for d_in, d_out in itertools.pairwise(name):
            layers += [nn.Linear(d_in, d_out), nn.Tanh()]
        return nn.Sequential(*layers[:-1])
    if name == "digits":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
        )
    outputs = {"classes": 3, "numbers": 2}[name]
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs))


def predict_with(la: Any, X: Tensor, likelihood: str) -> dict[str, Tensor]:
    """Covariances of f of each input, and probabilities."""
    f, cov = la._glm_predictive_distribution(X)
    out = {"mean": f.detach(), "cov": cov.detach()}
    if likelihood == "classification":
        out["probit"] = la(X, pred_type="glm", link_approx="probit").detach()
        out["bridge"] = la(X, pred_type="glm", link_approx="bridge").detach()
    return out


def by_evidence(la: Any, steps: int) -> None:
    """One prior precision and the noise by Adam on the log marginal likelihood, as laplace-torch's own example does."""
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), la.sigma_noise.detach().log().clone().requires_grad_()
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()


def main(folder: Path) -> None:
    """One job."""
    from laplace import Laplace

    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=True)
    told = json.loads((folder / "job.json").read_text())
    model = network(told["network"]).to(job["X"].dtype)
    model.load_state_dict(job["state"])
    loader = DataLoader(TensorDataset(job["X"], job["y"]), batch_size=told["batch"])
    given: dict[str, Any] = {"prior_precision": 1 / told["prior"]}
    if told["likelihood"] == "regression":
        given["sigma_noise"] = told["noise"] ** 0.5
    start = time.perf_counter()
    la = Laplace(
        model,
        told["likelihood"],
        subset_of_weights="last_layer" if told["last_layer"] else "all",
        hessian_structure=told["structure"],
        **given,
    )
    la.fit(loader)
    fitted = time.perf_counter()
    regression = told["likelihood"] == "regression"
    if told["tune"] and regression:
        by_evidence(la, told["steps"])
    elif told["tune"]:
        la.optimize_prior_precision(method="marglik", pred_type="glm")
    tuned = time.perf_counter()
    found = {}
    if told["tune"] and not regression:
        parts = [la(x, pred_type="glm", link_approx="probit") for x in job["new"].split(told["batch"])]
        found["probit"] = torch.cat(parts).detach()
    else:
        found = predict_with(la, job["new"], told["likelihood"])
    done = time.perf_counter()
    torch.save(found, folder / "found.pt")
    numbers = {
        "fit": fitted - start,
        "tune": tuned - fitted,
        "predict": done - tuned,
        "seconds": done - start,
        "log evidence": float(la.log_marginal_likelihood()),
        "prior": 1 / float(torch.as_tensor(la.prior_precision).detach().flatten()[0]),
        "noise": float(torch.as_tensor(la.sigma_noise).detach()) ** 2,
    }
    (folder / "found.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
