"""What intercepting SDPA costs all the other operators, for each way to do it.

python -m cp_dtensor.tools.interception_cost
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from cp_dtensor.interception import SdpaArguments, intercepted
from cp_dtensor.tools.report import environment, markdown_table


class _FunctionMode(TorchFunctionMode):
    """The smallest function mode that could intercept SDPA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _declines(call: SdpaArguments) -> None:
    return None


def main() -> None:
    """Measures and prints the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    x = torch.randn(8, 8)
    leaf = torch.randn(8, 8, requires_grad=True)
    q = torch.randn(1, 1, 8, 8)
    operations: dict[str, Callable[[], Any]] = {
        "x + x": lambda: x + x,
        "leaf * leaf": lambda: leaf * leaf,
        "x.view(64)": lambda: x.view(64),
        "F.silu(x)": lambda: F.silu(x),
        "SDPA, not intercepted": lambda: F.scaled_dot_product_attention(q, q, q),
    }
    ways: dict[str, Callable[[], Any]] = {
        "nothing": nullcontext,
        "dispatcher kernel": lambda: intercepted(_declines),
        "function mode": _FunctionMode,
    }
    micros: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(25):  # in turns, so that what else the machine does hits all ways alike
        for way, context in ways.items():
            with context():
                for name, operation in operations.items():
                    micros[name, way].append(_micros(operation))
    rows = [(name, *(f"{statistics.median(micros[name, way]):.2f}" for way in ways)) for name in operations]
    start = time.perf_counter()
    for _ in range(100):
        with intercepted(_declines):
            pass
    opening = (time.perf_counter() - start) / 100 * 1e6
    print(f"{environment()}\n\n{markdown_table(('us per call', *ways), rows)}\n")
    print(f"Opening and closing the interception: {opening:.0f} us")


def _micros(operation: Callable[[], Any], calls: int = 1000) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    main()
