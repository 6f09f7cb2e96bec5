"""Patches of transformers while a context is open, if transformers is loaded: masks of the whole sequence, and checks.

A model inside of a context makes its masks by `transformers.masking_utils`, from this rank's shard. There, the mask
function for "sdpa" returns a tensor that names a mask of the whole sequence, which SDPA in the context takes, and that
for "flex_attention" returns the block mask of the whole sequence. Other implementations are refused.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import Causal, Full, Mask
from cp_dtensor.api.extension import (
    Call,
    OpenContext,
    attribute_replaced,
    constant_in_trace,
    entry_replaced,
    handle_of,
    never_compiled,
    when_loaded,
    wrapped,
)
from cp_dtensor.integrations.transformers.checks import (
    PROVIDER,
    SEEN,
    check_arguments,
    class_tables_of,
    is_model,
    mark_caches,
    may_make_tokens,
    problems_of,
    refuse_in_table,
    unseen,
)
from cp_dtensor.integrations.transformers.layers import is_caught, layer_patches, sharding_context, shards_are_seen
from cp_dtensor.integrations.transformers.masks import NO_CACHE, MaskRequest, ModelMask, arguments_alone
from cp_dtensor.integrations.transformers.private import (
    GENERATION_UTILS,
    LOSS_UTILS,
    MASKING_UTILS,
    MODELING_UTILS,
    PREPROCESS,
    TESTED,
    implementation_of,
    table_of,
    warn_of_version,
)


class _Hook:
    """The hook of transformers in contexts; the provider's `register()` lets its patches hold for good."""

    def patches(self) -> Iterator[AbstractContextManager[object]]:
        """Yield the patches of each module of transformers, once that is loaded."""
        yield when_loaded(MASKING_UTILS, _masks_of_whole_sequences)
        yield when_loaded(MODELING_UTILS, _models_checked)
        yield when_loaded(MODELING_UTILS, _losses_checked)
        yield when_loaded(MODELING_UTILS, _provider_refused_by_tables)
        yield when_loaded(GENERATION_UTILS, _generation_refused)
        yield closing(layer_patches)

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        """Check the call of a model whose forward is about to be compiled."""
        model = arguments.get("self", arguments.get("mod"))
        # transformers wraps forward, and methods such as get_image_features, in functions of equal names.
        is_other_method = getattr(arguments.get("func"), "__name__", "forward") != "forward"
        if isinstance(model, nn.Module) and is_model(model) and not is_other_method:
            args, others = arguments.get("args", ()), arguments.get("kwargs", {})
            given = {name: each for name, each in arguments.items() if name not in ("self", "mod", "args", "kwargs")}
            _check_call(model, args, {**given, **others})

    def module(self, module: nn.Module) -> bool:
        """Replace the functions of convolutions and recurrent layers of a module; return whether it has any."""
        is_replaced = any(map(is_caught, module.modules()))
        if is_replaced:
            layer_patches.replace(module)
        return is_replaced


hook = _Hook()


_MASKS_UNCOMPILED = (
    "the ranks of context_parallel find the mask of a whole model by collectives: compile its layers with "
    "fullgraph=True, or the model without"
)


@contextmanager
def _masks_of_whole_sequences(utils: ModuleType) -> Iterator[None]:
    """While open, mask functions of transformers in contexts are those of the whole sequence."""
    warn_of_version()
    table = table_of(utils.AttentionMaskInterface)
    with ExitStack() as stack:
        if hasattr(utils, PREPROCESS):  # where it is missing, masks are refused when a model asks for one
            stack.enter_context(wrapped(utils, PREPROCESS, _of_shards(_preprocessed)))
        for name, make in (("sdpa", _sdpa_mask), ("flex_attention", _flex_mask)):
            ours = wraps(table[name])(partial(_of_shards(make), table[name]))
            stack.enter_context(entry_replaced(table, name, ours))
        yield


def _of_shards(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `make`, uncompiled, for models of shards or of the provider, else `original`."""
    uncompiled = never_compiled(make, _MASKS_UNCOMPILED)

    def mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        if implementation_of(config) == PROVIDER or shards_are_seen():
            return uncompiled(original, *args, **kwargs)
        return original(*args, **kwargs)

    return mask


def _models_checked(utils: ModuleType) -> AbstractContextManager[None]:
    """While open, models of transformers that are called in contexts are checked first, and their caches marked."""
    check_uncompiled = never_compiled(_check_call, "context_parallel checks the call of a vision or audio tower")
    mark_uncompiled = never_compiled(mark_caches)

    @constant_in_trace
    def may_be_refused(kind: type[nn.Module], positional: int, named: tuple[str, ...]) -> bool:
        return shards_are_seen() and may_make_tokens(kind, positional, named)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_traced := torch.compiler.is_compiling():
            has_shards = shards_are_seen()
            # Traced calls are checked only where a context may refuse a tower.
            if may_be_refused(type(self), len(args), tuple(name for name in kwargs if kwargs[name] is not None)):
                check_uncompiled(self, args, kwargs)
        else:
            has_shards = _check_call(self, args, kwargs)
        out = nn.Module.__call__(self, *args, **kwargs)
        if has_shards:
            results = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else ()
            (mark_uncompiled if is_traced else mark_caches)([*args, *kwargs.values(), *results])
        return out

    return attribute_replaced(utils.PreTrainedModel, "__call__", __call__)


@contextmanager
def _provider_refused_by_tables(utils: ModuleType) -> Iterator[None]:
    """While open, models with attention classes of their own by implementation (Falcon, GPT-Neo) refuse the provider.

    Such a model takes a class from a table of its Python module, by the name of the implementation.
    """
    with ExitStack() as stack:

        def requested(
            original: Callable[..., str], model: nn.Module, requested_attention: str | None, *args: Any, **kwargs: Any
        ) -> str:
            for name, table in class_tables_of(type(model)) if requested_attention == PROVIDER else ():
                refuse = partial(refuse_in_table, name, [*table])
                stack.enter_context(entry_replaced(table, PROVIDER, refuse))
            return original(model, requested_attention, *args, **kwargs)

        stack.enter_context(wrapped(utils.PreTrainedModel, "get_correct_attn_implementation", requested))
        yield


def _generation_refused(utils: ModuleType) -> AbstractContextManager[None]:
    """While open, `generate()` is refused in contexts, before it calls the model."""

    def generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if sharding_context() is not None:
            raise NotImplementedError(
                f"{type(model).__name__}.generate() was called inside of context_parallel, where a cache has the keys "
                "of this rank's shard only: call it outside of the context, where each rank generates from all keys"
            )
        return original(model, *args, **kwargs)

    return wrapped(utils.GenerationMixin, "generate", generate)


def _losses_checked(utils: ModuleType) -> AbstractContextManager[None]:
    """While open, losses of models that shift the labels of a shard are refused in contexts.

    The table of losses stays as it is: Trainer finds out from it which loss shifts labels.
    """
    owner, causal = utils.PreTrainedModel, import_module(LOSS_UTILS).ForCausalLMLoss
    before, checked = vars(owner)["loss_function"], _of_shifted_labels(causal)

    def loss_function(self: nn.Module) -> Callable[..., Any]:
        loss: Callable[..., Any] = before.fget(self)
        return checked if loss is causal else loss

    checking = property(loss_function, before.fset, before.fdel, before.__doc__)
    return attribute_replaced(owner, "loss_function", checking)


def _of_shifted_labels(loss: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, shift_labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None and shards_are_seen():
            _refuse_shift()
        return loss(*args, shift_labels=shift_labels, **kwargs)

    return checked


@never_compiled
def _refuse_shift() -> None:
    raise ValueError(
        "a model got labels inside of context_parallel, and would shift them within this rank's shard: shift labels "
        "before they are sharded and pass shift_labels, or compute the loss by "
        "cp_dtensor.integrations.transformers.causal_lm_loss"
    )


# Models


_problems: WeakKeyDictionary[nn.Module, tuple[Any, list[str]]] = WeakKeyDictionary()


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Refuse a call of a model that would be wrong in the open context; return whether one is open."""
    context = sharding_context()
    if context is None:
        return False
    context.seen.add("model")
    if kwargs.get("cu_seq_lens_q") is not None:
        context.seen.add("cu_seq_lens_q")
    implementation = implementation_of(getattr(model, "config", None))
    known = _problems.get(model)
    if known is None or known[0] != implementation:
        known = _problems[model] = implementation, problems_of(model)
    if known[1]:
        raise NotImplementedError(
            f"{type(model).__name__} would be wrong inside of context_parallel: {'; '.join(known[1])}"
        )
    check_arguments(model, args, kwargs)
    layer_patches.replace(model)
    return True


# Masks


def _preprocessed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the arguments of a mask; those of the whole sequence travel with the padding, as a `MaskRequest`."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    given, context = bound.arguments, sharding_context()
    config, embeds, positions = given["config"], given["inputs_embeds"], given["position_ids"]
    cache, encoder = given.get("cache", given.get("past_key_values")), given.get("encoder_hidden_states")
    if implementation_of(config) not in SEEN:
        raise NotImplementedError(unseen(str(implementation_of(config))))
    if context is not None:
        given["position_ids"] = None  # documents are found in the position ids of all ranks
    is_done, padding, packed, q_len, kv_len, q_offset, kv_offset = original(*bound.args, **bound.kwargs)
    if is_done:
        return is_done, padding, None, q_len, kv_len, q_offset, kv_offset
    is_cached = cache is not None and bool(q_offset or kv_offset or kv_len != q_len)
    is_packed = positions is not None and padding is None and cache is None
    request = MaskRequest(positions if is_packed else None, padding, packed, is_cached, is_packed)
    if context is not None:
        if is_cached:
            raise NotImplementedError(NO_CACHE)
        if positions is not None and positions.size(-1) != embeds.size(1):
            raise ValueError(
                f"expected position_ids of this rank's {embeds.size(1)} tokens, got {positions.size(-1)}: "
                "make position_ids of the whole sequence one of the context's buffers"
            )
        check = partial(_check_positions, context, config, cache is not None and padding is None)
        request = replace(request, positions=positions, context=context, check=check)
    if not is_cached:  # transformers takes the width of a whole padding for this rank's keys
        kv_len = q_len if encoder is None else encoder.size(1)
    return False, request.as_padding(embeds, kv_len), None, q_len, kv_len, q_offset, kv_offset


def _check_positions(context: OpenContext, config: Any, is_joined: bool, whole: torch.Tensor) -> None:
    """Refuse position ids (B, S) of the whole sequence that a model's RoPE does not take; warn of joined documents."""
    _refuse_rope_by_length(config, whole)
    kept_apart = context.call.mask is not None or (  # the caller says which tokens see each other
        implementation_of(config) == PROVIDER and "cu_seq_lens_q" in context.seen
    )
    if is_joined and not kept_apart and (whole.diff(dim=1) != 1).any():
        _warn_of_joined_documents()


@lru_cache(maxsize=1)
def _warn_of_joined_documents() -> None:
    """Warns once in a process, if it does not raise."""
    warnings.warn(
        "position_ids are those of packed documents, and the model has a cache: documents attend to each other, as in "
        "transformers without context_parallel. Pass use_cache=False, which keeps them apart",
        stacklevel=2,
    )


def _refuse_rope_by_length(config: Any, whole: torch.Tensor) -> None:
    """Refuses rotary embeddings whose frequencies depend on the largest position of this rank's shard."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (scaling, *[value for value in scaling.values() if isinstance(value, dict)]):
        kind = str(each.get("rope_type", each.get("type")))
        original = each.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if kind in ("longrope", "dynamic") and original and int(whole.max()) >= original:
            raise NotImplementedError(
                f"rope_type={kind!r} takes its frequencies from the largest position, which differs between ranks: got "
                f"position {int(whole.max())}, expected less than {original}"
            )


def _sdpa_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a tensor that names the mask of the whole sequence; None for masks that SDPA has as `is_causal`."""
    context = sharding_context()
    is_provider = implementation_of(kwargs.get("config")) == PROVIDER
    mask = _model_mask(original, context, *args, **kwargs) if context is not None or is_provider else None
    if mask is None:
        return original(*args, **kwargs)
    if context is not None:
        value = mask.mask_for(context.call)  # refused here, where the model is
        # Layers decide about a mask that is left out, and some of them (use_bidirectional_attention) see all keys then.
        is_plain = (kwargs.get("allow_is_causal_skip", True) and value == Causal()) or (
            kwargs.get("allow_is_bidirectional_skip", False) and value == Full()
        )
        # transformers takes a single query for the next token after a cache, which sees all keys
        if is_plain and mask.fewest_queries > 1:
            return None
    return handle_of(mask)


provider_mask = _sdpa_mask
"""The mask function of the provider; its first argument is transformers' `sdpa_mask`."""


def _flex_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the block mask of the whole sequence."""
    context = sharding_context()
    mask = None if context is None else _model_mask(original, context, *args, **kwargs)
    if mask is None or context is None:
        return original(*args, **kwargs)
    return block_mask_of(mask, context.call, kwargs["batch_size"], torch.device(kwargs.get("device", "cpu")))


def _model_mask(
    original: Callable[..., Any], context: OpenContext | None, *args: Any, **kwargs: Any
) -> ModelMask | None:
    """Return the mask that a model asks for; outside of contexts None if masking_utils did not ask for it."""
    request = MaskRequest.of_padding(kwargs.get("attention_mask"))
    if request is None:
        if context is None:
            return None
        raise NotImplementedError(
            "a model made a mask inside of context_parallel in a way that is not known here (transformers "
            f"{sys.modules['transformers'].__version__}; known: the functions of transformers.masking_utils in "
            f"{' to '.join(TESTED)}): give the context a mask= and the model none"
        )
    function = kwargs["mask_function"]

    def alone() -> Any:
        return original(*args, **{**kwargs, **arguments_alone(function, request)})

    return ModelMask(
        function, request, kwargs["batch_size"], (kwargs["q_length"], kwargs["kv_length"]),
        torch.device(kwargs.get("device", "cpu")), kwargs.get("local_size"), bool(kwargs.get("use_vmap")), alone,
    )  # fmt: skip


def block_mask_of(mask: ModelMask, call: Call, batch_size: int, device: torch.device) -> BlockMask:
    """Return the block mask of a model's mask, for the whole sequence."""
    value = mask.mask_for(call)
    q_len, kv_len = mask.whole
    rows = [_key_ends(value.of_batch_row(row), q_len, kv_len) for row in range(value.batch_size or 1)]
    most = max(lo.size(0) for lo, _ in rows)
    ends = torch.stack(
        [torch.stack([torch.cat([each, each.new_zeros(most - each.size(0), q_len)]) for each in pair]) for pair in rows]
    ).to(device)  # (rows, 2, sets, queries)
    by_row = len(rows) > 1

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        row = b if by_row else b * 0
        seen = (ends[row, 0, 0, q] <= kv) & (kv < ends[row, 1, 0, q])
        for index in range(1, most):
            seen = seen | ((ends[row, 0, index, q] <= kv) & (kv < ends[row, 1, index, q]))
        return seen

    size = batch_size if by_row else None
    return create_block_mask(mask_mod, size, None, q_len, kv_len, device=device, _compile=device.type == "cuda")


def _key_ends(mask: Mask, q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first and last + 1 key of each query, (sets, queries) each; 0 and 0 where there is none."""
    sets = mask.interval_sets(q_len, kv_len) or ((),)
    lo, hi = (torch.zeros(len(sets), q_len, dtype=torch.int64, device="cpu") for _ in range(2))
    for index, bands in enumerate(sets):
        for band in bands:
            first, last = max(band.first, 0), min(band.last, q_len)
            queries = torch.arange(first, max(last, first), device="cpu")
            lo[index, first : max(last, first)] = (queries - band.left).clamp(min=max(band.lo, 0))
            hi[index, first : max(last, first)] = (queries + band.right + 1).clamp(max=min(band.hi, kv_len))
    return lo, hi
