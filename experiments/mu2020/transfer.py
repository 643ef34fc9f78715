"""ResNets of CIFAR-10 to Fashion-MNIST and MNIST with few labels (the form of Mu et al. 2020, table 4).

Contenders: logistic regression on the frozen features; activation and gradient features together (equation 2, which
leaves the head and the gradients free: mean zero); fine-tuning of the same block and head; fine-tuning of everything.
Batch norm is folded into the convolutions, as in the paper. `--sizes`, `--sets`, `--seed` and `--seeds` measure some
and keep the others: runs may go side by side, and `--sizes` without a number shows what is kept.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from benchmarks.models import ResNet
from experiments import common
from experiments.common.data import as_cifar10, grayscale
from experiments.common.networks import resnet
from experiments.common.training import Labeled, Search, in_parts, in_turn
from experiments.mu2020 import gains
from experiments.mu2020.contest import EVERYTHING, GRADIENTS, SAME, Top, run_contests

SETS = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
CLASSES = 10
DEFAULTS = {
    "quick": {"sizes": [20], "test": 40, "seeds": 1},
    "cpu": {"sizes": [100, 300], "test": 500, "seeds": 3},
    "cuda": {"sizes": [100, 300, 1000, 3000, 10_000], "test": 10_000, "seeds": 3},
}
SEARCH = {
    "quick": Search((1e-3,), 2),
    "cpu": Search((1e-2, 3e-3, 1e-3), 30),
    "cuda": Search((1e-2, 3e-3, 1e-3, 3e-4), 50, patience=10),
}
# Up to how many labels a contender takes part, 0 for never; those not named always do.
LIMITS = {
    "quick": {},
    "cpu": {
        f"{GRADIENTS}, vi": 100,
        f"{GRADIENTS}, laplace": 0,
        f"{GRADIENTS}, ntk": 100,
        f"{GRADIENTS}, network's mean": 0,
        EVERYTHING: 100,
    },
    "cuda": {
        **dict.fromkeys((f"{GRADIENTS}, vi", f"{GRADIENTS}, laplace"), 300),
        **dict.fromkeys((f"{GRADIENTS}, ntk", f"{GRADIENTS}, network's mean"), 1000),
    },
}
SAID = {
    GRADIENTS: "+1.8 (VOC07) and +4.7 (COCO) mAP (table 4, AlexNet, conv4-5)",
    f"{GRADIENTS}, vi": "not in the paper",
    f"{GRADIENTS}, ntk": "the same: its scaling of the layers",
    SAME: "+1.0 and +4.2 mAP (table 4)",
    EVERYTHING: "not in the paper",
}


def below(net: ResNet, blocks: int, x: Tensor) -> Tensor:
    """What the layers below the last blocks make of images (n, 3, 32, 32)."""
    last = nn.Sequential(*list(net.layer3)[:-blocks])
    return in_parts(lambda part: last(net.layer2(net.layer1(F.relu(net.bn1(net.conv1(part)))))), (x,))


def with_head(net: ResNet, head: nn.Module) -> nn.Module:
    """A copy of the network with another head."""
    new = copy.deepcopy(net)
    new.set_submodule("linear", copy.deepcopy(head))
    return new


ARGUMENTS = {
    "--depth": {"type": int, "default": 20, "help": "of the ResNet: 20, 32 or 56 (default: 20)"},
    "--sizes": {"type": int, "nargs": "*", "help": "labels (default: 100 300; cuda: to 10,000)"},
    "--sets": common.several(SETS),
    "--seeds": "draws of labels, --seed the first (default: 3)",
    "--test": "test images of a draw (default: 500; cuda: all)",
    "--blocks": {"type": int, "default": 1, "help": "residual blocks that adapt (default: 1)"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Draw labels, adapt, score."""
    kind = common.fill(options, DEFAULTS)
    net = resnet(options.data / "weights", options.depth).to(options.device)
    if not 1 <= options.blocks <= len(net.layer3):
        raise ValueError(
            f"The last stage of ResNet-{options.depth} has {len(net.layer3)} blocks; got --blocks {options.blocks}."
        )
    top = linnet.fold_batchnorm(copy.deepcopy(Top(list(net.layer3)[-options.blocks :], net.linear)).eval())
    where, parts = setting(options), common.kept_parts(options)
    how = {
        "network": f"ResNet-{options.depth}",
        "blocks that adapt": options.blocks,
        "parameters that adapt": sum(p.numel() for p in top.parameters()),
        "test images of a draw": options.test,
    }
    own = {"fine-tuning": {**vars(SEARCH[kind])}, "machine": common.machine(options.device)}
    for name in options.sets if options.sizes else ():
        data = [grayscale(options.data, name, train) for train in (True, False)]
        for seed in range(options.seed, options.seed + options.seeds):
            for one in draw(net, top, *data, seed=seed, kind=kind, options=options):
                parts = gains.keep(options, where, how, {"set": SETS[name], "seed": seed, **one, **own})
    command = "python -m experiments transfer (and --device cuda, --depth 56)"
    return gains.of_parts(parts, where, said=SAID, differs=differs, command=command)


def setting(options: argparse.Namespace) -> str:
    return f"ResNet-{options.depth}, {gains.adapting(options.blocks, 'block')}, {options.test:,} test images"


def draw(
    net: ResNet,
    top: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    seed: int,
    kind: str,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """All contenders on one draw of labels and test images."""
    generator = torch.Generator().manual_seed(seed)
    index = in_turn(train[1], max(options.sizes), CLASSES, generator)
    at = torch.randperm(len(test[1]), generator=generator)[: options.test]
    data = [
        Labeled((as_cifar10(x[i]).to(options.device),), y[i].to(options.device))
        for (x, y), i in ((train, index), (test, at))
    ]

    def dtype(n: int) -> str:
        """Half the time on a CPU, and with many labels on a GPU; the mode is that of float64 to four digits."""
        return "auto" if options.device.startswith("cuda") and n <= 1000 else "float32"

    parts = top, lambda x: (below(net, options.blocks, x),), partial(with_head, net)
    how = {"limits": LIMITS[kind], "classes": CLASSES, "search": SEARCH[kind], "seed": seed}
    return run_contests(parts, *data, options, dtype=dtype, **how)


def differs(how: Mapping[str, Any], runs: Sequence[gains.Run], gain: Mapping[str, float]) -> str:
    """The setting in words, and how many draws were compared."""
    return (
        f"{how['network']} of CIFAR-10, accuracy on {' and '.join(sorted({run['set'] for run in runs}))}; paired "
        f"over {gains.draws(runs)} draws of each with {how['test images of a draw']:,} test images, 95 % interval; "
        f"{gains.machines(how, runs)}"
    )
