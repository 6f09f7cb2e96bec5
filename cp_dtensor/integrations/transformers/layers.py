"""Convolutions and recurrent layers of transformers' models in contexts: their functions, replaced by those of shards.

Models call these functions by names of their own modules, which transformers binds to a kernel of another package or to
torch operations. A function is recognised by the kernel's name, not by the architecture. Embeddings that count mask
tokens are recognised by the names that they use.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from cp_dtensor import causal_conv1d, gated_delta_rule, kda, mamba2
from cp_dtensor.api.extension import (
    OpenContext,
    constant_in_trace,
    current,
    innermost,
    length_of,
    never_compiled,
    positions_of,
    queries_alone,
    wrapped,
)
from cp_dtensor.integrations.transformers.private import MODELING_UTILS, PASSED_ON, kernel_name
from cp_dtensor.layers.arguments import IN_CONTEXT

Function = Callable[..., Any]
T = TypeVar("T")
_CONTEXT: Any = IN_CONTEXT


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    _refuse_others("a convolution", others)
    if activation in ("silu", "swish", None):
        out = causal_conv1d(x.transpose(1, 2).to(weight.dtype), weight, bias, activation=activation, mesh=_CONTEXT)
        return out.transpose(1, 2).to(x.dtype)
    raise NotImplementedError(f'a convolution of shards has the activation "silu" or none, got {activation!r}')


def _delta(
    rule: Function, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    chunk_size: int = 64, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, scale: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    _refuse_states(initial_state is not None or output_final_state)
    _refuse_others("a linear-attention layer", others)
    options = {"scale": scale, "use_qk_l2norm_in_kernel": bool(use_qk_l2norm_in_kernel)}
    return rule(query, key, value, g, beta, mesh=_CONTEXT, **options), None


def _scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int = 64,
    D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **others: Any,
) -> Any:  # fmt: skip
    _refuse_states(initial_states is not None)
    _refuse_others("a state-space layer", others)
    return mamba2(
        x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        return_final_states=return_final_states, mesh=_CONTEXT,
    )  # fmt: skip


def _not_fused(*_: Any, **__: Any) -> None:
    """None makes the layer call its convolution and its scan one after the other."""


def _one_token(*_: Any, **__: Any) -> Any:
    _refuse_states(True)


def _refuse_states(has_states: bool) -> None:
    if has_states:
        raise NotImplementedError(
            "context-parallel convolutions and recurrent layers take no cache of a model: pass use_cache=False"
        )


def _refuse_others(layer: str, others: dict[str, Any]) -> None:
    """Refuses keyword arguments, unless they ask for nothing."""
    for name, value in others.items():
        if value is None or value is False or name in PASSED_ON:
            continue
        if name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
            raise NotImplementedError(
                f"{layer} in context_parallel takes the documents of the context, got {name}: pass "
                "mask=Documents(...) to the context"
            )
        raise NotImplementedError(f"{layer} in context_parallel expects {name} to be None, got {shown(value)}")


def shown(argument: Any) -> str:
    """Return an argument as text of an error."""
    return f"a tensor {tuple(argument.shape)}" if isinstance(argument, torch.Tensor) else repr(argument)


_REPLACED: MappingProxyType[str, Function] = MappingProxyType({
    "causal_conv1d_fn": _convolution,
    "chunk_gated_delta_rule": partial(_delta, gated_delta_rule),
    "chunk_kda": partial(_delta, kda),
    "mamba_chunk_scan_combined": _scan,
    "mamba_split_conv1d_scan_combined": _not_fused,
    "causal_conv1d_update": _one_token,
    "fused_recurrent_gated_delta_rule": _one_token,
    "fused_recurrent_kda": _one_token,
    "selective_state_update": _one_token,
})  # fmt: skip
"""By the name of a kernel: the function of shards."""

_SHARE_IN_TRAINING = 0.15 * 0.8
"""The share of mask tokens that ESM's embeddings are scaled to."""

_ATTENTION = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "flex_attention"})
"""Names by which a layer calls attention that a context sees."""


def sharding_context() -> OpenContext | None:
    """Return the context in which models see shards; None outside, and where attention is left to each rank."""
    context = innermost()
    if context is None or context.call.ranks.size == 1 or queries_alone(context) is not None:
        return None
    return current()


@constant_in_trace
def shards_are_seen() -> bool:
    """Return whether models see shards now."""
    return sharding_context() is not None


# Positions that a layer counts


class _CountedFrom:
    """Stands for a layer's cache. Its length is a tensor, so that `arange(tokens) + length` gives global positions.

    Args:
        cache: the layer's own, or None.
        before: (tokens,), the global position of each token less its index in the shard.
    """

    def __init__(self, cache: Any, before: torch.Tensor) -> None:
        self._cache, self._before = cache, before

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self._before

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)


def counts_positions(module: nn.Module) -> bool:
    """True for attention of Llama 4 without RoPE, which scales queries by positions (`attn_temperature_tuning`)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def counts_from_cache(module: nn.Module) -> bool:
    """Return whether a layer that counts positions adds the length of its cache, for which `_CountedFrom` stands."""
    names = {*_names_in(inspect.unwrap(type(module).forward).__code__)}
    # A forward of the module itself, as accelerate sets, calls that of the class without our patch.
    return {"arange", "get_seq_length", "floor_scale"} <= names and "forward" not in vars(module)


def _with_whole_positions(
    cache_name: str, original: Function, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if counts_positions(module) and shards_are_seen():
        before = _positions_before(hidden_states.size(1), hidden_states.device)
        kwargs[cache_name] = _CountedFrom(kwargs.get(cache_name), before)
    return original(module, hidden_states, *args, **kwargs)


@never_compiled
def _positions_before(length: int, device: torch.device) -> torch.Tensor:
    """Return (tokens,) global positions of this rank's tokens in the context, less their indices in the shard."""
    context = sharding_context()
    assert context is not None
    call, ranks = context.call, context.call.ranks
    if len(call.layout.batch_groups(2)) > 1:
        raise NotImplementedError(
            f"attn_temperature_tuning takes positions that are the same in all batch rows, got {call.layout}: use "
            "another layout"
        )
    whole = length_of(call, length)
    positions = positions_of(call.layout.segments(whole, ranks.rank, ranks.size, 0), device)
    return positions - torch.arange(length, device=device)


# Functions that a layer calls


def by_class(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return `find`, whose results of the latest classes are kept: a call of a model looks at each module."""
    return lru_cache(maxsize=4096)(find)


def is_caught(module: nn.Module) -> bool:
    """Return whether all functions by which a layer mixes tokens are replaced in contexts."""
    return _is_caught(type(module))


@by_class
def _is_caught(kind: Any) -> bool:
    kernels = {kernel for _, _, kernel in _functions_of(kind)}
    return bool(kernels) and kernels <= _REPLACED.keys()


def is_attention(module: nn.Module) -> bool:
    """Return whether a layer calls the attention function of its model's `attn_implementation`, or one of torch."""
    return _calls_attention(type(module))


@by_class
def _calls_attention(kind: Any) -> bool:
    bases = (base for base in kind.__mro__ if base is not nn.Module and base.__module__ != MODELING_UTILS)
    return any(not _ATTENTION.isdisjoint(names) for base in bases for _, names in _methods_of(base))


def _functions_of(kind: Any) -> Iterator[tuple[Any, str, str]]:
    """`(Python module, name, kernel)` of each function with a kernel that the methods of a class refer to."""
    for function, names in _methods_of(kind):
        owner = sys.modules.get(function.__globals__.get("__name__", ""))
        for name in names:
            kernel = kernel_name(function.__globals__.get(name))
            if owner is not None and kernel is not None:
                yield owner, name, kernel


def _methods_of(kind: Any) -> Iterator[tuple[FunctionType, frozenset[str]]]:
    """Yield the functions that a class itself defines, unwrapped, and the names in the code of each."""
    for method in vars(kind).values():
        function = inspect.unwrap(method) if callable(method) else None
        if isinstance(function, FunctionType):
            yield function, frozenset(_names_in(function.__code__))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# Embeddings that count mask tokens


@by_class
def _counts_masks(kind: Any) -> bool:
    """True for ESM's embeddings, which scale with the share of mask tokens in the sequence."""
    forward = inspect.unwrap(vars(kind).get("forward", len))
    names = {*_names_in(forward.__code__)} if inspect.isfunction(forward) else set()
    return {"token_dropout", "mask_token_id", "word_embeddings"} <= names


def _with_whole_counts(forward: Function, module: Any, *given: Any, **named: Any) -> Any:
    """`forward` of such embeddings; in contexts with the share of the whole sequence."""
    arguments = dict(zip(("input_ids", "attention_mask", "position_ids", "inputs_embeds"), given, strict=False)) | named
    if not module.token_dropout or arguments.get("input_ids") is None or not shards_are_seen():
        return forward(module, **arguments)
    return _scaled_by_whole_counts(forward, module, **arguments)


@never_compiled
def _scaled_by_whole_counts(
    forward: Function, module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    context = sharding_context()
    assert context is not None
    is_mask = input_ids == module.mask_token_id
    kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    masks, lengths = context.call.ranks.gather(torch.stack([is_mask.sum(-1), kept.sum(-1).long()])).sum(0)
    embeddings = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    share = (masks.float() / lengths)[:, None, None]
    # Without input_ids, forward does the rest and scales nothing.
    scaled = embeddings.masked_fill(is_mask[..., None], 0.0) * (1 - _SHARE_IN_TRAINING) / (1 - share)
    return forward(
        module, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=scaled.to(embeddings.dtype)
    )


# Patches


class _Patches:
    """Functions of models that are replaced, until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._replaced = set[tuple[Any, str]]()
        self._models = WeakSet[nn.Module]()

    def replace(self, model: nn.Module) -> None:
        """Replace the functions of a model's layers, which behave as before where no shards are seen."""
        if model in self._models:
            return
        with self._lock:
            kinds: set[Any] = {type(module) for module in model.modules()}
            for caught in filter(_is_caught, kinds):
                for owner, name, kernel in list(_functions_of(caught)):
                    self._wrap(owner, name, partial(_in_contexts, _REPLACED[kernel]))
            owners = {next((each for each in kind.__mro__ if "forward" in vars(each)), kind) for kind in kinds}
            for owner in filter(_counts_masks, owners):
                self._wrap(owner, "forward", _with_whole_counts)
            for module in filter(counts_positions, model.modules()):
                first: Any = next(each for each in type(module).__mro__ if "forward" in vars(each))
                cache = "cache" if "cache" in inspect.signature(first.forward).parameters else "past_key_values"
                self._wrap(first, "forward", partial(_with_whole_positions, cache))
            self._models.add(model)

    def _wrap(self, owner: Any, name: str, around: Function) -> None:
        if (owner, name) not in self._replaced:
            self._replaced.add((owner, name))
            self._stack.enter_context(wrapped(owner, name, around))

    def close(self) -> None:
        """Restores all functions."""
        with self._lock:
            self._replaced.clear()
            self._models.clear()
            self._stack.close()


def _in_contexts(ours: Function, original: Function, *arguments: Any, **named: Any) -> Any:
    return (ours if shards_are_seen() else original)(*arguments, **named)


layer_patches = _Patches()
