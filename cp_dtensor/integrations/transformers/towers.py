"""Vision and audio towers of transformers' models, which attend to tokens of their own.

A tower makes its tokens from the images or the sound that a rank passes to it. Attention inside of a context takes
all tokens for shards of one sequence, so that images of different ranks would attend to each other. A tower is
recognised by what its class says of its inputs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from torch import nn

from cp_dtensor.integrations.transformers.layers import is_attention

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


def is_model(module: nn.Module) -> bool:
    """True for models of transformers, also parts of others."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def is_tower(module: nn.Module) -> bool:
    """True for a model that takes images or sound only, and attends to them."""
    return is_model(module) and _takes_no_tokens(_kind(module)) and _attends(module)


def is_tower_of(model: nn.Module, part: nn.Module) -> bool:
    """True for a part of a model which runs only if the call of the model has images or sound."""
    if part is model or not is_model(part):
        return False
    # The body of a model with a head has the configuration of the whole.
    is_body = type(getattr(part, "config", None)) is type(getattr(model, "config", None))
    return _takes_no_tokens(_kind(part)) or (bool(_main_inputs(_kind(part))) and not is_body)


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
        not inputs.isdisjoint(_parameters(_kind(part))) and not is_model(part) and _attends(part)
        for part in model.modules()
    )


def _attends(module: nn.Module) -> bool:
    """Return whether there is attention of any kind, which convolutional towers have not."""
    return any(is_attention(part) or "attention" in type(part).__name__.lower() for part in module.modules())


def _kind(module: nn.Module) -> Any:
    return type(module)  # mypy takes no class of modules for hashable


@lru_cache(maxsize=256)
def _takes_no_tokens(kind: Any) -> bool:
    """True for a class of models which take images or sound only."""
    parameters = inspect.signature(kind.forward).parameters.values()
    passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return not passes_on and _TOKENS.isdisjoint(_parameters(kind)) and _takes_other(kind)


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
def _parameters(kind: Any) -> tuple[str, ...]:
    """Return names of the arguments of `forward`, without `self`."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
