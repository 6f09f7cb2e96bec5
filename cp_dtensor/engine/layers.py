"""Layers that mix tokens of a sharded sequence: their interface, and one operator for all of them in compiled code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.attention.convolution import causal_convolution
from cp_dtensor.engine.sequence import SequenceCall, document_edges, rows_of, sequence_calls
from cp_dtensor.plan.rows import Edges, Extended

Tensors = Sequence[Tensor | None]
MOST_TENSORS = 6
"""Arguments of the operator that are tensors."""


class SequenceLayer(ABC):
    """A layer whose first tensor is (B, this rank's tokens, ...). Its `repr` names it in compiled code."""

    @abstractmethod
    def forward(self, call: SequenceCall, tensors: Tensors, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        """The output of this rank's tokens and, if asked for, the final state; differentiable."""

    @abstractmethod
    def shapes(self, tensors: Tensors, documents: int) -> tuple[Sequence[int], Sequence[int] | None]:
        """The shapes of both results."""


@dataclass(frozen=True)
class CausalConv1d(SequenceLayer):
    """Depthwise convolution of x (B, T, C) by weight (C, K) and bias."""

    activation: str | None

    def forward(self, call: SequenceCall, tensors: Tensors, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        x, weight, bias, *_ = tensors
        assert x is not None
        assert weight is not None
        rows, outs = Extended(weight.size(1) - 1), []
        for (start, stop), sequence in call.sequences(seq_len, x.size(0), edges):
            extended = rows_of(x[start:stop], 1, rows, sequence, call.ranks)
            tokens = list(rows.tokens(sequence, call.ranks.rank))
            outs.append(causal_convolution(extended, tokens, weight, bias, self.activation))
        return outs[0] if len(outs) == 1 else torch.cat(outs), None

    def shapes(self, tensors: Tensors, documents: int) -> tuple[Sequence[int], Sequence[int] | None]:
        assert tensors[0] is not None
        return tensors[0].shape, None


# Operators in compiled code


def traced_layer(key: str, tensors: Tensors, cu_seqlens: Tensor | None, seq_len: int) -> tuple[Tensor, Tensor]:
    """Both results of a layer in a program that is being captured; an empty final state if it has none.

    Args:
        key: of the call in `sequence_calls`.
        seq_len: -1 if it is known only when the code runs.
    """
    padded = (*tensors, *[None] * (MOST_TENSORS - len(tensors)))
    results: tuple[Tensor, Tensor] = torch.ops.cp_dtensor.sequence_layer(*padded, cu_seqlens, key, seq_len)
    return results


def _run(tensors: Tensors, cu_seqlens: Tensor | None, key: str, seq_len: int) -> tuple[Tensor, Tensor]:
    call = sequence_calls.value_of(key)
    edges = document_edges(call.owner, cu_seqlens)
    x = tensors[0]
    assert x is not None
    length = call.length(x, 1, None if seq_len < 0 else seq_len, edges)
    out, final = call.operation.forward(call, tensors, length, edges)
    return out, x.new_empty(0) if final is None else final


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, seq_len = arguments
    with torch.no_grad():
        out, final = _run(tensors, cu_seqlens, key, seq_len)
    return out.contiguous(), final.contiguous()


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, _ = arguments
    documents = 1 if cu_seqlens is None else cu_seqlens.numel() - 1
    operation = sequence_calls.value_of(key).operation
    out, final = operation.shapes(tensors, documents)
    x = tensors[0]
    return x.new_empty(out), x.new_empty(0) if final is None else x.new_empty(final, dtype=wide_dtype(x))


def _backward(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of all tensors. The layer is computed again, so that nothing but its arguments is saved."""
    *tensors, cu_seqlens, key, seq_len, needed = arguments
    with _torch.autograd_recorded():
        leaves = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
        results = _run(leaves, cu_seqlens, key, seq_len)
        pairs = [(y, g) for y, g in zip(results, (grad_out, grad_final), strict=True) if y.requires_grad]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True))
    nothing = grad_out.new_empty(0)
    return tuple(next(grads).contiguous() if x is not None and x.requires_grad else nothing.clone() for x in leaves)


def _fake_backward(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _cu_seqlens, _key, _seq_len, needed = arguments
    return tuple(
        grad_out.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip(tensors, needed, strict=True)
    )


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, cu_seqlens, ctx.key, ctx.seq_len = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)


def _gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:MOST_TENSORS])
    grads = torch.ops.cp_dtensor.sequence_layer_backward(
        grad_out, grad_final, *ctx.saved_tensors, ctx.key, ctx.seq_len, needed
    )
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None


def _define() -> None:
    tensors = "Tensor x, " + "".join(f"Tensor? x{number}, " for number in range(1, MOST_TENSORS))
    arguments = f"{tensors}Tensor? cu_seqlens, str call, SymInt seq_len"
    grads = ", ".join(["Tensor"] * MOST_TENSORS)
    _torch.define_operator(
        f"sequence_layer({arguments}) -> (Tensor, Tensor)", _forward, _fake_forward, gradients=_gradients,
        save=_keep_arguments,
    )  # fmt: skip
    _torch.define_operator(
        f"sequence_layer_backward(Tensor grad_out, Tensor grad_final, {arguments}, bool[] needed) -> ({grads})",
        _backward, _fake_backward,
    )  # fmt: skip


_define()
