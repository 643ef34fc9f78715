"""Stored networks and their images fit together; a small version of the spectra runs."""

import numpy as np
import pytest
import torch

from experiments import common
from experiments.__main__ import main
from experiments.common.data import cifar10, decode, mnist
from experiments.common.networks import LATENT, dcgan_discriminator, lenet5, resnet, untrained_generator
from experiments.common.training import train_gan
from experiments.zhang2022 import spectra
from tests.support.drawn import normal
from tests.support.needed import needs
from tests.support.quick_runs import run_quick

WEIGHTS = common.DATA / "weights"


# Stored networks.


def test_lenet_reads_digits():
    needs("mnist.npz", "weights/lenet5_mnist.safetensors")
    x, y = mnist(common.DATA, False, count=2000)
    assert x.shape == (2000, 1, 32, 32) and float(x.min()) >= 0 and float(x.max()) <= 1
    with torch.no_grad():
        assert float((lenet5(WEIGHTS)(x).argmax(1) == y).double().mean()) > 0.98


def test_the_discriminator_tells_digits_from_shuffled_ones():
    needs("mnist.npz", "weights/dcgan_discriminator_mnist.safetensors")
    x, _ = mnist(common.DATA, False, network="dcgan", count=200)
    shuffled = x.flatten(1)[:, torch.randperm(784, generator=torch.Generator().manual_seed(0))].view_as(x)
    assert x.shape == (200, 1, 28, 28) and float(x.min()) == -1 and float(x.max()) == 1
    D = dcgan_discriminator(WEIGHTS)
    with torch.no_grad():
        assert float(D(x).mean()) > float(D(shuffled).mean()) + 2


def test_resnet_knows_its_classes():
    needs("cifar10_test.npz", "weights/resnet20_cifar10.safetensors")
    x, y = cifar10(common.DATA, "test", count=200)
    with torch.no_grad():
        assert float((resnet(WEIGHTS, 20)(x).argmax(1) == y).double().mean()) > 0.85


def test_decoding_undoes_the_differences():
    x = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    stored = x.transpose(1, 0, 2, 3).copy()
    stored[0] -= stored[1]
    stored[2] -= stored[1]
    for axis in (3, 2):
        stored = np.diff(stored, axis=axis, prepend=np.uint8(0))
    assert stored.dtype == np.uint8 and np.array_equal(decode(stored), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: lenet5(None, classes=1, seed=seed),
        lambda seed: dcgan_discriminator(None, seed, width=2),
        lambda seed: resnet(None, 8, seed=seed),
        spectra.mlp,
        lambda seed: untrained_generator(seed, width=2),
    ],
)
def test_new_networks_are_those_of_their_seed(make):
    first, again, other = (torch.cat([t.flatten() for t in make(seed).parameters()]) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not make(0).training


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"reads lenet5_mnist.safetensors .* --data PATH"):
        lenet5(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"reads mnist.npz .* --data PATH"):
        mnist(tmp_path, True)
    with pytest.raises(ValueError, match=r"depth 6 b \+ 2 .* got 19"):
        resnet(None, 19)
    with pytest.raises(ValueError, match="'test', 'train_1' to 'train_5', 'train' or 'all'; got 'none'"):
        cifar10(tmp_path, "none")
    with pytest.raises(ValueError, match=r"'lenet5' or 'dcgan', .* got 'vae'"):
        mnist(tmp_path, True, network="vae")


# Training.


def test_a_discriminator_learns_to_tell_images_from_samples():
    images = torch.full((32, 1, 28, 28), -0.9)
    images[:, :, 8:20, 8:20] = 0.9
    D, G = train_gan(images, steps=20, seed=0, widths=(4, 4), batch=8, rate=2e-3)
    with torch.no_grad():
        samples = G(normal(20, LATENT).float())
        assert float(D(images).min()) > float(D(samples).max()) + 0.1
    assert not D.training and not G.training


def test_two_classes_are_learned():
    net, y = spectra.mlp(0), torch.arange(200) % 2 == 0
    x = normal(200, 1, 32, 32).float() + y.float().view(-1, 1, 1, 1) - 0.5
    spectra.train(net, x, y, steps=40, seed=0)
    with torch.no_grad():
        assert float(((net(x).squeeze(1) > 0) == y).double().mean()) > 0.95


# The experiment.


@pytest.mark.slow
def test_spectra_run(tmp_path):
    needs("mnist.npz", "weights/dcgan_discriminator_mnist.safetensors")
    table = run_quick(tmp_path, "spectra", "--images", "10")["spectra"]
    assert list(table) == [spectra.CLASSIFIERS, spectra.LARGE_GAN, spectra.SMALL_GAN, spectra.PLAIN_GAN]
    for networks in table.values():
        for kernels in networks.values():
            for one in kernels.values():
                counts = [value["mean"] for value in one["components"].values()]
                assert one["n"] == 10 and counts == sorted(counts) and counts[0] >= 1 and counts[-1] <= 10
    large, small = (table[name]["trained"] for name in (spectra.LARGE_GAN, spectra.SMALL_GAN))
    assert large["nfk"]["p"] == 661_248 and small["ntk"]["p"] == 16_920
    assert table[spectra.PLAIN_GAN]["trained"]["nfk"]["p"] == 16_800  # without the parameters of batch norm
    # Centered Fisher vectors have one component less than examples; the mean is the tangent kernel's first.
    assert large["nfk"]["explained"]["10"]["mean"] == pytest.approx(1)
    assert large["ntk"]["explained"]["1"]["mean"] > 2 * large["nfk"]["explained"]["1"]["mean"]
    assert "| spectra: binary MNIST, NFK" in (tmp_path / "README.md").read_text()


def test_spectra_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="two different digits; got 7 twice"):
        main(["spectra", "--quick", "--digits", "7", "7"])
    with pytest.raises(FileNotFoundError, match=r"reads mnist.npz .* --data PATH"):
        main(["spectra", "--quick", "--data", str(tmp_path)])
