"""Drop-in names of torch's experimental context parallel.

    from cp_dtensor.integrations.torch_experimental import context_parallel, set_rotate_method
    # was: from torch.distributed.tensor.experimental import context_parallel
    # and: from torch.distributed.tensor.experimental._attention import set_rotate_method

Or leave the program unchanged and call `redirect_imports()` before its own imports. Names and signatures are those of
torch 2.11 to 2.15, underscores included, because programs import them. `OURS` are of this package; every other name is
torch's own object: `_cp_options`, the load balancers, `_ContextParallel`, which makes DTensors of a module's inputs or
gathers keys for FlexAttention, `_templated_ring_attention`, which calls an attention function of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

from cp_dtensor.api.extension import SharedInstallation, entry_replaced
from cp_dtensor.integrations.torch_experimental.context import (
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    context_parallel,
    set_rotate_method,
)
from cp_dtensor.integrations.torch_experimental.private import torchs_own
from cp_dtensor.integrations.torch_experimental.sharding import _context_parallel_shard, context_parallel_unshard
from cp_dtensor.integrations.torchtitan import describe_installed


def __getattr__(name: str) -> Any:
    return torchs_own(name)


OURS: dict[str, Any] = {
    each.__name__: each for each in (
        _context_parallel_shard, _disable_context_parallel_dispatcher, _enable_context_parallel_dispatcher,
        context_parallel, context_parallel_unshard, set_rotate_method,
    )
}  # fmt: skip
"""The names that `redirect_imports` puts in place of torch's."""
__all__ = [
    "OURS", "_context_parallel_shard", "_disable_context_parallel_dispatcher", "_enable_context_parallel_dispatcher",
    "context_parallel", "context_parallel_unshard", "redirect_imports", "set_rotate_method",
]  # fmt: skip

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_REDIRECTED = {
    _EXPERIMENTAL: ("context_parallel",),
    f"{_EXPERIMENTAL}._attention": tuple(OURS),
    f"{_EXPERIMENTAL}._context_parallel": tuple(OURS),
    f"{_EXPERIMENTAL}._context_parallel._attention": tuple(OURS),
}
"""Names by module."""


def _replacements() -> Iterator[AbstractContextManager[None]]:
    for module, names in _REDIRECTED.items():
        for name in names:
            yield entry_replaced(vars(import_module(module)), name, OURS[name])


_installation = SharedInstallation(_replacements)


class Redirection(ExitStack):
    """A call of `redirect_imports`; `close()`, or the end of a `with` block, takes it back.

    Attributes:
        replaced: the names that are replaced, by module.
        torchtitan: a sentence on what the installed TorchTitan takes from torch, and so from here; "" without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callback(_installation.held().close)  # unlike an entered context, not called on garbage collection
        self.replaced = dict(_REDIRECTED)
        self.torchtitan = describe_installed()

    def __repr__(self) -> str:
        lines = [f"{module}: {', '.join(names)}" for module, names in self.replaced.items()]
        return "\n".join(["names of cp_dtensor now in", *lines, *([self.torchtitan] if self.torchtitan else [])])


def redirect_imports() -> Redirection:
    """Replace names in `torch.distributed.tensor.experimental` and its private modules by those of this package.

        print(redirect_imports())  # before other imports of these names; lists them by module
        import accelerate

    The modules stay torch's, and so do their other names. Code that imported a name before keeps torch's. It may be
    called several times; `close()` of the result, or the end of a `with` block over it, takes one call back. After the
    last one the modules are as before, except for names that others replaced meanwhile.
    """
    return Redirection()
