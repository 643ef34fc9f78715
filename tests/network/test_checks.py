"""Bad input: what was needed, what came, what to do, before any long work."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import linnet
from linnet.network import checks
from linnet.testing.case import Net, parameter

N, D, C = 6, 4, 3
P = D * C + C


def linear(*, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(D, C, dtype=dtype)


def ones(n: int = N, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, n * D, dtype=dtype).view(n, D)


@pytest.fixture
def J():
    return linnet.linearize(linear()).jacobian(ones(), 4)


# Vectors.


@pytest.mark.parametrize(
    ("product", "needed"),
    [
        pytest.param(lambda J: J @ torch.ones(N * C), r"J @ V needs V of shape \(15,\) or \(15, k\)", id="J U"),
        pytest.param(lambda J: J @ torch.ones(1, P), r"J @ V needs V of shape \(15,\)", id="a row"),
        pytest.param(lambda J: J.T @ torch.ones(P), r"J\.T @ V needs V of shape \(18,\)", id="J^T V"),
        pytest.param(lambda J: J.normal(torch.ones(7)), r"needs V of shape \(15,\)", id="normal"),
        pytest.param(lambda J: J.fused(lambda U, b: U, torch.ones(7)), r"needs V of shape \(15,\)", id="fused"),
        pytest.param(lambda J: J.gram(scale=torch.ones(7)), r"gram needs scale of shape \(15,\)", id="gram"),
        pytest.param(lambda J: J.gram_diag(torch.ones(7)), r"gram_diag needs scale of shape \(15,\)", id="diag"),
        pytest.param(lambda J: J.normal(torch.ones(P), torch.ones(N)), r"weight needs shape \(18,\)", id="w"),
    ],
)
def test_wrong_lengths(J, product, needed):
    with pytest.raises(ValueError, match=rf"Jacobian.*{needed}|Jacobian.*\(18, 15\).*{needed}"):
        product(J)


def test_the_transpose_is_suggested(J):
    with pytest.raises(ValueError, match=r"got \(18,\)\. For the transpose use J\.T @ V\."):
        J @ torch.ones(N * C)


@pytest.mark.parametrize("shape", [(N, C + 1, C + 1), (N * C, 1, 1), (2, 9, 9), (N, C), (N, C, 1)])
@pytest.mark.parametrize("method", ["normal", "column_norms"])
def test_weight_blocks_of_another_size(J, shape, method):
    weight = torch.ones(shape, dtype=torch.float64)
    args = (torch.ones(P, dtype=torch.float64),) if method == "normal" else ()
    with pytest.raises(ValueError, match=r"18 rows, so weight needs shape \(18,\), or \(6, 3, 3\); got"):
        getattr(J, method)(*args, weight)


def test_other_dtypes(J):
    with pytest.raises(TypeError, match=r"Jacobian is torch\.float64 on cpu, so V must be too; got torch\.float32"):
        J @ torch.ones(P)
    with pytest.raises(TypeError, match=r"multiplies tensors .*; got ndarray"):
        J @ np.ones(P)


def test_functions_that_return_another_shape(J):
    with pytest.raises(ValueError, match=r"fn to return the shape it is given, \(12,\); got \(\)"):
        J.fused(lambda JV, batch: JV.sum(), torch.ones(P, dtype=torch.float64))


def test_grams_between_models_of_other_shapes(J):
    wide = nn.Linear(C + 1, 3, dtype=torch.float64)
    other = linnet.linearize(nn.Sequential(nn.Linear(2, 5, dtype=torch.float64))).jacobian(ones()[:, :2])
    assert other.shape[1] == P
    with pytest.raises(ValueError, match=r"same shapes; 'weight' is \(3, 4\) and the other's '0\.weight' \(5, 2\)"):
        J.gram(other)
    fewer = linnet.linearize(wide, "weight").jacobian(ones())
    with pytest.raises(ValueError, match=r"Jacobian has 15 columns, so gram needs another operator with as many"):
        J.gram(fewer)
    raw = Net(lambda m, x: x @ m.w.t(), w=parameter(3, 4), b=parameter(1), d=parameter(2)).double()
    with pytest.raises(ValueError, match=r"'bias' is \(3,\) and the other's 'b' \(1,\)"):
        J.gram(linnet.linearize(raw).jacobian(ones()))


# Data.


@pytest.mark.parametrize(
    "data",
    [ones(0), (ones(0), torch.zeros(0)), {"input": ones(0)}, TensorDataset(ones(0)), np.ones((0, D))],
    ids=["tensor", "tuple", "dict", "Dataset", "array"],
)
def test_empty_data(data):
    with pytest.raises(ValueError, match=r"at least one example; the data .* is empty"):
        linnet.linearize(linear()).jacobian(data)


class Examples(Dataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 4])
def test_inputs_that_are_not_finite(bad, where):
    x = ones()
    x[where:, 2] = bad
    lin = linnet.linearize(linear())
    with pytest.raises(ValueError, match=rf"finite inputs; example {where} has NaN or infinity"):
        lin.jacobian(x)
    with pytest.raises(ValueError, match=rf"finite inputs; example {where} has NaN or infinity"):
        lin(x)
    with pytest.raises(ValueError, match=rf"finite inputs; example {where} has NaN or infinity"):
        lin.jacobian(Examples(x), 2).gram()


@pytest.mark.parametrize("engine", ["auto", "rows", "autodiff"])
@pytest.mark.parametrize("bad", [0.0, -1.0], ids=["infinite", "nan"])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_outputs_that_are_not_finite(bad, where, engine):
    """In the first pass that meets the example, and in every later one."""
    x = ones().abs() + 1.0
    x[where, 0] = bad
    net = Net(lambda m, x: m.a(x) * x[:, :1].log(), a=linear())
    lin = linnet.linearize(net)
    match = rf"output is not finite for example {where}: \[.*(inf|nan).*\]\. Look at that input"

    J = lin.jacobian(x, 2, engine=engine)
    V, U = torch.ones(P, dtype=torch.float64), torch.ones(N * C, dtype=torch.float64)
    for product in (
        lambda: J @ V,
        lambda: J.T @ U,
        lambda: J.normal(V),
        J.gram,
        J.gram_diag,
        J.column_norms,
        J.outputs,
    ):
        with pytest.raises(ValueError, match=match):
            product()


def test_data_in_another_dtype_than_the_model():
    lin = linnet.linearize(linear(dtype=torch.float32))
    for product in (lambda: lin.jacobian(ones()).outputs(), lambda: lin(ones())):
        with pytest.raises(RuntimeError) as caught:
            product()
        (note,) = caught.value.__notes__
        assert "inputs are torch.float64 and the model's parameters torch.float32 ('weight')" in note
        assert "Convert the data with .to(torch.float32)" in note


def test_other_errors_of_the_model_stay_as_they_are():
    lin = linnet.linearize(linear())
    with pytest.raises(RuntimeError) as caught:
        lin.jacobian(torch.ones(N, D + 1, dtype=torch.float64)).outputs()
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (
            lambda: DataLoader(Examples(ones()), sampler=RandomSampler(Examples(ones()), replacement=True)),
            "uses a RandomSampler.*shuffle=False",
        ),
        (lambda: DataLoader(Examples(ones()), 4, drop_last=True), r"drops 2 of 6 examples.*drop_last=False"),
    ],
)
def test_loaders_that_do_not_give_every_example_in_order(loader, match):
    with pytest.raises(ValueError, match=match):
        linnet.linearize(linear()).jacobian(loader())


def test_data_that_changes_between_passes():
    class Augmented(Examples):
        def __getitem__(self, i: int) -> Tensor:
            return self.x[i] + torch.rand(D, dtype=torch.float64)

    J = linnet.linearize(linear()).jacobian(Augmented(ones()), 2)
    with pytest.raises(RuntimeError, match=r"Example \d changed between two passes"):
        J.gram_diag(), J.gram_diag()


def test_streams_have_no_minibatches():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(ones())

    J = linnet.linearize(linear()).jacobian(Stream())
    with pytest.raises(TypeError, match=r"looked up by position; got data that is read in order \(Stream"):
        next(J.minibatches(2, seed=0))


# Models and parameters.


def test_no_selected_parameters():
    with pytest.raises(ValueError, match=r"No parameter is selected.* 2 parameters, 2 of them frozen"):
        linnet.linearize(linear().requires_grad_(False))
    with pytest.raises(ValueError, match=r"0 parameters, 0 of them frozen"):
        linnet.linearize(nn.ReLU())


def test_globs_that_match_nothing():
    net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C))
    with pytest.raises(ValueError, match=r"params='2\.wieght' matches none .* nearest names: '2\.weight'"):
        linnet.linearize(net, "2.wieght")
    with pytest.raises(ValueError, match=r"names a module; .* use '2\.\*'"):
        linnet.linearize(net, ["0.weight", "2"])


def test_something_that_is_no_module():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module; got a function"):
        linnet.linearize(lambda x: x)


def test_parameters_on_several_devices():
    net = nn.Sequential(nn.Linear(D, 5), nn.Linear(5, C, device="meta"))
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device and has no values"):
        linnet.linearize(net)

    class Elsewhere(nn.Parameter):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:1")

    net = linear()
    net.bias = Elsewhere(net.bias.detach())
    with pytest.raises(ValueError, match=r"'weight' is on cpu and 'bias' on cuda:1\. Move it with model\.to"):
        linnet.linearize(net)


class BatchStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(D, C), nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        return F.batch_norm(self.a(x), n.running_mean, n.running_var, n.weight, n.bias, training=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C, track_running_stats=False)),
        BatchStatistics,
    ],
    ids=["no running statistics", "training=True"],
)
@pytest.mark.parametrize("params", [None, "*.bias"])
def test_batch_norm_that_uses_the_batch(build, params):
    with pytest.raises(ValueError, match=r"uses the statistics of the batch.*track_running_stats=True"):
        linnet.linearize(build().double(), params).jacobian(ones()).outputs()


def test_batch_norm_in_train_mode_is_read_with_its_running_statistics():
    net = nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C)).double().train()
    frozen = copy.deepcopy(net).eval()
    close = linnet.linearize(net).jacobian(ones()).outputs() - frozen(ones())
    assert close.abs().max() < 1e-12


@pytest.mark.parametrize("n", [2, N])
def test_examples_that_interact(n):
    net = Net(lambda m, x: m.a(x - x.mean(0)), a=linear())
    with pytest.raises(ValueError, match="changes with the other examples of its batch"):
        linnet.linearize(net).jacobian(ones(n)).outputs()


def test_examples_that_interact_after_one_that_was_alone():
    lin = linnet.linearize(Net(lambda m, x: m.a(x - x.mean(0)), a=linear()))
    lin.jacobian(ones(1)).outputs()
    with pytest.raises(ValueError, match="changes with the other examples of its batch"):
        lin.jacobian(ones()).outputs()


@pytest.mark.parametrize("n", [1, N])
def test_random_outputs(n):
    net = Net(lambda m, x: m.a(F.dropout(x, 0.5)), a=linear())
    with pytest.raises(ValueError, match=r"different outputs for the same input.*dropout without training="):
        linnet.linearize(net).jacobian(ones(n)).outputs()


# Outputs.


@pytest.mark.parametrize(
    ("output", "error", "match"),
    [
        (lambda out: out.argmax(1), TypeError, r"floating outputs; got torch\.int64 of shape \(3,\).*logits"),
        (lambda out: out.sum(), ValueError, r"shape \(n, c\) or \(n,\), with n = 3 examples here; got \(\)"),
        (lambda out: out.mean(0), ValueError, r"n = 3 examples here; got \(4,\).*one row of outputs per example"),
        (lambda out: out[:2], ValueError, r"got \(2, 4\)"),
        (lambda out: out[:, :0], ValueError, r"got \(3, 0\)"),
        (lambda out: out.view(-1, 2, 2), ValueError, r"got \(3, 2, 2\).*out\.flatten\(1\)"),
        (lambda out: (out, out), TypeError, r"output= must return a tensor .*; it returned a tuple"),
        (lambda out: None, TypeError, r"it returned a NoneType"),
    ],
)
def test_outputs_that_are_not_a_matrix(output, error, match):
    net = nn.Linear(D, 4, dtype=torch.float64)
    with pytest.raises(error, match=match):
        linnet.linearize(net, output=output).jacobian(ones()).outputs()


def test_models_that_return_something_else():
    net = Net(lambda m, x: (m.a(x), m.a(x)), a=linear())
    with pytest.raises(TypeError, match=r"the model returned a tuple\. Say how to read it with output="):
        linnet.linearize(net).jacobian(ones()).outputs()
    net = Net(lambda m, x: {"logits": m.a(x)}, a=linear())
    assert linnet.linearize(net)(ones()).shape == (N, C)


# Settings.


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"engine": "fast"}, r"engine must be one of 'auto', 'rows', 'bilinear', 'ghost', 'autodiff'; got 'fast'"),
        ({"precision": "fp8"}, r"precision must be 'highest' .*; got 'fp8'"),
        ({"batch_size": 0}, r"batch_size must be a positive number of examples or 'auto'; got 0"),
        ({"batch_size": -3}, "got -3"),
        ({"batch_size": 2.0}, r"got 2\.0"),
        ({"batch_size": True}, "got True"),
        ({"batch_size": "all"}, "got 'all'"),
        ({"memory": "lots"}, "memory must be a number of bytes or 'auto'; got 'lots'"),
        ({"memory": 0}, "memory must be a positive number of bytes; got 0"),
        ({"memory": -1.0}, r"got -1\.0"),
    ],
)
def test_unknown_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        linnet.linearize(linear()).jacobian(ones(), **settings)


@pytest.mark.parametrize("size", [0, -1, "auto", 1.5])
def test_minibatch_sizes(J, size):
    with pytest.raises(ValueError, match="size must be a positive number of examples; got"):
        next(J.minibatches(size, seed=0))


def test_subsets_outside_the_data(J):
    with pytest.raises(IndexError, match=r"6 examples, so subset needs positions 0 to 5; got 6"):
        J.subset(torch.tensor([0, 6]))
    with pytest.raises(TypeError, match=r"mask\.nonzero\(\)"):
        J.subset(torch.ones(N, dtype=torch.bool))


def test_close_needs_numbers():
    assert checks.close(torch.ones(2), torch.ones(2) + 1e-9, 1e-6)
    assert not checks.close(torch.ones(2), torch.tensor([1.0, float("nan")]), 1e-6)
