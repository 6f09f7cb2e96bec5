"""torch.compile: compiled code by variant, constants of a trace, wrappers around traced code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cp_dtensor._torch.patches import wrapped

P = ParamSpec("P")
T = TypeVar("T")
_EVAL_FRAME = "torch._dynamo.eval_frame"
_PROXY = torch._C._TorchDispatchModeKey.PROXY


@contextmanager
def compiled_code_kept_apart(
    variant: Callable[[], str], check: Callable[[dict[str, Any]], None] = lambda arguments: None
) -> Iterator[None]:
    """Reuse compiled code, while open, only for calls with the `variant()` that it was compiled for.

    `check` is called with the arguments of each function, by name, before it is compiled for a variant; it may raise.

    The variant "" means code as it is compiled outside of this context. Dynamo reuses code that was compiled with an
    equal backend, so the backend holds the variant. Torch's cache on disk has the variant in its key.
    """

    def of_variant(original: Callable[[Any], Any], callback: Any) -> Any:
        if isinstance(callback, _VariantCallback) and callback.source is variant:  # of a nested call
            callback = callback.callback
        callback, name = original(callback), variant()
        if not name or callback is None:
            return callback
        if getattr(torch._dynamo.config, "caching_precompile", False):
            raise NotImplementedError(
                "torch._dynamo.config.caching_precompile takes compiled code from disk whatever it was compiled "
                "for: it cannot be used with context_parallel and DTensors"
            )
        # False means: reuse without compiling, whatever the backend. That would take code of other variants.
        return None if callback is False else _VariantCallback(callback, name, variant, check)

    with when_loaded(_EVAL_FRAME, lambda module: wrapped(module, "_callback_from_stance", of_variant)):
        yield


@dataclass(frozen=True)
class _VariantBackend:
    """A backend that Dynamo compares with others and never calls."""

    backend: Any
    variant: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)


class _VariantCallback:
    """Compiles a frame as `callback` does, for a variant."""

    def __init__(
        self, callback: Any, variant: str, source: Callable[[], str], check: Callable[[dict[str, Any]], None]
    ) -> None:
        self.callback, self.source, self._variant, self._check = callback, source, variant, check
        backend = callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        self._torchdynamo_orig_backend = _VariantBackend(backend, variant)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(frame.f_locals)
        config: Any = torch.compiler.config
        tag = "; ".join(filter(None, (config.cache_key_tag, self._variant)))
        with config.patch(cache_key_tag=tag):
            return self.callback(frame, *args, **kwargs)


@contextmanager
def when_loaded(name: str, change: Callable[[ModuleType], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter `change(module)` while open: from now on if the module is loaded, else from when it is loaded."""

    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as the finders behind this one do, with a loader that changes it at the end."""
        if fullname != name or finder not in finders:
            return None
        specs = (each.find_spec(fullname, path, target) for each in finders[finders.index(finder) + 1 :])
        spec = next((each for each in specs if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            if finder in finders:  # False if this was left since the module was found
                finders.remove(finder)
                stack.enter_context(change(module))

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    finders = sys.meta_path
    with ExitStack() as stack:
        if name in sys.modules:
            stack.enter_context(change(sys.modules[name]))
        else:
            finders.insert(0, finder)
        try:
            yield
        finally:
            if finder in finders:  # False once the module is loaded, or if the interpreter ends while this is open
                finders.remove(finder)


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether the tensor, or the local tensor of a DTensor, is part of a program being compiled or exported."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._get_dispatch_mode(_PROXY) is not None:  # make_fx, by default of real tensors
        return True
    return isinstance(getattr(tensor, "_local_tensor", tensor), (FakeTensor, FunctionalTensor))


def refuse_in_compiled_function(what: str) -> None:
    """Refuse a context that changes how functions are compiled while one is traced, or runs between its graphs."""
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and torch.compiler.is_compiling():  # which is also True if another thread compiles
        traced = detect_fake_mode() is not None
    if traced or (
        _EVAL_FRAME in sys.modules and torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)
    ):
        raise RuntimeError(
            f"{what} cannot be entered inside of a torch.compile'd function, which is compiled as if it were not: "
            "enter it around the call of the function"
        )


def constant_in_trace(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function of constants: Dynamo calls it while tracing, and its result is a constant of compiled code."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result
    return function


traced_inside: Callable[..., Any] = dynamo_bypassing_wrapper
"""`traced_inside(wrapper, function, *args)` returns `wrapper(function)(*args)`; Dynamo traces `function` only.

The wrapper runs when the captured function is traced further, down to the operators that are compiled.
"""


@constant_in_trace
def begin_traced_scope(name: str) -> None:
    """Begin a scope of the program that Dynamo traces now; an attempt that Dynamo gives up takes its scopes along."""
    trace: Any = TracingContext.get()
    trace.cp_dtensor_scopes = [*getattr(trace, "cp_dtensor_scopes", ()), name]


@constant_in_trace
def end_traced_scope() -> None:
    """End the scope that began last."""
    trace: Any = TracingContext.get()
    trace.cp_dtensor_scopes = trace.cp_dtensor_scopes[:-1]


def traced_scope() -> str | None:
    """Return the innermost scope of the program that is traced now, None outside of any."""
    scopes = getattr(TracingContext.try_get(), "cp_dtensor_scopes", ())
    return scopes[-1] if scopes else None


_eval_frame: Any = torch._C._dynamo.eval_frame  # there without torch._dynamo, whose import takes seconds
_SKIPPED = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)


def never_compiled(function: Callable[P, T], reason: str | None = None) -> Callable[P, T]:
    """Wrap a function so that a `torch.compile`d caller runs it, and all that it calls, as plain Python.

    `reason` is part of torch's error where `fullgraph=True` forbids that.
    """
    disabled: list[Callable[P, T]] = []

    @constant_in_trace  # Dynamo cannot trace torch.compiler.disable
    def disable() -> None:
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=reason))

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing has been compiled yet
            return function(*args, **kwargs)
        disable()
        return disabled[0](*args, **kwargs)

    # Dynamo would compile these two codes, which all such functions share, up to the limit of recompilations of one.
    for code in (run.__code__, disable.__code__):
        _eval_frame.set_code_exec_strategy(code, _SKIPPED)
    return functools.wraps(function)(run)


_library = torch.library.Library("cp_dtensor", "FRAGMENT")  # operators exist as long as this does


def define_operator(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *,
    gradients: Callable[..., Any] | None = None, save: Callable[..., None] | None = None, in_graphs: bool = False,
) -> None:  # fmt: skip
    """Define an operator of compiled code, in `torch.ops.cp_dtensor`.

    Args:
        schema: its name, arguments and results.
        fake: makes results of the right shapes.
        gradients, save: its backward, and the function that saves tensors for it.
        in_graphs: True if Inductor may put it into CUDA graphs. Replays use the lengths and masks of the capture, so
            operators that find or compare them when they run stay between graphs.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=() if in_graphs else (torch.Tag.cudagraph_unsafe,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cp_dtensor::{name}", fake, lib=_library)
    if gradients is not None:
        torch.library.register_autograd(f"cp_dtensor::{name}", gradients, setup_context=save, lib=_library)
