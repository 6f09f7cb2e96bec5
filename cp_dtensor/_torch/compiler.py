"""What is private in torch.compile: whose code is reused where, constants of a trace, wrappers around traced code."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cp_dtensor._torch.patches import patched

P = ParamSpec("P")
T = TypeVar("T")
_EVAL_FRAME = "torch._dynamo.eval_frame"
_PROXY = torch._C._TorchDispatchModeKey.PROXY


@contextmanager
def compiled_code_kept_apart(variant: Callable[[], str]) -> Iterator[None]:
    """While open, compiled functions are compiled for, and only reused under, what `variant()` says at each call.

    "" stands for code as it is compiled while this is not open. Dynamo reuses code that was compiled with an equal
    backend: a function is compiled as if with a backend of the variant's own. What is compiled is also kept on disk, by
    a key that does not say what the process has changed in torch; the variant becomes part of the key.
    """

    def of_variant(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def callback_from_stance(callback: Any) -> Any:
            if isinstance(callback, _VariantCallback) and callback.source is variant:  # back from a nested call
                callback = callback.callback
            callback, name = original(callback), variant()
            if not name or callback is None:
                return callback
            if getattr(torch._dynamo.config, "caching_precompile", False):
                raise NotImplementedError(
                    "torch._dynamo.config.caching_precompile takes compiled code from disk without asking what it was "
                    "compiled for: it cannot be used with context-parallel regions and DTensors"
                )
            # False: reuse without compiling, whatever the backend; that would take the code of others.
            return None if callback is False else _VariantCallback(callback, name, variant)

        return callback_from_stance

    with ExitStack() as stack:
        stack.enter_context(
            _when_loaded(
                _EVAL_FRAME, lambda module: stack.enter_context(patched(module, "_callback_from_stance", of_variant))
            )
        )
        yield


@dataclass(frozen=True)
class _VariantBackend:
    """What Dynamo compares, never called: equal if the backend and the variant are."""

    backend: Any
    variant: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)


class _VariantCallback:
    """Compiles a frame as `callback` does, but for a variant."""

    def __init__(self, callback: Any, variant: str, source: Callable[[], str]) -> None:
        self.callback = callback
        self.source = source
        self._variant = variant
        backend = callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        self._torchdynamo_orig_backend = _VariantBackend(backend, variant)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = torch.compiler.config
        tag = "; ".join(filter(None, (config.cache_key_tag, self._variant)))
        with config.patch(cache_key_tag=tag):
            return self.callback(*args, **kwargs)


@contextmanager
def _when_loaded(name: str, then: Callable[[ModuleType], object]) -> Iterator[None]:
    """Calls `then` with a module: now if it is loaded, else if it gets loaded while this is open."""
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return
    watcher, finders = _Watcher(name, then), sys.meta_path
    finders.insert(0, watcher)
    try:
        yield
    finally:
        if watcher in finders:  # `sys` has lost it where the interpreter ends while this is open
            finders.remove(watcher)


class _Watcher(MetaPathFinder):
    """Finds one module as the others do, and tells when it has been loaded."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or what a DTensor is here, stands for one in a program that is being compiled or exported."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._get_dispatch_mode(_PROXY) is not None:  # make_fx, by default of real tensors
        return True
    return isinstance(getattr(tensor, "_local_tensor", tensor), (FakeTensor, FunctionalTensor))


def refuse_in_compiled_function(what: str) -> None:
    """For what changes how functions are compiled: refused while one is traced, or runs between its graphs.

    Raises:
        RuntimeError: it is.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and torch.compiler.is_compiling():  # which other threads may be, too
        traced = detect_fake_mode() is not None
    if traced or (
        _EVAL_FRAME in sys.modules and torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)
    ):
        raise RuntimeError(
            f"{what} cannot be entered inside of a torch.compile'd function, which is compiled as if it were not: "
            "enter it around the call of the function"
        )


def constant_in_trace(function: Callable[P, T]) -> Callable[P, T]:
    """`function` of constants, called by Dynamo while it traces; its result is a constant of the compiled code."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result
    return function


def traced_inside(
    wrapper: Callable[[Callable[..., T]], Callable[..., T]], function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """`wrapper(function)(*args, **kwargs)` in code that Dynamo traces: `function` is traced, `wrapper` is not.

    The wrapper runs when the captured function is traced further, down to the operators that are compiled.
    """
    return dynamo_bypassing_wrapper(wrapper, function, *args, **kwargs)


@constant_in_trace
def begin_traced_scope(name: str) -> None:
    """Begins a scope of the program that Dynamo traces now; an attempt that Dynamo gives up takes its scopes along."""
    trace: Any = TracingContext.get()
    trace.cp_dtensor_scopes = [*getattr(trace, "cp_dtensor_scopes", ()), name]


@constant_in_trace
def end_traced_scope() -> None:
    """Ends the scope that began last."""
    trace: Any = TracingContext.get()
    trace.cp_dtensor_scopes = trace.cp_dtensor_scopes[:-1]


def traced_scope() -> str | None:
    """The innermost scope of the program that is traced now, None outside of any."""
    scopes = getattr(TracingContext.try_get(), "cp_dtensor_scopes", ())
    return scopes[-1] if scopes else None


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, run as plain Python, with all that it calls, also when called from a `torch.compile`d function."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing has been compiled yet
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run
