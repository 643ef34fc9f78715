"""The public names, and what importing linnet does not import."""

import subprocess
import sys
import textwrap

import pytest
import torch

import linnet


@pytest.mark.parametrize("name", linnet.__all__)
def test_public_names_are_there(name):
    if name == "limits":
        pytest.importorskip("gpytorch", reason="needs the extra gpytorch")
    assert getattr(linnet, name) is not None
    assert name in dir(linnet)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'linnet' has no attribute 'tangent_classifier'"):
        _ = linnet.tangent_classifier


def test_importing_linnet_imports_nothing_slow_until_a_public_module_is_asked_for():
    pytest.importorskip("gpytorch", reason="needs the extra gpytorch")
    slow = ("sklearn", "scipy", "gpytorch", "linear_operator", "matplotlib", "transformers")
    code = f"""
        import sys, linnet
        print([name for name in {slow} if name in sys.modules])
        for name in ("conformal", "likelihoods", "sampling", "metrics", "limits", "scores", "report", "testing"):
            assert getattr(linnet, name) is sys.modules[f"linnet.{{name}}"]
        assert "gpytorch" in sys.modules
        from linnet.likelihoods import Categorical
        assert Categorical is linnet.probability.likelihoods.Categorical
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_files_of_every_door_can_be_read_first(tmp_path):
    # In a process that has not met the estimator yet.
    torch.manual_seed(0)
    model, X = torch.nn.Linear(2, 1).double(), torch.randn(6, 2, dtype=torch.float64)
    fitted = {
        "TangentRegressor": linnet.TangentRegressor(model, noise=0.1).fit(X, X[:, 0]),
        "TangentClassifier": linnet.TangentClassifier(model, inference="map").fit(X, (X[:, 0] > 0).long()),
        "FisherEmbedding": linnet.FisherEmbedding(model, 1).fit(X),
        "Laplace": linnet.Laplace(model, "regression", prior=1.0, noise=0.1).fit(X, model(X).detach() + 0.1),
    }
    for name, estimator in fitted.items():
        estimator.save(tmp_path / name)
    torch.save(model.state_dict(), tmp_path / "weights")
    code = f"""
        import os, sys, sklearn.base, torch, linnet  # scikit-learn once, and not in each process
        assert not [name for name in sys.modules if name.startswith("linnet._estimator")]
        sys.modules["huggingface_hub"] = None  # no door needs the extra
        model = torch.nn.Linear(2, 1).double()
        model.load_state_dict(torch.load({str(tmp_path / "weights")!r}))
        for name in {list(fitted)}:
            if not os.fork():
                print(type(linnet.load({str(tmp_path)!r} + "/" + name, model)).__name__, flush=True)
                os._exit(0)
            assert os.wait()[1] == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(fitted)


def test_users_see_no_warning_of_scripting_in_other_packages():
    pytest.importorskip("botorch", reason="needs the extra botorch")
    # torch scripts the decompositions of forward mode, and linear_operator scripts functions when it is imported.
    code = """
        import torch
        import linnet, linnet.interop.botorch, linnet.interop.gpytorch, linnet.limits

        J = linnet.linearize(torch.nn.Linear(3, 2)).jacobian(torch.randn(5, 3), engine="autodiff")
        print((J @ torch.ones(J.shape[1])).shape)
    """
    command = [sys.executable, "-W", "error:`torch.jit.script", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([10])"
