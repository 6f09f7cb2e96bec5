"""Models whose loss is of whole rows: rewards, preferences (DPO, KTO), classes of rows.

The backbone sees this rank's tokens, and the head those of all ranks, on every rank alike. A head is cheap beside a
backbone, and most losses take few of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from cp_dtensor import context_parallel, context_parallel_shard, context_parallel_unshard
from cp_dtensor.api.extension import Mesh, attribute_replaced
from cp_dtensor.integrations.transformers.checks import (
    arguments_of,
    check_call,
    inputs_of,
    is_model,
    lacks_positions,
    refuse_own_positions,
)
from cp_dtensor.integrations.transformers.chosen import shards_are_seen
from cp_dtensor.integrations.transformers.layers import facts_of


@contextmanager
def whole_rows(model: nn.Module, mesh: Mesh, **options: Any) -> Iterator[None]:
    """While open, a model takes whole rows, equal on every rank, and its backbone computes this rank's tokens of them.

    Args:
        model: of transformers, perhaps inside of others, called outside of contexts. The mean of the ranks' gradients
            is the gradient of one process.
        mesh: the ranks that share the rows.
        options: of `context_parallel`.

    Raises:
        NotImplementedError: no model of transformers, or one whose head attends, too. When called: as models in
            contexts; a backbone that gives more than the last hidden states.
    """
    whole: Any = next(filter(is_model, model.modules()), None)
    if whole is None:
        raise NotImplementedError(f"a loss of whole rows needs a model of transformers, got {type(model).__name__}")
    backbone, inside = whole.base_model, {*whole.base_model.modules()}
    for module in whole.modules():
        if module not in inside and facts_of(module).calls_attention:
            raise NotImplementedError(
                f"{type(whole).__name__} has attention beside its backbone ({type(module).__name__}), so a loss of "
                "whole rows is not supported under context parallelism"
            )
    with attribute_replaced(backbone, "forward", partial(_of_shards, backbone.forward, backbone, mesh, options)):
        yield


def _of_shards(
    forward: Callable[..., Any], backbone: Any, mesh: Mesh, options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    given = arguments_of(backbone, args, kwargs)
    tokens = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    rows, length = tokens.shape[:2]
    if lacks_positions(backbone, given):
        refuse_own_positions(backbone, given)
        given["position_ids"] = torch.arange(length, device=tokens.device).repeat(rows, 1)
    if "use_cache" in inputs_of(backbone).names:
        given["use_cache"] = False
    shapes = {name: value.shape[:2] for name, value in given.items() if isinstance(value, torch.Tensor)}
    sequences = [name for name, shape in shapes.items() if shape in ((rows, length), (1, length))]
    layout = options.get("layout")
    shards = context_parallel_shard(mesh, [given[name] for name in sequences], [1] * len(sequences), layout)
    given.update(zip(sequences, shards, strict=True))
    with context_parallel(mesh, seq_len=length, **options):
        if shards_are_seen():
            check_call(backbone, (), given)
        out = forward(**given)
    others = [name for name, value in out.items() if name != "last_hidden_state" and value is not None]
    if others:
        raise NotImplementedError(
            f"{type(backbone).__name__} gives {', '.join(others)} of this rank's tokens, where the loss is of whole "
            "rows: expected last_hidden_state only"
        )
    # All ranks compute the same loss, and their gradients are averaged afterwards: the sum makes up for the mean.
    [out.last_hidden_state] = context_parallel_unshard(mesh, [out.last_hidden_state], [1], layout, grad="partial")
    return out
