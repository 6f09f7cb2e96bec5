"""Patches of transformers while a context is open, if transformers is loaded: masks of the whole sequence, and checks.

A model inside of a context makes its masks by `transformers.masking_utils`, from this rank's shard. There, the mask
function for "sdpa" returns a tensor that names a mask of the whole sequence, which SDPA in the context takes, and that
for "flex_attention" returns the block mask of the whole sequence. Other implementations are refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn

from cp_dtensor import Causal, Full
from cp_dtensor.api.extension import (
    attribute_replaced,
    entry_replaced,
    handle_of,
    innermost,
    never_compiled,
    queries_alone,
    when_loaded,
    wrapped,
)
from cp_dtensor.integrations.transformers.checks import (
    check_call,
    check_part,
    inputs_of,
    is_model,
    mark_caches,
    unseen,
)  # fmt: skip
from cp_dtensor.integrations.transformers.chosen import sharding_context, shards_are_seen
from cp_dtensor.integrations.transformers.layers import counts_positions, facts_of, layer_patches
from cp_dtensor.integrations.transformers.masks import NO_CACHE, ModelMask, block_mask_of
from cp_dtensor.integrations.transformers.multimodal import SHARD_IMAGES, whole_call
from cp_dtensor.integrations.transformers.private import (
    CACHE_UTILS,
    GENERATION_UTILS,
    INDEXED,
    LOSS_UTILS,
    MASKING_UTILS,
    MODELING_UTILS,
    PREPROCESS,
    PROVIDER,
    SEEN,
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
        yield when_loaded(GENERATION_UTILS, lambda utils: wrapped(utils.GenerationMixin, "generate", _generate))
        yield when_loaded(CACHE_UTILS, lambda utils: wrapped(utils.Cache, "update", _update))
        yield closing(layer_patches)

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        """Check the call of a model whose forward is about to be compiled.

        `torch.compile(model)` before the first context has kept a `__call__` that is not patched.
        """
        model = arguments.get("self", arguments.get("mod"))
        # transformers wraps forward, and methods such as get_image_features, in functions of equal names.
        is_other_method = getattr(arguments.get("func"), "__name__", "forward") != "forward"
        if isinstance(model, nn.Module) and is_model(model) and not is_other_method and sharding_context() is not None:
            args, others = arguments.get("args", ()), arguments.get("kwargs", {})
            own = ("self", "mod", "func", "args", "kwargs")
            _check_traced(model, args, {**{k: v for k, v in arguments.items() if k not in own}, **others})

    def module(self, module: nn.Module) -> bool:
        """Replace functions of layers that would see this rank's shard only; return whether a module has any.

        Raises:
            NotImplementedError: the module has other such layers.
        """
        check_part(module)
        if is_model(module):  # its own call is outside of the context
            module.forward = wraps(module.forward)(partial(_checked, module, module.forward))
        is_replaced = any(map(_is_replaced, module.modules()))
        if is_replaced:
            layer_patches.replace(module)
        return is_replaced


def _checked(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Check a call of a model with `ContextParallel` inside of the context that its forward opens."""
    if shards_are_seen():  # not on a single rank
        check = never_compiled(_check_traced, _UNCOMPILED) if torch.compiler.is_compiling() else check_call
        if check(model, args, kwargs) is not None:
            raise NotImplementedError(
                f"{type(model).__name__} with ContextParallel got whole inputs with images or sound: call it inside of "
                "context_parallel, without the style"
            )
    return forward(*args, **kwargs)


def _is_replaced(module: nn.Module) -> bool:
    facts = facts_of(module)
    # Of Llama 4, which is known by its class, layers with RoPE count none.
    counts = facts.counts and (counts_positions(module) or not hasattr(module, "attn_temperature_tuning"))
    return facts.is_caught or facts.selects or counts


hook = _Hook()
_UNCOMPILED = (
    "the ranks of context_parallel check a whole model and find its masks by collectives: compile its layers with "
    "fullgraph=True, or the model without"
)


# Models


def _models_checked(utils: Any) -> AbstractContextManager[None]:
    """Check each model that is called in a context before its forward, and mark its caches as a shard's after it."""
    # Compiled code runs these two between graphs; with fullgraph=True the error is _UNCOMPILED.
    check, mark = never_compiled(_check_traced, _UNCOMPILED), never_compiled(mark_caches, _UNCOMPILED)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_traced, shard_images = torch.compiler.is_compiling(), kwargs.pop(SHARD_IMAGES, False)
        if not shards_are_seen():
            whole = None if is_traced else whole_call()
            if whole is None:
                return nn.Module.__call__(self, *args, **kwargs)
            return whole.run_part(self, args, kwargs, inputs_of(self).is_tower)
        whole = check(self, args, kwargs) if is_traced else check_call(self, args, kwargs)
        if whole is not None:
            return whole.run(self, args, kwargs, shard_images)
        out = nn.Module.__call__(self, *args, **kwargs)
        (mark if is_traced else mark_caches)(args, kwargs, out)
        return out

    return attribute_replaced(utils.PreTrainedModel, "__call__", __call__)


def _check_traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if check_call(model, args, kwargs) is not None:
        raise NotImplementedError(
            f"{type(model).__name__} got whole inputs inside of context_parallel, and is compiled: compile its layers "
            "or its language model"
        )


def _losses_checked(utils: Any) -> AbstractContextManager[None]:
    """While open, losses of models that shift the labels of a shard are refused in contexts.

    The table of losses stays as it is: Trainer finds out from it which loss shifts labels.
    """
    before, causal = vars(utils.PreTrainedModel)["loss_function"], import_module(LOSS_UTILS).ForCausalLMLoss

    def checked(*args: Any, shift_labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None and shards_are_seen():
            _refuse_shift()
        return causal(*args, shift_labels=shift_labels, **kwargs)

    def loss_function(self: nn.Module) -> Callable[..., Any]:
        loss: Callable[..., Any] = before.fget(self)
        return checked if loss is causal else loss

    checking = property(loss_function, before.fset, before.fdel, before.__doc__)
    return attribute_replaced(utils.PreTrainedModel, "loss_function", checking)


@never_compiled
def _refuse_shift() -> None:
    raise ValueError(
        "a model got labels inside of context_parallel, and would shift them within this rank's shard: shift labels "
        "before they are sharded and pass shift_labels, or compute the loss by "
        "cp_dtensor.integrations.transformers.causal_lm_loss"
    )


def _generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse `generate()` in contexts, before it calls the model."""
    if sharding_context() is not None:
        raise NotImplementedError(
            f"{type(model).__name__}.generate() was called inside of context_parallel, where a cache has the keys of "
            "this rank's shard only: call it outside of the context, where each rank generates from all keys"
        )
    return original(model, *args, **kwargs)


def _update(original: Callable[..., Any], cache: Any, k: Any, v: Any, layer_idx: int, *args: Any, **kw: Any) -> Any:
    """Keep all keys of a shard in a cache in contexts, so that those that are gathered are of all tokens.

    Layers with windows would keep the last ones only, but they return all, for the windows of this call's queries.
    """
    keys, values = original(cache, k, v, layer_idx, *args, **kw)
    if shards_are_seen():
        layer = cache.layers[layer_idx]
        if layer.keys.shape[-2] < keys.shape[-2]:
            layer.keys, layer.values = keys, values
    return keys, values


# Masks

_ASKED = "_cp_dtensor_asked"
"""Attribute of the padding that transformers passes on: what is known of the mask before its function is."""


@contextmanager
def _masks_of_whole_sequences(utils: Any) -> Iterator[None]:
    """While open, mask functions of transformers in contexts are those of the whole sequence."""
    warn_of_version()
    table = table_of(utils.AttentionMaskInterface)
    with ExitStack() as stack:
        if hasattr(utils, PREPROCESS):  # where it is missing, masks are refused when a model asks for one
            stack.enter_context(wrapped(utils, PREPROCESS, _of_shards(_preprocessed)))
        for name, make in (("sdpa", _mask), ("flex_attention", _block_mask)):
            ours = wraps(table[name])(partial(_of_shards(make), table[name]))
            stack.enter_context(entry_replaced(table, name, ours))
        yield


def _of_shards(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `make`, uncompiled, for models of shards or of the provider, else `original`."""
    uncompiled = never_compiled(make, _UNCOMPILED)

    def mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        is_ours = implementation_of(config) == PROVIDER or shards_are_seen() or _is_of_whole_call(config)
        return uncompiled(original, *args, **kwargs) if is_ours else original(*args, **kwargs)

    return mask


def _is_of_whole_call(config: Any) -> bool:
    """Return whether a model asks for a mask of the whole sequence, for its language model."""
    whole = None if torch.compiler.is_compiling() else whole_call()
    return whole is not None and type(config) is whole.config_class


def _preprocessed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the arguments of a mask; those of the whole sequence travel with the padding, as a `ModelMask`."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    given, context = bound.arguments, sharding_context()
    config, embeds, positions = given["config"], given["inputs_embeds"], given["position_ids"]
    cache, encoder = given.get("cache", given.get("past_key_values")), given.get("encoder_hidden_states")
    if implementation_of(config) not in SEEN:
        raise NotImplementedError(unseen(implementation_of(config)))
    is_whole = context is None and _is_of_whole_call(config)
    around = innermost() if context is None and not is_whole else None
    if around is not None and queries_alone(around) is not None:
        return original(*args, **kwargs)  # a tower's
    if context is not None:
        given["position_ids"] = None  # documents are found in the position ids of all ranks
    is_done, padding, packed, q_len, kv_len, q_offset, kv_offset = original(*bound.args, **bound.kwargs)
    if is_done:
        return is_done, padding, None, q_len, kv_len, q_offset, kv_offset
    is_cached = cache is not None and bool(q_offset or kv_offset or kv_len != q_len)
    if context is not None and is_cached:
        raise NotImplementedError(NO_CACHE)
    if context is not None and positions is not None and positions.size(-1) != embeds.size(1):
        raise ValueError(
            f"expected position_ids of this rank's {embeds.size(1)} tokens, got {positions.size(-1)}: "
            "make tokens and position_ids of the whole sequence, not copies of them, buffers of the context"
        )
    if not is_cached:  # transformers takes the width of a whole padding for this rank's keys
        kv_len = q_len if encoder is None else encoder.size(1)
    # transformers passes the padding on, as an argument of its mask function.
    carrier = embeds.new_ones(embeds.size(0), kv_len, dtype=torch.bool) if padding is None else padding[:]
    setattr(carrier, _ASKED, ModelMask(config, positions, padding, cache is not None, is_cached, context, is_whole))
    return False, carrier, packed, q_len, kv_len, q_offset, kv_offset


def _mask(original: Callable[..., Any], *args: Any, is_block: bool = False, **kwargs: Any) -> Any:
    """Return a tensor that names the mask of the whole sequence, None for one that SDPA has, or the block mask."""
    context, known = sharding_context(), getattr(kwargs.get("attention_mask"), _ASKED, None)
    if known is None and context is not None:
        raise NotImplementedError(
            "a model made a mask inside of context_parallel in a way that is not known here (transformers "
            f"{sys.modules['transformers'].__version__}; known: the functions of transformers.masking_utils in "
            f"{' to '.join(TESTED)}): give the context a mask= and the model none"
        )
    if known is None or (context is None and is_block):
        return original(*args, **kwargs)
    asked = replace(
        known, function=kwargs["mask_function"], batch_size=kwargs["batch_size"],
        local=(kwargs["q_length"], kwargs["kv_length"]),
        device=torch.device(kwargs.get("device", "cpu")), use_vmap=bool(kwargs.get("use_vmap")),
        alone=partial(original, *args, **{**kwargs, "attention_mask": known.padding}), _found={},
    )  # fmt: skip
    if context is None:  # indexers, layers with compressed keys and heads of towers (without vocabulary) read the mask
        layer_types = getattr(asked.config, "layer_types", None) or ()
        is_read = any(each in INDEXED or "compressed" in each for each in layer_types)
        is_read = is_read or not hasattr(asked.config, "vocab_size")
        return asked.alone() if is_read else handle_of(asked)
    mask, whole = asked.found(context.call)  # refused here, where the model is
    if is_block:
        return block_mask_of(mask, whole, asked.batch_size, asked.device)
    # Layers decide about a mask that is left out, and some of them (use_bidirectional_attention) see all keys then.
    is_plain = (kwargs.get("allow_is_causal_skip", True) and mask == Causal()) or (
        kwargs.get("allow_is_bidirectional_skip", False) and mask == Full()
    )
    # transformers takes a single query for the next token after a cache, which sees all keys
    return None if is_plain and min(whole.queries) > 1 else handle_of(asked)


def _block_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _mask(original, *args, is_block=True, **kwargs)
