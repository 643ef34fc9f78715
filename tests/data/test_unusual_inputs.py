"""Models and arrays of unusual kinds: each works, or the error says what to do."""

import numpy as np
import pytest
import torch
from torch import nn

import linnet

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
labels = torch.arange(12) % 2
USES = {
    "linearize": lambda model: linnet.linearize(model),
    "regressor": lambda model: linnet.TangentRegressor(model).fit(X, X[:, :2]),
    "classifier": lambda model: linnet.TangentClassifier(model).fit(X, labels),
    "laplace": lambda model: linnet.Laplace(model).fit(X, labels),
    "embedding": lambda model: linnet.FisherEmbedding(model, n_components=1).fit(X),
    "head": lambda model: linnet.attach_head(model, X, labels),
    "fold": lambda model: linnet.fold_batchnorm(model),
    "similarity": lambda model: linnet.similarity(model, net(), X),
    "training": lambda model: linnet.train_with_evidence(model, (X, labels)),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)

    def forward(self, x):
        return self.a(x)


@pytest.mark.parametrize("name", USES)
def test_a_class_is_not_a_network(name):
    with pytest.raises(TypeError, match=r"got the class Net. Make a network of the class first, as in Net\(...\)"):
        USES[name](Net)


@pytest.mark.parametrize("name", USES)
def test_weights_are_not_a_network(name):
    with pytest.raises(TypeError, match=r"a model that is a torch.nn.Module; got a state dict"):
        USES[name](net().state_dict())


def compiled_whole() -> nn.Module:
    return torch.compile(net(), backend="eager")


def compiled_inside() -> nn.Module:
    model = net()
    return nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])


@pytest.mark.parametrize("make", [compiled_whole, compiled_inside])
@pytest.mark.parametrize("name", USES)
def test_a_compiled_network_runs_as_it_was_and_says_so_once(name, make):
    if name == "training" and make is compiled_inside:
        pytest.skip("training runs the network as it is given")
    if name in ("head", "fold") and make is compiled_inside:
        pytest.skip("the network that is returned has the compiled part")
    model = make()
    with pytest.warns(UserWarning, match=r"runs the module that was compiled, model\._orig_mod") as caught:
        USES[name](model)
    assert len(caught) == 1


@pytest.mark.parametrize("make", [compiled_whole, compiled_inside])
def test_a_compiled_network_gives_the_numbers_of_its_module(make):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    A = linnet.testing.dense_jacobian(net(), X)
    with pytest.warns(UserWarning, match="was compiled"):
        lin = linnet.linearize(model)
    assert torch.allclose(lin.jacobian(X).dense(), A, rtol=1e-5, atol=1e-6)
    assert torch.equal(lin(X), model(X).detach())
    assert (next(iter(lin.theta)) == "0.weight") is (make is compiled_whole)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="has changed since the model was linearized"):
        lin(X)


def test_a_file_is_loaded_with_a_compiled_network(tmp_path):
    model = net()
    linnet.TangentRegressor(model, noise=0.1, prior=1.0).fit(X, X[:, :2]).save(tmp_path / "f")
    with pytest.warns(UserWarning, match="was compiled"):
        loaded = linnet.load(tmp_path / "f", torch.compile(model, backend="eager"))
    assert loaded.predict(X).shape == (12, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", USES)
def test_a_scripted_network_is_refused_by_name(name):
    with pytest.raises(TypeError, match=r"the model is a torch.jit script"):
        USES[name](torch.jit.script(net()))
    with pytest.raises(TypeError, match=r"the submodule '0' is a torch.jit script"):
        USES[name](nn.Sequential(torch.jit.trace(nn.Linear(4, 2), X), nn.Tanh()))


@pytest.mark.parametrize("given", [torch.ones(5, 4).long(), np.ones((5, 4), dtype=int), np.ones((5, 4), dtype=bool)])
def test_whole_numbers_where_a_network_takes_floats_are_named(given):
    with pytest.raises(RuntimeError) as caught:
        linnet.linearize(net())(given)
    assert "are whole numbers" in caught.value.__notes__[0]
    assert "Convert the data with .to(torch.float32)" in caught.value.__notes__[0]


def test_arrays_that_run_backwards_are_taken():
    backwards = X.numpy()[::-1]
    model = net()
    torch.testing.assert_close(linnet.linearize(model)(backwards), linnet.linearize(model)(X.flip(0)))
    y = X[:, :2].numpy().astype(np.float64)
    one = linnet.TangentRegressor(model, seed=0).fit(backwards, y[::-1])
    two = linnet.TangentRegressor(model, seed=0).fit(backwards.copy(), y[::-1].copy())
    np.testing.assert_allclose(one.predict(X.numpy()), two.predict(X.numpy()), rtol=1e-9)
    la = linnet.Laplace(model, "regression").fit(backwards, y[::-1])
    assert la.predict(X.numpy()).shape == (12, 2)


def test_sparse_outputs_are_refused_by_name():
    class Sparse(nn.Linear):
        def forward(self, x):
            return super().forward(x).to_sparse()

    with pytest.raises(TypeError, match=r"needs dense outputs.*Use output=lambda out: out.to_dense\(\)"):
        linnet.linearize(Sparse(4, 2))(X)
    assert linnet.linearize(Sparse(4, 2), output=lambda out: out.to_dense())(X).shape == (12, 2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return torch.sparse.mm(self.a(x).relu().to_sparse(), self.w)


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x):
        return torch.func.grad(lambda z: self.b(self.a(z).tanh()).sum())(x)


@pytest.mark.parametrize("build", [Sparse, Force])
def test_sparse_intermediates_and_torch_func_inside_a_network_are_taken(build):
    model, x = build().double(), X.double()
    rows = []
    for out in model(x).flatten():
        grads = torch.autograd.grad(out, model.parameters(), retain_graph=True, allow_unused=True)
        pairs = zip(model.parameters(), grads, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]))
    A = torch.stack(rows)
    J = linnet.linearize(model).jacobian(x)
    torch.testing.assert_close(J.gram(), A @ A.T)
    torch.testing.assert_close(J @ torch.eye(J.shape[1], dtype=torch.float64), A)
