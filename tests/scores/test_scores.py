"""Scores: one number per example, against the same written out, with its gradient by autograd."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet import scores
from linnet.data import as_source
from linnet.scores.elbo import LIKELIHOODS, draw_noise
from linnet.scores.generated_samples import draw_latents
from linnet.testing.case import Net
from tests.support.drawn import double, normal

X = normal(7, 3)


def net(outputs: int = 4, *more: nn.Module, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *more), seed)


def bound(score: scores.Score, model: nn.Module) -> linnet.Linearization:
    module, output = score.bind(model)
    return linnet.linearize(module, None, output)


def check(score: scores.Score, model: nn.Module, data: Any, reference: Callable[[], Tensor]) -> None:
    """Values and Jacobian are those of the reference, and the model computes what it did before."""
    values = reference()
    lin = bound(score, model)
    assert list(lin.theta) == [name for name, p in model.named_parameters() if p.requires_grad]
    J = lin.jacobian(data)
    assert J.c == 1
    torch.testing.assert_close(J.outputs()[:, 0], values.detach(), rtol=1e-10, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for value in values:
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs]))
    torch.testing.assert_close(J.dense(), torch.stack(rows), rtol=1e-9, atol=1e-11)


# Energies.


def test_classifier_is_the_log_sum_exp_of_the_logits() -> None:
    model = net()
    check(scores.classifier(), model, X, lambda: model(X).logsumexp(1))


def test_a_single_logit_is_taken_as_it_is() -> None:
    model = net(1)
    check(scores.classifier(), model, X, lambda: model(X)[:, 0])


def test_classifier_reads_the_logits_of_model_outputs() -> None:
    model = Net(lambda m, x: {"logits": m.net(x)}, net=net())
    check(scores.classifier(), model, X, lambda: model.net(X).logsumexp(1))


def test_energies_and_callables() -> None:
    def fn(out: Tensor) -> Tensor:
        return out.square().sum(1)

    model = net()
    for score in (scores.energy(fn), scores.as_score(fn)):
        assert score.centered
        check(score, model, X, lambda: model(X).square().sum(1))
    one = net(1)
    check(scores.energy(), one, X, lambda: one(X)[:, 0])


def test_centered_are_the_energies() -> None:
    energies = (scores.classifier(), scores.energy(), scores.gan())
    densities = (scores.vae(), scores.flow(), scores.autoregressive())
    assert all(score.centered for score in energies)
    assert not any(score.centered for score in densities)


# GANs.


def deconvolution() -> nn.Sequential:
    """Latents (m, 2) to samples (m, 3), with parts that act otherwise in training."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()


def reference(score: scores.Score, model: nn.Module, data: Tensor = X) -> Any:
    lin = bound(score, model)
    return score.reference(model, lin, as_source(data, lin.module.forward))


def samples_of(source: Any, size: int) -> Tensor:
    return torch.cat([batch.args[0] for batch in source.batches(size)])


def test_samples_are_those_of_the_generator_in_eval_mode_whatever_the_batch() -> None:
    generator = deconvolution().train()
    source = reference(scores.gan(generator, latent=2, samples=9, seed=3), net(1))
    expected = deconvolution().eval()
    expected.load_state_dict(generator.state_dict())
    z = torch.randn(9, 2, generator=torch.Generator().manual_seed(3)).double()
    torch.testing.assert_close(samples_of(source, 4), expected(z).detach())
    torch.testing.assert_close(samples_of(source, 9), expected(z).detach())
    assert generator.training
    assert float(generator[1].running_mean.abs().sum()) == 0


@pytest.mark.parametrize(
    ("latent", "shape"),
    [(3, (6, 3)), ((3, 1, 2), (6, 3, 1, 2)), (torch.ones(4, 2), (4, 2)), (lambda m, g: torch.rand(m, 5), (6, 5))],
)
def test_latents_come_in_four_ways(latent: Any, shape: tuple[int, ...]) -> None:
    assert draw_latents(latent, 6, 0).shape == shape


def test_samples_already_made_serve_without_a_generator() -> None:
    made = normal(5, 3, seed=4)
    source = reference(scores.gan(samples=made), net(1))
    torch.testing.assert_close(samples_of(source, 2), made)


def test_a_final_sigmoid_is_left_out() -> None:
    model, made = Net(lambda m, x: m.main(x).view(-1), main=net(1, nn.Sigmoid())), normal(5, 3, seed=4)
    score = scores.gan(samples=made)
    check(score, model, X, lambda: model.main[:3](X)[:, 0])
    assert reference(score, model).n == 5
    assert isinstance(model.main[3], nn.Sigmoid)
    flat = net(1, nn.Sigmoid())
    check(score, flat, X, lambda: flat[:3](X)[:, 0])


def test_a_sigmoid_that_is_not_the_last_step_is_noticed() -> None:
    model = Net(lambda m, x: 3 * m.main(x) - 1, main=net(1, nn.Sigmoid()))
    with pytest.raises(ValueError, match="not the sigmoid of"):
        reference(scores.gan(samples=normal(5, 3, seed=4)), model)
    score = scores.gan(samples=normal(5, 3, seed=4), output=lambda raw: torch.logit((raw + 1) / 3))
    check(score, model, X, lambda: model.main[:3](X)[:, 0])
    assert reference(score, model).n == 5


def test_probabilities_earn_a_warning() -> None:
    model = Net(lambda m, x: m.main(x).sigmoid(), main=net(1))
    with pytest.warns(UserWarning, match="between 0 and 1"):
        reference(scores.gan(samples=normal(20, 3, seed=4)), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference(scores.gan(samples=normal(20, 3, seed=4), output=torch.logit), model)


def wide(z: Tensor) -> Tensor:
    return torch.ones(len(z), 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("score", "match"),
    [
        (scores.gan(), r"pass generator= and latent=, or samples="),
        (scores.gan(wide, samples=4), "gan needs latent="),
        (scores.gan(wide, latent="normal", samples=4), "gan needs latent="),
        (scores.gan(wide, latent=2, samples=4), r"do not fit the discriminator: they have shape \(8,\) each.*\(3,\)"),
        (scores.gan(lambda z: normal(9, 3), latent=2, samples=4), "made 9 samples from 2 latents"),
        (scores.gan(lambda z: normal(2, 3) / 0, latent=2, samples=4), "do not fit.*finite"),
        (scores.gan(lambda z: z[:, :3].long(), latent=3, samples=4), "do not fit the discriminator"),
        (scores.gan(wide, latent=2, samples=0), "samples must be a positive number"),
        (scores.gan(wide, latent=lambda m, g: torch.ones(3, 2), samples=4), r"m = 4 latents, \(4, ...\); got \(3, 2\)"),
    ],
)
def test_generators_that_do_not_fit(score: scores.Score, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        reference(score, net(1))


def test_a_discriminator_that_takes_other_sizes_is_held_to_the_data() -> None:
    pooled = double(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1)))
    data = normal(2, 1, 8, 8)
    with pytest.raises(ValueError, match=r"\(1, 6, 6\) each, and the data \(1, 8, 8\)"):
        reference(scores.gan(samples=normal(4, 1, 6, 6)), pooled, data)


# VAEs.


class Autoencoder(nn.Module):
    def __init__(self, d: int = 2, inputs: int = 3) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(inputs, 2 * d), nn.Sequential(nn.Linear(d, 4), nn.Tanh())
        self.out = nn.Linear(4, inputs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        return self.out(self.decoder(z)).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x)
        return self.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))


PIXELS = (X > 0).double()


def elbo(model: Any, x: Tensor, log_p: Callable[[Tensor, Tensor], Tensor], samples: int, weights: bool) -> Tensor:
    """Sample by sample, with torch's own densities."""
    mean, log_variance = model.encode(x)
    q = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    eps = draw_noise(x, (samples, mean.shape[1]), seed=5)
    terms = []
    for k in range(samples):
        z = q.loc + q.scale * eps[:, k]
        terms.append(log_p(x, z) + ((p.log_prob(z) - q.log_prob(z)).sum(1) if weights else 0))
    stacked = torch.stack(terms)
    if weights:
        return stacked.logsumexp(0) - math.log(samples)
    return stacked.mean(0) - torch.distributions.kl_divergence(q, p).sum(1)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("weights", [False, True])
def test_vae_is_the_bound_written_out(samples: int, weights: bool) -> None:
    model = double(Autoencoder())

    def log_p(x: Tensor, z: Tensor) -> Tensor:
        return torch.distributions.Bernoulli(model.decode(z)).log_prob(x).sum(1)

    score = scores.vae(samples=samples, importance=weights, seed=5)
    check(score, model, PIXELS, lambda: elbo(model, PIXELS, log_p, samples, weights))


def test_likelihoods_of_vaes() -> None:
    model = double(Autoencoder())
    gray = X.sigmoid()

    def mean(module: Any, z: Tensor) -> Tensor:
        return module.out(module.decoder(z))

    def logits(x: Tensor, z: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(mean(model, z), x, reduction="none").sum(1)

    def gaussian(x: Tensor, z: Tensor) -> Tensor:
        return torch.distributions.Normal(mean(model, z), math.sqrt(0.3)).log_prob(x).sum(1)

    def scaled(x: Tensor, z: Tensor) -> Tensor:
        return torch.distributions.Normal(mean(model, z), (0.1 * mean(model, z)).exp().sqrt()).log_prob(x).sum(1)

    cases = [
        (scores.vae(seed=5), logits),
        (scores.vae(decode=mean, likelihood="bernoulli-logits", seed=5), logits),
        (scores.vae(decode=mean, likelihood="gaussian", noise=0.3, seed=5), gaussian),
        (scores.vae(decode=lambda m, z: (mean(m, z), 0.1 * mean(m, z)), likelihood="gaussian", seed=5), scaled),
        (scores.vae(decode=lambda m, z: z, likelihood=lambda x, z: (x[:, :2] * z).sum(1), seed=5), dot),
    ]
    for score, log_p in cases:
        check(score, model, gray, lambda log_p=log_p: elbo(model, gray, log_p, 1, False))


def dot(x: Tensor, z: Tensor) -> Tensor:
    return (x[:, :2] * z).sum(1)


def test_saturated_probabilities_of_binary_pixels_have_their_limits() -> None:
    x, p = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.25]], requires_grad=True)
    value = LIKELIHOODS["bernoulli"](x, p, noise=1.0)
    assert value.item() == pytest.approx(math.log(0.25))
    value.sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(p.grad, torch.tensor([[1.0, -1.0, 4.0]]))


def test_images_and_flat_decoders_meet() -> None:
    class Images(Autoencoder):
        def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().encode(x.flatten(1))

    model, x = double(Images(inputs=4)), (normal(5, 1, 2, 2) > 0).double()
    flat = double(Autoencoder(inputs=4))
    flat.load_state_dict(model.state_dict())
    torch.testing.assert_close(bound(scores.vae(), model)(x), bound(scores.vae(), flat)(x.flatten(1)))


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 6), size=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_noise_belongs_to_the_example(start: int, size: int, seed: int) -> None:
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    whole = draw_noise(X, (2, 3), seed=seed)
    torch.testing.assert_close(draw_noise(X[start : start + size], (2, 3), seed=seed), whole[start : start + size])
    torch.testing.assert_close(draw_noise(X[order], (2, 3), seed=seed), whole[order])
    torch.testing.assert_close(draw_noise(X.float(), (2, 3), seed=seed), whole)


def test_noise_is_standard_normal_and_changes_with_seed_and_example() -> None:
    x = normal(4000, 5)
    z = draw_noise(x, (6,))
    n = math.sqrt(z.numel())
    assert abs(float(z.mean())) < 4 / n
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2) / n
    assert abs(float((z * draw_noise(x, (6,), seed=1)).mean())) < 4 / n
    assert float((torch.corrcoef(z.T) - torch.eye(6)).abs().max()) < 5 / math.sqrt(4000)
    assert abs(float((z[1:] * z[:-1]).mean())) < 4 / n
    moved = x.clone()
    moved[0, 0] += 1
    assert not bool((draw_noise(moved, (6,))[0] == z[0]).any())
    tokens = torch.arange(200).view(50, 4)
    assert len(draw_noise(tokens, (1,)).unique()) == 50
    torch.testing.assert_close(draw_noise(torch.tensor([[0.0]]), (2,)), draw_noise(torch.tensor([[-0.0]]), (2,)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: scores.vae(likelihood="poisson"), "likelihood must be 'bernoulli'"),
        (lambda: scores.vae(samples=0), "samples must be a positive number"),
        (lambda: scores.vae(noise=0.0), "noise is a variance"),
        (
            lambda: bound(scores.vae(encode=lambda m, x: x), Autoencoder().double())(X),
            "two tensors of one.*a Tensor",
        ),
        (
            lambda: bound(scores.vae(encode=lambda m, x: (x, x[:, :1])), Autoencoder().double())(X),
            r"got \(7, 3\) and \(7, 1\)",
        ),
        (lambda: bound(scores.vae(decode=lambda m, z: z), Autoencoder().double())(X), r"\(7, 3\) .*got \(7, 2\)"),
        (
            lambda: bound(scores.vae(likelihood=lambda x, p: x - p), Autoencoder().double())(X),
            r"one number for each of the 7 draws, \(7,\); got \(7, 3\)",
        ),
    ],
)
def test_vaes_that_cannot_be_read(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_vae_needs_encode_and_decode() -> None:
    with pytest.raises(TypeError, match="Sequential has no encode"):
        scores.vae().bind(net())
    with pytest.raises(TypeError, match=r"has no decode.*vae\(decode=lambda model, z"):
        scores.vae(encode=lambda m, x: (x, x)).bind(net())


# Flows.


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def log_prob(self, x: Tensor) -> Tensor:
        z = (x - self.shift) * (-self.log_scale).exp()
        return (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - self.log_scale).sum(1)

    def forward(self) -> torch.distributions.Distribution:
        return torch.distributions.Independent(torch.distributions.Normal(self.shift, self.log_scale.exp()), 1)


def test_flow_is_log_prob() -> None:
    model = double(Affine())
    check(scores.flow(), model, X, lambda: model().log_prob(X))
    check(scores.flow(lambda module, x: module().log_prob(x)), model, X, lambda: model.log_prob(X))


def test_a_flow_needs_log_prob() -> None:
    with pytest.raises(TypeError, match="Sequential has none"):
        scores.flow().bind(net())


# Sequences.


TOKENS = torch.randint(0, 6, (5, 7), generator=torch.Generator().manual_seed(0))


def test_autoregressive_adds_up_the_tokens() -> None:
    model = double(Net(lambda m, x: m.out(m.embed(x).cumsum(1).tanh()), embed=nn.Embedding(6, 4), out=nn.Linear(4, 6)))

    def log_p() -> Tensor:
        logits = model(TOKENS)[:, :-1]
        return -F.cross_entropy(logits.transpose(1, 2), TOKENS[:, 1:], reduction="none").sum(1)

    check(scores.autoregressive(), model, TOKENS, log_p)


def test_hugging_face_language_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=6, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = double(transformers.GPT2LMHeadModel(config)).eval()
    lengths = torch.tensor([7, 4, 2, 5, 3])
    right = (torch.arange(7) < lengths[:, None]).long()
    labels = TOKENS.masked_fill(right == 0, -100)

    def log_p(mask: Tensor) -> Tensor:
        logits = model(input_ids=TOKENS, attention_mask=mask).logits[:, :-1]
        parts = -F.cross_entropy(logits.transpose(1, 2), TOKENS[:, 1:], reduction="none")
        return (parts * mask[:, 1:] * mask[:, :-1]).sum(1)

    check(scores.autoregressive(), model, {"input_ids": TOKENS, "attention_mask": right}, lambda: log_p(right))
    left = right.flip(1)
    check(scores.autoregressive(), model, {"input_ids": TOKENS, "attention_mask": left}, lambda: log_p(left))
    data = {"input_ids": TOKENS, "attention_mask": right, "labels": labels}
    check(scores.autoregressive(), model, data, lambda: log_p(right))
    lin = bound(scores.autoregressive(), model)
    alone = torch.cat([lin({"input_ids": TOKENS[i : i + 1, : lengths[i]]}) for i in range(5)])
    torch.testing.assert_close(alone, lin({"input_ids": TOKENS, "attention_mask": right}))


def test_masked_convolutions_predict_the_position_itself() -> None:
    model = double(Net(lambda m, x: m.conv(F.pad(x, (1, 0, 1, 0))), conv=nn.Conv2d(1, 4, 2)))
    levels = torch.randint(0, 4, (3, 1, 5, 5), generator=torch.Generator().manual_seed(1))
    x = levels.double() / 3
    score = scores.autoregressive(targets=lambda x: (3 * x[:, 0]).round().long(), shift=False, axis=1)
    check(score, model, x, lambda: -F.cross_entropy(model(x), levels[:, 0], reduction="none").sum((1, 2)))


def test_tokens_that_do_not_match_the_logits() -> None:
    with pytest.raises(ValueError, match=r"logits \(7, 4\) and tokens \(7, 3\) in torch.float64.*targets="):
        bound(scores.autoregressive(), net())(X)


# What is no score.


@pytest.mark.parametrize(
    ("score", "match"),
    [
        (None, r"reads class logits \(n, c\); got \(7, 3, 4\)"),
        (scores.energy(), r"one number per example, \(n,\); got \(7, 3, 4\)"),
        (lambda out: out.sum(1), r"one number per example, \(n,\); got \(7, 4\)"),
        (lambda out: out.mean(), "got a single number. Do not average"),
        (lambda out: out.sum((1, 2))[:3], r"n = 7 examples here; got \(3,\)"),
    ],
)
def test_scores_are_one_number_per_example(score: Any, match: str) -> None:
    model = double(nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (3, 4))))
    with pytest.raises(ValueError, match=match):
        bound(scores.as_score(score), model)(X)


def test_scores_are_tensors() -> None:
    with pytest.raises(TypeError, match="got a list"):
        bound(scores.energy(lambda out: out.tolist()), net())(X)


@pytest.mark.parametrize("score", ["classifier", 3, scores.flow, scores.Score])
def test_what_is_no_score_is_refused(score: Any) -> None:
    with pytest.raises(TypeError, match=r"score (must be None|needs a score)"):
        scores.as_score(score)


def test_settings_come_back_without_functions() -> None:
    kept = [
        scores.classifier(),
        scores.energy(),
        scores.flow(),
        scores.vae(samples=3, importance=True, likelihood="gaussian", noise=0.2),
        scores.autoregressive(shift=False, axis=1),
    ]
    for score in kept:
        found = score.settings()
        assert found is not None
        assert scores.from_settings(found) == score
    assert scores.gan(deconvolution(), latent=2).settings() == {"name": "gan", "output": None}
    for score in (scores.energy(torch.sum), scores.vae(decode=dot), scores.gan(output=torch.logit)):
        assert score.settings() is None
