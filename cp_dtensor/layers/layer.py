"""Operations on tokens of a sharded sequence: their interface, and one operator for all of them in compiled code."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import (
    SequenceRanks,
    autograd_recorded,
    cluster_of,
    define_operator,
    fastest,
    indexable,
    no_autocast,
    refuse_first_dim,
    wide_dtype,
)
from cp_dtensor.layers.call import SequenceCall, operation_of, sequence_call_of
from cp_dtensor.layers.chunked import ChunkedRecurrence, Rows
from cp_dtensor.layers.cost import recurrence_estimates
from cp_dtensor.layers.exchange import rows_of
from cp_dtensor.layers.fla import FlaRecurrence, fla_serves
from cp_dtensor.layers.rows import Extended, Relayout, RowMap, SequenceLayout
from cp_dtensor.layers.scan import METHODS, axis_of_heads, scan_plan, scanned
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.logs import log_once

Inputs = Sequence[Any]
"""Tensors of a layer, None for those that it was not given."""
Result = tuple[Tensor, Tensor | None]
"""The output of this rank's tokens and, if asked for, the final state."""
MOST_TENSORS = 6
"""Arguments of the operator that are tensors."""


class SequenceLayer(ABC):
    """An operation whose first tensor is (B, this rank's tokens, ...). Its `repr` names it in compiled code."""

    dims: ClassVar[tuple[str, ...]]
    """For each tensor, its dims as letters, which tensors share: "B" batch, "T" this rank's tokens, "N" its blocks."""
    saves_tensors: ClassVar[bool] = True
    """False if gradients in compiled code need no tensors of the forward."""
    dim: int = 1
    """The dim of the first tensor that is the sequence."""
    keeps_rows: bool = True
    """True if the output has as many rows as the first tensor, on every rank."""
    takes_mask: ClassVar[bool] = False
    """True if the operation has a field `mask`, the keys of each query: of contexts it takes masks, not documents."""
    is_sparse: ClassVar[bool] = False
    """True if it selects keys or reads selected ones, whose gradients kernels add in any order."""

    @abstractmethod
    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        """Compute the result; differentiable."""

    def gradients(
        self, call: SequenceCall, tensors: Inputs, grads: tuple[Tensor, Tensor], needed: Sequence[bool]
    ) -> list[Tensor]:
        """Return gradients of the needed tensors, given those of the result: by a forward, computed again."""
        leaves = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
        with autograd_recorded():
            results = _result(call, leaves)
            pairs = [(y, grad) for y, grad in zip(results, grads, strict=True) if y.requires_grad]
            outs, of_outs = [y for y, _ in pairs], [grad for _, grad in pairs]
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            return [*torch.autograd.grad(outs, wanted, of_outs, materialize_grads=True)]

    def agreed(self, call: SequenceCall, tensors: Inputs) -> SequenceCall:
        """Return the call with its global length, checked or found."""
        return call.agreed(tensors)

    def check(self, call: SequenceCall, tensors: Inputs) -> None:  # noqa: B027, most layers take any
        """Refuse, by a ValueError or NotImplementedError, what does not fit the call, whose global length is known."""

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        """Return an empty tensor like the output, with other rows than the first tensor unless they are -1."""
        return _resized(tensors[0], self.dim, rows)

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        """Return shape and dtype of the final state, None if there is none."""
        return None


@dataclass(frozen=True)
class Moved(SequenceLayer):
    """The rows of this rank by a row map; in eager code differentiable any number of times."""

    dims = (ascii_letters,)
    saves_tensors = False
    row_map: RowMap
    dim: int

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.row_map.keeps_rows

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        target = (self.row_map.target,) if isinstance(self.row_map, Relayout) else ()
        for each in (call.layout, *target) if self.dim == 0 else ():
            refuse_first_dim(call.owner, each)

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        x = tensors[0]
        out = self._moved(call, x if x.requires_grad else indexable(x), transposed=False)
        return out if out.dtype == x.dtype else out.view(x.dtype), None

    def gradients(
        self, call: SequenceCall, tensors: Inputs, grads: tuple[Tensor, Tensor], needed: Sequence[bool]
    ) -> list[Tensor]:
        return [self._moved(call, grads[0], transposed=True)]

    def _moved(self, call: SequenceCall, x: Tensor, *, transposed: bool) -> Tensor:
        parts = [
            rows_of(x[start:stop], self.dim, row_map, sequence, call.ranks, transposed=transposed)
            for (start, stop), sequence, row_map in self._groups(call, x.size(0))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _groups(self, call: SequenceCall, batch_size: int) -> Iterator[tuple[Span, SequenceLayout, RowMap]]:
        """Yield batch rows that are divided alike, in both layouts if there are two, with sequence and row map."""
        for (start, stop), sequence in call.sequences(batch_size):
            if not isinstance(self.row_map, Relayout):
                yield (start, stop), sequence, self.row_map
                continue
            for group, (first, last) in enumerate(self.row_map.target.batch_groups(batch_size)):
                rows = max(start, first), min(stop, last)
                if rows[0] < rows[1] or batch_size == 0:
                    yield rows, sequence, replace(self.row_map, group=group)


@dataclass(frozen=True)
class CausalConv1d(SequenceLayer):
    """Depthwise convolution of x (B, T, C) by weight (C, K) and bias."""

    dims = "BTC", "CK", "C"
    activation: str | None

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        x, weight, bias, *_ = tensors
        rows, outs = Extended(weight.size(1) - 1), []
        for (start, stop), sequence in call.sequences(x.size(0)):
            extended = rows_of(x[start:stop], 1, rows, sequence, call.ranks)
            outs.append(self._convolution(extended, [*rows.tokens(sequence, call.ranks.rank)], weight, bias))
        return outs[0] if len(outs) == 1 else torch.cat(outs), None

    def _convolution(self, extended: Tensor, tokens: list[Span], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution at ranges of rows, each after at least K - 1 rows, of extended (B, E, C)."""
        before, count = weight.size(1) - 1, sum(stop - start for start, stop in tokens)
        if not count:  # torch refuses fewer rows than K; the gradients are zeros
            out = extended[:, :0] * weight[:, 0]
            out = out if bias is None else out + bias
            return out * out  # saves a tensor: a checkpoint recomputes up to here, past the exchange
        out = F.conv1d(extended.transpose(1, 2), weight.unsqueeze(1), bias, groups=weight.size(0)).transpose(1, 2)
        if out.size(1) > count:
            out = torch.cat([out[:, start - before : stop - before] for start, stop in tokens], 1)
        return out if self.activation is None else F.silu(out)


@dataclass(frozen=True)
class LinearRecurrence(SequenceLayer):
    """`ChunkedRecurrence` of v (B, T, H, V), q and k (B, T, H', K), g, beta and the initial state.

    H is a multiple of H'. v may be wider than q and k; kernels round it. States are (B, H, K, V), with
    documents (documents, H, K, V), in float32 or float64.
    """

    dims = "BTHV", "BTHK", "BTHK", "BTHK", "BTH", "BHKV"
    scale: float | None
    """None for 1 / sqrt(K), which is a symbol where compiled code has dynamic shapes."""
    normalizes: bool
    """True if q and k are divided by their norms first."""
    returns_state: bool
    method: str = "auto"
    """Key of `METHODS`, or "auto"."""

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        v, initial, owner, edges = tensors[0], tensors[-1], call.owner, call.edges
        if edges and v.size(0) != 1 and (initial is not None or self.returns_state):
            raise ValueError(f"{owner} with documents and states expects one batch row, got v {tuple(v.shape)}")
        states = len(edges) - 1 if edges else v.size(0)
        if initial is not None and initial.size(0) != states:
            raise ValueError(
                f"{owner} expects an initial state of each {'document' if edges else 'batch row'}, {states}, got "
                f"{tuple(initial.shape)}"
            )
        axis, size = axis_of_heads(call.ranks), call.ranks.size
        if self.method == "heads" and (axis is None or v.size(2) % size):
            raise ValueError(
                f'{owner} with method "heads" expects ranks along one mesh axis and a multiple of their number as '
                f'heads, got {v.size(2)} heads and {size} ranks along {1 + (axis is None)}: use method="auto"'
            )

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        *given, initial = tensors
        outs, finals = [], []
        for (start, stop), sequence in call.sequences(given[0].size(0)):
            some: list[Any] = [x if x is None else x[start:stop] for x in given]
            rows = Rows(*some)
            states = None
            if initial is not None:  # (documents, B, H, K, V)
                states = initial.unsqueeze(1) if call.edges else initial[start:stop].unsqueeze(0)
                states = states.to(wide_dtype(rows.v))
            by_method = METHODS[self._method(call, rows, sequence)]
            out, ends = by_method(self._prepared, rows, sequence, call.ranks, states, self.returns_state)
            outs.append(out.to(rows.v.dtype))
            if ends is not None:
                finals.append(ends.squeeze(1) if call.edges else ends.squeeze(0))
        return torch.cat(outs), torch.cat(finals) if finals else None

    def _prepared(self, rows: Rows, lengths: Sequence[int]) -> ChunkedRecurrence | FlaRecurrence:
        has_kernels, (v, q, k, *_) = fla_serves(rows, lengths), rows
        v = v.to(q.dtype if has_kernels else v.dtype)
        if self.normalizes:
            q, k = _normalized(q), _normalized(k)
        if q.size(2) != v.size(2):
            q, k = (x.repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k))
        recurrence = FlaRecurrence if has_kernels else ChunkedRecurrence
        scale = k.size(3) ** -0.5 if self.scale is None else self.scale
        return recurrence.of(rows._replace(v=v, q=q, k=k), scale, lengths)

    def _method(self, call: SequenceCall, rows: Rows, sequence: SequenceLayout) -> str:
        """Return the method of a call, alike on every rank; "auto" takes the one that is predicted to be fastest."""
        ranks, v = call.ranks, rows.v
        if self.method != "auto":
            return self.method
        if not self._is_predicted(v, ranks):
            return "scan"
        cluster = cluster_of(ranks, v.device, v.dtype.itemsize)
        found = recurrence_estimates(rows, sequence, cluster, one_axis=axis_of_heads(ranks) is not None)
        times = ", ".join(f"{name} {1e3 * each.seconds:.3g} ms" for name, each in found.items())
        log_once("engine", logging.INFO, f'{call.owner}: "auto" takes {fastest(found)}, the first within 2%: {times}')
        return fastest(found)

    def _is_predicted(self, v: Tensor, ranks: SequenceRanks) -> bool:
        return ranks.size > 1 and v.device.type == "cuda"  # the cost model is of GPUs

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        v, q, *_ = tensors
        rows = v.size(0) if documents is None else documents
        return ((rows, v.size(2), q.size(3), v.size(3)), wide_dtype(v)) if self.returns_state else None


@dataclass(frozen=True)
class AffineScan(SequenceLayer):
    """The states (pieces, ..., K, V) that enter this rank's pieces. Tensors: state, transition, initial state."""

    dims = "", "", ""
    returns_state: bool

    def agreed(self, call: SequenceCall, tensors: Inputs) -> SequenceCall:
        call.check_edges(call.length)
        return call

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        state, transition, initial, *_ = tensors
        sequence = call.sequence()
        plan = scan_plan(sequence, call.ranks.rank, self.returns_state)
        if state.size(0) != len(plan.documents):
            raise ValueError(
                f"{call.owner} expects a map of each of this rank's runs, {sequence.pieces(plan.rank)}, got state "
                f"{tuple(state.shape)}"
            )
        if initial is not None and initial.size(0) != sequence.documents:
            raise ValueError(
                f"{call.owner} expects an initial state of each of {sequence.documents} documents, got "
                f"{tuple(initial.shape)}"
            )
        sent = torch.tensor(plan.sent, dtype=torch.int64, device=state.device)
        maps = transition.index_select(0, sent), state.index_select(0, sent)
        entering, final = scanned(*maps, plan, call.ranks, initial, sequence.documents, self.returns_state)
        nothing = torch.zeros_like(state[0])
        return torch.stack([nothing if each is None else each for each in entering]), final

    def final_state(self, tensors: Inputs, documents: int | None) -> tuple[Sequence[int], torch.dtype] | None:
        state = tensors[0]
        return ((documents or 1, *state.shape[1:]), state.dtype) if self.returns_state else None


def _normalized(x: Tensor) -> Tensor:
    wide = x.to(wide_dtype(x))
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)


# Calls, eager and as an operator of compiled code


def run_layer(call: SequenceCall, tensors: Inputs) -> Result:
    """Compute the result of a call; differentiable."""
    agreed = call.operation.agreed(call, tensors)
    with no_autocast(tensors[0]):
        result: Result = call.operation.forward(agreed, tensors)
    return result


def traced_layer(key: str, tensors: Inputs, cu_seqlens: Tensor | None, seq_len: int, rows: int = -1) -> Result:
    """Return the result of a layer in a program that is being captured.

    Args:
        key: of the call.
        seq_len: -1 if it is known only when the code runs.
        rows: of the output; -1 for those of the first tensor.
    """
    padded = (*tensors, *[None] * (MOST_TENSORS - len(tensors)))
    out, final = torch.ops.cp_dtensor.sequence_layer(*padded, cu_seqlens, key, seq_len, rows)
    return out, final if final.numel() else None


def _result(call: SequenceCall, tensors: Inputs) -> tuple[Tensor, Tensor]:
    """Return both results of the operator; the final state is empty if there is none."""
    out, final = run_layer(call, tensors)
    return out, out.new_empty(0) if final is None else final


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, seq_len, _ = arguments
    with torch.no_grad():
        out, final = _result(sequence_call_of(key, seq_len, cu_seqlens), tensors)
    return out.contiguous(), final.contiguous()


def _resized(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return an empty tensor like x, with other rows unless they are -1."""
    return x.new_empty([rows if each == dim and rows >= 0 else size for each, size in enumerate(x.shape)])


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, cu_seqlens, key, _, rows = arguments
    documents = None if cu_seqlens is None or cu_seqlens.numel() == 1 else cu_seqlens.numel() - 1
    operation, x = operation_of(key), tensors[0]
    final = operation.final_state(tensors, documents)
    out = operation.empty_output(tensors, rows)
    return out, x.new_empty(0) if final is None else x.new_empty(final[0], dtype=final[1])


def _backward(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return gradients of all tensors, empty ones for those that are not needed. Only arguments were saved."""
    *tensors, cu_seqlens, key, seq_len, _, needed = arguments
    call = sequence_call_of(key, seq_len, cu_seqlens)
    if call.seq_len is None:  # without saved tensors the output has as many rows as the first one
        call = call.operation.agreed(call, tensors if tensors[0] is not None else [grad_out])
    grads = iter(call.operation.gradients(call, tensors, (grad_out, grad_final), needed))
    return tuple(next(grads).contiguous() if need else grad_out.new_empty(0) for need in needed)


def _fake_backward(grad_out: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _cu_seqlens, key, _seq_len, rows, needed = arguments
    return tuple(
        grad_out.new_empty(0) if not need
        else _resized(grad_out, operation_of(key).dim, rows) if x is None else x.new_empty(x.shape)
        for x, need in zip(tensors, needed, strict=True)
    )  # fmt: skip


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, cu_seqlens, ctx.key, ctx.seq_len, _ = inputs
    operation = operation_of(ctx.key)
    ctx.rows = tensors[0].size(operation.dim)
    ctx.save_for_backward(*(tensors if operation.saves_tensors else [None] * MOST_TENSORS), cu_seqlens)


def _gradients(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:MOST_TENSORS])
    grads = torch.ops.cp_dtensor.sequence_layer_backward(
        grad_out, grad_final, *ctx.saved_tensors, ctx.key, ctx.seq_len, ctx.rows, needed
    )
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 4


def _define() -> None:
    tensors = "".join(f"Tensor? x{number}, " for number in range(MOST_TENSORS))
    arguments = f"{tensors}Tensor? cu_seqlens, str call, SymInt seq_len, SymInt rows"
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
