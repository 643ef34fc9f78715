"""The networks and the rivals of the timings are what they claim; no timing here."""

import json
import sys
import warnings

import pytest
import torch
from torch import nn

import linnet
from benchmarks import heads, laplace, laplace_peer, many_outputs, padding, sampling, startup
from benchmarks.models import MODELS, ResNet, ResNet18, VisionTransformer, WideResNet
from benchmarks.rivals import per_example_rows, plain, published
from experiments import common
from linnet.testing import dense_jacobian

RIVALS = {"published": published, "per_example_rows": per_example_rows}


def first(raw):
    return raw[:, 0]


def tiny(kind: str) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        if kind == "mlp":
            model = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 2))
            return model.double().eval(), torch.randn(5, 4, dtype=torch.float64, generator=generator)
        if kind == "vit":
            return VisionTransformer(dim=8, depth=1, heads=2).double().eval(), images
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(1))
        return nn.Sequential(*model, nn.Linear(256, 2)).double().eval(), images


@pytest.mark.parametrize(
    ("name", "p"),
    [("wrn-40-2", 2_243_546), ("resnet-20", 269_722), ("vit-tiny", 5_362_762), ("mlp-800k", 803_601)],
)
def test_networks_have_their_published_sizes(name, p):
    model = MODELS[name].build()
    assert sum(tensor.numel() for tensor in model.parameters()) == p
    assert not model.training
    x = MODELS[name].data(2)
    with torch.no_grad():
        f = model(x)
    assert f.shape == (2, 1 if name == "mlp-800k" else 10)
    assert f.isfinite().all()
    again = MODELS[name].build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_resnet20_has_the_usual_state_dict():
    keys = [key for key in ResNet(3).state_dict() if "num_batches" not in key]
    blocks = [f"layer{i}.{b}." for i in (1, 2, 3) for b in (0, 1, 2)]
    norm = ("weight", "bias", "running_mean", "running_var")
    needed = {"conv1.weight", "linear.weight", "linear.bias", *(f"bn1.{key}" for key in norm)}
    for block in blocks:
        needed |= {f"{block}conv1.weight", f"{block}conv2.weight"}
        needed |= {f"{block}{bn}.{key}" for bn in ("bn1", "bn2") for key in norm}
    assert set(keys) == needed


def test_resnet20_shortcut_keeps_channels_in_the_middle():
    block = ResNet(3).layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().max() == out[:, 24:].abs().max() == 0


def test_wide_resnet_has_forty_layers():
    convolutions = [m for m in WideResNet(40, 2).modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) == 37  # and three shortcuts, and the linear layer


@pytest.mark.parametrize("kind", ["mlp", "conv", "vit"])
@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_rivals_agree_with_the_dense_product(kind, rival, chunk):
    model, x = tiny(kind)
    J = dense_jacobian(model, x, output=first)
    V = torch.randn(J.shape[1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    reference = J.T @ (J @ V)
    got = RIVALS[rival](model, first, x, V, chunk=chunk)
    torch.testing.assert_close(got, reference, rtol=1e-9, atol=1e-9 * float(reference.abs().max()))


@pytest.mark.parametrize("kind", ["mlp", "conv", "vit"])
def test_plain_is_the_gradient_of_the_sum(kind):
    model, x = tiny(kind)
    J = dense_jacobian(model, x, output=first)
    torch.testing.assert_close(plain(model, first, x), J.sum(0), rtol=1e-9, atol=1e-9)


def test_gradient_features_are_the_same_however_they_are_kept():
    X, y = heads.data(6, "cpu")
    assert X.shape == (6, 3, 32, 32) and y.shape == (6,)
    plain = linnet.linearize(MODELS["resnet-20"].build(), heads.TOP["1 block"]).jacobian(X)
    kept = [heads.full_batch(J, y)() for J in (plain, plain.above_frozen(), plain.cached())]
    reference = kept[0]
    assert float(reference.norm()) > 0
    for found in kept[1:]:
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.filterwarnings("ignore:The evidence of these 20 labels")  # which are too few
def test_passes_over_real_data_are_counted(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra demo")
    needed = ("mnist.npz", "fashion_mnist.npz", "weights/resnet20_cifar10.safetensors")
    missing = [name for name in needed if not (common.DATA / name).exists()]
    if missing:
        pytest.skip(f"no {missing[0]} under {common.DATA}")
    out = tmp_path / "heads.json"
    out.write_text(json.dumps({"machine": heads.machine("cpu"), "optimum": ["kept"]}))
    given = {"rounds": 1, "only": "real", "n": 20}
    heads.run("cpu", out, folder=common.DATA, **given)
    found = json.loads(out.read_text())
    assert found["optimum"] == ["kept"]
    assert [one["set"] for one in found["real"]] == ["mnist", "fashion_mnist"]
    assert all(one["passes"] > 2 and one["n"] == 20 for one in found["real"])
    assert f"mnist, 20 labels: {found['real'][0]['passes']} passes" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs a folder of data"):
        heads.run("cpu", out, folder=None, **given)


def test_fine_tuning_moves_the_same_parameters():
    X, y = heads.data(4, "cpu")
    model = MODELS["resnet-20"].build()
    before = {name: t.clone() for name, t in model.named_parameters()}
    names = set(linnet.linearize(model, heads.TOP["1 block"]).theta)
    heads.fine_tuning(model, names, X, y, 2)()
    assert all(torch.equal(t, before[name]) for name, t in model.named_parameters())  # a copy is tuned
    assert "layer3.2.conv1.weight" in names and "layer3.1.conv1.weight" not in names


def test_rivals_refuse_train_mode_and_wrong_vectors():
    model, x = tiny("mlp")
    with pytest.raises(ValueError, match=r"V needs 44 rows, one per parameter; got \(43, 2\)"):
        published(model, first, x, torch.zeros(43, 2).double())
    with pytest.raises(ValueError, match="got one in train mode"):
        plain(model.train(), first, x)


def test_resnet18_has_its_usual_size():
    assert sum(p.numel() for p in ResNet18(100).parameters()) == 11_220_132
    with torch.no_grad():
        assert ResNet18(7, width=2).eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_the_sampling_benchmark_measures_what_it_says():
    row = sampling.measured("small", "cpu", n=2)
    assert (row["n"], row["c"], row["p"], row["samples"]) == (2, 10, 75_290, 16)
    assert row["residual"] <= 0.01 and row["residual, highest precision"] <= 0.0101
    assert 0 < row["effective dimension"] < 20


def test_the_network_beside_laplace_torch_has_its_size():
    model = laplace_peer.network("digits")
    assert sum(p.numel() for p in model.parameters()) == 26_122
    X, y, new = laplace.data("digits")
    assert (len(X), len(new)) == (797, 1000)
    assert y.max() == 9


@pytest.mark.parametrize("kind", ["classes", "numbers", "cnn"])
def test_a_job_beside_laplace_torch_gives_what_is_compared(kind):
    parts = laplace.data(kind)
    model = laplace.trained(kind, *parts[:2], steps=3)
    likelihood = "regression" if kind == "numbers" else "classification"
    told = {"network": kind, "structure": "kron", "last_layer": True, "likelihood": likelihood, "tune": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = laplace.ours((model, {**told, "prior": 0.4, "noise": 0.05}, parts))
    c = 2 if kind == "numbers" else 3
    assert found["tensors"]["cov"].shape == (20, c, c)
    assert ("probit" in found["tensors"]) == (kind != "numbers")
    assert laplace.difference(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 0.0])) == 0.5


def test_a_peer_that_fails_says_why():
    parts = laplace.data("classes")
    job = (laplace.trained("classes", *parts[:2], steps=1), {"network": "nothing"}, parts)
    with pytest.raises(RuntimeError, match="laplace-torch failed in"):
        laplace.peer(sys.executable, [job])


def test_startup_measures_what_it_says(tmp_path, monkeypatch):
    names = ("TangentRegressor", "TangentClassifier", "Laplace", "FisherEmbedding")
    monkeypatch.setattr(startup, "seconds", lambda code: exec(code, {}) or (1.0 + code.count("linnet"), 0.5))
    table = startup.run(tmp_path / "startup.json", rounds=1)
    assert list(table) == [*startup.IMPORTS, *(f"load {name}" for name in names)]
    assert table["import torch"]["beyond torch"] == 0 and table["import linnet"]["ratio to torch"] == 2
    assert table["python"]["CPU seconds"] == 0.5
    kept = json.loads((tmp_path / "startup.json").read_text())
    assert kept["times"] == table and kept["targets beyond torch"] == startup.TARGETS


def test_padding_is_timed_with_and_without():
    found = padding.measured(4, rounds=1)
    assert 0 < found["share of tokens"] < 1
    assert found["times as long with all tokens"].keys() == {"as read", "factors kept"}
    assert found["ms"].keys() == {"as read", "as read, all tokens", "factors kept", "factors kept, all tokens"}


def test_error_bars_of_images_are_compared_with_exact_ones():
    found = many_outputs.run("cpu", ["diag", "last layer"], images=2, side=8, samples=4, checked=3)
    assert found["outputs"] == 192
    for door in ("diag", "last layer"):  # few outputs, whose error bars are exact
        assert found[door]["variance"] == "exact" and found[door]["std_error"] == 0
        assert found[door]["relative_difference_to_exact"] < 1e-4
