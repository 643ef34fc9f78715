"""python -m benchmarks passes | adapt [--device cuda]"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import adapt, passes


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
    args = parser.parse_args()
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
