"""Layers that mix tokens of a sharded sequence: their interface, and one operator for all of them in compiled code."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_dtensor.api.extension import (
    SequenceRanks,
    autograd_recorded,
    cluster_of,
    define_operator,
    fastest,
    no_autocast,
    wide_dtype,
)
from cp_dtensor.layers.call import SequenceCall, document_edges, rows_of, sequence_call_of
from cp_dtensor.layers.chunked import ChunkedRecurrence
from cp_dtensor.layers.convolution import causal_convolution
from cp_dtensor.layers.cost import RecurrenceSpec, recurrence_estimates
from cp_dtensor.layers.fla import FlaRecurrence, fla_serves
from cp_dtensor.layers.methods import METHODS, Rows, axis_of_heads
from cp_dtensor.layers.rows import Edges, Extended, SequenceLayout
from cp_dtensor.layers.scan import scan_plan, scanned
from cp_dtensor.spec.logs import log_once

Inputs = Sequence[Any]
"""Tensors of a layer, None for those that it was not given."""
MOST_TENSORS = 6
"""Arguments of the operator that are tensors."""


class SequenceLayer(ABC):
    """A layer whose first tensor is (B, this rank's tokens, ...). Its `repr` names it in compiled code."""

    of_tokens: ClassVar[int] = 1
    """The number of tensors, the first ones, that have these dims."""

    @abstractmethod
    def forward(self, call: SequenceCall, tensors: Inputs, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        """The output of this rank's tokens and, if asked for, the final state; differentiable."""

    def length(self, call: SequenceCall, tensors: Inputs, seq_len: int | None, edges: Edges) -> int:
        """The global length, checked or found."""
        others = [
            (index, str(x.dtype), *x.shape[2 if index < self.of_tokens else 1 :])
            for index, x in enumerate(tensors)
            if index and x is not None
        ]
        return call.length(tensors[0], 1, seq_len, edges, tuple(others))

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        """Shape and dtype of the final state, None if there is none; the output has those of the first tensor."""
        return None


@dataclass(frozen=True)
class CausalConv1d(SequenceLayer):
    """Depthwise convolution of x (B, T, C) by weight (C, K) and bias."""

    activation: str | None

    def forward(self, call: SequenceCall, tensors: Inputs, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        x, weight, bias, *_ = tensors
        rows, outs = Extended(weight.size(1) - 1), []
        for (start, stop), sequence in call.sequences(seq_len, x.size(0), edges):
            extended = rows_of(x[start:stop], 1, rows, sequence, call.ranks)
            tokens = list(rows.tokens(sequence, call.ranks.rank))
            outs.append(causal_convolution(extended, tokens, weight, bias, self.activation))
        return outs[0] if len(outs) == 1 else torch.cat(outs), None


@dataclass(frozen=True)
class LinearRecurrence(SequenceLayer):
    """`ChunkedRecurrence` of v (B, T, H, V), q and k (B, T, H', K), g, beta and the initial state.

    H is a multiple of H'. v may be wider than q and k; kernels round it. States are (B, H, K, V), with
    documents (documents, H, K, V), in float32 or float64.
    """

    of_tokens = 5  # all but the initial state
    owner: str
    scale: float | None
    """None for 1 / sqrt(K), which is a symbol where compiled code has dynamic shapes."""
    normalizes: bool
    """True if q and k are divided by their norms first."""
    returns_state: bool
    method: str = "auto"
    """Key of `METHODS`, or "auto"."""

    def length(self, call: SequenceCall, tensors: Inputs, seq_len: int | None, edges: Edges) -> int:
        self._check_states(tensors[0], tensors[-1], edges)
        self._check_heads(tensors[0], call.ranks)
        return super().length(call, tensors, seq_len, edges)

    def forward(self, call: SequenceCall, tensors: Inputs, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        *given, initial = tensors
        outs, finals = [], []
        for (start, stop), sequence in call.sequences(seq_len, given[0].size(0), edges):
            some: list[Any] = [x if x is None else x[start:stop] for x in given]
            rows = Rows(*some)
            states = None
            if initial is not None:  # (documents, B, H, K, V)
                states = (initial.unsqueeze(1) if edges else initial[start:stop].unsqueeze(0)).to(wide_dtype(rows.v))
            by_method = METHODS[self._method(rows, sequence, call.ranks)]
            out, ends = by_method(self._prepared, rows, sequence, call.ranks, states, self.returns_state)
            outs.append(out.to(rows.v.dtype))
            if ends is not None:
                finals.append(ends.squeeze(1) if edges else ends.squeeze(0))
        return torch.cat(outs), torch.cat(finals) if finals else None

    def _prepared(self, rows: Rows, lengths: Sequence[int]) -> ChunkedRecurrence | FlaRecurrence:
        v, q, k, g, beta = rows
        has_kernels = fla_serves(q, v, g, beta is not None, lengths)
        v = v.to(q.dtype if has_kernels else v.dtype)
        if self.normalizes:
            q, k = _normalized(q), _normalized(k)
        if q.size(2) != v.size(2):
            q, k = (x.repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k))
        recurrence = FlaRecurrence if has_kernels else ChunkedRecurrence
        scale = k.size(3) ** -0.5 if self.scale is None else self.scale
        return recurrence.of(q, k, v, g, beta, scale, lengths)

    def _method(self, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks) -> str:
        """The method of a call, alike on every rank; "auto" takes the one that is predicted to be fastest."""
        v = rows.v
        if self.method != "auto":
            return self.method
        if not self._is_predicted(v, ranks):
            return "scan"
        spec = recurrence_spec(rows, sequence)
        cluster = cluster_of(ranks, v.device, v.dtype.itemsize)
        found = recurrence_estimates(spec, cluster, one_axis=axis_of_heads(ranks) is not None)
        times = ", ".join(f"{name} {1e3 * each.seconds:.3g} ms" for name, each in found.items())
        log_once("engine", logging.INFO, f'{self.owner}: "auto" takes {fastest(found)}, the first within 5%: {times}')
        return fastest(found)

    def _is_predicted(self, v: Tensor, ranks: SequenceRanks) -> bool:
        return ranks.size > 1 and v.device.type == "cuda"  # the cost model is of GPUs

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        v, q, *_ = tensors
        rows = v.size(0) if documents is None else documents
        return ((rows, v.size(2), q.size(3), v.size(3)), wide_dtype(v)) if self.returns_state else None

    def _check_heads(self, v: Tensor, ranks: SequenceRanks) -> None:
        """Refuses the exchange of heads where these do not divide, and over two axes."""
        axis = axis_of_heads(ranks)
        if self.method == "heads" and (axis is None or v.size(2) % ranks.size):
            raise ValueError(
                f'{self.owner} with method "heads" expects ranks along one mesh axis and a multiple of their number as '
                f'heads, got {v.size(2)} heads and {ranks.size} ranks along {1 + (axis is None)}: use method="auto"'
            )

    def _check_states(self, v: Tensor, initial: Tensor | None, edges: Edges) -> None:
        """Refuses states of documents in several batch rows, and another number of them."""
        if edges and v.size(0) != 1 and (initial is not None or self.returns_state):
            raise ValueError(f"{self.owner} with documents and states expects one batch row, got v {tuple(v.shape)}")
        states = len(edges) - 1 if edges else v.size(0)
        if initial is not None and initial.size(0) != states:
            raise ValueError(
                f"{self.owner} expects an initial state of each {'document' if edges else 'batch row'}, {states}, got "
                f"{tuple(initial.shape)}"
            )


@dataclass(frozen=True)
class AffineScan(SequenceLayer):
    """The states (pieces, ..., K, V) that enter this rank's pieces. Tensors: state, transition, initial state."""

    owner: str
    returns_state: bool

    def length(self, call: SequenceCall, tensors: Inputs, seq_len: int | None, edges: Edges) -> int:
        assert seq_len is not None
        call.check_edges(edges, seq_len)
        return seq_len

    def forward(self, call: SequenceCall, tensors: Inputs, seq_len: int, edges: Edges) -> tuple[Tensor, Tensor | None]:
        state, transition, initial, *_ = tensors
        if len(call.layout.batch_groups(2)) > 1:
            raise NotImplementedError(
                f"{self.owner} expects a layout that divides all batch rows alike, got {call.layout}"
            )
        ((_, sequence),) = call.sequences(seq_len, 1, edges)
        plan = scan_plan(sequence, call.ranks.rank, self.returns_state)
        documents = max(len(edges) - 1, 1)
        if state.size(0) != len(plan.documents):
            raise ValueError(
                f"{self.owner} expects a map of each of this rank's runs, {sequence.pieces(plan.rank)}, got state "
                f"{tuple(state.shape)}"
            )
        if initial is not None and initial.size(0) != documents:
            raise ValueError(
                f"{self.owner} expects an initial state of each of {documents} documents, got {tuple(initial.shape)}"
            )
        sent = torch.tensor(plan.sent, dtype=torch.int64, device=state.device)
        maps = transition.index_select(0, sent), state.index_select(0, sent)
        entering, final = scanned(*maps, plan, call.ranks, initial, documents, self.returns_state)
        nothing = torch.zeros_like(state[0])
        return torch.stack([nothing if each is None else each for each in entering]), final

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        state = tensors[0]
        return ((documents or 1, *state.shape[1:]), state.dtype) if self.returns_state else None


def recurrence_spec(rows: Rows, sequence: SequenceLayout) -> RecurrenceSpec:
    """The numbers that the cost of a recurrent layer depends on."""
    v, q, _, g, beta = rows
    of_token = [math.prod(x.shape[2:]) * x.dtype.itemsize for x in rows if x is not None]
    return RecurrenceSpec(
        sequence, v.size(0), v.size(2), q.size(3), v.size(3), sum(of_token),
        v.size(2) * v.size(3) * q.dtype.itemsize, beta is not None, g is not None and g.dim() == 4,
    )  # fmt: skip


def _normalized(x: Tensor) -> Tensor:
    wide = x.to(wide_dtype(x))
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)


# Operators in compiled code


def traced_layer(key: str, tensors: Inputs, cu_seqlens: Tensor | None, seq_len: int) -> tuple[Tensor, Tensor]:
    """Both results of a layer in a program that is being captured; an empty final state if it has none.

    Args:
        key: of the call.
        seq_len: -1 if it is known only when the code runs.
    """
    padded = (*tensors, *[None] * (MOST_TENSORS - len(tensors)))
    results: tuple[Tensor, Tensor] = torch.ops.cp_dtensor.sequence_layer(*padded, cu_seqlens, key, seq_len)
    return results


def _run(tensors: Inputs, cu_seqlens: Tensor | None, key: str, seq_len: int) -> tuple[Tensor, Tensor]:
    call = sequence_call_of(key)
    edges = document_edges(call.owner, cu_seqlens)
    length = call.operation.length(call, tensors, None if seq_len < 0 else seq_len, edges)
    with no_autocast(tensors[0]):
        out, final = call.operation.forward(call, tensors, length, edges)
    return out, out.new_empty(0) if final is None else final


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, seq_len = arguments
    with torch.no_grad():
        out, final = _run(tensors, cu_seqlens, key, seq_len)
    return out.contiguous(), final.contiguous()


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, _ = arguments
    documents = None if cu_seqlens is None or cu_seqlens.numel() == 1 else cu_seqlens.numel() - 1
    final = sequence_call_of(key).operation.final_state(tensors, documents)
    x = tensors[0]
    return x.new_empty(x.shape), x.new_empty(0) if final is None else x.new_empty(final[0], dtype=final[1])


def _backward(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of all tensors. The layer is computed again, so that nothing but its arguments is saved."""
    *tensors, cu_seqlens, key, seq_len, needed = arguments
    with autograd_recorded():
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
    define_operator(
        f"sequence_layer({arguments}) -> (Tensor, Tensor)", _forward, _fake_forward, gradients=_gradients,
        save=_keep_arguments,
    )  # fmt: skip
    define_operator(
        f"sequence_layer_backward(Tensor grad_out, Tensor grad_final, {arguments}, bool[] needed) -> ({grads})",
        _backward, _fake_backward,
    )  # fmt: skip


_define()
