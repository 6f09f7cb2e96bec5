"""Calls of recurrent layers, compared with the recurrence of one process, token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from cp_dtensor import Mask, context_parallel, gated_delta_rule, kda, linear_attention
from support.sequences import Sequence, check_layer, normal, recurrence

KINDS = ("gated_delta_rule", "delta_rule", "kda", "linear_attention", "simple_gla", "gla")
K, V, HEADS = 3, 2, 2


def problem(kind: str, batch: int, length: int, heads: int = HEADS) -> dict[str, torch.Tensor]:
    """The tensors of a layer, whole."""
    of_keys = 1 if kind in ("gated_delta_rule", "gla") else heads
    tensors = {"q": normal(batch, length, of_keys, K), "k": normal(batch, length, of_keys, K, seed=1)}
    tensors["v"] = normal(batch, length, heads, V, seed=2)
    if kind in ("gated_delta_rule", "simple_gla"):
        tensors["g"] = F.logsigmoid(normal(batch, length, heads, seed=3))
    if kind in ("kda", "gla"):
        tensors["g"] = 3 * F.logsigmoid(normal(batch, length, heads, K, seed=3))
    if kind in ("gated_delta_rule", "delta_rule", "kda"):
        tensors["beta"] = normal(batch, length, heads, seed=4).sigmoid()
        tensors["k"] = F.normalize(tensors["k"], dim=-1)
    return tensors


def layer(kind: str, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    """The result of a layer."""
    if kind == "kda":
        return kda(**tensors, **options)  # type: ignore[arg-type]
    if "beta" in tensors:
        return gated_delta_rule(**{"g": None, **tensors}, **options)  # type: ignore[arg-type]
    return linear_attention(**tensors, **options)  # type: ignore[arg-type]


def check(
    kind: str, sequence: Sequence, with_states: bool, mesh_shape: tuple[int, ...] = (),
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None, method: str = "scan",
    mask: Mask | None = None, around: Callable[..., Any] = lambda call, *tensors: call(*tensors),
    tolerance: float = 1e-9,
) -> None:  # fmt: skip
    """Compare out, final states and all gradients on every rank with one process, token by token.

    Args:
        mask: of a context around the call, which takes over the layout, the documents and the length from there.
        around: makes the call, such as a checkpoint.
    """
    batch = 1 if with_states and sequence.edges else sequence.batch
    heads = HEADS if method != "heads" else sequence.ranks * (1 + sequence.length % 2)
    whole = problem(kind, batch, sequence.length, heads)
    change(whole)
    names, of_states = list(whole), int(sequence.has_documents)
    documents = len(sequence.edges or ()) - 1 if sequence.has_documents else batch
    initial = [normal(documents, heads, K, V, seed=5)] * with_states

    def ours(mesh: Any, *tensors: torch.Tensor) -> Any:
        options: dict[str, Any] = {"mesh": mesh, "scale": 0.5, "method": method}
        if mask is None:
            options |= sequence.options()

        def call(*given: torch.Tensor) -> Any:
            states = {"initial_state": given[-1], "output_final_state": True} if with_states else {}
            return layer(kind, dict(zip(names, given, strict=False)), **options, **states)

        in_context = {"layout": sequence.layout, "mask": mask, "seq_len": sequence.length}
        with nullcontext() if mask is None else context_parallel(mesh, **in_context):  # type: ignore[arg-type]
            return around(call, *tensors)

    def reference(*tensors: torch.Tensor) -> Any:
        given = {"g": None, "beta": None, **dict(zip(names, tensors, strict=False))}
        states = [x.unsqueeze(of_states) for x in tensors[len(names) :]]
        out, finals = recurrence(sequence, **given, scale=0.5, initial=states[0] if states else None)  # type: ignore[arg-type]
        return (out, finals.squeeze(of_states)) if states else out

    check_layer(sequence, ours, reference, whole.values(), initial, mesh_shape=mesh_shape, tolerance=tolerance)
