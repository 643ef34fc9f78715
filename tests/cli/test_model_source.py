"""Networks from --model and --weights, and what is said where they cannot be had."""

from __future__ import annotations

import json
import pickle
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from linnet.cli import model_source
from linnet.cli.terminal import UsageError
from tests.support.command_cases import networks

CPU = torch.device("cpu")


def made(spec, weights=None, seed=0):
    return model_source.load_network(spec, weights, seed=seed, device=CPU)


def refused(spec, weights=None) -> str:
    with pytest.raises(UsageError) as error:
        made(spec, weights)
    return str(error.value)


def test_a_function_of_a_file_or_a_module(tmp_path, monkeypatch):
    path = networks(tmp_path)
    model = made(f"{path}:two")
    assert isinstance(model, nn.Sequential) and not model.training
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undone after the test
    code = "from torch import nn\n\n\ndef Net():\n    return nn.Linear(2, 3)\n\n\nnet = Net()\n"
    (tmp_path / "linnet_test_nets.py").write_text(code)
    assert made("linnet_test_nets:Net").weight.shape == (3, 2)
    assert made("linnet_test_nets:net").weight.shape == (3, 2)


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit()", "raise SystemExit(0)", "raise typer.Exit(0)"])
def test_models_that_end_the_program(tmp_path, code):
    path = tmp_path / "ends.py"
    path.write_text(f"import sys\nimport typer\n{code}\n")
    assert "ends.py cannot be imported" in refused(f"{path}:build")
    path.write_text(f"import sys\nimport typer\ndef build():\n    {code}\n")
    assert "failed. It is called without arguments" in refused(f"{path}:build")


def test_the_seed_is_that_of_drawn_weights(tmp_path):
    path = networks(tmp_path)
    before = torch.get_rng_state()
    one, two, other = (made(f"{path}:drawn", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one[0].weight, two[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_networks_that_are_not_trained_are_refused(tmp_path):
    path, how = networks(tmp_path), {"seed": 0, "device": CPU, "random_weights": False}
    with pytest.raises(UsageError, match=r"drawn at random: another seed gives other weights.*--random-weights"):
        model_source.load_network(f"{path}:drawn", None, **how)
    with pytest.warns(UserWarning, match=r"Some weights of .* are drawn at random: '2.weight'"):
        model_source.load_network(f"{path}:half_drawn", None, **how)
    before = torch.get_rng_state()
    kept = model_source.load_network(f"{path}:numbers", None, **how)
    save_file(kept.state_dict(), tmp_path / "w.safetensors")
    loaded = model_source.load_network(f"{path}:drawn", tmp_path / "w.safetensors", **how)
    assert torch.equal(loaded[0].weight, kept[0].weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_without_counters_of_batches(tmp_path):
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))\n"
    )
    state = {k: v for k, v in made(f"{tmp_path / 'normed.py'}:build").state_dict().items() if "num_batches" not in k}
    save_file({k: v + 1 for k, v in state.items()}, tmp_path / "w.safetensors")
    model = made(f"{tmp_path / 'normed.py'}:build", tmp_path / "w.safetensors")
    assert torch.equal(model[1].running_var, torch.full((3,), 2.0))


def test_models_that_do_not_import(tmp_path):
    path = networks(tmp_path)
    said = refused("no_such_package_here.models:build")
    assert "ModuleNotFoundError: No module named 'no_such_package_here'" in said
    assert "--model is module:function" in said
    (tmp_path / "bad.py").write_text("import math\n1 / 0\n")
    said = refused(f"{tmp_path / 'bad.py'}:build")
    assert "ZeroDivisionError: division by zero" in said and "bad.py, line 2" in said
    assert "names no function" in refused("nothing")
    assert "There is no file" in refused("missing_file.py:build")
    said = refused(f"{path}:absent")
    assert "has no 'absent'" in said and "'numbers'" in said
    assert "is int, neither a network" in refused(f"{path}:number")
    assert "returned int" in refused(f"{path}:no_network")
    said = refused(f"{path}:broken")
    assert "ZeroDivisionError: no such thing" in said and "without arguments" in said


@pytest.mark.parametrize("ending", ["safetensors", "pt", "pth"])
def test_weights(tmp_path, ending):
    path = networks(tmp_path)
    state = {name: torch.full_like(t, 0.5) for name, t in made(f"{path}:two").state_dict().items()}
    file = tmp_path / f"w.{ending}"
    if ending == "safetensors":
        save_file(state, file)
    else:
        torch.save(state if ending == "pt" else {"state_dict": state, "epoch": 3}, file)
    model = made(f"{path}:two", file)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_weights_that_do_not_fit_say_which_keys(tmp_path):
    path, file = networks(tmp_path), tmp_path / "w.safetensors"
    state = dict(made(f"{path}:two").state_dict())
    state["2.weight"] = torch.zeros(7, 6)
    state["extra"] = state.pop("0.bias")
    save_file(state, file)
    said = refused(f"{path}:two", file)
    assert "missing: '0.bias'" in said
    assert "not in the network: 'extra'" in said
    assert "of another shape: '2.weight (7, 6) (the network has (2, 6))'" in said


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_files_that_are_no_weights(tmp_path, capsys):
    spec = f"{networks(tmp_path)}:two"
    assert "There is no file" in refused(spec, tmp_path / "none.pt")
    other = tmp_path / "w.onnx"
    other.write_text("x")
    assert "has an unknown ending" in refused(spec, other)
    cut = tmp_path / "w.safetensors"
    cut.write_bytes(b"\x10")
    assert "not a complete safetensors file" in refused(spec, cut)
    evil = tmp_path / "w.pt"
    evil.write_bytes(pickle.dumps(Evil(), protocol=2))
    assert "would run code of the file" in refused(spec, evil)
    assert capsys.readouterr().out == ""
    torch.save({"epoch": 3}, evil)
    assert "holds 'int'" in refused(spec, evil)


def test_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install timm" in refused("timm:resnet18")
    fake = types.ModuleType("timm")

    def create_model(name, pretrained):
        if name != "tiny":
            raise RuntimeError(f"Unknown model ({name})")
        model = nn.Linear(2, 2)
        model.pretrained_cfg = {"mean": (0.1,) * 3, "std": (0.2,) * 3, "input_size": (3, 8, 9)}
        model.given = pretrained
        return model

    fake.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", fake)
    model = made("timm:tiny")
    assert model.given is True
    assert model_source.find_pixel_settings(model) == {
        "pixel_mean": (0.1,) * 3,
        "pixel_std": (0.2,) * 3,
        "size": (8, 9),
    }
    assert model_source.find_pixel_settings(nn.Linear(1, 1)) == {}
    assert "Unknown model (huge)" in refused("timm:huge")


def test_pixels_of_a_hugging_face_model(monkeypatch, tmp_path):
    """The image processor in the folder of the model says which pixels the network was trained with."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    folder = tmp_path / "vit"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_source.find_pixel_settings(made(f"hf:{folder}")) == {}
    processor = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3, "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    found = model_source.find_pixel_settings(made(f"hf:{folder}"))
    assert found == {"pixel_mean": (0.4, 0.5, 0.6), "pixel_std": (0.2,) * 3, "size": (8, 8)}
    crop = {"do_center_crop": True, "crop_size": {"height": 6, "width": 4}, "do_normalize": False, "do_rescale": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | crop))
    found = model_source.find_pixel_settings(made(f"hf:{folder}"))
    assert found == {"pixel_mean": (0.0,) * 3, "pixel_std": (1 / 255,) * 3, "size": (6, 4)}


def test_hugging_face_without_transformers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refused("hf:bert")
    monkeypatch.undo()
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "transformers finds no model at" in refused(f"hf:{tmp_path}")


def test_networks_without_parameters(tmp_path):
    (tmp_path / "empty.py").write_text("from torch import nn\ndef build():\n    return nn.Tanh()\n")
    assert "has no parameters" in refused(f"{tmp_path / 'empty.py'}:build")
    (tmp_path / "meta.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2, device='meta')\n")
    assert "--weights" in refused(f"{tmp_path / 'meta.py'}:build")
