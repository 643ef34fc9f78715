"""Training of GANs: its parts against plain formulas, and a few steps."""

import pytest
import torch
from torch import nn

from experiments.common import adversarial
from experiments.common.adversarial import SpectralNorm, augment_alike, renew_statistics, train_bigan, train_hinge
from experiments.common.networks import ColorDiscriminator, ColorGenerator, ImageEncoder, PairDiscriminator
from tests.support.drawn import normal

IMAGES = torch.randint(0, 256, (40, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_augmented_images_have_a_gradient_and_differ_by_example():
    torch.manual_seed(0)
    x = normal(1, 3, 32, 32).float().expand(20, -1, -1, -1).clone().requires_grad_()
    out = augment_alike(x)
    out.sum().backward()
    assert out.shape == x.shape and bool(x.grad.isfinite().all())
    assert min(float((out[i] - out[j]).detach().abs().max()) for i in range(20) for j in range(i)) > 0
    # Where a hole is, or the edge of a shift, all colors are zero; some images have no hole.
    zero = (out == 0).all(1).flatten(1).double().mean(1)
    assert float(zero.max()) > 0.15 and float(zero.min()) < 0.12


def test_shifts_move_all_pixels_alike():
    torch.manual_seed(1)
    M = adversarial._shift(50, 8, torch.zeros(1))
    moved = M @ torch.arange(1.0, 9.0)
    for row in moved:
        kept = row[row > 0]
        assert len(kept) >= 8 - adversarial.SHIFT and bool((kept.diff() == 1).all())
    assert len({tuple(row.tolist()) for row in moved}) == 2 * adversarial.SHIFT + 1


def test_the_spectral_norm_is_baked_into_plain_weights():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    norm = SpectralNorm(net)
    norm.iterate(300)
    wanted = {key: w.detach() / torch.linalg.matrix_norm(w.detach().flatten(1), 2) for key, w in norm.weights.items()}
    found = norm.normalized()
    assert set(found) == {"0.weight", "2.weight"} and found["0.weight"].requires_grad
    for key, w in wanted.items():
        torch.testing.assert_close(found[key].detach(), w, rtol=1e-4, atol=1e-5)
    before = net(normal(2, 3, 4, 4).float())
    norm.bake()
    torch.testing.assert_close(
        torch.func.functional_call(net, found, normal(2, 3, 4, 4).float()), net(normal(2, 3, 4, 4).float())
    )
    assert not torch.allclose(before, net(normal(2, 3, 4, 4).float()))
    for key, w in wanted.items():
        torch.testing.assert_close(net.get_parameter(key).detach(), w, rtol=1e-4, atol=1e-5)
    assert not any("parametrizations" in name for name, _ in net.named_parameters())


def test_statistics_of_batch_norm_are_those_of_the_batches():
    net = nn.Sequential(nn.BatchNorm2d(2))
    batches = [normal(4, 2, 3, 3, seed=i).float() for i in range(3)]
    renew_statistics(net, batches)
    torch.testing.assert_close(net[0].running_mean, torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0))
    assert not net.training


def test_a_gan_trains_and_tells_how_far_it_came():
    D, G = ColorDiscriminator(2), ColorGenerator(2)
    first = {name: t.clone() for name, t in D.state_dict().items()}
    averaged, steps, path = train_hinge(D, G, IMAGES, steps=5, seed=0, batch=4, every=2)
    assert steps == 5 and len(path) == 3 and averaged is not G
    assert not D.training and not averaged.training
    assert any(not torch.equal(first[name], t) for name, t in D.state_dict().items())
    for layer in D.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) == pytest.approx(1, rel=0.1)
    with torch.no_grad():
        x = averaged(normal(3, 100).float())
        torch.testing.assert_close(D(x)[1:2], D(x[1:2]))  # examples do not interact


def test_training_stops_when_its_time_is_over():
    _, steps, path = train_hinge(ColorDiscriminator(2), ColorGenerator(2), IMAGES, steps=50, seed=0, batch=4, seconds=0)
    assert steps == 1 and len(path) == 1
    with pytest.raises(ValueError, match=r"stay in uint8 on the device; got torch\.float32"):
        train_hinge(ColorDiscriminator(2), ColorGenerator(2), IMAGES.float(), steps=1, seed=0)


def test_a_bigan_trains_its_encoder():
    D, E, G = PairDiscriminator(2), ImageEncoder(2), ColorGenerator(2)
    first = E.last.weight.detach().clone()
    encoder, generator, steps, path = train_bigan(D, E, G, IMAGES, steps=3, seed=0, batch=4)
    assert steps == 3 and len(path) == 1 and not encoder.training and not generator.training
    assert not torch.equal(first, E.last.weight)
    with torch.no_grad():
        assert encoder(generator(normal(2, 100).float())).shape == (2, 100)
