"""The command: ``python -m fastcollab.bench [ops|rollout|handoff|corl|mintrl|kernels|all]``; all: but kernels."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fastcollab.bench import corl, handoff, harness, kernels, mintrl, ops, rollout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastcollab.bench", description="Claims, beside their baselines.")
    what = ["ops", "rollout", "handoff", "corl", "mintrl", "kernels", "all"]
    parser.add_argument("what", nargs="?", default="all", choices=what)
    parser.add_argument("--out", type=Path, help="JSON file; default: bench/results/<device>.json (or kernels.json)")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="ops: cases, kernels: modules with this text")
    args = parser.parse_args(arguments)
    if args.what == "kernels":
        return kernels.run(args.out, args.only)
    path = args.out or harness.default_path(args.device)
    if args.what in ("ops", "all"):
        ops.run(path, args.quick, args.device, args.only)
    for name, bench in (("rollout", rollout), ("handoff", handoff), ("corl", corl), ("mintrl", mintrl)):
        if args.what in (name, "all"):
            bench.run(path, args.quick, args.device)
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
