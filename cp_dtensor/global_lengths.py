"""The global lengths of a call: known beforehand, or found by the ranks together."""

from __future__ import annotations

from functools import lru_cache

import torch

from cp_dtensor import agreement
from cp_dtensor.arguments import refuse_other_lengths
from cp_dtensor.extras import Extras
from cp_dtensor.layouts import Layout
from cp_dtensor.local_attention.policy import allowed_backends, is_deterministic
from cp_dtensor.masks import Mask
from cp_dtensor.settings import AttentionSettings


def global_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    mask: Mask,
    extras: Extras,
    scale: float,
    lengths: tuple[int, int] | None,
    *,
    gives_lse: bool = False,
    compiled: bool = False,
) -> tuple[int, int]:
    """Of queries and keys; `lengths` are what the caller says, checked against the local shards.

    `gives_lse` says whether the call gives lse, and `compiled` whether it is one of compiled code.

    Raises:
        ValueError: lengths that do not fit, alike on every rank if the ranks have told each other.
    """
    layout, splitting = settings.layout, settings.splitting
    rank, world_size = settings.ranks.rank, settings.ranks.size
    if not settings.debug:
        if lengths is not None:
            _check_local_lengths(q.size(2), k.size(2), lengths, layout, rank, world_size)
            return lengths
        # On a GPU the exchange may have to wait for the device; on a CPU it costs little beside the attention.
        declared = settings.declared_lengths if q.is_cuda and settings.declared_lengths else ()
        known_q, known_kv = (
            agreement.known_length(tensor.size(2), declared, layout, rank, world_size) for tensor in (q, k)
        )
        if known_q is not None and known_kv is not None:
            return known_q, known_kv
    facts = agreement.CallFacts(
        q_length=q.size(2), kv_length=k.size(2), batch_size=q.size(0), q_heads=q.size(1), kv_heads=k.size(1),
        head_dim=q.size(3), v_head_dim=v.size(3), dtype=str(q.dtype), mask=repr(mask),
        attn_mask=extras.described(q), sinks=extras.described_sinks(values=settings.debug),
        dropout_p=extras.dropout_p, scale=scale,
        layout=repr(layout), method=splitting.method, rotate_method=splitting.rotation.name,
        deterministic=is_deterministic(q, allowed_backends(), splitting.deterministic),
        requires_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        declared_q=-1 if lengths is None else lengths[0], declared_kv=-1 if lengths is None else lengths[1],
        returns_lse=gives_lse and _may_exchange_heads(q, settings), compiled=compiled,
        attn_mask_has_rows=extras.has_rows and splitting.method in ("ulysses", "hybrid"),  # "auto" is a ring then
    )  # fmt: skip
    everyone = agreement.exchange(facts, settings.ranks, q.device)
    found = (
        agreement.global_length([q_local for q_local, _ in everyone], layout, "query"),
        agreement.global_length([kv_local for _, kv_local in everyone], layout, "key"),
    )
    if lengths is not None and lengths != found:
        raise ValueError(f"got seq_len={lengths} for (queries, keys), but the ranks' shards are of {found} tokens")
    if lengths is None and settings.lengths_vary:
        _refuse_whole_queries([q_local for q_local, _ in everyone], found[0], settings.declared_lengths or ())
    return found


def _may_exchange_heads(q: torch.Tensor, settings: AttentionSettings) -> bool:
    """Whether lse may travel. In rings it does not, which is what "auto" takes over one axis of CPUs."""
    method = settings.splitting.method
    return method in ("ulysses", "hybrid") or (method == "auto" and (q.is_cuda or settings.ranks.inner is not None))


def _refuse_whole_queries(local: list[int], found: int, declared: tuple[int, ...]) -> None:
    """Refuses queries of a whole buffer's length on every rank: the context sees a sequence of so many copies of it.

    Raises:
        ValueError: on every rank alike.
    """
    if len(local) > 1 and found not in declared and len({*local}) == 1 and local[0] in declared:
        raise ValueError(
            f"got queries of {local[0]} tokens on each of {len(local)} ranks, as long as a whole buffer of the context "
            f"(lengths {declared}), expected this rank's part: a tensor becomes its shard where it is one of buffers, "
            "the very object (no copy or slice of it), or by context_parallel_shard. If there is a sequence of "
            f"{found} tokens in all, announce it: context_parallel(..., seq_lens=[{found}])"
        )


@lru_cache(maxsize=1024)
def _check_local_lengths(
    q_local: int, kv_local: int, lengths: tuple[int, int], layout: Layout, rank: int, world_size: int
) -> None:
    for what, total, local in (("query", lengths[0], q_local), ("key", lengths[1], kv_local)):
        refuse_other_lengths(layout, total, f"{what} length")
        expected = layout.local_length(total, rank, world_size)
        if local != expected:
            raise ValueError(
                f"{what} length does not fit: got {local} local tokens on rank {rank} of {world_size}, "
                f"expected {expected} of {total} tokens in {layout}"
            )
