"""Networks whose frozen weights are sharded over ranks, and processes that run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.adapters import Adapted

TOKENS, WIDTH, C = 11, 8, 3


class Block(nn.Module):
    """Two adapted layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Adapted(nn.Linear(WIDTH, 2 * WIDTH), 2, torch.float64)
        self.down = Adapted(nn.Linear(2 * WIDTH, WIDTH), 2, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Tokens to class logits. The adapters are selected.

    Args:
        branches: Whether the second block serves examples that begin with token 1 alone.
    """

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, C)

    def forward(self, x: Tensor) -> Tensor:
        h, chosen = self.blocks[0](self.embed(x)), x[:, 0] == 1
        if not self.branches:
            h = self.blocks[1](h)
        elif chosen.any():
            h = torch.where(chosen[:, None, None], self.blocks[1](h), h)
        return self.head(h.mean(1))


def tower(*, branches: bool = False) -> Tower:
    torch.manual_seed(0)
    net = Tower(branches).double()
    for name, t in net.named_parameters():
        t.requires_grad_("norm" not in name and "base" not in name and name.startswith("blocks"))
    return net


def peft_tower() -> nn.Module:
    """A small Llama with adapters by PEFT."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=C,
        pad_token_id=0,
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    net = peft.get_peft_model(transformers.LlamaForSequenceClassification(config), lora)
    for name, t in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(t, std=0.1)
    return net.double()


def tokens(n: int, seed: int = 0) -> Tensor:
    x = torch.randint(2, TOKENS, (n, 4), generator=torch.Generator().manual_seed(seed))
    x[-1, 0] = 1  # an example of the last rank
    return x


def start(work: Callable[..., None], world: int, folder: Path, *args: Any) -> None:
    """Run ``work(rank, folder, *args)`` in as many processes as ranks, which form a group."""
    mp.spawn(_work, args=(world, work, str(folder), *args), nprocs=world, join=True)


def _work(rank: int, world: int, work: Callable[..., None], folder: str, *args: Any) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting, timeout = f"file://{folder}/meeting{world}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timeout)
    try:
        work(rank, folder, *args)
    finally:
        dist.destroy_process_group()
    # Threads of torch.distributed may outlive the group, and abort a process that takes itself down in the usual way.
    sys.stdout.flush()
    os._exit(0)
