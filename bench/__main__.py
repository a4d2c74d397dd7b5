"""The command: ``python -m fastcollab.bench [rollout|handoff|all] [--out JSON] [--quick]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastcollab.bench import handoff, harness, rollout


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fastcollab.bench", description="Claims, beside their baselines.")
    parser.add_argument("what", nargs="?", default="all", choices=["rollout", "handoff", "all"])
    parser.add_argument("--out", type=Path, help="JSON file; default: bench/results/<machine>.json")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 8 only")
    args = parser.parse_args(arguments)
    path = args.out or harness.default_path()
    for name, bench in (("rollout", rollout), ("handoff", handoff)):
        if args.what in (name, "all"):
            bench.run(path, args.quick)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
