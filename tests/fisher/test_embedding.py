"""Fisher embeddings against the dense Fisher vectors, and as a scikit-learn transformer."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn

import linnet
from linnet import FisherEmbedding, scores
from linnet.fisher import spectrum
from linnet.jacobian.chunk import ChunkBuilder
from tests.support.drawn import double, normal

X, NEW = normal(30, 3), normal(9, 3, seed=5)


def net(outputs: int = 3, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)), seed)


def rows(model: nn.Module, x: Tensor, score: scores.Score) -> Tensor:
    """The dense Jacobian of a score."""
    module, output = score.bind(model)
    theta = {name: t.detach() for name, t in module.named_parameters()}
    J = torch.func.jacrev(lambda theta: output(torch.func.functional_call(module, theta, (x,))))(theta)
    return torch.cat([J[name].flatten(1) for name in theta], 1)


def dense(J: Tensor, at: Tensor | None = None, *, centered: bool) -> Tensor:
    """Fisher vectors with the statistics of other rows, by the formula; without constant columns."""
    at = J if at is None else at
    Z = at.mean(0) if centered else torch.zeros(J.shape[1], dtype=J.dtype)
    info = (at - Z).square().mean(0)
    kept = info > 1e-24 * at.square().mean(0).max()
    return ((J - Z) / info.sqrt())[:, kept]


def same_up_to_sign(a: Tensor, b: Tensor, rtol: float = 1e-6) -> None:
    sign = (a * b).sum(0).sign()
    torch.testing.assert_close(a * sign, b, rtol=rtol, atol=rtol * float(b.abs().max()))


# The numbers.


@pytest.mark.parametrize("score", [scores.classifier(), scores.energy(lambda out: out[:, 0]), None])
def test_energies_are_centered_and_scaled_by_the_data(score: Any) -> None:
    model = net()
    V = dense(rows(model, X, scores.as_score(score)), centered=True)
    emb = FisherEmbedding(model, 5, score)
    E = emb.fit_transform(X)
    U, s, Vh = torch.linalg.svd(V, full_matrices=False)
    torch.testing.assert_close(emb.eigenvalues_, s[:5].square(), rtol=1e-8, atol=0)
    torch.testing.assert_close(emb.explained_variance_ratio_, s[:5].square() / s.square().sum(), rtol=1e-8, atol=0)
    same_up_to_sign(E, U[:, :5] * s[:5])
    same_up_to_sign(emb.right_vectors_, Vh[:5].T)
    assert emb.statistics_ is not None
    new = dense(rows(model, NEW, scores.as_score(score)), rows(model, X, scores.as_score(score)), centered=True)
    same_up_to_sign(emb.transform(NEW), new @ Vh[:5].T)


@pytest.mark.parametrize("kernel", ["nfk", "ntk"])
def test_all_eigenvalues_without_a_fit(kernel: str) -> None:
    J = rows(net(), X, scores.classifier())
    V = dense(J, centered=True) if kernel == "nfk" else J
    emb = FisherEmbedding(net(), 0.995, kernel=kernel)
    found = emb.exact_eigenvalues(X)
    expected = torch.linalg.eigvalsh(V @ V.T).flip(0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected[0]))
    assert not hasattr(emb, "lin_") and not hasattr(emb, "n_features_in_")  # as it was
    emb.fit(X)
    assert emb.n_components_ == spectrum(found).components(0.995)
    torch.testing.assert_close(found[: emb.n_components_], emb.eigenvalues_, rtol=1e-9, atol=0)
    given = emb.exact_eigenvalues(NEW.numpy())
    assert isinstance(given, np.ndarray) and given.shape == (9,) and len(emb.eigenvalues_) == emb.n_components_


def test_all_eigenvalues_need_room() -> None:
    with pytest.raises(MemoryError, match=r"kernel of 30 examples .* 21,600 bytes, and 20,000 are allowed"):
        FisherEmbedding(net(), memory=20_000).exact_eigenvalues(X)


def test_log_densities_are_not_centered() -> None:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 3)

        def log_prob(self, x: Tensor) -> Tensor:
            return -0.5 * (self.net(x) - x).square().sum(1)

    model = double(Gaussian())
    V = dense(rows(model, X, scores.flow()), centered=False)
    emb = FisherEmbedding(model, 4, scores.flow()).fit(X)
    torch.testing.assert_close(emb.eigenvalues_, torch.linalg.svdvals(V)[:4].square(), rtol=1e-8, atol=0)
    assert emb.statistics_ is not None
    assert float(emb.statistics_.Z.abs().max()) == 0


def test_the_tangent_kernel_has_no_statistics() -> None:
    model = net()
    J = rows(model, X, scores.classifier())
    emb = FisherEmbedding(model, 4, kernel="ntk").fit(X)
    torch.testing.assert_close(emb.eigenvalues_, torch.linalg.svdvals(J)[:4].square(), rtol=1e-8, atol=0)
    assert emb.statistics_ is None
    assert emb.dropped_columns_ == 0


def test_a_gan_takes_its_statistics_from_the_generator() -> None:
    generator = double(nn.Linear(2, 3), seed=3)
    model = double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1), nn.Sigmoid()))
    score = scores.gan(generator, latent=2, samples=25, seed=4)
    with torch.no_grad():
        fake = generator(torch.randn(25, 2, generator=torch.Generator().manual_seed(4)).double())
    energy = scores.energy(torch.logit)
    V = dense(rows(model, X, energy), rows(model, fake, energy), centered=True)
    emb = FisherEmbedding(model, 4, score).fit(X)
    s = torch.linalg.svdvals(V)
    torch.testing.assert_close(emb.eigenvalues_, s[:4].square(), rtol=1e-7, atol=0)
    torch.testing.assert_close(emb.explained_variance_ratio_, s[:4].square() / s.square().sum(), rtol=1e-7, atol=0)
    assert emb.statistics_ is not None
    assert emb.statistics_.n == 25


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
def test_the_embedding_of_the_data_is_their_transform(dtype: str) -> None:
    emb = FisherEmbedding(net().float(), 6, dtype=dtype, batch_size=7)
    E = emb.fit_transform(X)
    found = emb.transform(X)
    assert found.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert float((found - E).abs().max() / E.abs().max()) < 1e-6


def test_full_rank_gives_the_kernel_itself() -> None:
    model = net()
    V = dense(rows(model, X, scores.classifier()), centered=True)
    emb = FisherEmbedding(model, 29).fit(X)  # one less than the examples: they are centered
    torch.testing.assert_close(emb.kernel(X), V @ V.T, rtol=1e-8, atol=1e-8)
    new = dense(rows(model, NEW, scores.classifier()), rows(model, X, scores.classifier()), centered=True)
    torch.testing.assert_close(emb.kernel(NEW, X), new @ V.T, rtol=1e-8, atol=1e-8)
    assert float(emb.explained_variance_ratio_.sum()) == pytest.approx(1.0)


def test_parameters_that_do_nothing_are_dropped_and_counted() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.idle = net(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    whole, part = FisherEmbedding(Partly(), 4).fit(X), FisherEmbedding(net(), 4).fit(X)
    assert whole.dropped_columns_ == part.dropped_columns_ + 10
    torch.testing.assert_close(whole.eigenvalues_, part.eigenvalues_)
    torch.testing.assert_close(whole.transform(NEW), part.transform(NEW))


def test_components_by_the_variance_that_they_explain() -> None:
    whole = FisherEmbedding(net(), 29).fit(X)
    share = whole.explained_variance_ratio_.cumsum(0)
    for asked in (0.3, 0.9, 0.999):
        emb = FisherEmbedding(net(), asked)
        E = emb.fit_transform(X)
        needed = int((share < asked).sum()) + 1
        assert emb.n_components_ == E.shape[1] == len(emb.eigenvalues_) == needed
        assert float(emb.explained_variance_ratio_.sum()) >= asked
        torch.testing.assert_close(emb.eigenvalues_, whole.eigenvalues_[:needed])


def test_more_components_than_a_first_guess() -> None:
    x = normal(90, 3)
    model = double(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 3)))
    emb = FisherEmbedding(model, 0.99999).fit(x)
    assert emb.n_components_ > 32
    assert float(emb.explained_variance_ratio_.sum()) >= 0.99999
    assert float(emb.explained_variance_ratio_[:-1].sum()) < 0.99999


def test_chosen_parameters_and_signs() -> None:
    emb = FisherEmbedding(net(), 3, params="2.*").fit(X)
    assert list(emb.lin_.theta) == ["2.weight", "2.bias"]
    largest = emb.right_vectors_.gather(0, emb.right_vectors_.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


def test_methods_agree() -> None:
    exact = FisherEmbedding(net(), 4, method="exact").fit(X)
    krylov = FisherEmbedding(net(), 4, method="krylov", seed=3).fit(X)
    assert (exact.method_, krylov.method_) == ("exact", "krylov")
    torch.testing.assert_close(krylov.eigenvalues_, exact.eigenvalues_, rtol=1e-7, atol=0)
    assert krylov.passes_ >= 1
    assert len(krylov.residuals_) == 4


def test_a_fit_can_be_kept_pass_by_pass(tmp_path: Path) -> None:
    expected = FisherEmbedding(net(), 4, method="krylov").fit_transform(X)
    path = tmp_path / "state.safetensors"
    found = FisherEmbedding(net(), 4, method="krylov", checkpoint=path).fit_transform(X)
    torch.testing.assert_close(found, expected)
    assert not path.exists()


def test_passes_and_tolerance_reach_the_method() -> None:
    x = normal(200, 3)
    one = FisherEmbedding(net(), 3, method="krylov", block=4, passes=1).fit(x)
    assert one.passes_ == 1
    exact = FisherEmbedding(net(), 3, method="exact").fit(x)
    assert not torch.allclose(one.eigenvalues_, exact.eigenvalues_, rtol=1e-7)
    loose = FisherEmbedding(net(), 3, method="krylov", block=4, tolerance=1e-2).fit(x)
    tight = FisherEmbedding(net(), 3, method="krylov", block=4, tolerance=1e-9).fit(x)
    assert loose.passes_ < tight.passes_
    torch.testing.assert_close(tight.eigenvalues_, exact.eigenvalues_, rtol=1e-8, atol=0)


# Several ranks.


def everything() -> dict[str, Tensor]:
    """What a rank finds, and what a process alone finds."""
    found = {}
    generator = double(nn.Linear(2, 3), seed=3)
    for name, model, score in (
        ("classifier", net(), scores.classifier()),
        ("gan", net(1), scores.gan(generator, latent=2, samples=25)),
    ):
        for method in ("krylov", "exact"):
            emb = FisherEmbedding(model, 4, score, method=method)
            found[f"{name} {method}"] = emb.fit_transform(X)
            found[f"{name} {method} eigenvalues"] = emb.eigenvalues_
            found[f"{name} {method} new"] = emb.transform(NEW)
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(everything(), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_two_ranks_find_what_one_finds(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2, join=True)
    alone = everything()
    for rank in range(2):
        here = torch.load(tmp_path / f"rank{rank}.pt")
        for name, value in alone.items():
            torch.testing.assert_close(here[name], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()))


# Data of every kind; scikit-learn.


def test_arrays_give_arrays_and_tensors_tensors() -> None:
    emb = FisherEmbedding(net(), 4)
    tensors = emb.fit_transform(X)
    assert isinstance(tensors, Tensor)
    assert isinstance(emb.eigenvalues_, Tensor)
    arrays = emb.fit_transform(X.numpy())
    assert isinstance(arrays, np.ndarray)
    assert isinstance(emb.kernel(X.numpy()), np.ndarray)
    assert isinstance(emb.explained_variance_ratio_, np.ndarray)
    np.testing.assert_allclose(arrays, tensors.numpy(), rtol=1e-9)
    assert emb.n_features_in_ == 3
    with pytest.raises(ValueError, match="X has 2 features"):
        emb.transform(X.numpy()[:, :2])


def test_datasets_and_dicts() -> None:
    expected = FisherEmbedding(net(), 4).fit_transform(X)
    data = torch.utils.data.TensorDataset(X, torch.zeros(30))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    for given in ({"input": X}, (X, torch.zeros(30)), data, loader):
        emb = FisherEmbedding(net(), 4)
        torch.testing.assert_close(emb.fit_transform(given), expected)
        torch.testing.assert_close(emb.transform(given), expected)


def test_before_a_classifier_in_a_pipeline() -> None:
    y = (X[:, 0] > 0).numpy()
    pipe = make_pipeline(FisherEmbedding(net(), 6), LogisticRegression(C=10.0))
    assert pipe.fit(X.numpy(), y).score(X.numpy(), y) > 0.9
    search = GridSearchCV(pipe, {"fisherembedding__n_components": [1, 6]}, cv=2)
    assert search.fit(X.numpy(), y).best_params_["fisherembedding__n_components"] in (1, 6)
    assert list(pipe[0].get_feature_names_out()) == [f"fisherembedding{i}" for i in range(6)]


def test_settings_are_kept_as_given() -> None:
    score = scores.energy()
    emb = FisherEmbedding(net(), 4, score, "ntk", seed=3)
    other = clone(emb)
    assert other.get_params()["kernel"] == "ntk" == other.kernel
    assert other.set_params(kernel="nfk").kernel == "nfk"
    assert type(other.get_params()["kernel"]) is str
    assert (other.seed, other.n_components, other.score) == (3, 4, score)
    assert "kernel='ntk'" in repr(emb)
    fitted = FisherEmbedding(net(), 4).fit(X)
    again = pickle.loads(pickle.dumps(fitted))
    torch.testing.assert_close(again.transform(NEW), fitted.transform(NEW))


def test_the_model_is_untouched() -> None:
    model = net().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    FisherEmbedding(model, 4).fit(X)
    assert model.training
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


# Files.


@pytest.mark.parametrize("kernel", ["nfk", "ntk"])
@pytest.mark.parametrize("arrays", [False, True])
def test_embeddings_come_back(tmp_path: Path, kernel: str, arrays: bool) -> None:
    model, data = net(), X.numpy() if arrays else X
    emb = FisherEmbedding(model, 4, kernel=kernel, params="0.*").fit(data)
    emb.save(tmp_path / "a.safetensors")
    other = net(seed=9)
    other.load_state_dict(model.state_dict())
    again = linnet.load(tmp_path / "a.safetensors", other)
    assert again.kernel == kernel
    np.testing.assert_allclose(again.transform(data), emb.transform(data), rtol=1e-12)
    np.testing.assert_allclose(again.kernel(data, data[:3]), emb.kernel(data, data[:3]), rtol=1e-12)
    assert type(again.eigenvalues_) is type(emb.eigenvalues_)
    np.testing.assert_allclose(again.eigenvalues_, emb.eigenvalues_)
    np.testing.assert_allclose(again.explained_variance_ratio_, emb.explained_variance_ratio_)
    assert (again.passes_, again.dropped_columns_) == (emb.passes_, emb.dropped_columns_)
    assert again.n_components_ == 4
    if arrays:
        assert again.n_features_in_ == 3


def test_a_gan_comes_back_without_its_generator(tmp_path: Path) -> None:
    model = net(1)
    emb = FisherEmbedding(model, 4, scores.gan(double(nn.Linear(2, 3)), latent=2, samples=20)).fit(X)
    emb.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", model)
    torch.testing.assert_close(again.transform(NEW), emb.transform(NEW))
    with pytest.raises(ValueError, match="pass generator="):
        again.fit(X)


def test_a_score_with_a_function_is_asked_for_again(tmp_path: Path) -> None:
    def first(out: Tensor) -> Tensor:
        return out[:, 0]

    model = net()
    emb = FisherEmbedding(model, 4, first).fit(X)
    emb.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="fitted with score="):
        linnet.load(tmp_path / "a.safetensors", model)
    again = linnet.load(tmp_path / "a.safetensors", model, score=first)
    torch.testing.assert_close(again.transform(NEW), emb.transform(NEW))


def test_files_of_other_weights_or_with_too_much_are_refused(tmp_path: Path) -> None:
    FisherEmbedding(net(), 4).fit(X).save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"checksum [0-9a-f]{64}, this one has [0-9a-f]{64}"):
        linnet.load(tmp_path / "a.safetensors", net(seed=1))
    with pytest.raises(ValueError, match="pass it as model="):
        linnet.load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="without output="):
        linnet.load(tmp_path / "a.safetensors", net(), output=torch.sum)
    with pytest.raises(ValueError, match="without score="):
        linnet.load(tmp_path / "a.safetensors", net(), score=torch.sum)
    reg = linnet.TangentRegressor(net(), noise=0.1, prior=1.0).fit(X, normal(30, 3))
    reg.save(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="without score="):
        linnet.load(tmp_path / "b.safetensors", net(), score=torch.sum)


# Bad input.


@pytest.mark.parametrize("count", [0, -1, 1.0, 1.5, True, "all", None])
def test_numbers_of_components_that_are_none(count: Any) -> None:
    with pytest.raises(ValueError, match="n_components must be"):
        FisherEmbedding(net(), count).fit(X)


def test_more_components_than_there_are() -> None:
    whole = FisherEmbedding(net(), 29).fit(X)
    for asked in (30, 31, 128):  # centered, so that the examples add up to zero
        with pytest.warns(UserWarning, match=f"have 29 components above rounding, fewer than n_components={asked}"):
            more = FisherEmbedding(net(), asked).fit(X)
        assert more.n_components_ == 29
        torch.testing.assert_close(more.eigenvalues_, whole.eigenvalues_, rtol=1e-7, atol=0.0)
    few = torch.cat([X[:4]] * 5)
    with pytest.warns(UserWarning, match="have 3 components"):
        assert FisherEmbedding(net(), 8).fit_transform(few).shape == (20, 3)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kernel": "rbf"}, "kernel must be 'nfk' or 'ntk'; got 'rbf'"),
        ({"dtype": "half"}, "dtype must be 'auto'"),
        ({"method": "magic"}, "method"),
        ({"score": lambda out: out}, r"one number per example, \(n,\); got \(3, 3\)"),
    ],
)
def test_settings_that_do_not_exist(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FisherEmbedding(net(), 2, **settings).fit(X)


def test_scores_that_are_not_finite_are_named() -> None:
    x = X.clone()
    x[17] = 1e4
    with pytest.raises(ValueError, match="not finite for example 17"):
        FisherEmbedding(double(nn.Linear(3, 2)), 2, lambda out: out.abs().sum(1).exp()).fit(x)


def test_a_score_that_is_constant_has_nothing_to_embed() -> None:
    with pytest.raises(ValueError, match="All 45 columns are constant"):
        FisherEmbedding(net(), 2, lambda out: 0 * out[:, 0]).fit(X)


def test_a_generator_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit the discriminator"):
        FisherEmbedding(net(1), 2, scores.gan(double(nn.Linear(2, 5)), latent=2, samples=20)).fit(X)


def test_it_has_to_be_fitted() -> None:
    from sklearn.exceptions import NotFittedError

    for call in (FisherEmbedding(net()).transform, FisherEmbedding(net()).kernel):
        with pytest.raises(NotFittedError):
            call(X)


# Cheaper passes.


def wide(seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 3)), seed)


def test_cheaper_passes_leave_no_trace() -> None:
    model, data = wide(), normal(300, 3)
    full = FisherEmbedding(model, 6, method="krylov").fit(data)
    cheap = FisherEmbedding(model, 6, method="krylov", precision="bf16")
    E = cheap.fit_transform(data)
    torch.testing.assert_close(cheap.eigenvalues_, full.eigenvalues_, rtol=1e-6, atol=0)
    torch.testing.assert_close(E, cheap.transform(data), rtol=1e-8, atol=1e-8)
    same_up_to_sign(cheap.transform(NEW), full.transform(NEW), rtol=1e-3)


def test_cheaper_passes_are_made_in_the_precision_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("build_by_rules", "build_by_autodiff"):
        build = getattr(ChunkBuilder, name)

        def noted(self: ChunkBuilder, batch: Any, precision: Any, build: Any = build, **more: Any) -> Any:
            used.append(precision)
            return build(self, batch, precision, **more)

        monkeypatch.setattr(ChunkBuilder, name, noted)
    FisherEmbedding(wide(), 6, method="krylov", precision="bf16").fit(normal(300, 3))
    assert {"highest", "bf16"} == set(used) and used[-1] == "highest"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"precision": "half"}, "precision must be 'highest'"),
        ({"precision": "high", "method": "exact"}, r"serves method='krylov' \(or 'auto'\).*got method='exact'"),
    ],
)
def test_precisions_that_do_not_serve(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FisherEmbedding(net(), 2, **settings).fit(X)
