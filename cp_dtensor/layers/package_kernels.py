"""Which kernels of an optional package compute an operation of a layer, and which are left to torch operations."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cp_dtensor.api.extension import current, first_use
from cp_dtensor.spec.logs import log_once

TOP_K = {"return_val": False, "deterministic": True}
"""Options of cuDNN's top-k: indices alone, the same in every run."""


@dataclass(frozen=True)
class PackageKernels:
    """Kernels of a package for an operation."""

    distribution: str
    """Its name in package registries."""
    module: str
    """What is imported at first use."""
    operation: str
    """The public function, and a part of it."""
    extra: str = "sparse"
    """That of this library which installs it."""

    def load(self) -> Any:
        """Return the module."""
        return importlib.import_module(self.module)

    def serve(
        self, x: Tensor, refusal: str | None, kernel: tuple[Any, ...], check: Callable[[], str], *,
        adds_in_any_order: bool = False,
    ) -> bool:  # fmt: skip
        """Return whether the kernels compute a call; a line of log says so. False on CPUs.

        Args:
            x: a tensor of the call.
            refusal: what the kernels need that the call has not.
            kernel: all that decides which kernel is compiled.
            check: as of `first_use`.
            adds_in_any_order: True if results are not the same bits in every run.
        """
        if not x.is_cuda:
            return False
        reason = refusal
        if reason is None and adds_in_any_order and torch.are_deterministic_algorithms_enabled():
            reason = "they add in any order, and deterministic algorithms are asked for"
        if reason is None and find_spec(self.module.split(".")[0]) is None:
            reason = f"{self.distribution} is not installed: pip install '.[{self.extra}]' in a clone of cp_dtensor"
        if reason is None:

            def warn(wrong: str) -> None:
                what = f"{self.distribution} is not used for {self.operation}, {kernel}"
                warnings.warn(f"{what}: {wrong}; torch operations are", RuntimeWarning, stacklevel=2)

            if first_use((self.operation, *kernel), x.device, check, warn) == "":
                log_once("attention", logging.INFO, f"{self.distribution} computes {self.operation}")
                return True
            reason = "their first results were wrong, or a CUDA graph is captured before their first use"
        log_once(
            "attention", logging.WARNING,
            f"torch operations compute {self.operation}, many times slower than kernels of a package: {reason}",
        )  # fmt: skip
        return False


def refuse_equal_bits(owner: str) -> None:
    """Refuse calls that models make in a context that promises equal bits in every run, which kernels do not keep."""
    context = current()
    if context is not None and context.call.deterministic and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            f"{owner}, in a context with deterministic=True, expects torch.use_deterministic_algorithms(True): on GPUs "
            "kernels add gradients of selected keys in any order, torch operations then do not"
        )


def hopper_or_blackwell(x: Tensor) -> str | None:
    """Return what kernels for Hopper and datacenter Blackwell GPUs lack on x's device, None if nothing."""
    found = torch.cuda.get_device_capability(x.device) if x.is_cuda else None
    is_served = found is None or found[0] in (9, 10)
    return None if is_served else f"they need Hopper or datacenter Blackwell, got compute capability {found}"
