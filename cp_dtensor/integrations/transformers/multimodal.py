"""Calls of models that take images or sound: all but the language model gets the whole sequence.

Such a model makes embeddings, positions and masks by its own code, as in one process. Attention of its towers is left
to each rank. Where it calls its language model, the arguments become this rank's shards, and attention is that of the
context. So logits are those of this rank's tokens, and gradients reach the towers through the embeddings.

Towers are not called before the context: FSDP2 refuses embeddings and projectors, which its root holds, outside of the
root's forward, and positions, masks of image blocks and deepstack features would be made again here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from cp_dtensor import Layout
from cp_dtensor.api.extension import (
    Call,
    OpenContext,
    Segment,
    SequenceRanks,
    attribute_replaced,
    content_hash,
    entered,
    entry_replaced,
    gathered_shards,
    innermost,
    is_handle,
    local_sdpa,
    take_shard,
)
from cp_dtensor.integrations.transformers.private import PASSED_ON

SHARD_IMAGES = "shard_images"
"""Argument of models in contexts: True divides images, frames and sounds over the ranks."""


@dataclass(eq=False)
class WholeCall:
    """A call of a model with the whole sequence on every rank."""

    context: OpenContext
    tokens: torch.Tensor  # (B, S) ids or (B, S, D) embeddings
    config_class: type  # of the configuration of the language model
    has_reached: bool = False  # the language model was called

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shard_images: bool) -> Any:
        """Call the model, whose parts then call `run_part`.

        Raises:
            ValueError: ranks that have other tokens; on every rank alike.
            NotImplementedError: towers that `shard_images` cannot divide; no language model of its own.
        """
        # The model with a head has methods of these names, too, which its body does not call.
        methods = [
            (part, name)
            for part in (model.modules() if shard_images else ())
            for name in _FEATURES
            if hasattr(part, name) and not hasattr(getattr(part, "model", None), name)
        ]
        if shard_images and not methods:
            raise NotImplementedError(
                f"{type(model).__name__} calls its towers by none of {', '.join(_FEATURES)}, which shard_images=True "
                "divides: pass shard_images=False"
            )
        ranks, (rows, length) = self.context.call.ranks, self.tokens.shape[:2]
        facts = ranks.gather_integers([rows, length, content_hash(self.tokens)], self.tokens.device)
        if len({*map(tuple, facts)}) > 1:
            raise ValueError(
                f"{type(model).__name__} got other tokens on each rank of a sequence, of (rows, tokens) "
                f"{[tuple(each[:2]) for each in facts]}: expected the same whole inputs on every rank"
            )
        with ExitStack() as stack:
            for part, name in methods:
                divided = partial(_divided, self.context, getattr(part, name))
                stack.enter_context(attribute_replaced(part, name, divided))
            stack.enter_context(local_sdpa(queries_are_shards=False))
            stack.enter_context(entry_replaced(_running, self.context, self))
            out = nn.Module.__call__(model, *args, **kwargs)
        if not self.has_reached:
            raise NotImplementedError(
                f"{type(model).__name__} did not call a language model of {self.config_class.__name__} inside of "
                "context_parallel, so that each rank has computed the whole sequence: make its tokens buffers"
            )
        return out

    def run_part(self, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_tower: bool) -> Any:
        """Call a model that is a part of the model."""
        if type(part.config) is self.config_class and not is_tower:
            return self._run_language_model(part, args, kwargs)
        with entry_replaced(_running, self.context, None if is_tower else self):
            return nn.Module.__call__(part, *args, **kwargs)

    def _run_language_model(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _arguments(part.forward, args, kwargs)
        embeddings, (rows, length) = given.get("inputs_embeds"), self.tokens.shape[:2]
        if embeddings is None or embeddings.shape[:2] != (rows, length):
            raise NotImplementedError(
                f"{type(part).__name__} inside of context_parallel expects inputs_embeds of the whole sequence, of "
                f"shape ({rows}, {length}, ...), got {None if embeddings is None else tuple(embeddings.shape)}"
            )
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(length, device=embeddings.device).expand(rows, -1)
        self.has_reached = True
        call = replace(self.context.call, lengths=tuple(sorted({*self.context.call.lengths, length})))
        self.context.seen.add("whole inputs")
        local = _shards(call, rows, length, given, [each.buffer.tensor for each in self.context.buffers])
        # Another object than the context, since `local_sdpa` holds in that one.
        with entered(replace(self.context, call=call, buffers=())):
            return part(**local)


_running: Any = WeakKeyDictionary()
"""By context: the call whose code runs now; none in towers."""


def whole_call() -> WholeCall | None:
    """Return the call with the whole sequence whose code this thread runs; None in towers and language models."""
    context = innermost()
    return None if context is None else _running.get(context)


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the function's."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    others = [name for name, each in signature.parameters.items() if each.kind is inspect.Parameter.VAR_KEYWORD]
    for name in others:
        given.update(given.pop(name, {}))
    return given


# Arguments of the language model


def _shards(call: Call, rows: int, length: int, given: dict[str, Any], buffers: list[torch.Tensor]) -> dict[str, Any]:
    """Return this rank's shards of arguments, whose shapes tell where the sequence is."""
    flags = [x for x in given.values() if isinstance(x, torch.Tensor) and x.dtype == torch.bool]

    def shard(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return take_shard(tensor, dim, call.layout, call.ranks.rank, call.ranks.size)

    def of(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(name, each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(of(name, each) for each in value)
        is_whole = isinstance(value, torch.Tensor) and value.dim() and not is_handle(value)
        if not is_whole or name.startswith("cu_seq_lens") or any(value is each for each in buffers):
            return value
        if value.shape[:2] == (rows, length):
            return shard(value, 1)
        if value.dim() in (2, 3) and value.shape[-2:] in ((rows, length), (1, length)):  # positions of several axes
            by_row = value.expand(*value.shape[:-2], rows, length).movedim(-2, 0)
            return shard(by_row, by_row.dim() - 1).movedim(0, -2)
        for flag in flags:
            # Values of flagged tokens, such as deepstack_visual_embeds, row by row.
            if flag.shape == (rows, length) and int(flag.sum()) == value.size(0):
                places = (flag.flatten().cumsum(0) - 1).view(rows, length)
                return value[shard(places, 1)[shard(flag, 1)]]
        raise NotImplementedError(
            f"the language model got {name} of shape {tuple(value.shape)} inside of context_parallel, of which it is "
            f"not known how tokens ({rows}, {length}) divide it"
        )

    return {name: of(name, value) for name, value in given.items()}


# Towers whose inputs are divided

_FEATURES = ("get_image_features", "get_video_features", "get_audio_features")
"""Methods by which models call their towers and project the results."""
_SEQUENCES_OF_FRAMES = frozenset({"get_vision_cu_seqlens", "get_vision_attention_seqlens"})
"""Functions of transformers that make each frame a sequence of its own, unless they get `merge_temporal=True`."""


@dataclass(frozen=True)
class _Parts(Layout):
    """Rank r owns the r-th of adjacent parts."""

    lengths: tuple[int, ...]

    @property
    def only_length(self) -> int:
        return sum(self.lengths)

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        return (Segment.contiguous(sum(self.lengths[:rank]), sum(self.lengths[: rank + 1])),)


def _divided(context: OpenContext, features: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of `_FEATURES` with this rank's images, frames or sounds; return the results of all ranks.

    Ranks get adjacent ones, of about equally many patches. A rank that gets none computes the first one and returns
    nothing of it, so that all ranks make the same collectives of FSDP.

    Raises:
        RuntimeError: the method fails on some ranks, as Mistral 3's does for one image of one token; on every rank.
    """
    call = whole_call()
    if call is None:  # that for video may call that for images, which are divided by now
        return features(*args, **kwargs)
    what, model, ranks, device = features.__name__, features.__self__, context.call.ranks, call.tokens.device
    for part in model.modules():
        if "BatchNorm" in type(part).__name__ and part.training:
            raise NotImplementedError(f"{what}: {type(part).__name__} mixes images, which shard_images=True divides")
    given = _arguments(features, args, kwargs)
    grids = [each for name, each in given.items() if name.endswith("grid_thw") and each is not None]
    if any(len(each) > 1 for each in grids) and not _images_are_apart(model):
        raise NotImplementedError(
            f"{what}: in this version of transformers images of one call attend to each other in the tower of "
            f"{type(model).__name__}, which shard_images=True divides: pass shard_images=False"
        )
    own, count = _own_images(ranks, what, given, _frames_are_apart(model))
    error: Exception | None = None
    try:
        with entry_replaced(_running, context, None):
            out = features(**own)
    except Exception as caught:  # the other ranks hear of it, since they would wait for the features
        error = caught
    if any(ranks.gather_integers(int(error is not None), device)):
        reasons = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}", device)
        raise RuntimeError(
            f"{what} with shard_images=True failed for the images of some ranks, "
            f"{ ({rank: each for rank, each in enumerate(reasons) if each is not None}) }: pass shard_images=False"
        ) from error
    whole: Callable[[Any], Any] = partial(_of_all_ranks, ranks, count, what)
    if isinstance(out, (torch.Tensor, list, tuple)):
        return whole(out)
    # The last hidden state has all patches, and only some audio models read it.
    names = ["pooler_output", "attention_mask", "deepstack_features"]
    names += ["last_hidden_state"] if "audio" in what or getattr(out, "pooler_output", None) is None else []
    found: Any = type(out)()  # of attributes, which are not always fields of its class
    for name in names:
        mine = getattr(out, name, None)
        if mine is not None:
            setattr(found, name, [*map(whole, mine)] if name == "deepstack_features" else whole(mine))
    return found


def _own_images(
    ranks: SequenceRanks, what: str, given: dict[str, Any], frames_are_apart: bool
) -> tuple[dict[str, Any], int]:
    """Return arguments of a method of `_FEATURES` for this rank's images, and how many images it has."""
    first, values = next(iter(given.items()))
    if "pixel_attention_mask" in given and values.dim() == 5:  # (rows, images, ...), padding is zeros
        kept, mask = values.flatten(2).any(-1), given["pixel_attention_mask"]
        values = given[first] = values[kept][:, None]
        given["pixel_attention_mask"] = None if mask is None else mask[kept][:, None]
    grid = next((name for name in given if name.endswith("grid_thw")), None)
    if grid is not None:
        if frames_are_apart:
            each_frame = F.pad(given[grid][:, 1:], (1, 0), value=1)
            given[grid] = each_frame.repeat_interleave(given[grid][:, 0], 0)
        patches = given[grid].prod(-1).tolist()
    else:
        masks = [each for name, each in given.items() if name.endswith("mask") and _has(each, len(values))]
        patches = masks[0].flatten(1).sum(1).tolist() if masks else [1] * len(values)
    units, counts = len(patches), _counts(patches, ranks.size)
    start, stop = sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1])
    own = slice(start, stop) if start < stop else slice(0, 1)
    for name, value in given.items():
        if name == first and grid is not None:
            given[name] = value[sum(patches[: own.start]) : sum(patches[: own.stop])]
        elif _has(value, units):
            given[name] = value[own]
        elif isinstance(value, torch.Tensor) and value.dim() and name not in PASSED_ON and "cu_seq_lens" not in name:
            raise NotImplementedError(
                f"{what} got {name} of shape {tuple(value.shape)}, which shard_images=True cannot divide by {units} "
                "images"
            )
    return given, stop - start


def _has(value: Any, units: int) -> bool:
    """Return whether a value has one entry for each image."""
    return (isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)) and (
        len(value) == units
    )


def _codes(model: nn.Module) -> list[CodeType]:
    """Return the code of forward of each part of a model."""
    return [inspect.unwrap(type(part).forward).__code__ for part in model.modules()]


def _images_are_apart(model: nn.Module) -> bool:
    """Return whether a tower that gets the patches of all images as one sequence knows where each image begins."""
    return any("cu_seqlens" in (*code.co_varnames, *code.co_names) for code in _codes(model))


def _frames_are_apart(model: nn.Module) -> bool:
    """Return whether frames of a video do not attend to each other, as the code of a tower tells."""
    users = [code for code in _codes(model) if not _SEQUENCES_OF_FRAMES.isdisjoint(code.co_names)]
    return bool(users) and not any("merge_temporal" in str(code.co_consts) for code in users)


def _counts(patches: list[int], size: int) -> list[int]:
    """Return how many adjacent images each rank gets.

    >>> _counts([4, 4, 8, 2], 2), _counts([100], 3)
    ([2, 2], [0, 1, 0])
    """
    middles = [end - own / 2 for own, end in zip(patches, accumulate(patches), strict=True)]
    owners = [min(int(middle * size / max(sum(patches), 1)), size - 1) for middle in middles]
    return [owners.count(rank) for rank in range(size)]


def _of_all_ranks(ranks: SequenceRanks, units: int, what: str, own: Any) -> Any:
    """Gather features (..., D) of a rank's images, or a list of such, in the order of ranks; gradients are summed."""
    pieces = [own] if isinstance(own, torch.Tensor) else [*own]
    is_one_row = len(pieces) == 1 and pieces[0].dim() == 3 and len(pieces[0]) == 1 and units > 1
    shapes_of_rank = [tuple(each.shape) for each in pieces] if units else []
    one_rows, by_rank = zip(*ranks.gather_objects((is_one_row, shapes_of_rank), pieces[0].device), strict=True)
    if any(one_rows):
        raise NotImplementedError(f"{what} returns features of several images as one row: pass shard_images=False")
    shapes = [shape for each in by_rank for shape in each]
    flat = torch.cat([each.flatten(0, -2) for each in pieces])
    layout = _Parts(tuple(sum(math.prod(shape[:-1]) for shape in each) for each in by_rank))
    whole = gathered_shards(flat if units else flat[:0], layout, ranks, what, dim=0, has_gradient=True)
    parts = whole.split([math.prod(shape[:-1]) for shape in shapes])
    found = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return torch.cat(found) if isinstance(own, torch.Tensor) else type(own)(found)
