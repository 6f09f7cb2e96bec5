"""Context-parallel multi-head latent attention: compressed latents travel in place of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cp_dtensor.api.functional import attend_shards, cast_by_autocast, takes_options
from cp_dtensor.engine.arguments import check_tensors, expect, refuse_dtensors, tensors_of
from cp_dtensor.engine.call import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_options()
def context_parallel_mla(
    q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, *, up: torch.Tensor,
    attn_mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute multi-head latent attention (MLA) of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of `context_parallel_attention(q, k, v)` with, for each head,

        k = [up_k latent | k_rope],  v = up_v latent

    The ranks exchange latents and rotary keys, R + Dr values of a token (576 in DeepSeek-V3) in place of
    H (Dn + Dr + Dv) (320 for each head), and expand them after arrival, some heads at a time. Backward expands again
    and returns the gradients of latents and rotary keys only. In rings each rank expands the rows that its queries see;
    in Ulysses the latents of all ranks, for its own heads.

    The gradient of `up` on each rank is a share (in rings that of its queries, in Ulysses that of its heads); the sum
    over the ranks is the whole gradient, as for any parameter that the ranks hold alike and whose gradients FSDP or DDP
    over the context-parallel axis, or an all-reduce, sums (or averages, with the loss).

    Args:
        q: (B, H, S, Dn + Dr), this rank's queries in `layout` order, the Dr rotary dims last; S may differ between
            ranks, and be 0.
        latent: (B, T, R), this rank's compressed keys and values, after their norm.
        k_rope: (B, T, Dr), this rank's rotary keys, rotated, which all heads share.
        up: (H * (Dn + Dv), R), the weight of the linear layer that expands latents, equal on every rank: for each head
            Dn rows of keys, then Dv rows of values. Under tensor parallelism the rows of q's heads.
        method: "ring", "ulysses" and "hybrid" send latents. "auto" takes the one with the lowest predicted time, or
            expands latents before it sends K/V where that is predicted to be faster: on one rank, and on GPUs where
            expanding the rows of all ranks takes longer than the link saves (few heads or short sequences over fast
            links; see `explain`).
        attn_mask, sinks, return_lse, options: as for `context_parallel_attention`; also what a context around the call
            gives.
        scale: factor of the logits; None is 1 / sqrt(Dn + Dr).

    Returns:
        out: (B, H, S, Dv) in q's dtype. With `return_lse`, also lse, as `context_parallel_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `context_parallel_attention`. DTensors are refused:
            pass what is local of them.

    One rank with two tokens, one head, and R = Dn = Dr = Dv = 1: keys are [3 latent, k_rope], values 5 latent. Queries
    of zeros weigh all keys alike, so the outputs are the means of 5 latent up to each token:

        latent = torch.tensor([[[1.0], [2.0]]])
        up = torch.tensor([[3.0], [5.0]])
        out = context_parallel_mla(torch.zeros(1, 1, 2, 2), latent, latent, up=up, mesh=mesh, is_causal=True)  # 5, 7.5

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    refuse_dtensors(q=q, latent=latent, k_rope=k_rope, up=up, attn_mask=attn_mask, sinks=sinks)
    q, latent, k_rope, up = cast_by_autocast(q, latent, k_rope, up)
    check_latents(q, latent, k_rope, up)
    of_heads = up.unflatten(0, (q.size(1), -1))
    t = tensors_of(q, latent.unsqueeze(1), k_rope.unsqueeze(1), attn_mask, sinks, of_heads)
    out, lse = attend_shards("context_parallel_mla", t, return_lse, options)
    return (out, lse) if return_lse else out


def check_latents(q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor) -> None:
    """Refuse shapes, dtypes and devices that do not fit; messages have all four shapes."""
    tensors = {"q": q, "latent": latent, "k_rope": k_rope, "up": up}
    check_tensors(**tensors)
    shapes = tuple(q.shape), tuple(latent.shape), tuple(k_rope.shape), tuple(up.shape)
    received = f"got q {shapes[0]}, latent {shapes[1]}, k_rope {shapes[2]}, up {shapes[3]}"

    dims = [tensor.dim() for tensor in tensors.values()]
    expect(
        dims == [4, 3, 3, 2],
        "q (batch, heads, sequence, Dn + Dr), latent (batch, sequence, R), k_rope (batch, sequence, Dr) and up "
        "(heads * (Dn + Dv), R)",
        received,
    )
    for what in ("dtype", "device"):
        values = [getattr(tensor, what) for tensor in tensors.values()]
        expect(len(set(values)) == 1, f"one {what} for q, latent, k_rope and up", f"got {', '.join(map(str, values))}")
    expect(q.device.type in ("cpu", "cuda"), "tensors on a CPU or a CUDA device", f"got {q.device}")
    expect(q.is_floating_point(), "a floating dtype", f"got {q.dtype}")
    expect(q.size(0) == latent.size(0) == k_rope.size(0), "one batch size (dim 0) for q, latent and k_rope", received)
    expect(latent.size(1) == k_rope.size(1), "one sequence length (dim 1) for latent and k_rope", received)
    expect(latent.size(2) == up.size(1), "up of as many columns as latent has (R)", received)
    expect(
        0 not in (q.size(0), q.size(1), latent.size(2), k_rope.size(2)),
        "at least one batch row, head, R and Dr",
        received,
    )
    expect(k_rope.size(2) < q.size(3), "q of more dims than k_rope, its Dn + Dr", received)
    rows, plain = up.size(0) // q.size(1), q.size(3) - k_rope.size(2)
    expect(
        up.size(0) % q.size(1) == 0 and rows > plain,
        f"up of Dn + Dv rows for each of {q.size(1)} heads, more than Dn = {plain}",
        received,
    )
