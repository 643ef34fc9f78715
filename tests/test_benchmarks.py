"""The networks and the rivals of the timings are what they claim; no timing here."""

import pytest
import torch
from torch import nn

from benchmarks.models import MODELS, ResNet, VisionTransformer, WideResNet
from benchmarks.rivals import per_example_rows, plain, published
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


def test_rivals_refuse_train_mode_and_wrong_vectors():
    model, x = tiny("mlp")
    with pytest.raises(ValueError, match=r"V needs 44 rows, one per parameter; got \(43, 2\)"):
        published(model, first, x, torch.zeros(43, 2).double())
    with pytest.raises(ValueError, match="got one in train mode"):
        plain(model.train(), first, x)
