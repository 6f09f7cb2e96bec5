"""Layers of hybrid models with a state: gated delta rules, state-space models and linear attention of shards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dtensor.api.extension import Mesh, check_devices, softmax_scale
from cp_dtensor.layers.arguments import check_given, layer
from cp_dtensor.layers.layer import LinearRecurrence
from cp_dtensor.layers.scan import METHODS
from cp_dtensor.spec.layouts import Layout

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The output, or with `output_final_state` the output and the final state."""


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor, *,
    mesh: Mesh | None = None, layout: Layout | None = None, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, seq_len: int | None = None, method: str = "auto",
) -> Result:  # fmt: skip
    """Compute the gated delta rule of a sharded sequence, the linear attention of Qwen3-Next.

    For each head, with a state S (K, V) of each document that begins as `initial_state` or zeros:

        S_t = exp(g_t) S_{t-1} + beta_t k_t^T (v_t - exp(g_t) k_t S_{t-1}),  o_t = scale q_t S_t

    Differentiable. With `method="scan"`, each rank computes how its runs of consecutive tokens map a state. The ranks
    exchange these maps, H K (K + V) numbers of a run whatever its length, and compose them in the order of positions.
    With "heads", ranks exchange rows for heads, as Ulysses attention does.

    Arithmetic of torch operations is in float32 (float64 for float64). With the extra `hybrid`, bfloat16 and float16 on
    GPUs go through the kernels of flash-linear-attention, which round the factors of products to that dtype and sum in
    float32.

    Args:
        q, k: (B, T, H', K), this rank's tokens in `layout` order; T may differ between ranks, and be 0.
        v: (B, T, H, V), in the dtype of q and k; H is a multiple of H', and head h reads query and key head
            h // (H / H').
        g: (B, T, H), logarithms of the decays, <= 0, also -inf; None for no decay (the delta rule).
        beta: (B, T, H).
        mesh: the ranks that share the sequence, as for `context_parallel_attention`; None for DTensors' own.
        layout: which rank owns which tokens. None takes the layout of the context (or module) around the call, if that
            is over these ranks, else `HeadTail()`. `Contiguous()` has the fewest runs.
        scale: factor of q; None is 1 / sqrt(K).
        initial_state: (B, H, K, V), or (documents, H, K, V) with documents and B = 1; equal on every rank. Its gradient
            is a share, and the sum over ranks is the whole gradient. None for zeros.
        output_final_state: True also returns the state at the end of the sequence or of each document.
        use_qk_l2norm_in_kernel: True divides q and k by sqrt(sum of squares + 1e-6) first.
        cu_seqlens: ascending positions in the whole sequence where documents begin and end, as integers or a tensor.
            None takes the documents in the mask of the context around the call; `[0]` is one document.
        seq_len: tokens of the whole sequence. If None, and no context knows it, all ranks have equally many.
        method: "scan", "heads", where H is a multiple of the ranks along one mesh axis, or "relayout": rows travel to
            adjacent chunks, where runs are few, are scanned there, and travel back. "auto" takes the one that is
            predicted to be fastest (`explain_recurrence` prints predictions; on CPUs always "scan").

    Returns:
        out: (B, T, H, V) in v's dtype; a DTensor placed as v for DTensors. With `output_final_state`, also the final
        state, shaped as `initial_state`, in float32 (float64 for float64), on every rank; if it is part of a loss, the
        loss is the sum over ranks.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; shards of other
            lengths, and calls that differ between ranks, on every rank at the first call of each kind.
        NotImplementedError: states with DTensors; contexts as for `halo`.

    One rank, two tokens, K = V = 1: the first token writes beta v = 1, the second erases half of it and adds 2:

        one = torch.ones(1, 2, 1, 1)
        v, beta = torch.tensor([[[[2.0]], [[4.0]]]]), torch.full((1, 2, 1), 0.5)
        out = gated_delta_rule(one, one, v, None, beta, mesh=mesh)  # 1, 2.5

    Source: Gated Delta Networks (arXiv 2412.06464). Arguments as `chunk_gated_delta_rule` of flash-linear-attention.
    """
    return _recurrence(
        "gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, mesh,
        layout, cu_seqlens, seq_len, method,
    )  # fmt: skip


def kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    mesh: Mesh | None = None, layout: Layout | None = None, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, seq_len: int | None = None, method: str = "auto",
) -> Result:  # fmt: skip
    """Compute Kimi delta attention of a sharded sequence: `gated_delta_rule` with a decay of each channel of the keys.

        S_t = diag(exp(g_t)) S_{t-1} + beta_t k_t^T (v_t - k_t diag(exp(g_t)) S_{t-1}),  o_t = scale q_t S_t

    Args:
        g: (B, T, H, K), logarithms of the decays, <= 0.
        q, k, v, beta, mesh, layout, scale, initial_state, output_final_state: as for `gated_delta_rule`.
        use_qk_l2norm_in_kernel, cu_seqlens, seq_len, method: likewise.

    Returns:
        as `gated_delta_rule`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `gated_delta_rule`.

    As the example of `gated_delta_rule`, with a state that is halved before the second token: 1, then 0.25 + 2:

        one, decays = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1, 1), math.log(0.5))
        v, beta = torch.tensor([[[[2.0]], [[4.0]]]]), torch.full((1, 2, 1), 0.5)
        out = kda(one, one, v, decays, beta, mesh=mesh)  # 1, 2.25

    Source: Kimi Linear (arXiv 2510.26692). Arguments as `chunk_kda` of flash-linear-attention.
    """
    return _recurrence(
        "kda", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, mesh, layout,
        cu_seqlens, seq_len, method,
    )  # fmt: skip


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None, *,
    mesh: Mesh | None = None, layout: Layout | None = None, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, cu_seqlens: Any = None,
    seq_len: int | None = None, method: str = "auto",
) -> Result:  # fmt: skip
    """Compute causal linear attention of a sharded sequence, without a softmax; gated with `g`.

        S_t = exp(g_t) S_{t-1} + k_t^T v_t,  o_t = scale q_t S_t

    The maps that ranks exchange are K V + K numbers for each head and run.

    Args:
        g: logarithms of the decays, <= 0: (B, T, H) one of each head (RetNet, Lightning, Mamba-2), (B, T, H, K) one of
            each key channel (GLA), or None for none.
        q, k, v, mesh, layout, scale, initial_state, output_final_state, cu_seqlens, seq_len, method: as for
            `gated_delta_rule`.

    Returns:
        as `gated_delta_rule`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `gated_delta_rule`.

    One rank, two tokens, K = V = 1: running sums of the values 2 and 4:

        one = torch.ones(1, 2, 1, 1)
        out = linear_attention(one, one, torch.tensor([[[[2.0]], [[4.0]]]]), mesh=mesh)  # 2, 6

    Source: Linear Transformers (arXiv 2006.16236); GLA (arXiv 2312.06635). Arguments as `chunk_simple_gla` and
    `chunk_gla` of flash-linear-attention.
    """
    return _recurrence(
        "linear_attention", q, k, v, g, None, scale, initial_state, output_final_state, False, mesh, layout, cu_seqlens,
        seq_len, method,
    )  # fmt: skip


def mamba2(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *,
    D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), mesh: Mesh | None = None, layout: Layout | None = None,
    initial_states: torch.Tensor | None = None, return_final_states: bool = False, cu_seqlens: Any = None,
    seq_len: int | None = None, method: str = "auto",
) -> Result:  # fmt: skip
    """Compute the state-space layer of Mamba-2 (SSD) of a sharded sequence.

    With dt = softplus(dt + dt_bias), clamped to `dt_limit`, and a state S (P, N) of each head:

        S_t = exp(dt_t A) S_{t-1} + dt_t x_t^T B_t,  y_t = S_t C_t + D x_t

    Args:
        x: (batch, T, H, P), this rank's tokens, in the dtype of B and C.
        dt: (batch, T, H).
        A: (H,), < 0.
        B, C: (batch, T, G, N); H is a multiple of G.
        D: (H,) or (H, P), or None.
        dt_bias: (H,) or None.
        dt_softplus: True applies softplus to dt.
        dt_limit: the smallest and the largest dt.
        initial_states: (batch, H, P, N), or (documents, H, P, N); else as `initial_state` of `gated_delta_rule`.
        return_final_states: True also returns the final states, in the same shape.
        mesh, layout, cu_seqlens, seq_len, method: as for `gated_delta_rule`.

    Returns:
        (batch, T, H, P) in x's dtype, and the final states if asked for. Gradients of A, D and dt_bias are shares.

    Raises:
        TypeError, ValueError, NotImplementedError: as `gated_delta_rule`.

    One rank, two tokens, all sizes 1, dt = 1 and A = -log 2: the state is x_0, then x_0 / 2 + x_1:

        one, x = torch.ones(1, 2, 1, 1), torch.tensor([[[[2.0]], [[4.0]]]])
        y = mamba2(x, torch.ones(1, 2, 1), torch.tensor([-math.log(2)]), one, one, mesh=mesh)  # 2, 5

    Source: Mamba-2 (arXiv 2405.21060). Arguments as `mamba_chunk_scan_combined` of mamba_ssm.
    """
    given = {"x": x, "B": B, "C": C, "dt": dt, "A": A, "dt_bias": dt_bias, "D": D, "initial_states": initial_states}
    check_given("mamba2", _DIMS_OF_MAMBA2, given, "x B C")
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"mamba2 expects dt_limit to be a smallest and a largest dt, got {dt_limit!r}")
    for name, parameter in (("A", A), ("dt_bias", dt_bias), ("D", D)) if isinstance(x, DTensor) else ():
        if parameter is not None and not isinstance(parameter, DTensor):
            raise TypeError(f"mamba2 of DTensors expects {name} to be a DTensor, got a plain tensor")
    check_devices("mamba2", list(given.values()))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    result = _recurrence(
        "mamba2", C, B, x.to(wide) * dt.unsqueeze(-1), dt * A.to(wide), None, 1.0, state,
        return_final_states, False, mesh, layout, cu_seqlens, seq_len, method,
    )  # fmt: skip
    out, final = result if isinstance(result, tuple) else (result, None)
    if D is not None:
        out = out + (D if D.dim() == 2 else D.unsqueeze(-1)) * x
    out = out.to(x.dtype)
    return out if final is None else (out, final.transpose(-1, -2))


_KEYS, _VALUES = "batch tokens groups K", "batch tokens heads V"
_OF_HEADS, _OF_CHANNELS = "batch tokens heads", "batch tokens heads K"
_COMMON = {"q": _KEYS, "k": _KEYS, "v": _VALUES, "initial_state": "?states heads K V"}
_DIMS = {
    "gated_delta_rule": {**_COMMON, "g": f"?{_OF_HEADS}", "beta": _OF_HEADS},
    "kda": {**_COMMON, "g": _OF_CHANNELS, "beta": _OF_HEADS},
    "linear_attention": {**_COMMON, "g": f"?{_OF_HEADS}|{_OF_CHANNELS}", "beta": "?"},
}
_DIMS_OF_MAMBA2 = {
    "x": "batch tokens heads P", "B": "batch tokens groups N", "C": "batch tokens groups N",
    "dt": "batch tokens heads", "A": "heads", "dt_bias": "?heads", "D": "?heads|heads P",
    "initial_states": "?states heads P N",
}  # fmt: skip


def _divided_as(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return q or k, its heads repeated to those of v if v's are sharded over ranks that do not divide them."""
    if not isinstance(x, DTensor) or not isinstance(v, DTensor):
        return x
    over = [axis for axis, each in enumerate(v.placements) if isinstance(each, Shard) and each.dim == 2]
    if x.size(2) % math.prod([v.device_mesh.size(axis) for axis in over]) == 0:
        return x
    whole = x.redistribute(placements=[Replicate() if each in (Shard(2), Partial()) else each for each in x.placements])
    return whole.unsqueeze(3).expand(-1, -1, -1, v.size(2) // x.size(2), -1).flatten(2, 3)


def _recurrence(
    owner: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    scale: float | None, initial: torch.Tensor | None, returns_state: bool, normalizes: bool, mesh: Mesh | None,
    layout: Layout | None, cu_seqlens: Any, seq_len: int | None, method: str,
) -> Result:  # fmt: skip
    if owner in _DIMS:  # mamba2 has checked arguments of other names
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial}
        check_given(owner, _DIMS[owner], given, "q k v")
    if method not in ("auto", *METHODS):
        raise ValueError(f"{owner} expects method to be one of {('auto', *METHODS)}, got {method!r}")
    if isinstance(v, DTensor) and (initial is not None or returns_state):
        raise NotImplementedError(f"{owner} of DTensors takes and returns no states: pass local tensors (to_local())")
    factor = None if scale is None else softmax_scale(q.size(-1), scale)
    operation = LinearRecurrence, (factor, bool(normalizes), bool(returns_state), method)
    q, k = _divided_as(v, q), _divided_as(v, k)
    out, final = layer(owner, [v, q, k, g, beta, initial], operation, mesh, layout, cu_seqlens, seq_len)
    return out if final is None else (out, final)
