"""Arguments in flash-attn's style, (batch, sequence, heads, head dim): what the integrations that take them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor import _torch_private
from cp_dtensor.arguments import Mesh, sequence_ranks

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""out, or (out, lse, None) where `return_attn_probs` was given."""


@dataclass(frozen=True)
class FlashAttnOptions:
    """Options of flash-attn's functions that have a value here which must not be ignored."""

    dropout_p: float
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool

    def check(self, device: torch.device) -> None:
        """Refuses what attention over sequence shards cannot do.

        Raises:
            NotImplementedError: what was received, and what is expected.
        """
        if self.dropout_p:
            raise NotImplementedError(
                f"dropout is not supported on sequence shards yet: got dropout_p={self.dropout_p}, expected 0.0"
            )
        if tuple(self.window_size) != (-1, -1):
            raise NotImplementedError(
                f"sliding windows are not supported on sequence shards yet: got window_size={self.window_size}, "
                "expected (-1, -1)"
            )
        if self.softcap:
            raise NotImplementedError(
                f"capped logits are not supported on sequence shards yet: got softcap={self.softcap}, expected 0.0"
            )
        if self.alibi_slopes is not None:
            received = f"a tensor of shape {tuple(self.alibi_slopes.shape)}"
            raise NotImplementedError(
                f"ALiBi is not supported on sequence shards yet: got alibi_slopes, {received}, expected None"
            )
        if self.deterministic and device.type != "cpu":
            raise NotImplementedError(
                f"deterministic gradients are not promised on {device.type} yet: got deterministic=True, expected "
                "False (on CPUs they always are)"
            )


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views (B, H, S, D) of q, k and v (B, S, H, D), where H may be a multiple of k's heads.

    Checked here and not only by the core, whose messages would name the dims of the views.

    Raises:
        TypeError: not tensors.
        ValueError: shapes that do not fit; the message has all three.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected {name} to be a torch.Tensor, got {type(tensor).__name__}")
    received = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected q, k and v of four dims (batch, sequence, heads, head_dim); {received}")
    for fits, expected in (
        (q.size(0) == k.size(0) == v.size(0), "one batch size (dim 0) for q, k and v"),
        (k.shape[1:3] == v.shape[1:3], "as many tokens (dim 1) and heads (dim 2) in v as in k"),
        (q.size(3) == k.size(3), "one head dim (dim 3) for q and k"),
        (k.size(2) > 0 and q.size(2) % k.size(2) == 0, "query heads (dim 2) to be a multiple of key heads"),
    ):
        if not fits:
            raise ValueError(f"expected {expected}; {received}")
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def unpacked(name: str, packed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The `count` tensors (B, S, H, D) of a packed (B, S, count, H, D), as views.

    Raises:
        TypeError: not a tensor.
        ValueError: another shape.
    """
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != 5 or packed.size(2) != count:
        raise ValueError(
            f"expected {name} of shape (batch, sequence, {count}, heads, head_dim), got {tuple(packed.shape)}"
        )
    return packed.unbind(2)


def check_causal_lengths(
    q: torch.Tensor, k: torch.Tensor, causal: bool, seq_len: int | tuple[int, int] | None, mesh: Mesh
) -> None:
    """Refuses causal attention between different lengths, where flash-attn lines up the last query with the last key.

    Global lengths may differ where this rank's do not: of 9 queries and 10 keys, the first of 2 ranks has 5 and 5. So
    without `seq_len` the ranks tell each other their local lengths, in one small collective. In compiled code there is
    none, and a rank compares its own.

    Args:
        q: (B, S, H, D), local queries.
        k: (B, T, Hkv, D), local keys.
        causal: nothing is refused without.
        seq_len: the global length, which says that there is one, or those of queries and keys.
        mesh: the ranks that share the sequence.

    Raises:
        NotImplementedError: the lengths differ; on every rank alike, if `seq_len` is right or None.
        TypeError, ValueError: no such mesh.
    """
    if not causal:
        return
    q_length, k_length = q.size(1), k.size(1)
    if isinstance(seq_len, (tuple, list)) and len(set(seq_len)) > 1:
        raise _lengths_differ(f"{q_length} local queries and {k_length} local keys of {tuple(seq_len)}")
    if seq_len is None and not (torch.compiler.is_compiling() or _torch_private.is_traced(q)):
        ranks = sequence_ranks(mesh)
        mine = torch.tensor([q_length, k_length], device="cpu" if ranks.have_cpu_backend else q.device)
        q_lengths, k_lengths = ranks.gather(mine).t().tolist()
        if q_lengths != k_lengths:
            raise _lengths_differ(f"{q_lengths} local queries and {k_lengths} local keys, by rank")
    elif q_length != k_length:
        raise _lengths_differ(f"{q_length} local queries and {k_length} local keys")


def _lengths_differ(received: str) -> NotImplementedError:
    return NotImplementedError(
        "causal attention between queries and keys of different lengths is aligned to the last tokens in flash-attn, "
        f"which is not supported on sequence shards yet; got {received}, expected equal lengths "
        "(cp_dtensor.ring_attention aligns the first tokens)"
    )


def group_or_default(group: Mesh | None) -> Mesh:
    """`group`, or the default process group.

    Raises:
        ValueError: there is no default process group.
    """
    if group is not None:
        return group
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise ValueError("expected a group, or torch.distributed.init_process_group() before; got group=None")
    return world


def flash_attn_result(out: torch.Tensor, lse: torch.Tensor, return_attn_probs: bool) -> AttentionResult:
    """What flash-attn's functions return, from (B, H, S, D) and (B, H, S): contiguous, for callers that view it."""
    out = out.transpose(1, 2).contiguous()
    return (out, lse, None) if return_attn_probs else out
