"""python -m benchmarks NAME: a name of `python -m benchmarks --help`, such as passes, adapt, forget or precision."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    adapt,
    attribution,
    command,
    forget,
    heads,
    laplace,
    passes,
    precision,
    proofs,
    ranks,
    sampling,
    scale,
    sharded,
    startup,
)
from benchmarks.peers import compare, environment, jobs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side timings of linnet.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("passes", help="the fused pass, the Gram matrix and the memory of a pass")
    one.add_argument("--device", default="cpu")
    one.add_argument(
        "--out", type=Path, default=None, help="JSON file (default: benchmarks/results/passes-DEVICE.json)"
    )
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--only", default="all", help="a network's name, gram, or memory")
    two = commands.add_parser("peak", help="peak bytes of one pass, for the memory measurement")
    two.add_argument("--device", default="cpu")
    two.add_argument("--n", type=int, required=True)
    three = commands.add_parser("adapt", help="exact, matrix-free and laptop-sized regression")
    three.add_argument("--device", default="cpu")
    three.add_argument("--out", type=Path, default=None, help="JSON file (default: results/adapt-DEVICE.json)")
    three.add_argument("--only", default="all", choices=("all", "exact", "million", "laptop"))
    three.add_argument("--n", type=int, default=None, help="another number of examples")
    four = commands.add_parser("sampling", help="posterior samples of a network as it stands")
    four.add_argument("--device", default="cpu")
    four.add_argument("--out", type=Path, default=None, help="JSON file (default: results/sampling-DEVICE.json)")
    four.add_argument("--only", default="all", choices=("all", *sampling.CASES))
    four.add_argument("--n", type=int, default=None, help="another number of examples")
    four.add_argument(
        "--precision",
        default="highest",
        choices=("highest", "products", "high"),
        help="of the iterations; highest (the default) leaves them to linnet",
    )
    four.add_argument("--data", type=Path, default=None, help="CIFAR-10 and weights/resnet20_cifar10 (default: random)")
    five = commands.add_parser("laplace", help="error bars beside laplace-torch's: the same numbers, and how long")
    five.add_argument("--peer", default=None, help="a Python interpreter that has laplace-torch")
    five.add_argument("--out", type=Path, default=None, help="JSON file (default: results/laplace-cpu.json)")
    five.add_argument("--only", default="all", choices=("all", "agreement", "speed", "passes"))
    five.add_argument("--rounds", type=int, default=3)
    five.add_argument("--device", default="cpu", help="of --only passes")
    five.add_argument("--n", type=int, default=4096, help="examples of --only passes")
    six = commands.add_parser("heads", help="gradient features against fine-tuning of the same top layers")
    six.add_argument("--device", default="cpu")
    six.add_argument("--out", type=Path, default=None, help="JSON file (default: results/heads-DEVICE.json)")
    six.add_argument("--only", default="all", choices=("all", "epochs", "optimum", "real"))
    six.add_argument(
        "--data", type=Path, default=None, help="MNIST, Fashion-MNIST and weights, for passes over real data"
    )
    six.add_argument("--rounds", type=int, default=3)
    six.add_argument("--n", type=int, default=None, help="another number of examples")
    start = commands.add_parser("startup", help="importing linnet, and from a saved file to the first prediction")
    start.add_argument("--out", type=Path, default=None, help="JSON file (default: results/startup-cpu.json)")
    start.add_argument("--rounds", type=int, default=5)
    seven = commands.add_parser("command", help="`linnet adapt` on a CSV file, beside fine-tuning")
    seven.add_argument("--out", type=Path, default=None, help="JSON file (default: results/command-cpu.json)")
    seven.add_argument("--only", default="all", choices=("all", *command.CASES))
    seven.add_argument("--n", type=int, default=10_000, help="rows of the file")
    seven.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    seven.add_argument("--source", type=Path, default=None, help="the src folder of another version, to compare with")
    eight = commands.add_parser("peers", help="the same jobs by laplace-torch, curvlinops, GPyTorch and linnet")
    eight.add_argument("--peer", default=None, help="an interpreter that has them (default: an environment is made)")
    eight.add_argument("--venv", type=Path, default=environment.FOLDER, help="where it is made (default: .peers)")
    eight.add_argument("--out", type=Path, default=None, help="JSON file (default: results/peers-cpu.json)")
    eight.add_argument("--only", default="all", choices=("all", *jobs.PACKAGES))
    eight.add_argument("--rounds", type=int, default=3)
    eight.add_argument("--quick", action="store_true", help="small and once; no file, unless --out names one")
    nine = commands.add_parser("proofs", help="what comparing new chunks with reverse mode adds to a first pass")
    nine.add_argument("--device", default="cpu")
    nine.add_argument("--out", type=Path, default=None, help="JSON file (default: results/proofs-DEVICE.json)")
    nine.add_argument("--rounds", type=int, default=3)
    nine.add_argument("--n", type=int, default=None, help="another number of examples")
    eleven = commands.add_parser("precision", help="networks in float32 beside float64: how far predictions are apart")
    eleven.add_argument("--device", default="cpu")
    eleven.add_argument(
        "--data", type=Path, default=None, help="a folder with uci (default: scikit-learn's digits alone)"
    )
    eleven.add_argument("--out", type=Path, default=None, help="JSON file (default: results/precision-DEVICE.json)")
    eleven.add_argument("--only", default="", help="jobs whose name has this in it")
    eleven.add_argument("--n", type=int, default=600, help="examples of a fit at most")
    ten = commands.add_parser("scale", help="today's models beside a training step: passes, Gram matrices, estimators")
    ten.add_argument("--device", default="cpu")
    ten.add_argument("--out", type=Path, default=None, help="JSON file (default: results/scale-DEVICE.json)")
    ten.add_argument("--rounds", type=int, default=5)
    ten.add_argument("--only", default="all", help="passes, a network, estimators, laplace, outputs, adapters or kron")
    ten.add_argument("--profile", default=None, choices=("pass", "column", "gram", "step"), help="a table of kernels")
    less = commands.add_parser("forget", help="forgetting examples beside a refit: differences, and how long")
    less.add_argument("--out", type=Path, default=None, help="JSON file (default: results/forget-cpu.json)")
    less.add_argument("--only", default="all", choices=("all", *forget.CASES))
    less.add_argument("--rounds", type=int, default=3)
    parts = commands.add_parser("sharded", help="peak memory of a rank with sharded weights, beside one process")
    parts.add_argument("--out", type=Path, default=None, help="JSON file (default: results/sharded-cpu.json)")
    parts.add_argument("--width", type=int, default=1024, help="of the layers")
    parts.add_argument("--depth", type=int, default=96, help="number of layers")
    several = commands.add_parser(
        "ranks", help="one, two and four gloo processes: times, and bytes against the formula"
    )
    several.add_argument("--out", type=Path, default=None, help="JSON file (default: results/ranks-cpu.json)")
    several.add_argument("--rounds", type=int, default=5)
    several.add_argument("--n", type=int, default=2048, help="examples; Gram matrices take an eighth of them")
    who = commands.add_parser("attribution", help="what each training image does to the losses of test images")
    who.add_argument("--device", default="cpu")
    who.add_argument("--out", type=Path, default=None, help="JSON file (default: results/attribution-DEVICE.json)")
    who.add_argument("--n", type=int, default=None, help="another number of training images")
    who.add_argument("--tests", type=int, default=None, help="another number of test images")
    who.add_argument("--structure", default="ekfac")
    args = parser.parse_args()
    if args.command == "forget":
        forget.run(args.out or Path(__file__).parent / "results" / "forget-cpu.json", args.only, args.rounds)
        return
    if args.command == "attribution":
        kept = args.out or Path(__file__).parent / "results" / f"attribution-{args.device.split(':')[0]}.json"
        attribution.run(args.device, kept, args.n, args.tests, args.structure)
        return
    if args.command == "sharded":
        sharded.run(args.out or Path(__file__).parent / "results" / "sharded-cpu.json", args.width, args.depth)
        return
    if args.command == "ranks":
        ranks.run(args.out or Path(__file__).parent / "results" / "ranks-cpu.json", args.n, args.rounds)
        return
    if args.command == "precision":
        kept = args.out or Path(__file__).parent / "results" / f"precision-{args.device.split(':')[0]}.json"
        precision.run(args.data, kept, args.only, args.n, args.device)
        return
    if args.command == "scale":
        kept = args.out or Path(__file__).parent / "results" / f"scale-{args.device.split(':')[0]}.json"
        scale.run(args.device, None if args.profile else kept, args.rounds, args.only, table=args.profile)
        return
    if args.command == "proofs":
        proofs.run(args.device, args.out, args.rounds, args.n)
        return
    if args.command == "peers":
        kept = args.out or (None if args.quick else Path(__file__).parent / "results" / "peers-cpu.json")
        compare.run(kept, peer=args.peer, venv=args.venv, only=args.only, rounds=args.rounds, quick=args.quick)
        return
    if args.command == "command":
        kept = args.out or Path(__file__).parent / "results" / "command-cpu.json"
        command.run(kept, only=args.only, n=args.n, threads=args.threads, source=args.source)
        return
    if args.command == "startup":
        startup.run(args.out or Path(__file__).parent / "results" / "startup-cpu.json", args.rounds)
        return
    if args.command == "heads":
        kept = args.out or Path(__file__).parent / "results" / f"heads-{args.device.split(':')[0]}.json"
        heads.run(args.device, kept, rounds=args.rounds, only=args.only, n=args.n, folder=args.data)
        return
    if args.command == "laplace":
        kept = args.out or Path(__file__).parent / "results" / "laplace-cpu.json"
        laplace.run(args.peer, kept, args.only, args.rounds, args.device, args.n)
        return
    if args.command == "sampling":
        kept = args.out or Path(__file__).parent / "results" / f"sampling-{args.device.split(':')[0]}.json"
        sampling.run(args.device, kept, args.only, n=args.n, precision=args.precision, data=args.data)
        return
    if args.command == "adapt":
        kept = args.out or Path(__file__).parent / "results" / f"adapt-{args.device.split(':')[0]}.json"
        adapt.run(args.device, kept, args.only, args.n)
        return
    if args.command == "peak":
        print(passes.peak(args.n, args.device))
        return
    out = args.out or Path(__file__).parent / "results" / f"passes-{args.device.split(':')[0]}.json"
    passes.run(args.device, out, args.rounds, args.only)


if __name__ == "__main__":
    main()
