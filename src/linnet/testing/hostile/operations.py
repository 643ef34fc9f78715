"""Operations where vectorized, batched or forward-mode differentiation is wrong, missing or a matter of opinion."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, net, normal, tokens, weight

add = Register("operations", predicts=True)
CONV = functools.partial(nn.Conv2d, 1, 2, 3, padding=1)


def late_zeros() -> Tensor:
    """Zero from the sixth example on."""
    return draw(13, 4) * (torch.arange(13) < 5)[:, None]


# Distances: zero distances and several norms.
for p in (1.0, 1.5, 2.0, 3.0, float("inf")):
    distance = functools.partial(lambda m, x, p: m.head(torch.cdist(m.a(x), m.centers, p=p)), p=p)
    add(f"cdist_{p:g}", net(distance, a=(4, 3), centers=weight(5, 3), head=(5, 2)))
add(
    "cdist_pairs_of_tokens",
    net(lambda m, x: m.head(torch.cdist(m.a(x), m.a(x)).flatten(1)), a=(3, 3), head=(16, 2)),
    normal(4, 3),
)
add(
    "cdist_to_itself_at_zero",
    net(lambda m, x: m.head((torch.cdist(m.a(x), m.b(x)) + 1).log().flatten(1)), a=(3, 3), b=(3, 3), head=(16, 2)),
    lambda: torch.cat([draw(5, 4, 3), torch.zeros(8, 4, 3, dtype=torch.float64)]),
)
add(
    "pdist_by_hand",
    net(lambda m, x: m.head(torch.stack([F.pdist(row) for row in m.a(x)])), a=(3, 3), head=(6, 2)),
    normal(4, 3),
)


# Lookups.
def lookup(function: Any) -> Any:
    return net(function, table=weight(6, 4), head=(4, 2))


add(
    "functional_embedding_padding",
    lookup(lambda m, x: m.head(F.embedding(x, m.table, padding_idx=0).sum(1))),
    lambda: torch.cat([integers(5, 6, 3) + 1, integers(2, 7, 3)]),
)
add(
    "functional_embedding_padding_twice",
    lookup(lambda m, x: m.head((F.embedding(x, m.table, padding_idx=0) * F.embedding(x, m.table)).sum(1).tanh())),
    lambda: torch.cat([integers(5, 6, 3) + 1, integers(2, 7, 3)]),
)
add(
    "functional_embedding_scaled_by_frequency",
    lookup(lambda m, x: m.head(F.embedding(x, m.table, scale_grad_by_freq=True).sum(1))),
    tokens(3, 4),
    expects="either",
)
for mode in ("sum", "mean", "max"):
    bag = functools.partial(lambda m, x, mode: m.head(F.embedding_bag(x, m.table, mode=mode)), mode=mode)
    add(f"embedding_bag_{mode}", lookup(bag), tokens(6, 3))
add(
    "embedding_bag_padding",
    lookup(lambda m, x: m.head(F.embedding_bag(x, m.table, padding_idx=1))),
    lambda: torch.cat([integers(4, 6, 3) + 2, integers(4, 7, 3)]),
)
add(
    "sparse_embedding",
    lambda: nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2)),
    tokens(6, 3),
)
add("take_along_weight", net(lambda m, x: m.head(m.table.take(x)), table=weight(4, 3), head=(3, 2)), tokens(12, 3))


# Writes at indices.
def put(m: Any, x: Tensor) -> Tensor:
    out, rows = x.new_zeros(len(x), 5), torch.arange(len(x))[:, None].expand(-1, 4)
    return m.head(out.index_put((rows, (x.abs() * 2).long().clamp(max=4)), m.a(x), accumulate=True).sin())


def bucket(x: Tensor) -> Tensor:
    return (x.abs() * 3).long().clamp(max=4)


add(
    "scatter_add",
    net(lambda m, x: m.head(x.new_zeros(len(x), 5).scatter_add(1, bucket(x), m.a(x)).tanh()), a=(4, 4), head=(5, 2)),
)
add("index_put_duplicates", net(put, a=(4, 4), head=(5, 2)))
for how in ("prod", "amax", "mean"):
    reduce = functools.partial(
        lambda m, x, how: m.head(x.new_ones(len(x), 5).scatter_reduce(1, bucket(x), m.a(x), how)), how=how
    )
    add(f"scatter_reduce_{how}", net(reduce, a=(4, 4), head=(5, 2)))
add(
    "masked_scatter",
    net(lambda m, x: m.head(x.masked_scatter(x > 0, m.a(x)).tanh()), a=(4, 4), head=(4, 2)),
    lambda: draw(13, 4).abs() * torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64),
    expects="refused",
)
add(
    "masked_select_of_weights",
    net(lambda m, x: m.head(m.a(x)) + m.w[m.w > 0].sum(), a=(4, 4), head=(4, 2), w=weight(6)),
)

# Order statistics.
add("sort", net(lambda m, x: m.head(m.a(x).sort(1).values)))
add("topk", net(lambda m, x: m.head(m.a(x).topk(3, 1).values), a=(4, 5), head=(3, 2)))
add("median", net(lambda m, x: m.head(m.a(x).median(1, keepdim=True).values), a=(4, 5), head=(1, 2)))
add("kthvalue", net(lambda m, x: m.head(m.a(x).kthvalue(2, 1, True).values), a=(4, 5), head=(1, 2)))
add("mode_of_rounded", net(lambda m, x: m.head(m.a(x).mode(1, True).values), a=(4, 5), head=(1, 2)))
add("quantile", net(lambda m, x: m.head(m.a(x).quantile(0.3, 1, True)), a=(4, 5), head=(1, 2)))
add("cummax", net(lambda m, x: m.head(m.a(x).cummax(1).values)))
add("cumprod_with_zero", net(lambda m, x: m.head((m.a(x) * (x > 0)).cumprod(1)), a=(4, 4), head=(4, 2)))
add("logcumsumexp", net(lambda m, x: m.head(m.a(x).logcumsumexp(1)), a=(4, 4), head=(4, 2)))
add(
    "unique_weights",
    net(
        lambda m, x: m.head(m.a(x)) * m.w.detach().round().unique().sum() + m.w.sum(),
        a=(4, 4),
        head=(4, 2),
        w=weight(6),
    ),
)
add(
    "maxout_with_ties",
    net(lambda m, x: m.head(torch.maximum(m.a(x).relu(), m.b(x).relu())), a=(4, 5), b=(4, 5), head=(5, 2)),
)
add("amax_with_ties", net(lambda m, x: m.head(m.a(x).relu().amax(1, True)), a=(4, 5), head=(1, 2)))


# Derivatives that are defined by hand.
def own(forward: Any, backward: Any, **more: Any) -> Any:
    """A `torch.autograd.Function` from its methods; attributes that are not functions stay as they are."""
    methods = {"forward": forward, "backward": lambda ctx, *grads: backward(ctx, grads[0])} | more
    parts = {name: staticmethod(part) if callable(part) else part for name, part in methods.items()}
    return type("Own", (torch.autograd.Function,), parts)


def sine_by_numpy(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return torch.from_numpy(x.detach().numpy().copy()).sin()


def slope_of_sine(ctx: Any, *grads: Any) -> Any:
    return grads[0] * ctx.saved_tensors[0].cos()


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def split_product(ctx: Any, g: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return g * w, (g * x).sum_to_size(w.shape)


OWN = {
    "straight_through": own(lambda ctx, x: x.round(), lambda ctx, g: g),
    "reversed": own(  # gradients of the other sign; with a setup and a rule for vmap
        lambda x: x.clone(),
        lambda ctx, g: -0.5 * g,
        setup_context=lambda ctx, inputs, output: None,
        generate_vmap_rule=True,
    ),
    "wrong_tangent": own(  # a square whose forward mode says something else than its reverse mode
        lambda x: x.square(),
        lambda ctx, g: 2 * ctx.saved_tensors[0] * g,
        setup_context=save,
        jvp=lambda ctx, t: torch.where(ctx.saved_tensors[0] > 1, 3.0, 2.0) * ctx.saved_tensors[0] * t,
    ),
    "numpy": type(  # only torch's plain reverse mode passes a function computed by NumPy
        "Own",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(sine_by_numpy),
            "backward": staticmethod(torch.autograd.function.once_differentiable(slope_of_sine)),
        },
    ),
}
CLIPPED = own(lambda ctx, x: x.clone(), lambda ctx, g: g.clamp(-0.05, 0.05))  # not linear in the incoming gradient
WRONG_VMAP = own(  # the rule for vmap forgets a factor for large inputs
    lambda x, w: x * w,
    split_product,
    setup_context=save,
    vmap=lambda info, in_dims, x, w: (x * w * (1 + (x > 1)), 0),
)
for name, function in OWN.items():
    add(f"own_function_{name}", net(lambda m, x, f=function: m.head(f.apply(2 * m.a(x)))))
    of_weight = functools.partial(lambda m, x, f: m.head(x @ f.apply(m.w) + m.a(x).tanh()), f=function)
    add(f"own_function_{name}_of_weight", net(of_weight, w=weight(4, 5), a=(4, 5), head=(5, 2)))
add("own_function_wrong_vmap", net(lambda m, x: m.head(WRONG_VMAP.apply(x, m.w)).tanh(), w=weight(4), head=(4, 2)))
add("own_function_clips_gradients", net(lambda m, x: m.head(CLIPPED.apply(m.a(x).tanh()))), expects="either")

# Graphs that are cut.
add("detached_branch", net(lambda m, x: m.head(m.a(x).tanh() + m.a(x).sin().detach())))


def under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.a(x).sigmoid()
    return m.head(gate * m.b(x))


def late_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    with torch.no_grad():
        fixed = m.a(x).tanh()
    return m.head(torch.where(x[:, :1] > 0, fixed, h))


def no_grad_if_any(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if bool((x[:, 0] > 0).any()):
        with torch.no_grad():
            fixed = m.a(x).tanh()
        h = torch.where(x[:, :1] > 0, fixed, h)
    return m.head(h)


add("no_grad_branch", net(under_no_grad, a=(4, 5), b=(4, 5), head=(5, 2)))
add("no_grad_for_late_examples", net(late_no_grad), late(4))
add("no_grad_if_any_late", net(no_grad_if_any), late(4))
add("weight_data_read", net(lambda m, x: m.head(m.a(x) * m.a.weight.data.sum())))

# Points without a derivative.
add(
    "norm_at_zero", net(lambda m, x: m.head((x[:, :, None] * m.w).norm(dim=2)), w=weight(4, 3), head=(4, 2)), late_zeros
)
add(
    "where_with_nan_branch",
    net(
        lambda m, x: m.head(torch.where(x > 0, (m.a(x).square() + x).clamp(min=1e-3).sqrt(), m.a(x))),
        a=(4, 4),
        head=(4, 2),
    ),
    late(4),
)
add("relu_at_zero", net(lambda m, x: m.head((x * m.w).relu()), w=weight(4), head=(4, 2)), late_zeros)
add(
    "absolute_value_at_zero",
    net(lambda m, x: m.head((x * m.w).abs() + (x * m.w).sign()), w=weight(4), head=(4, 2)),
    late_zeros,
)
add(
    "clamp_at_edge",
    net(lambda m, x: m.head((x + m.w - m.w.detach()).clamp(-1.0, 1.0)), w=weight(4), head=(4, 2)),
    lambda: torch.cat([draw(5, 4), torch.ones(4, 4), draw(4, 4)]).double(),
)
add("rounding", net(lambda m, x: m.head(m.a(x).round() + m.a(x).tanh()), a=(4, 4), head=(4, 2)))


# Complex numbers.
def spectrum(m: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft(m.a(x))
    return m.head(torch.cat([z.abs(), z.real, z.imag], 1))


def filtered(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.w), n=6).tanh())


add("fft_spectrum", net(spectrum, a=(4, 6), head=(12, 2)))
add("fft_filter", net(filtered, w=weight(4, 2), head=(6, 2)), normal(6))
add("complex_angle", net(lambda m, x: m.head(torch.fft.fft(m.a(x)).angle())))


# Work done twice, or elsewhere.
def sparse(m: Any, x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2, 2], [1, 0, 3, 2]])
    adjacency = torch.sparse_coo_tensor(index, m.w, (4, 4), check_invariants=False)
    return m.head(torch.sparse.mm(adjacency, x.T).T.tanh())


def sparse_graph(m: Any, x: Tensor) -> Tensor:
    adjacency, h = torch.eye(4, dtype=x.dtype).flip(0).to_sparse(), m.a(x).permute(1, 0, 2)
    return m.head(torch.sparse.mm(adjacency, h.flatten(1)).view(4, len(x), 3).permute(1, 0, 2).flatten(1))


add(
    "checkpoint",
    net(
        lambda m, x: m.head(checkpoint(lambda y: m.b(y).tanh(), m.a(x), use_reentrant=False)),
        a=(4, 5),
        b=(5, 5),
        head=(5, 2),
    ),
)
add("sparse_matmul", net(sparse, w=weight(4), head=(4, 2)), expects="either")
add("sparse_adjacency", net(sparse_graph, a=(3, 3), head=(12, 2)), normal(4, 3), expects="either")


# Recurrent networks and attention.
def recurrent(kind: Any, **options: Any) -> Any:
    cell = functools.partial(kind, 3, 4, batch_first=True, **options)
    width = 4 * (2 if options.get("bidirectional") else 1)
    return net(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=cell, head=(width, 2))


def unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for step in x.unbind(1):
        h = m.cell(step, h)
    return m.head(h)


for cell in (nn.RNN, nn.LSTM, nn.GRU):
    add(f"{cell.__name__.lower()}_batch_first", recurrent(cell), normal(4, 3))
add("lstm_bidirectional", recurrent(nn.LSTM, bidirectional=True, num_layers=2), normal(4, 3))
add("gru_cell_loop", net(unrolled, cell=functools.partial(nn.GRUCell, 3, 4), head=(4, 2)), normal(4, 3))


def attend(m: Any, x: Tensor, causal: bool) -> Tensor:
    q, k, v = m.qkv(x).view(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def attention(function: Any) -> Any:
    parts: Any = {"attention": functools.partial(nn.MultiheadAttention, 4, 2, batch_first=True), "qkv": (4, 12)}
    return net(lambda m, x: m.head(function(m, x).mean(1)), **parts, head=(4, 2))


add.each(
    "attention_",
    attention,
    normal(3, 4),
    mha=lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    mha_mask=lambda m, x: m.attention(x, x, x, key_padding_mask=x[:, :, 0] > 1.5)[0],
    sdpa=functools.partial(attend, causal=False),
    causal=functools.partial(attend, causal=True),
)


# Images.
def sampled(m: Any, x: Tensor) -> Tensor:
    grid = m.locate(x.flatten(1)).tanh().view(len(x), 2, 2, 2)
    return m.head(F.grid_sample(m.conv(x), grid, align_corners=False).flatten(1))


def per_example(m: Any, x: Tensor) -> Tensor:
    w = m.make(x.flatten(1)).view(-1, 1, 3, 3)
    return m.head(F.conv2d(x.transpose(0, 1), w, groups=len(x)).transpose(0, 1).flatten(1))


add("grid_sample", net(sampled, locate=(16, 8), conv=CONV, head=(8, 2)), normal(1, 4, 4))
for mode in ("nearest", "bilinear", "bicubic", "area"):
    resize = functools.partial(
        lambda m, x, mode: m.head(F.interpolate(m.conv(x), size=(3, 5), mode=mode).flatten(1)), mode=mode
    )
    add(f"interpolate_{mode}", net(resize, conv=CONV, head=(30, 2)), normal(1, 4, 4))
add(
    "unfold_fold",
    net(
        lambda m, x: m.head(F.fold(m.a(F.unfold(x, 2).transpose(1, 2)).transpose(1, 2), (4, 4), 2).flatten(1)),
        a=(4, 4),
        head=(16, 2),
    ),
    normal(1, 4, 4),
)
add(
    "max_pool_indices",
    net(
        lambda m, x: m.head(F.max_unpool2d(*F.max_pool2d(m.conv(x), 2, return_indices=True), [2, 2]).flatten(1)),
        conv=CONV,
        head=(32, 2),
    ),
    normal(1, 4, 4),
    expects="either",
)
add("weight_made_per_example", net(per_example, make=(16, 9), head=(4, 2)), normal(1, 4, 4))


# Recursions and linear algebra.
def forward_algorithm(m: Any, x: Tensor) -> Tensor:
    """The forward algorithm of a hidden Markov chain."""
    emission = m.emit(x)
    alpha = emission[:, 0]
    for t in range(1, x.shape[1]):
        alpha = emission[:, t] + torch.logsumexp(alpha[:, :, None] + m.jump, 1)
    return torch.stack([alpha.logsumexp(1), alpha[:, 0]], 1)


def ctc(m: Any, x: Tensor) -> Tensor:
    scores, n = m.emit(x).log_softmax(2).transpose(0, 1), len(x)
    target = torch.tensor([[1, 2]]).expand(n, 2)
    loss = F.ctc_loss(scores, target, torch.full((n,), x.shape[1]), torch.full((n,), 2), reduction="none")
    return loss[:, None]


def spd(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(len(x), 3, 3)
    return h @ h.transpose(1, 2) + torch.eye(3, dtype=x.dtype)


add("forward_algorithm", net(forward_algorithm, emit=(3, 4), jump=weight(4, 4)), normal(5, 3))
add("ctc_loss", net(ctc, emit=(3, 4)), normal(5, 3))
add.each(
    "linalg_",
    lambda f: net(lambda m, x: m.head(f(spd(m, x))), a=(4, 9), head=nn.Identity),
    normal(4, n=12),
    inverse=lambda A: torch.linalg.inv(A).flatten(1),
    cholesky=lambda A: torch.linalg.cholesky(A).flatten(1),
    svd=torch.linalg.svdvals,
    eigh=lambda A: torch.linalg.eigh(A).eigenvectors.square().flatten(1),
    eigvalsh=torch.linalg.eigvalsh,
    logdet=lambda A: torch.logdet(A)[:, None],
    solve=lambda A: torch.linalg.solve(A, A.square()).flatten(1),
    matrix_exp=lambda A: torch.matrix_exp(0.1 * A).flatten(1),
    pinv=lambda A: torch.linalg.pinv(A[:, :2]).flatten(1),
)
add(
    "inverse_of_weight",
    net(
        lambda m, x: m.head(x @ torch.linalg.inv(m.w @ m.w.T + torch.eye(4, dtype=x.dtype))),
        w=weight(4, 4),
        head=(4, 2),
    ),
)


# Hooks on tensors.
def hooked(hook: Any) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: hook(g, x))
        return m.head(h.tanh())

    return net(forward)


def scaled_by_module() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def halve(module: nn.Module, before: Any, after: Any) -> Any:
        return (0.5 * before[0],)

    model[1].register_full_backward_hook(halve)
    return model


add("gradient_hook", hooked(lambda g, x: 0.5 * g), expects="either")
add(
    "gradient_hook_for_late_examples",
    hooked(lambda g, x: g * torch.where(x[:, :1] > 0, 0.5, 1.0)),
    late(4),
    expects="either",
)
add("module_backward_hook", scaled_by_module, expects="either")

# Things torch's transforms refuse.
add("item_in_forward", net(lambda m, x: m.head(torch.cat([m.a(row[None]) * float(row[0] > 0) for row in x]))))
add("numpy_in_forward", net(lambda m, x: m.head(m.a(x) * torch.from_numpy(x.detach().numpy().sum(1, keepdims=True)))))
add("func_in_forward", net(lambda m, x: m.head(torch.func.vmap(m.a)(x).tanh())), expects="either")
add(
    "bincount_of_tokens",
    net(lambda m, x: m.head(torch.stack([row.bincount(minlength=6).to(m.head.weight) for row in x])), head=(6, 2)),
    tokens(6, 4),
)

CASES: list[Hostile] = add.cases
