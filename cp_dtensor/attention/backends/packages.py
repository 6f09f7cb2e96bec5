"""Optional packages of attention kernels: installed versions, signatures, quiet compilation, and stepping back."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cp_dtensor._torch import installed_version
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.first_use import SmallTile, first_use
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import TileMask

_log = logging.getLogger("cp_dtensor.attention")

INSTALL = "pip install '.[kernels]' in a clone of cp_dtensor"
"""Installs the packages. This library is in no registry yet, where another project could have its name."""

SHORTEST = 256
"""Fewest rows and keys of a tile that a package computes. For shorter ones FlashAttention-4 has other kernels, which
would be compiled in the middle of a run. Shorter ones under masks, such as those of one token after the other, are
not worth a mask plan, which takes milliseconds."""


@dataclass(frozen=True)
class Package:
    """A package that may be installed, with kernels for Hopper and datacenter Blackwell GPUs.

    Any version is used: the signatures of its functions and the first results of each kernel decide whether it stays.
    """

    distribution: str
    """Its name in package registries."""
    title: str
    """Its name in messages."""

    @property
    def version(self) -> str | None:
        """The installed version, None without the package."""
        return installed_version(self.distribution)

    def refusal(self, spec: CallSpec) -> str | None:
        """Return the reason why the package has no kernel for a call of any head dims; None if it may have one."""
        if spec.device_type != "cuda":
            return f"the tensors are on {spec.device_type}, not cuda"
        if not has_package_kernels(spec.capability):
            return f"it needs Hopper or datacenter Blackwell, this device has compute capability {spec.capability}"
        if spec.dtype not in ("bfloat16", "float16"):
            return f"it needs bfloat16 or float16, got {spec.dtype}"
        return None if self.version else f"{self.distribution} is not installed"

    def passes_check(
        self, direction: str, kind: tuple[str, ...], q: Tensor, v: Tensor, group: int, rows: int, mask: TileMask,
        reference: AttentionBackend, compute: Callable[..., tuple[Tensor, ...] | None],
    ) -> bool:  # fmt: skip
        """Return whether the first use of a kernel was right, which computes a small tile; warn once if it was not.

        False under CUDA graph capture for a kernel that was not used before it.

        Args:
            direction, kind: "forward" or "backward", and what else decides about the kernel.
            q, v: those of a tile; dtype, head dims and device decide, too.
            group: query heads that share a key head.
            rows, mask, reference: the small tile, and the backend that computes it in float64.
            compute: the kernel, as of `AttentionBackend.forward` or `backward`.
        """
        device, dtype, dims = q.device, q.dtype, (q.size(3), v.size(3))

        def check() -> str:
            with quiet():
                tile = SmallTile.drawn(device, dtype, (2 * group, 2), dims, rows, mask, reference)
                # By the package's wrapper, then by what was recorded.
                return tile.error(direction, compute) or tile.error(direction, compute)

        kernel = (direction, *kind, dtype, "head dims", dims, "group", group)

        def failed(reason: str) -> None:
            self._warn(f"for {' '.join(map(str, kernel))}: {reason}")

        return first_use((self.distribution, *kernel), device, check, failed) == ""

    def unusable(self, error: Exception) -> str:
        """Warn that the installed version cannot be used at all; return the reason."""
        reason = f"{type(error).__name__}: {error}"
        self._warn(f"at all: {reason}")
        return f"{self.distribution} {self.version}: {reason}"

    def _warn(self, what_and_why: str) -> None:
        warnings.warn(
            f"{self.title} is not used {what_and_why} ({self.distribution} {self.version}, torch {torch.__version__}, "
            f"CUDA {torch.version.cuda}); other kernels are used",
            RuntimeWarning,
            stacklevel=3,
        )


def has_package_kernels(capability: tuple[int, int] | None) -> bool:
    """Return True for Hopper (compute capability 9.0) and datacenter Blackwell (10.0 and 10.3)."""
    return capability is not None and capability[0] in (9, 10)


_being_quiet = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what packages print, log and warn while they are imported and compile. One thread at a time.

    It changes settings of the process, so two threads at once would each restore the settings of the other.
    """
    with _being_quiet, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        disabled = logging.root.manager.disable
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(disabled)


def check_parameters(function: Callable[..., Any], *names: str) -> None:
    """Check that a function takes parameters of these names.

    Raises:
        TypeError: it does not.
    """
    missing = set(names) - set(inspect.signature(function).parameters)
    if missing:
        raise TypeError(f"{function.__name__} has no parameters {', '.join(sorted(missing))}")


@lru_cache(maxsize=2)
def log_missing(distributions: tuple[str, ...]) -> None:
    """Log once, on a GPU that packages serve, which of them are not installed."""
    if distributions:
        names = " and ".join(distributions)
        _log.warning("%s would make attention faster on this GPU: %s", names, INSTALL)
