"""Command line of the library: `python -m cp_dtensor --help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": ("cp_dtensor.tools.doctor", "checks of versions, GPUs, links and results; --info lists what is here"),
    "bench": ("cp_dtensor.tools.bench", "time and error of attention, beside one GPU and torch; on ranks of torchrun"),
    "train-bench": ("cp_dtensor.tools.train_bench", "time of training steps, beside torch; on ranks of torchrun"),
    "plan": ("cp_dtensor.tools.plan", "methods, layouts and degrees on a cluster by name, predicted without its GPUs"),
    "draw": ("cp_dtensor.tools.draw", "picture of the pairs that each rank computes under a mask and a layout"),
}


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand of the command line; its module is imported only then."""
    commands = "\n".join(f"  {name:<11} {about}" for name, (_, about) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m cp_dtensor",
        usage="%(prog)s COMMAND [options]",
        description="Context-parallel attention for PyTorch: tools.",
        epilog=f"commands:\n{commands}\n\npython -m cp_dtensor COMMAND --help describes the options of a command.\n"
        "torchrun --nproc-per-node N -m cp_dtensor COMMAND ... runs it on N ranks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of " + ", ".join(COMMANDS))
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    chosen = parser.parse_args(arguments or ["--help"])
    importlib.import_module(COMMANDS[chosen.command][0]).main(chosen.options)


if __name__ == "__main__":
    main(sys.argv[1:])
