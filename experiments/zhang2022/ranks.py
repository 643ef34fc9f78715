"""One fit of LeNet-5's Fisher embedding, for `torchrun`; the first rank prints seconds and eigenvalues as JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import linnet
from experiments import common
from experiments.common.data import mnist
from experiments.common.networks import lenet5


def launch(count: int, *, data: Path, n: int, components: int) -> dict[str, Any]:
    """Run this file in so many processes, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "experiments.zhang2022.ranks", "--data", str(data)]
    command += ["--examples", str(n), "--components", str(components)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=common.DATA)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--components", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = lenet5(options.data / "weights").double()
    X = mnist(options.data, False, count=options.examples)[0].double()

    def fit(X: torch.Tensor) -> linnet.FisherEmbedding:
        return linnet.FisherEmbedding(net, options.components, method="krylov", progress=False).fit(X)

    fit(X[: 4 * options.components])  # what a first call costs is not counted
    dist.barrier()
    start = time.perf_counter()
    found = fit(X)
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "passes": found.passes_, "eigenvalues": found.eigenvalues_.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
