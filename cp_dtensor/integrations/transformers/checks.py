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
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from cp_dtensor.integrations.transformers.layers import (
    by_class,
    counts_from_cache,
    counts_positions,
    is_attention,
    is_caught,
)
from cp_dtensor.integrations.transformers.private import CACHE_UTILS, implementation_of

PROVIDER = "cp_dtensor"
"""Name of the provider in transformers: `attn_implementation="cp_dtensor"`."""
SEEN = ("sdpa", "flex_attention", PROVIDER)
"""Attention implementations of transformers that a context sees."""
_MIXERS = re.compile(
    r"mamba|deltanet|linearattention|lightningattention|rwkv|shortconv|recurrent|rglru|hyena|retention|mlstm|slstm",
    re.I,
)
"""Class names of layers that mix tokens by other ways than attention."""
_LAYER_TYPES = {
    "linear_attention": "a linear-attention or state-space layer",
    "conv": "a convolution along the sequence",
    "mamba": "a state-space layer",
    "recurrent": "a recurrent layer",
    "hybrid": "a state-space layer beside attention",
    "hybrid_sliding": "a state-space layer beside attention",
    "compressed_sparse_attention": "attention to compressed keys",
    "heavily_compressed_attention": "attention to compressed keys",
    "indexed_attention": "attention to keys that an indexer selects",
    "minimax_m3_sparse": "attention to selected blocks of keys",
}
_BY_FUNCTIONS = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
"""Types of layers that are right in a context if their functions are replaced (`is_caught`)."""
_COUNTED = re.compile(r"(learned|sinusoidal)\w*position\w*embedding", re.I)
_OF_ROWS = re.compile(r"For(SequenceClassification|MultipleChoice|NextSentencePrediction)$|DoubleHeads")
"""Class names of models whose results are of whole rows, beside those that take next_sentence_label or its like."""
_TOKENS = frozenset({"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"})
"""Names of arguments that are the tokens of a sequence."""
_INPUTS = re.compile(r"pixel_values|input_features|input_values")
"""Part of the names of arguments that are images or sound."""
_OTHER = re.compile(rf"{_INPUTS.pattern}|image|video|audio|speech|vision|pixel")
"""Part of the names of modalities, configurations and arguments of models that take images or sound."""
OWN_TOKENS = (
    "makes tokens of images or sound, which attention inside of context_parallel would take for shards of the "
    "sequence: call it before the context, put the results into inputs_embeds, and give the language model shards of "
    "these (context_parallel_shard) and position_ids; docs/models.md has an example"
)
models_with_positions = WeakSet[nn.Module]()
"""Models whose pre-hooks add missing position ids now, which the check of a call does not see."""
_IN_PARALLEL = "mixes tokens of this rank's shard only"


def problems_of(model: nn.Module) -> list[str]:
    """One line for each kind of layer that would be wrong in a context, with the names of the layers.

    Parts that run only if a call has images or sound are left out: their own calls are checked.
    """
    found: dict[str, list[str]] = {}
    if is_tower(model):
        return [f"{type(model).__name__} {OWN_TOKENS}"]
    towers = {part for tower in model.modules() if is_tower_of(model, tower) for part in tower.modules()}
    inside = {part for module in model.modules() if is_caught(module) for part in module.modules()}
    seen = {part for module in model.modules() if is_attention(module) for part in module.modules()}
    seen_or_inside = seen | inside
    for name, module in model.named_modules():
        if module in towers:
            continue
        problems = [] if module in inside else [*_problems_of_module(module)]
        if _mixes_unseen(module, seen_or_inside):
            problems.append(f"{type(module).__name__} computes attention by operations that a context does not see")
        for problem in problems:
            found.setdefault(problem, []).append(name or type(model).__name__)
    if is_model(model) and not found and not seen_or_inside and getattr(model.config, "num_hidden_layers", None):
        found["none of its layers calls attention that a context sees"] = [type(model).__name__]
    return [f"{_shortened(names)}: {problem}" for problem, names in found.items()]


def _problems_of_module(module: nn.Module) -> Iterator[str]:
    kind, config = type(module).__name__, getattr(module, "config", None)
    if is_model(module):
        implementation, layer_types = implementation_of(config), getattr(config, "layer_types", None) or ()
        has_attention = not layer_types or not {*layer_types} <= {*_LAYER_TYPES}
        if has_attention and implementation is not None and implementation not in SEEN:
            yield unseen(implementation)
        caught = sum(map(is_caught, module.modules()))
        are_caught = sum(layer_type in _BY_FUNCTIONS for layer_type in layer_types) <= caught
        types = {*layer_types} & {*_LAYER_TYPES} - ({*_BY_FUNCTIONS} if are_caught else set())
        for layer_type in sorted(types):
            yield f"layer_types has {layer_type!r}, {_LAYER_TYPES[layer_type]}, which {_IN_PARALLEL}"
        labels_of_rows = any("sentence" in name for name in _parameters(type(module)))
        if _OF_ROWS.search(kind) or labels_of_rows:
            yield f"{kind} takes the result of a whole row from the tokens of this rank's shard"
        return
    has_caught_part = any(map(is_caught, module.modules()))
    if isinstance(module, nn.RNNBase) or (_mixes(kind) and not has_caught_part and not is_attention(module)):
        yield f"{kind} {_IN_PARALLEL}"
    elif isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
        yield f"a convolution over {module.kernel_size[0]} tokens {_IN_PARALLEL}"
    elif _COUNTED.search(kind):
        yield f"{kind} counts positions within this rank's shard"
    elif isinstance(getattr(module, "relative_attention_bias", None), nn.Module):
        yield f"{kind} has a position bias of positions within this rank's shard"
    elif counts_positions(module) and not counts_from_cache(module):
        yield f"{kind} scales queries by positions within this rank's shard (attn_temperature_tuning)"
    elif getattr(module, "expert_capacity", None) is not None:
        yield f"{kind} counts the tokens of an expert within this rank's shard (expert_capacity)"
    elif getattr(module, "trigram_input", False):
        yield f"{kind} joins the embeddings of neighbouring tokens of this rank's shard only (trigram_input)"


def _mixes_unseen(module: nn.Module, seen: set[nn.Module]) -> bool:
    """True for attention of which no part calls, and which is not part of, a layer in `seen`."""
    return "attention" in type(module).__name__.lower() and seen.isdisjoint(module.modules())


def _mixes(kind: str) -> bool:
    return _MIXERS.search(kind) is not None and "norm" not in kind.lower()


def unseen(implementation: str) -> str:
    """Return the reason to refuse an attention implementation that a context does not see."""
    how = "as matrix products" if implementation == "eager" else "by kernels that a context does not see"
    return (
        f'attn_implementation="{implementation}" computes attention {how}, so each rank would attend to its own shard '
        f'only: use "sdpa", or cp_dtensor.integrations.transformers.register() and "{PROVIDER}"'
    )


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments of a model's call that are wrong for shards, and warns of a router's loss.

    Raises:
        NotImplementedError: images or sound of which the model makes tokens of its own.
        ValueError: position ids are missing; labels that are positions, or that the model would shift for a decoder.
    """
    name = type(model).__name__
    parameters = _parameters(type(model))
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if makes_tokens(model, [key for key in given if given[key] is not None]):
        raise NotImplementedError(f"{name} {OWN_TOKENS}")
    of_decoder = [given.get(key) for key in ("decoder_input_ids", "decoder_inputs_embeds")]
    if (
        "decoder_input_ids" in parameters
        and all(each is None for each in of_decoder)
        and given.get("labels") is not None
    ):
        raise ValueError(
            f"{name} got labels without decoder_input_ids inside of context_parallel, and would shift them within this "
            "rank's shard: make both of the whole sequence buffers of the context, the latter labels that are shifted"
        )
    tokens = next((given[key] for key in ("input_ids", "inputs_embeds") if given.get(key) is not None), None)
    if not isinstance(tokens, torch.Tensor):
        return
    if given.get("start_positions") is not None:
        raise ValueError(
            f"{name} got start_positions inside of context_parallel, and would look for them in this rank's shard: "
            "compute the loss of logits that cp_dtensor.context_parallel_unshard has gathered"
        )
    with_router = given.get("output_router_logits")
    if getattr(model.config, "output_router_logits", False) if with_router is None else with_router:
        warnings.warn(
            f"{name} computes the loss of its router (output_router_logits) from the tokens of this rank's shard: each "
            "rank has its own, and none is that of the whole sequence",
            stacklevel=2,
        )
    if "position_ids" in parameters and given.get("position_ids") is None and model not in models_with_positions:
        raise ValueError(
            f"{name} got no position_ids inside of context_parallel, and would count positions within this rank's "
            "shard: make position_ids (torch.arange(seq_len) of the whole sequence, a row for each batch row) one of "
            "the context's buffers and pass them to the model; cp_dtensor.integrations.transformers.ModelBatch does so"
        )


def class_tables_of(kind: type[nn.Module]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tables without the provider, of attention classes by implementation, in the Python modules of a model class."""
    for owner in {each.__module__ for each in kind.__mro__}:
        for name, table in vars(sys.modules[owner]).items():
            lacks_provider = isinstance(table, dict) and "eager" in table and PROVIDER not in table
            if lacks_provider and all(isinstance(each, type) for each in table.values()):
                yield name, table


def refuse_in_table(name: str, implementations: list[str], *_: Any, **__: Any) -> None:
    """Refuses the provider, in the place of an attention class of the table `name`.

    Raises:
        ValueError: always.
    """
    seen = [each for each in implementations if each in SEEN]
    way_out = f'use "{seen[0]}", which context_parallel sees' if seen else "context_parallel sees none of these"
    raise ValueError(
        f'{name} of this model has attention classes for {", ".join(implementations)}, not for "{PROVIDER}": {way_out}'
    )


def mark_caches(values: Iterable[Any]) -> None:
    """Makes the caches among arguments and results of a model, which have the keys of a shard, refuse later calls.

    A context may be closed then, and its patches removed, so a cache itself refuses: models call its `update`.
    """
    for value in values:
        if isinstance(value, sys.modules[CACHE_UTILS].Cache):
            value.update = _refuse_update
            mark_caches(vars(value).values())  # a cache of an encoder-decoder has two


def _refuse_update(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "got a cache that was filled inside of context_parallel, where it has the keys of this rank's shard only: call "
        "the model or generate() outside of the context with the whole sequence and another cache, or put the keys "
        "that cp_dtensor.context_parallel_unshard gathers into another cache"
    )


# Towers


def is_model(module: nn.Module) -> bool:
    """True for models of transformers, also parts of others."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def is_tower(module: nn.Module) -> bool:
    """True for a model that takes images or sound only, and attends to them."""
    return is_model(module) and _takes_no_tokens(type(module)) and _attends(module)


def is_tower_of(model: nn.Module, part: nn.Module) -> bool:
    """True for a part of a model which runs only if the call of the model has images or sound."""
    if part is model or not is_model(part):
        return False
    # The body of a model with a head has the configuration of the whole.
    is_body = type(getattr(part, "config", None)) is type(getattr(model, "config", None))
    return _takes_no_tokens(type(part)) or (bool(_main_inputs(type(part))) and not is_body)


def may_make_tokens(kind: Any, positional: int, named: Collection[str]) -> bool:
    """Return whether a class of models may make tokens of its own from the arguments of a call.

    Args:
        positional: the number of arguments without names.
        named: names of the other ones that are not None.
    """
    given = {*_parameters(kind)[:positional], *named}
    return _takes_no_tokens(kind) or not _main_inputs(kind).isdisjoint(given)


def makes_tokens(model: nn.Module, given: Collection[str]) -> bool:
    """Return whether a model makes tokens of its own from the arguments of these names, and attends to them.

    Parts that are models are not looked at: their own calls are checked.
    """
    if may_make_tokens(type(model), 0, given):
        return _attends(model)
    inputs = {name for name in given if _INPUTS.search(name)}
    return bool(inputs) and any(
        not inputs.isdisjoint(_parameters(type(part))) and not is_model(part) and _attends(part)
        for part in model.modules()
    )


def _attends(module: nn.Module) -> bool:
    """Return whether there is attention of any kind, which convolutional towers have not."""
    return any(is_attention(part) or "attention" in type(part).__name__.lower() for part in module.modules())


@by_class
def _takes_no_tokens(kind: Any) -> bool:
    """True for a class of models which take images or sound only."""
    parameters = inspect.signature(kind.forward).parameters.values()
    passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return not passes_on and _TOKENS.isdisjoint(_parameters(kind)) and _takes_other(kind)


@by_class
def _main_inputs(kind: Any) -> frozenset[str]:
    """Return the names of the main input of a class of models, where that is images or sound."""
    main: Any = getattr(kind, "main_input_name", ())
    names = {main} if isinstance(main, str) else {*main}
    return frozenset(names - _TOKENS) if _takes_other(kind) else frozenset()


def _takes_other(kind: Any) -> bool:
    modalities: Any = getattr(kind, "input_modalities", ())
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    key = getattr(getattr(kind, "config_class", None), "base_config_key", "")
    return _OTHER.search(" ".join(map(str, (*modalities, key, *_parameters(kind))))) is not None


@by_class
def _parameters(kind: Any) -> tuple[str, ...]:
    """Return names of the arguments of `forward`, without `self`."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
