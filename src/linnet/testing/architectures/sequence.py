"""Embeddings, recurrent networks, language models, layers applied along folded time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Case, Net, case, net, normal, tokens, weight


class Bag(nn.Module):
    """Bags of tokens, weighted by a second lookup."""

    def __init__(self, mode: str, *, weighted: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.weighted = weighted
        self.bag = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=padding_idx)
        self.fc = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        weights = 0.5 + 0.1 * ids.to(self.bag.weight.dtype) if self.weighted else None
        return self.fc(torch.tanh(self.bag(ids, per_sample_weights=weights)))


class LanguageModel(nn.Module):
    """A causal model whose output layer is its embedding, in one of the two ways people tie them."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.embed = nn.Embedding(9, 6)
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        if not functional:
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        past = h.cumsum(1) / torch.arange(1, ids.shape[1] + 1, dtype=h.dtype, device=h.device)[:, None]
        h = self.norm(h + torch.tanh(self.mix(past)))
        return F.linear(h, self.embed.weight) if self.functional else self.head(h)


class Likelihood(LanguageModel):
    """The log likelihood of each sequence, one number per example."""

    def forward(self, ids: Tensor) -> Tensor:
        log_p = super().forward(ids[:, :-1]).log_softmax(2)
        return log_p.gather(2, ids[:, 1:, None]).sum((1, 2))


class Cell(nn.Module):
    """A recurrent cell called once per step from Python."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.fc = cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.fc(state[0] if isinstance(state, tuple) else state)


def lookup(padding_idx: int | None = None) -> Any:
    embed = partial(nn.Embedding, 9, 6, padding_idx=padding_idx)
    return net(lambda m, ids: m.fc(torch.tanh(m.embed(ids)).mean(1)), embed=embed, fc=(6, 3))


def recurrent(rnn: nn.RNNBase, width: int) -> nn.Module:
    """A recurrent network read at its last step and on average."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.rnn(x if m.rnn.batch_first else x.transpose(0, 1))[0]
        h = h if m.rnn.batch_first else h.transpose(0, 1)
        return m.fc(h[:, -1] + h.mean(1))

    return Net(forward, rnn=rnn, fc=nn.Linear(width, 3))


def folded(*, time_major: bool) -> nn.Module:
    """Linear layers on (n * T, d), example-major, or on (T * n, d), where example i is in rows i, n + i..."""

    def forward(m: Any, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        rows = (x.transpose(0, 1) if time_major else x).reshape(n * t, -1)
        h = m.b(torch.tanh(m.a(rows)))
        h = h.view(t, n, -1).transpose(0, 1) if time_major else h.view(n, t, -1)
        return (h * torch.linspace(0.2, 1.0, t, dtype=h.dtype, device=h.device)[:, None]).sum(1)

    return Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))


def positions(m: Any, x: Tensor) -> Tensor:
    """Learned positions: the lookup is the same for all examples and has no batch axis."""
    h = m.enter(x) + m.position(torch.arange(x.shape[1], device=x.device))
    return m.fc(torch.tanh(h).mean(1) * m.scale)


def flat(raw: Tensor) -> Tensor:
    return raw.flatten(1)


SEQUENCE = normal(5, 4)

CASES: list[Case] = [
    case("embedding", lookup(), tokens(9, 5)),
    case("embedding_padding", lookup(padding_idx=0), tokens(9, 5)),
    case(
        "embedding_positions",
        net(positions, enter=(4, 6), position=partial(nn.Embedding, 5, 6), scale=weight(6), fc=(6, 3)),
        SEQUENCE,
    ),
    case("embedding_bag_mean", lambda: Bag("mean", padding_idx=2), tokens(9, 5)),
    case("embedding_bag_sum", lambda: Bag("sum", weighted=True), tokens(9, 5)),
    case("embedding_bag_max", lambda: Bag("max"), tokens(9, 5)),
    case("rnn", lambda: recurrent(nn.RNN(4, 5, batch_first=True), 5), SEQUENCE),
    case("lstm", lambda: recurrent(nn.LSTM(4, 5, batch_first=True), 5), SEQUENCE),
    case("lstm_time_first", lambda: recurrent(nn.LSTM(4, 5), 5), SEQUENCE),
    case(
        "lstm_bidirectional",
        lambda: recurrent(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), 6),
        SEQUENCE,
    ),
    case("lstm_projected", lambda: recurrent(nn.LSTM(4, 5, proj_size=3, batch_first=True), 3), SEQUENCE),
    case("gru", lambda: recurrent(nn.GRU(4, 5, batch_first=True), 5), SEQUENCE),
    case(
        "gru_bidirectional",
        lambda: recurrent(nn.GRU(4, 3, bidirectional=True, bias=False, batch_first=True), 6),
        SEQUENCE,
    ),
    case("lstm_cell", lambda: Cell(nn.LSTMCell(4, 4)), SEQUENCE),
    case("gru_cell", lambda: Cell(nn.GRUCell(4, 4)), SEQUENCE),
    case("language_model", lambda: LanguageModel(functional=False), tokens(9, 4), flat),
    case("language_model_functional", lambda: LanguageModel(functional=True), tokens(9, 4), flat),
    case("language_model_likelihood", lambda: Likelihood(functional=False), tokens(9, 5)),
    case("folded_time", lambda: folded(time_major=False), SEQUENCE),
    case("folded_time_major", lambda: folded(time_major=True), SEQUENCE),
]
