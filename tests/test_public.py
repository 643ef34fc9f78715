"""The public names, and what importing linnet does not import."""

import subprocess
import sys

import pytest

import linnet


@pytest.mark.parametrize("name", linnet.__all__)
def test_public_names_are_there(name):
    assert getattr(linnet, name) is not None
    assert name in dir(linnet)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'linnet' has no attribute 'tangent_classifier'"):
        _ = linnet.tangent_classifier


def test_importing_linnet_imports_nothing_slow():
    slow = ("sklearn", "scipy", "gpytorch", "linear_operator", "torchmetrics", "matplotlib", "transformers")
    code = f"import sys, linnet; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_of_every_door_can_be_read_first(tmp_path):
    # In a process that has not met the estimator yet.
    code = f"import linnet; linnet.load({str(tmp_path / 'none')!r}, None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr
    code = "from linnet import load, saved\ntry: load('x')\nexcept FileNotFoundError: print(sorted(saved._READERS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['FisherEmbedding', 'Laplace', 'TangentClassifier', 'TangentRegressor']"
