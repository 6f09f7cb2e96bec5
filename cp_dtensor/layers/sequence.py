"""Operations along a sharded sequence: halos, shifts, changes of layout, causal convolution and scans."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor.api.extension import Mesh, cast_by_autocast, check_tensors, checked_length, parts_of
from cp_dtensor.layers.arguments import check_given, checked_number, layer, moved_rows, refuse_dtensors, runs_of_rank
from cp_dtensor.layers.layer import AffineScan, CausalConv1d
from cp_dtensor.layers.rows import Halo, Relayout, Shift
from cp_dtensor.spec.layouts import Layout


def halo(
    x: torch.Tensor, left: int, *, mesh: Mesh | None = None, dim: int, layout: Layout | None = None,
    cu_seqlens: Any = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the `left` rows before each run of this rank's tokens, one run after the other.

    A run is a longest range of consecutive positions in the local order: one in `Contiguous()`, two in `HeadTail()`
    (one on the last rank, whose chunks are adjacent), each block in `Striped`. A rank without tokens has one empty run.
    Rows before the sequence, and before the document in which the run begins, are zeros. Differentiable: the gradient
    of a row is the sum over all runs that it precedes.

    Args:
        x: any dtype and shape, this rank's tokens in `layout` order along `dim`; their number may differ between ranks,
            and be 0. A DTensor sharded along `dim` instead has `mesh` None and `layout` None or `Contiguous()`.
        left: number of rows, >= 0; may be larger than a run.
        mesh: the ranks that share the sequence, as for `context_parallel_attention`; None for a DTensor's.
        dim: the sequence dim; negative counts from the end.
        layout: which rank owns which tokens. None takes the layout of the context (or module) around the call, if that
            is over these ranks, else `HeadTail()`.
        cu_seqlens: ascending positions in the whole sequence where documents begin and end, equal on every rank, as
            integers or a tensor (reading one on a GPU waits for the GPU). None takes the documents in the mask of the
            context around the call, if that is over these ranks; `[0]` is one document.
        seq_len: tokens of the whole sequence. If None, and no context knows it, all ranks have equally many.

    Returns:
        x's shape, with runs * left rows along `dim`, contiguous; a DTensor sharded along `dim` for DTensors.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; shards of other
            lengths, and calls that differ between ranks, on every rank at the first call of each kind.
        NotImplementedError: in compiled code, without `seq_len`; a context whose mask has documents that `cu_seqlens`
            cannot have, as other ones in each batch row, or whose mask or layout compiled code cannot take over.

    Two ranks with two tokens each, 0 to 3, `Contiguous()`: rank 0 gets [0], rank 1 gets [1]:

        before = halo(torch.tensor([[0, 1], [2, 3]][rank]), 1, mesh=mesh, dim=0, layout=Contiguous())
    """
    left = checked_number("halo", "left", left, least=0)
    return moved_rows("halo", x, dim, (Halo, (left,)), mesh, layout, cu_seqlens, seq_len)


def shift(
    x: torch.Tensor, n: int, *, mesh: Mesh | None = None, dim: int, layout: Layout | None = None,
    cu_seqlens: Any = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Shift the tokens by n positions: token i gets token i - n of its document, or zeros where there is none.

    `shift(labels, -1)` gives every token the next one, for shifted labels and multi-token prediction. Zeros may be a
    token: `shift(labels + 100, -1) - 100` has -100 where there is no next one. Differentiable.

    Args:
        n: any integer; negative for later tokens.
        x, mesh, dim, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        x's shape and dtype, contiguous; a DTensor placed as x for DTensors.

    Raises:
        TypeError, ValueError, NotImplementedError: as `halo`; compiled code needs no `seq_len`.

    Two ranks with two tokens each, 0 to 3, `Contiguous()`: rank 0 gets [1, 2], rank 1 gets [3, 0]:

        following = shift(torch.tensor([[0, 1], [2, 3]][rank]), -1, mesh=mesh, dim=0, layout=Contiguous())
    """
    n = checked_number("shift", "n", n)
    return moved_rows("shift", x, dim, (Shift, (n,)), mesh, layout, cu_seqlens, seq_len)


def relayout(
    x: torch.Tensor, source: Layout | None, target: Layout, *, mesh: Mesh, dim: int, seq_len: int | None = None
) -> torch.Tensor:
    """Return this rank's tokens in another layout, from the ranks' tokens in `source`, in one exchange.

    Differentiable: gradients take the way back.

    Args:
        x: any dtype and shape, this rank's tokens in `source` order along `dim`.
        source: None as `layout` of `halo`.
        target: such as `Contiguous()`, for recurrences.
        mesh, dim, seq_len: as for `halo`.

    Returns:
        x's shape, with the rank's tokens of `target` along `dim`, contiguous.

    Raises:
        TypeError, ValueError, NotImplementedError: as `halo`. DTensors are refused: they are in contiguous chunks.

    Two ranks with two tokens each: rank 0 has [0, 3] in `HeadTail()` and gets [0, 1]; rank 1 has [1, 2], gets [2, 3]:

        adjacent = relayout(torch.tensor([[0, 3], [1, 2]][rank]), HeadTail(), Contiguous(), mesh=mesh, dim=0)
    """
    if not isinstance(target, Layout):
        raise TypeError(f"relayout expects target to be a Layout such as Contiguous(), got {target!r}")
    if isinstance(x, DTensor):
        raise TypeError(
            "relayout expects a plain tensor, since DTensors are sharded in contiguous chunks; got a DTensor placed "
            f"{x.placements}: pass its local tensor, to_local(), with source=Contiguous() if its chunks are even"
        )
    return moved_rows("relayout", x, dim, (Relayout, (parts_of(target), 0)), mesh, source, [0], seq_len)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, mesh: Mesh | None = None,
    layout: Layout | None = None, activation: str | None = None, cu_seqlens: Any = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute a depthwise causal convolution along a sharded sequence, as the short convolutions of hybrid models.

    y[t] = act(bias + sum_k weight[:, k] * x[t - K + 1 + k]), with zeros before each document. The ranks exchange the
    K - 1 rows before their runs. Differentiable; the gradients of weight and bias are the shares of this rank's tokens,
    and the sums over ranks are the whole gradients.

    Args:
        x: (B, T, C), floating, this rank's tokens.
        weight: (C, K), equal on every rank; of a `nn.Conv1d` it is `weight.squeeze(1)`.
        bias: (C,) or None.
        activation: None, "silu" or "swish" (the same).
        mesh, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        (B, T, C) in x's dtype; a DTensor placed as x if x is a DTensor. Weight and bias are then DTensors, or plain
        tensors that are equal on every rank.

    Raises:
        TypeError, ValueError, NotImplementedError: as `halo`; compiled code needs no `seq_len`.

    Two ranks with two tokens each, of values 1 to 4, `Contiguous()`: rank 0 gets [1, 3], rank 1 gets [5, 7]:

        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]][rank]).view(1, 2, 1)
        y = causal_conv1d(x, torch.ones(1, 2), mesh=mesh, layout=Contiguous())

    Source: Mamba (arXiv 2312.00752), section 3.4; Qwen3-Next and LFM2 have it too.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"causal_conv1d expects activation to be one of {_ACTIVATIONS}, got {activation!r}")
    x, weight = cast_by_autocast(x, weight)
    bias = bias if bias is None else cast_by_autocast(bias)[0]
    dims = {"x": "batch tokens channels", "weight": "channels width", "bias": "?channels"}
    check_given("causal_conv1d", dims, {"x": x, "weight": weight, "bias": bias}, "x weight bias")
    operation = CausalConv1d, (activation,)
    return layer("causal_conv1d", [x, weight, bias], operation, mesh, layout, cu_seqlens, seq_len)[0]


_ACTIVATIONS = (None, "silu", "swish")


def local_runs(
    mesh: Mesh, seq_len: int, layout: Layout | None = None, *, cu_seqlens: Any = None
) -> list[tuple[int, int]]:
    """Return the positions of this rank's runs within documents, in local order: the spans of `affine_scan`.

    A run is a longest range of consecutive positions in the local order, cut where documents begin and end. A rank
    without tokens has one empty run, (0, 0).

    Args:
        mesh, seq_len, layout, cu_seqlens: as for `halo`.

    Returns:
        pairs (start, stop).

    Raises:
        TypeError, ValueError, NotImplementedError: as `halo`.

        local_runs(mesh, 8)  # of two ranks, rank 0: [(0, 2), (6, 8)]; rank 1: [(2, 6)]
    """
    return runs_of_rank(mesh, layout, cu_seqlens, seq_len)


def affine_scan(
    transition: torch.Tensor, state: torch.Tensor, *, mesh: Mesh, seq_len: int, layout: Layout | None = None,
    cu_seqlens: Any = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the state that enters each run of this rank, if run r maps a state S to M_r S + B_r.

    The ranks exchange the maps of runs whose documents lie in several runs, in one all-gather, and compose them in the
    order of positions; backward is one reduce-scatter. A layer with a state of its own kind computes M and B of each
    run from a state of zero, calls this, and computes its runs again from the states that enter them.

    Args:
        transition: M of each run in `local_runs` order: (R, ..., K, K) matrices, (R, ..., K) diagonals or (R, ...)
            numbers.
        state: B of each run: (R, ..., K, V).
        mesh, layout, cu_seqlens: as for `halo`.
        seq_len: tokens of the whole sequence.
        initial_state: (documents, ..., K, V), equal on every rank; its gradient is a share. None for zeros.
        output_final_state: True also returns the state at the end of each document.

    Returns:
        (R, ..., K, V); with `output_final_state`, also (documents, ..., K, V), on every rank: if it is part of a loss,
        the loss is the sum over ranks.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective.
        NotImplementedError: layouts that divide batch rows differently; contexts as for `halo`.

    Two ranks of one run each, `Contiguous()`, that double the state and add 1 and 5: the states 0 and 1 enter:

        two, added = torch.full((1,), 2.0), torch.tensor([[1.0], [5.0]][rank]).view(1, 1, 1)
        entering = affine_scan(two, added, mesh=mesh, seq_len=2, layout=Contiguous())

    Source: parallel scans (Blelloch, 1990); for linear attention LASP-2 (arXiv 2502.07563).
    """
    tensors = {"transition": transition, "state": state}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    check_tensors("affine_scan", **tensors)
    numbers = state.shape[:-2]
    if state.dim() < 3 or transition.shape not in (numbers, state.shape[:-1], (*state.shape[:-1], state.size(-2))):
        raise ValueError(
            "affine_scan expects state (runs, ..., K, V), and transition (runs, ..., K, K), (runs, ..., K) or "
            f"(runs, ...); got transition {tuple(transition.shape)}, state {tuple(state.shape)}"
        )
    refuse_dtensors("affine_scan", tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != state.dtype:
            raise ValueError(f"affine_scan expects one dtype, got {name} {tensor.dtype}, state {state.dtype}")
    if initial_state is not None and initial_state.shape[1:] != state.shape[1:]:
        raise ValueError(f"affine_scan expects initial_state (documents, ..., K, V), got {tuple(initial_state.shape)}")
    checked_length(seq_len)
    operation = AffineScan, (bool(output_final_state),)
    given = [state, transition, initial_state]
    out, final = layer("affine_scan", given, operation, mesh, layout, cu_seqlens, seq_len)
    return out if final is None else (out, final)
