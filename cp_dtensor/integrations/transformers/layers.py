"""Layers of transformers' models in contexts: kernels and forwards that are replaced by functions of shards.

A model calls its kernels by names of its own Python module, which transformers binds to a function of another package
or to torch operations. A kernel is known by its name, not by the architecture; a method that counts positions is known
by its arguments or the names in its code. One more is one more entry of `KERNELS` or `COUNTING`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from cp_dtensor import causal_conv1d, gated_delta_rule, kda, mamba2
from cp_dtensor.api.extension import (
    entry_replaced,
    length_of,
    never_compiled,
    positions_of,
    wrapped,
)
from cp_dtensor.integrations.transformers import pooled, sparse
from cp_dtensor.integrations.transformers.chosen import (
    CONTEXT,
    Function,
    sharding_context,
    shards_are_seen,
    with_selected_keys,
)
from cp_dtensor.integrations.transformers.private import MODELING_UTILS, PASSED_ON, kernel_name, table_of

T = TypeVar("T")
_ATTENTION = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "flex_attention"})
"""Names by which a layer calls attention that a context sees."""


# Kernels: functions that take the original first and the kernel's arguments


def _convolution(
    _: Function, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, **others: Any,
) -> torch.Tensor:  # fmt: skip
    refuse_arguments("a convolution in context_parallel", others)
    out = causal_conv1d(x.transpose(1, 2).to(weight.dtype), weight, bias, activation=activation, mesh=CONTEXT)
    return out.transpose(1, 2).to(x.dtype)


def _delta(
    rule: Function, _: Function, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, chunk_size: int = 64, use_qk_l2norm_in_kernel: bool = False, scale: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    refuse_arguments("a linear-attention layer in context_parallel", others)
    options = {"scale": scale, "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel)}
    return rule(query, key, value, g, beta, mesh=CONTEXT, **options), None


def _scan(
    _: Function, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int = 64, **options: Any,
) -> Any:  # fmt: skip
    known = {"D", "dt_bias", "dt_softplus", "dt_limit", "return_final_states"} & options.keys()
    ours = {name: options.pop(name) for name in known}
    refuse_arguments("a state-space layer in context_parallel", options)
    return mamba2(x, dt, A, B, C, mesh=CONTEXT, **ours)


def _one_token(*_: Any, **__: Any) -> None:
    refuse_arguments("a layer that continues a sequence, in context_parallel,", {"cache": True})


_WAYS_OUT = {
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "seq_idx"), "give the context mask=Documents(...), which it reads"),
    **dict.fromkeys(("initial_state", "initial_states", "output_final_state", "cache"), "pass use_cache=False"),
}


def refuse_arguments(what: str, others: dict[str, Any]) -> None:
    """Refuse keyword arguments of a layer or of attention, unless they ask for nothing."""
    for name, value in others.items():
        if value is not None and value is not False and name not in PASSED_ON:
            received = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            way_out = f": {_WAYS_OUT[name]}" if name in _WAYS_OUT else ""
            raise NotImplementedError(f"{what} expects {name} to be None, got {received}{way_out}")


KERNELS: MappingProxyType[str, Function] = MappingProxyType({
    "causal_conv1d_fn": _convolution,
    "chunk_gated_delta_rule": partial(_delta, gated_delta_rule),
    "chunk_kda": partial(_delta, kda),
    "mamba_chunk_scan_combined": _scan,
    "mamba_split_conv1d_scan_combined": lambda *_, **__: None,  # the layer then calls its convolution and its scan
    "causal_conv1d_update": _one_token,
    "fused_recurrent_gated_delta_rule": _one_token,
    "fused_recurrent_kda": _one_token,
    "selective_state_update": _one_token,
})  # fmt: skip
"""By the name of a kernel: the function of shards."""
METHODS = (*sparse.METHODS, *pooled.METHODS)
SELECTIONS = sparse.SELECTIONS | pooled.SELECTIONS


# Forwards: functions that take the original, the module and its arguments


class _CountedFrom:
    """Stands for a layer's cache. Its length is a tensor, so that `arange(tokens) + length` gives global positions."""

    def __init__(self, cache: Any, before: torch.Tensor) -> None:
        self._cache = cache  # the layer's own, or None
        self._before = before  # (tokens,), the global position of each token less its index in the shard

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self._before

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)


def counts_positions(module: nn.Module) -> bool:
    """Return whether a layer scales queries by positions that it counts (`attn_temperature_tuning` of Llama 4)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _with_whole_positions(
    forward: Function, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if counts_positions(module):
        # The layer adds the length of its cache, an argument that was past_key_values before transformers 5.24.
        name = "cache" if "cache" in kwargs else "past_key_values"
        kwargs[name] = _CountedFrom(kwargs.get(name), _positions_before(hidden_states.size(1), hidden_states.device))
    return forward(module, hidden_states, *args, **kwargs)


def _positions_before(length: int, device: torch.device) -> torch.Tensor:
    """Return (tokens,) global positions of this rank's tokens in the context, less their indices in the shard."""
    return positions_here(length, device) - torch.arange(length, device=device)


@never_compiled
def positions_here(length: int, device: torch.device) -> torch.Tensor:
    """Return (tokens,) global positions of this rank's tokens in the context."""
    context = sharding_context()
    assert context is not None
    call, ranks = context.call, context.call.ranks
    if len(call.layout.batch_groups(2)) > 1:
        raise NotImplementedError(
            f"a model that counts positions needs positions that are the same in all batch rows, got {call.layout}: "
            "use another layout"
        )
    segments = call.layout.segments(length_of(call, length), ranks.rank, ranks.size, 0)
    return positions_of(segments, device)


def _with_whole_embeddings(
    forward: Function, module: nn.Module, tokens: Any, *past: int, position_ids: torch.Tensor | None = None,
    **named: int,
) -> torch.Tensor:  # fmt: skip
    """Embeddings of positions, which they or the decoder around them count: one row then. Callers give a batch of rows.

    `tokens` is a tensor (B, tokens, ...), or a shape.
    """
    if position_ids is None or position_ids.dim() == 1:
        device = next(module.parameters()).device
        position_ids = positions_here(getattr(tokens, "shape", tokens)[1], device)
    return forward(module, tokens, *past, position_ids=position_ids, **named)


def _with_whole_bias(
    compute_bias: Function, module: nn.Module, query_length: int, key_length: int, device: Any = None,
    past_seen_tokens: Any = 0,
) -> torch.Tensor:  # fmt: skip
    """Bias of T5 (1, H, queries, keys): a function of the positions of this rank's queries and of all keys."""
    before = _positions_before(query_length, device)  # the method adds the number of past tokens to arange
    return compute_bias(module, query_length, whole_length(key_length), device, before[:, None])


@never_compiled
def whole_length(local: int) -> int:
    """Return the global length of which this rank has `local` tokens in the context."""
    context = sharding_context()
    assert context is not None
    return length_of(context.call, local)


def _takes(*names: str) -> Callable[[CodeType], bool]:
    """Return whether some code takes these arguments and no others, but `self` and perhaps one more before them."""

    def fits(code: CodeType) -> bool:
        arguments = code.co_varnames[: code.co_argcount]
        return names in (arguments[1:], arguments[2:])

    return fits


COUNTING: tuple[tuple[str, Callable[[CodeType], bool], Function], ...] = (
    ("forward", lambda code: {"arange", "get_seq_length", "floor_scale"} <= {*_names_in(code)}, _with_whole_positions),
    ("forward", _takes("past_key_values_length", "position_ids"), _with_whole_embeddings),
    ("forward", _takes("cache_length", "position_ids"), _with_whole_embeddings),  # since transformers 5.24
    ("compute_bias", _takes("query_length", "key_length", "device", "past_seen_tokens"), _with_whole_bias),
)
"""Methods that count positions: name, whether some code is that of one, and the function of shards."""


# Classes of layers


class ClassFacts(NamedTuple):
    """What the code of a module's class tells."""

    is_caught: bool  # it calls kernels, all of which are replaced in contexts
    calls_attention: bool  # a method calls the attention function of its `attn_implementation`, or one of torch
    counts: bool  # a method counts positions, and is replaced in contexts
    selects: bool  # its forward selects keys for sparse attention, and is replaced in contexts
    counts_padding: bool  # it makes position ids from padding where it gets none, as OPT does
    skips_padding: bool  # it makes position ids from tokens where it gets none, as RoBERTa does
    replaced: tuple[tuple[Any, str, Function], ...]  # owner, name and replacement of each function


def by_class(find: Callable[[Any], T]) -> Callable[[nn.Module], T]:
    """Return a function of modules that keeps what `find` returns for their classes: calls look at each module."""
    kept: Callable[[Any], T] = lru_cache(maxsize=4096)(find)
    return lambda module: kept(type(module))


@by_class
def facts_of(kind: Any) -> ClassFacts:
    """Return what the code of a module's class tells."""
    kernels, methods, names = list[tuple[Any, str, str]](), dict[str, tuple[Any, CodeType]](), set[str]()
    for base in kind.__mro__:
        for attribute, method in vars(base).items() if base.__module__ != MODELING_UTILS else ():
            function = inspect.unwrap(method) if callable(method) and base is not nn.Module else None
            if not isinstance(function, FunctionType):
                continue
            own, known = {*_names_in(function.__code__)}, function.__globals__
            names |= own
            owner = sys.modules.get(known.get("__name__", ""))
            kernels += [(owner, name, kernel) for name in own if owner and (kernel := kernel_name(known.get(name)))]
            methods.setdefault(attribute, (base, function.__code__))
    is_caught = bool(kernels) and all(kernel in KERNELS for *_, kernel in kernels)
    replaced = [(owner, name, KERNELS[kernel]) for owner, name, kernel in kernels if is_caught]
    counting = [
        (methods[name][0], name, ours) for name, fits, ours in COUNTING if name in methods and fits(methods[name][1])
    ]
    selecting = [
        (methods[name][0], name, ours) for name, own, ours in METHODS
        if name in methods and own <= {each for part in (name, "forward") for each in _names_in(methods[part][1])}
    ]  # fmt: skip
    return ClassFacts(
        is_caught, calls_attention=not _ATTENTION.isdisjoint(names), counts=bool(counting),
        selects=any(ours in SELECTIONS for *_, ours in selecting),
        counts_padding={"cumsum", "embed_positions"} <= names,
        skips_padding="create_position_ids_from_input_ids" in names, replaced=(*replaced, *counting, *selecting),
    )  # fmt: skip


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# Patches


class _Patches:
    """Functions of models that are replaced, until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._replaced = set[tuple[Any, str]]()
        self._models = WeakSet[nn.Module]()

    def replace(self, model: nn.Module) -> None:
        """Replace kernels and forwards of a model's layers, which behave as before where no shards are seen."""
        if model in self._models:
            return
        with self._lock:
            for facts in map(facts_of, model.modules()):
                for owner, name, ours in facts.replaced:
                    if (owner, name) not in self._replaced:
                        self._replaced.add((owner, name))
                        self._stack.enter_context(wrapped(owner, name, partial(_in_contexts, ours)))
                if facts.selects and (None, "sdpa") not in self._replaced:
                    self._replaced.add((None, "sdpa"))
                    table = table_of(sys.modules[MODELING_UTILS].ALL_ATTENTION_FUNCTIONS)
                    self._stack.enter_context(entry_replaced(table, "sdpa", with_selected_keys(table["sdpa"])))
            self._models.add(model)

    def close(self) -> None:
        """Restore all functions."""
        with self._lock:
            self._replaced.clear()
            self._models.clear()
            self._stack.close()


def _in_contexts(ours: Function, original: Function, *args: Any, **kwargs: Any) -> Any:
    return ours(original, *args, **kwargs) if shards_are_seen() else original(*args, **kwargs)


layer_patches = _Patches()
