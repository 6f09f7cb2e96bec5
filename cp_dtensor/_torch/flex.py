"""Redirection of `flex_attention`, and private parts of `BlockMask`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._higher_order_ops.flex_attention import FlexAttentionHOP
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor._torch.patches import wrapped

WHOLE_BLOCK: int = module._LARGE_SPARSE_BLOCK_SIZE
"""The block size of a mask that is a single block, whatever the lengths."""


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Copies a function; the copy keeps its code when the code of the original is replaced."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_public: Any = module.flex_attention
original_flex_attention: Callable[..., Any] = _copied(_public)
"""FlexAttention of whole tensors, never redirected."""


def _redirected(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    # This code runs with the globals of torch's module. Dynamo, which traces it, expects the original's parameters.
    from cp_dtensor._torch.flex import redirection

    return redirection.call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


def _parameters(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


FLEX_ATTENTION_IS_KNOWN = _parameters(_redirected) == _parameters(_public) and not _public.__closure__
"""True if the installed `flex_attention` has the parameters that `_redirected` has."""


class _Redirection:
    """The handler of redirected calls."""

    handler: Callable[..., Any] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the handler, or torch's function if another thread has just removed the last handler."""
        handler = self.handler
        return original_flex_attention(*args, **kwargs) if handler is None else handler(*args, **kwargs)


redirection = _Redirection()


@contextmanager
def flex_attention_redirected(handler: Callable[..., Any]) -> Iterator[None]:
    """While open, calls of `flex_attention` go to `handler`, which takes the same arguments.

    The code of the function is replaced, so earlier imports are redirected too, and Dynamo traces into the handler.
    """
    if not FLEX_ATTENTION_IS_KNOWN:
        yield
        return
    before, redirection.handler = redirection.handler, handler
    code, ours = _public.__code__, _redirected.__code__
    _public.__code__ = ours
    try:
        yield
    finally:
        if _public.__code__ is ours:
            _public.__code__ = code
        redirection.handler = before


def flex_attention_is_redirected() -> bool:
    """Returns True if calls of `flex_attention`, also those that Dynamo traces, go to a handler."""
    return _public.__code__ is _redirected.__code__ and redirection.handler is not None


@contextmanager
def captured_flex_attention_checked(check: Callable[[], None]) -> Iterator[None]:
    """While open, calls `check`, which may raise, when FlexAttention that Dynamo captured is run or traced."""

    def checked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    with wrapped(FlexAttentionHOP, "__call__", checked):
        yield


def with_write_order_like(mask: BlockMask, whole: Any) -> BlockMask:
    """Gives the mask of some rows an order of a deterministic backward's writes to dQ if the whole mask has one.

    Raises:
        NotImplementedError: the whole mask has an explicit order.
    """
    if getattr(whole, "dq_write_order", None) is None:  # torch 2.11 has none
        return mask
    if whole.dq_kv_order is not None:
        raise NotImplementedError(
            "a block mask with an explicit dq_kv_order is not supported on sequence shards: got a tensor of shape "
            f"{tuple(whole.dq_kv_order.shape)}, expected a bool or None"
        )
    ordered: Any = mask
    ordered.dq_write_order, ordered.dq_write_order_full = module._compute_dq_write_order_from_block_mask(
        mask, dq_kv_order=whole.dq_kv_order_spt
    )
    ordered.dq_kv_order_spt = whole.dq_kv_order_spt
    return mask
