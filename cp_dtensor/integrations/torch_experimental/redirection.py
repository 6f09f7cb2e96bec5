"""`redirect_imports`: programs that import torch's experimental context parallel get this one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, TracebackType

from cp_dtensor._torch.experimental import experimental_module, names_replaced
from cp_dtensor.api.interception import SharedInstallation
from cp_dtensor.integrations.torch_experimental.rings import watched

_EVERYTHING = ("_attention", "_context_parallel", "_context_parallel._attention")
_BALANCERS = "_context_parallel._load_balancer"
_PUBLIC = ""  # torch.distributed.tensor.experimental itself


def _parts() -> Iterator[AbstractContextManager[None]]:
    ours = importlib.import_module(__package__ or "")
    names = {name: getattr(ours, name) for name in ours.__all__ if name != "redirect_imports"}
    chosen = {
        _PUBLIC: {"context_parallel": names["context_parallel"]},
        **dict.fromkeys(_EVERYTHING, names),
        _BALANCERS: {name: value for name, value in names.items() if name.endswith("LoadBalancer")},
    }
    for name, replaced in chosen.items():
        module = experimental_module(name)
        if module is not None:
            yield names_replaced(module, replaced)
            if name in _EVERYTHING:
                yield _watching(module)


@contextmanager
def _watching(module: ModuleType) -> Iterator[None]:
    watched.redirected.append(module)
    try:
        yield
    finally:
        watched.redirected.remove(module)


_installation = SharedInstallation(_parts)


class Redirection:
    """What `redirect_imports` returns: takes it back on exit of a `with` block, or on `close()`."""

    def __init__(self) -> None:
        _installation.acquire()
        self._is_open = True

    def close(self) -> None:
        """Takes the redirection back; again does nothing."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            _installation.release()

    def __enter__(self) -> Redirection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def redirect_imports() -> Redirection:
    """From now on, imports from `torch.distributed.tensor.experimental` and its private modules get our names.

        redirect_imports()  # before anything imports them
        import accelerate

    The modules stay torch's, and so do the names in them that this package does not have. A program that has imported
    a name before keeps torch's. May be called several times; what is returned takes one call back:
    `with redirect_imports(): ...`, or `.close()`. After the last one the modules are as before, but for names that
    somebody else has replaced meanwhile.
    """
    return Redirection()
