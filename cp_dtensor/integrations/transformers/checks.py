"""Checks of transformers' models: layers and arguments that are wrong where a model sees shards.

Vision and audio towers make tokens of their own from the images or the sound that a rank passes to them. Attention
inside of a context takes all tokens for shards of one sequence, so that images of different ranks would attend to each
other. A tower is recognised by what its class says of its inputs.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from cp_dtensor.api.extension import OpenContext
from cp_dtensor.integrations.transformers.chosen import sharding_context
from cp_dtensor.integrations.transformers.layers import (
    by_class,
    counts_positions,
    facts_of,
    layer_patches,
)
from cp_dtensor.integrations.transformers.multimodal import WholeCall
from cp_dtensor.integrations.transformers.private import CACHE_UTILS, INDEXED, PROVIDER, SEEN, implementation_of

positions_are_added = WeakSet[nn.Module]()
"""Models with a hook that adds position ids which a call lacks; calls of others without position ids are refused."""
OWN_TOKENS = (
    "makes tokens of images or sound, which attention inside of context_parallel would take for shards of the "
    "sequence: give the model the whole inputs by cp_dtensor.integrations.transformers.ModelBatch.from_processor, or "
    "call a tower before the context and shard what it returns; docs/models.md has an example"
)


# Layers

_MIXERS = re.compile(
    r"mamba|deltanet|linearattention|lightningattention|rwkv|shortconv|recurrent|rglru|hyena|retention|mlstm|slstm",
    re.I,
)
"""Class names of layers that mix tokens by other ways than attention."""
_COUNTED = re.compile(r"(learned|sinusoidal)\w*position\w*embedding", re.I)
_OF_ROWS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$|DoubleHeads")
"""Class names of models whose results are of whole rows, beside those that take next_sentence_label or its like."""
_SEES_ALL = frozenset({
    "full_attention", "sliding_attention", "reference_sliding_attention", "chunked_attention", "attention", "moe",
    "mlp", "sparse", "dense",
})  # fmt: skip
"""Layer types of configurations whose attention is that of masks, or that mix no tokens."""
_BY_KERNELS = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
"""Layer types that are right in a context if their kernels are replaced (`ClassFacts.is_caught`)."""
_BY_INDEXERS = INDEXED | {"minimax_m3_sparse", "compressed_sparse_attention", "heavily_compressed_attention"}
"""Layer types that are right in a context if the forwards of indexers are replaced."""


def _problem_of_layer(module: nn.Module, has_own_forward: bool = False) -> str | None:
    """Return why a layer would be wrong in a context; None if it would not.

    A forward of the module itself, as accelerate and `ContextParallel` set, calls that of the class without our patch.
    """
    name, shard, facts = type(module).__name__, "this rank's shard", facts_of(module)
    counts = facts.counts and not has_own_forward and "forward" not in vars(module)
    is_mixer = _MIXERS.search(name) and "norm" not in name.lower() and not facts.calls_attention
    if isinstance(module, nn.RNNBase) or (is_mixer and not any(facts_of(each).is_caught for each in module.modules())):
        return f"{name} mixes tokens of {shard} only"
    if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        return f"a convolution over {module.kernel_size[0]} tokens mixes tokens of {shard} only"
    if _COUNTED.search(name) and not counts:
        return f"{name} counts positions within {shard}"
    if "indexer" in name.lower() and not facts.selects:
        return f"{name} selects keys of {shard} only"
    if name.endswith("Compressor") and not facts.selects:
        return f"{name} compresses keys of {shard} only"
    if counts_positions(module) and not counts:
        return f"{name} scales queries by positions within {shard} (attn_temperature_tuning)"
    if getattr(module, "relative_attention_bias", None) is not None:
        if not facts.counts:  # by another method than forward
            return f"{name} has a position bias of positions within {shard}"
        if implementation_of(getattr(module, "config", None)) != PROVIDER:
            return f'{name} joins its position bias and a mask of {shard}: use register() and "{PROVIDER}"'
    if getattr(module, "expert_capacity", None):
        return f"{name} counts the tokens of an expert within {shard} (expert_capacity)"
    if getattr(module, "token_dropout", False):
        return f"{name} scales embeddings by the share of mask tokens in {shard} (token_dropout)"
    if getattr(module, "trigram_input", False):
        return f"{name} joins the embeddings of neighbouring tokens of {shard} only (trigram_input)"
    return None


def _parts(model: nn.Module) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return modules whose functions are replaced in contexts, and these with those that call attention.

    Both with all modules inside of them.
    """
    facts = [(module, facts_of(module)) for module in model.modules()]
    replaced = {part for module, of in facts if of.is_caught or of.selects for part in module.modules()}
    return replaced, replaced | {part for module, of in facts if of.calls_attention for part in module.modules()}


def _unseen_attention(module: nn.Module, seen: set[nn.Module]) -> str | None:
    """Return the problem of attention of which a context sees no part; None if there is none."""
    name = type(module).__name__
    if "attention" in name.lower() and seen.isdisjoint(module.modules()):
        return f"{name} computes attention by operations that a context does not see"
    return None


def check_part(part: nn.Module) -> None:
    """Refuse to give `ContextParallel` to a model, or to layers of transformers, that would be wrong in a context."""
    problems, (inside, seen) = list[str | None](), _parts(part)
    for module in () if is_model(part) else part.modules():
        owners = {each.__module__.partition(".")[0] for each in type(module).__mro__}  # also of modules in FSDP2
        if owners.isdisjoint(("transformers", "transformers_modules")) or module in inside:
            continue
        problems += _problem_of_layer(module, module is part), _unseen_attention(module, seen)
        config = getattr(module, "config", None)
        implementation = implementation_of(config) or "eager"  # as transformers does
        if config is not None and facts_of(module).calls_attention and implementation not in SEEN:
            problems.append(unseen(implementation))
    if found := [each for each in (check_model(part) if is_model(part) else problems) if each]:
        raise NotImplementedError(f"{type(part).__name__} would be wrong with ContextParallel: {'; '.join(found)}")


def check_model(model: nn.Module) -> list[str]:
    """Return the known problems of a model inside of `context_parallel`; an empty list if there are none.

    Each line names the layers: attention that a context does not see (`attn_implementation="eager"` and kernels of
    other packages), convolutions, recurrent and linear-attention layers, and positions that are counted in each shard.
    A context refuses to run a model of transformers of which this list is not empty. Parts that run only if a call has
    images or sound are left out: their own calls are checked.
    """
    if is_model(model) and inputs_of(model).is_tower and _attends(model):
        return [f"{type(model).__name__} {OWN_TOKENS}"]
    found: dict[str, list[str]] = {}
    towers = {part for tower in model.modules() if _is_tower_of(model, tower) for part in tower.modules()}
    inside, seen = _parts(model)
    for path, module in model.named_modules():
        problems = list[str | None]()
        if module in towers:
            continue
        if is_model(module):
            problems += _problems_of_model(module)
        elif module not in inside:
            problems.append(_problem_of_layer(module))
        problems.append(_unseen_attention(module, seen))
        for problem in filter(None, problems):
            found.setdefault(problem, []).append(path or type(module).__name__)
    if is_model(model) and not found and not seen and getattr(model.config, "num_hidden_layers", None):
        found["none of its layers calls attention that a context sees"] = [type(model).__name__]
    return [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {problem}"
        for problem, names in found.items()
    ]


def _problems_of_model(model: Any) -> list[str]:
    name, problems = type(model).__name__, []
    implementation, layer_types = implementation_of(model.config), getattr(model.config, "layer_types", None) or ()
    has_attention = not layer_types or bool({*layer_types} - {"linear_attention", "conv", "mamba"})
    if has_attention and implementation is not None and implementation not in SEEN:
        problems.append(unseen(implementation))
    by_kernels = sum(layer_type in _BY_KERNELS for layer_type in layer_types)
    known = (
        _SEES_ALL | _BY_KERNELS
        if by_kernels <= sum(facts_of(each).is_caught for each in model.modules())
        else _SEES_ALL
    )
    known |= _BY_INDEXERS if any(facts_of(module).selects for module in model.modules()) else set()
    problems += [
        f"layer_types has {layer_type!r}, layers that are not known to mix tokens of all ranks"
        for layer_type in sorted({*layer_types} - known)
    ]
    if _OF_ROWS.search(name) or any("sentence" in each for each in inputs_of(model).names):
        problems.append(f"{name} takes the result of a whole row from the tokens of this rank's shard")
    return problems


def unseen(implementation: str | None) -> str:
    """Return the reason to refuse an attention implementation that a context does not see."""
    how = "as matrix products" if implementation == "eager" else "by kernels that a context does not see"
    return (
        f'attn_implementation="{implementation}" computes attention {how}, so each rank would attend to its own shard '
        f'only: use "sdpa", or cp_dtensor.integrations.transformers.register() and "{PROVIDER}"'
    )


# Calls

_problems: WeakKeyDictionary[nn.Module, tuple[Any, list[str]]] = WeakKeyDictionary()


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeCall | None:
    """Refuse a call of a model that would be wrong in the open context; return a call with the whole sequence.

    Raises:
        NotImplementedError: layers that are wrong; images or sound of which the model makes tokens of its own.
        ValueError: position ids are missing; labels that are positions, or that the model would shift for a decoder.
    """
    context = sharding_context()
    assert context is not None
    context.seen.add("model")
    if kwargs.get("cu_seq_lens_q") is not None:
        context.seen.add("cu_seq_lens_q")
    implementation = implementation_of(getattr(model, "config", None))
    known = _problems.get(model)
    if known is None or known[0] != implementation:
        known = _problems[model] = implementation, check_model(model)
    if known[1]:
        raise NotImplementedError(
            f"{type(model).__name__} would be wrong inside of context_parallel: {'; '.join(known[1])}"
        )
    given = arguments_of(model, args, kwargs)
    whole = _whole_call(model, given, context)
    if whole is None:
        _check_arguments(model, given)
    layer_patches.replace(model)
    return whole


def arguments_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model by name, but those that are None."""
    arguments = {**dict(zip(inputs_of(model).names, args, strict=False)), **kwargs}
    return {name: value for name, value in arguments.items() if value is not None}


def lacks_positions(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether a model takes position ids, which are not among the arguments of a call."""
    return "position_ids" in inputs_of(model).names and "position_ids" not in given


def refuse_own_positions(model: nn.Module, given: dict[str, Any]) -> None:
    """Refuse to give position ids from 0 on, in a call with these arguments, to models that make other ones."""
    padding = given.get("attention_mask")
    for module in model.modules():
        facts = facts_of(module)
        source = "tokens" if facts.skips_padding else None
        # A shard does not tell whether there is padding before tokens, in which case the ids are others.
        if facts.counts_padding and padding is not None:
            is_left = sharding_context() is not None or bool((padding[:, :-1] < padding[:, 1:]).any())
            source = "padding" if is_left else source
        if source:
            raise ValueError(
                f"{type(module).__name__} makes position ids from {source}, and got none under context parallelism, "
                "where it has this rank's tokens only: pass position_ids of the whole sequence"
            )


def _check_arguments(model: Any, given: dict[str, Any]) -> None:
    name, inputs = type(model).__name__, inputs_of(model)
    makes_tokens = inputs.is_tower or not inputs.own.isdisjoint(given) or any(map(_INPUTS.search, given))
    if makes_tokens and _attends(model):
        raise NotImplementedError(f"{name} {OWN_TOKENS}")
    if "decoder_input_ids" in inputs.names and "labels" in given and not any("decoder_input" in each for each in given):
        raise ValueError(
            f"{name} got labels without decoder_input_ids inside of context_parallel, and would shift them within this "
            "rank's shard: make both of the whole sequence buffers of the context, the latter labels that are shifted"
        )
    if not isinstance(given.get("input_ids", given.get("inputs_embeds")), torch.Tensor):
        return
    if "start_positions" in given:
        raise ValueError(
            f"{name} got start_positions inside of context_parallel, and would look for them in this rank's shard: "
            "compute the loss of logits that cp_dtensor.context_parallel_unshard has gathered"
        )
    if given.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
        warnings.warn(
            f"{name} computes the loss of its router (output_router_logits) from the tokens of this rank's shard: each "
            "rank has its own, and none is that of the whole sequence",
            stacklevel=2,
        )
    if lacks_positions(model, given) and model not in positions_are_added:
        raise ValueError(
            f"{name} got no position_ids inside of context_parallel, and would count positions within this rank's "
            "shard: make position_ids (torch.arange(seq_len) of the whole sequence, a row for each batch row) one of "
            "the context's buffers and pass them to the model; cp_dtensor.integrations.transformers.ModelBatch does so"
        )


def mark_caches(*values: Any) -> None:
    """Make the caches among arguments and results of a model, which have the keys of a shard, refuse later calls.

    A context may be closed then, and its patches removed, so a cache itself refuses: models call its `update`.
    """
    left = [*values]
    while left:
        value = left.pop()
        if isinstance(value, sys.modules[CACHE_UTILS].Cache):
            value.update = _refuse_update
            left += vars(value).values()  # a cache of an encoder-decoder has two
        elif isinstance(value, (dict, tuple)):
            left += value.values() if isinstance(value, dict) else value


def _refuse_update(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "got a cache that was filled inside of context_parallel, where it has the keys of this rank's shard only: call "
        "the model or generate() outside of the context with the whole sequence and another cache, or put the keys "
        "that cp_dtensor.context_parallel_unshard gathers into another cache"
    )


# Images and sound

_TOKENS = frozenset({"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"})
"""Names of arguments that are the tokens of a sequence."""
_INPUTS = re.compile(r"pixel_values|input_features|input_values")
"""Part of the names of arguments that are images or sound."""
_OTHER = re.compile(rf"{_INPUTS.pattern}|image|video|audio|speech|vision|pixel")
"""Part of the names of modalities, configurations and arguments of models that take images or sound."""


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, also as a part of another."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


class _Inputs(NamedTuple):
    """What a class of models takes."""

    names: tuple[str, ...]  # the arguments of `forward`, without `self`
    is_tower: bool  # it takes images or sound only
    own: frozenset[str]  # the main inputs, where these are images or sound


@by_class
def inputs_of(kind: Any) -> _Inputs:
    parameters = inspect.signature(kind.forward).parameters
    names = tuple(parameters)[1:]
    main, modalities = (
        (each,) if isinstance(each, str) else tuple(each)
        for each in (getattr(kind, "main_input_name", ()), getattr(kind, "input_modalities", ()))
    )
    key = getattr(getattr(kind, "config_class", None), "base_config_key", "")
    if not _OTHER.search(" ".join(map(str, (*modalities, key, *names)))):
        return _Inputs(names, False, frozenset())
    passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values())
    return _Inputs(names, not passes_on and _TOKENS.isdisjoint(names), frozenset(main) - _TOKENS)


def _is_tower_of(model: nn.Module, part: nn.Module) -> bool:
    """Return whether a part of a model runs only if the call of the model has images or sound."""
    if part is model or not is_model(part):
        return False
    # The body of a model with a head has the configuration of the whole.
    is_body, inputs = type(part.config) is type(getattr(model, "config", None)), inputs_of(part)
    return inputs.is_tower or (bool(inputs.own) and not is_body)


def _whole_call(model: Any, given: dict[str, Any], context: OpenContext) -> WholeCall | None:
    """Return the call of a model that takes images or sound, if its tokens are no shards; None for another call.

    Raises:
        ValueError: shards among the other arguments; labels that the model would shift.
    """
    inputs, tokens = inputs_of(model), given.get("input_ids", given.get("inputs_embeds"))
    if inputs.is_tower or not any(map(_INPUTS.search, inputs.names)) or not isinstance(tokens, torch.Tensor):
        return None
    buffers, text = {id(each.buffer.tensor) for each in context.buffers}, type(model.config.get_text_config())
    if id(tokens) in buffers:
        return None
    if text is type(model.config) or tokens.dim() < 2 or tokens.size(1) not in context.call.lengths:
        return None
    for name, value in given.items():
        if name != "shift_labels" and id(value) in buffers:
            raise ValueError(
                f"{type(model).__name__} got the whole sequence, and a shard of {name}, which is a buffer of "
                "context_parallel: expected the whole of all inputs but shift_labels"
            )
    if "labels" in given:
        raise ValueError(
            f"{type(model).__name__} got labels of the whole sequence inside of context_parallel, where its logits are "
            "those of this rank's tokens: compute cp_dtensor.integrations.transformers.causal_lm_loss(logits, "
            "batch.shift_labels) instead"
        )
    return WholeCall(context, tokens, text)


def _attends(module: nn.Module) -> bool:
    """Return whether there is attention of any kind, which convolutional towers have not."""
    return any(
        facts_of(part).calls_attention or "attention" in type(part).__name__.lower() for part in module.modules()
    )
