"""Global sequence lengths of a call, and the check that all ranks make the same call.

A shard does not determine the global length: 5 tokens on one of 2 ranks are a part of 9 or of 10. If buffers, a DTensor
or the caller do not determine it either, one small all-gather finds it. The same all-gather compares a hash of
everything else that must be equal on all ranks (`agreement`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from contextlib import suppress
from itertools import pairwise

from torch import Tensor

from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.calls import COMPARISON, begin_pass
from cp_dtensor.engine.agreement import (
    compare_first_call,
    facts_of_call,
    hash_of,
    refuse_disagreement,
    refuse_equal_rows,
    refuse_equal_shards,
    refuse_masks_of_local_keys,
)
from cp_dtensor.engine.config import AttentionConfig, refuse_other_lengths
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import Layout, shard_lengths
from cp_dtensor.spec.masks import Mask


def global_lengths(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask, modifiers: Modifiers,
    scale: float, lengths: tuple[int, int] | None, *, gives_lse: bool = False, compiled: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """The global lengths of queries and keys.

    Ranks exchange nothing where `lengths`, the layout or the declared lengths of a context determine them, except at
    the first call of each kind and in debug mode.

    Refuses `lengths` of the caller that do not fit the local shards; and, on every rank alike, calls that differ
    between ranks or are refused on some. `gives_lse`: the call returns the log-sum-exp; `compiled`: in compiled code.
    """
    ranks, layout = config.ranks, config.layout

    def compared(verdict: str = "accepted") -> tuple[list[int], list[int], bool, tuple[int, int]]:
        """The local lengths, True if all facts are equal, and the global lengths, of calls that ranks have compared."""
        facts = facts_of_call(q, k, v, config, mask, modifiers, scale, known or lengths, gives_lse, compiled)
        facts["local lengths"] = verdict
        begin_pass(ranks, COMPARISON, q, debug=config.debug)
        # Readable facts travel only where their hashes differ.
        gathered = ranks.gather_integers([q.size(2), k.size(2), hash_of(facts)], q.device)
        local_q, local_kv, hashes = map(list, zip(*gathered, strict=True))
        if len({*hashes}) > 1:
            gathered_facts = ranks.gather_objects(facts, q.device)
            refuse_masks_of_local_keys(gathered_facts, local_kv)
            refuse_disagreement(gathered_facts, has_single_query=1 in local_q)
        found = global_length(local_q, layout, "query"), global_length(local_kv, layout, "key")
        return local_q, local_kv, len({*hashes}) == 1, found

    declared, known = config.declared_lengths or (), None
    if not config.debug:
        kind = _kind_of_call(q, k, v, config, mask)
        try:
            known = _known_lengths(q.size(2), k.size(2), lengths, declared, layout, ranks.rank, ranks.size)
        except ValueError:
            with suppress(ValueError):  # what this rank refuses says more
                compare_first_call(ranks, kind, q, lambda: compared(f"refused: {q.size(2)} and {k.size(2)}"))
            raise
        if known is not None:
            compare_first_call(ranks, kind, q, compared)
            return known
    local_q, local_kv, have_equal_facts, found = compared()
    if lengths is not None and lengths != found:
        raise ValueError(f"got seq_len={lengths} for (queries, keys), but the ranks' shards are of {found} tokens")
    if lengths is None and found[0] not in declared:
        if config.lengths_vary:
            _refuse_whole_queries(local_q, found[0], declared)
            _refuse_single_queries(local_q, local_kv, found[0])
        # Ranks whose facts and lengths are equal agree about what is the first call of a kind.
        if not compiled and have_equal_facts and len({*local_q}) == len({*local_kv}) == 1:
            refuse_equal_shards(q, k, v, config, mask, modifiers)
    if config.debug:
        refuse_equal_rows(modifiers, config, min(local_q))
    return found


def _kind_of_call(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask) -> Hashable:
    """The part of a call that code determines, and not the data: ranks agree about what is the first of its kind."""
    dims = q.size(1), k.size(1), q.size(3), v.size(3)
    return config.method, config.transport.name, type(config.layout), type(mask), dims, q.dtype


# Global and local lengths


def global_length(lengths: list[int], layout: Layout, what: str) -> int:
    """The global length that a layout divides into these local `lengths`; refused on every rank if none."""
    world_size = len(lengths)
    total = sum(lengths) if layout.only_length is None else layout.only_length
    expected = list(shard_lengths(layout, total, world_size))
    if lengths != expected:
        raise ValueError(
            f"the ranks' {what} lengths are not those of {layout}: got {lengths} on ranks 0 to {world_size - 1}, "
            f"expected {expected} for {total} tokens in all"
        )
    return total


def checked_only_length(local_length: int, layout: Layout, rank: int, world_size: int) -> int:
    """The only length of a layout; refuses a shard of this rank that does not fit it."""
    assert layout.only_length is not None
    expected = layout.local_length(layout.only_length, rank, world_size)
    if local_length != expected:
        raise ValueError(
            f"got {local_length} local tokens on rank {rank} of {world_size}, expected {expected}: this "
            f"{type(layout).__name__} divides sequences of {layout.only_length} tokens only, queries, keys and values "
            "alike; attention over other lengths, or to keys of another length, needs another layout"
        )
    return layout.only_length


@lru_cached
def known_length(
    local_length: int, declared: tuple[int, ...], layout: Layout, rank: int, world_size: int
) -> int | None:
    """The declared global length that fits this rank's shard, or None if the ranks have to exchange lengths.

    All ranks must return the same, each from its own local length. So the result is None if there is a length that
    fits one declared length on one rank and another declared length on another rank. A shard of an undeclared length is
    refused if it may fit a declared one on other ranks, which then would not exchange.
    """
    if layout.only_length is not None:
        return checked_only_length(local_length, layout, rank, world_size)
    look_alikes = {length: _look_alikes(length, layout, world_size) for length in sorted(declared)}
    if any(one[1] >= next_one[0] for one, next_one in pairwise(look_alikes.values())):
        return None
    for length in declared:
        if layout.local_length(length, rank, world_size) == local_length:
            return length
    possible = _lengths_with_share(local_length, layout, rank, world_size)
    for length, (first, last) in look_alikes.items():
        if possible[0] <= last and possible[-1] >= first:
            raise ValueError(
                f"got {local_length} local tokens on rank {rank} of {world_size}, which is the share of {possible[0]} "
                f"to {possible[-1]} tokens in {layout}, but of no buffer's length {declared}; other ranks may take "
                f"theirs for a share of {length}. Announce every length that attention runs over: "
                "context_parallel(..., seq_len=...)"
            )
    return None


def _look_alikes(length: int, layout: Layout, world_size: int) -> tuple[int, int]:
    """The smallest and the largest global length whose shard on some rank is as long as that of `length`."""
    local = shard_lengths(layout, length, world_size)
    spans = [_lengths_with_share(each, layout, rank, world_size) for rank, each in enumerate(local)]
    return min(span[0] for span in spans), max(span[-1] for span in spans)


def _lengths_with_share(local_length: int, layout: Layout, rank: int, world_size: int) -> range:
    """The global lengths of which `rank` owns `local_length` tokens; shards grow with the global length."""

    def share(length: int) -> int:
        return layout.local_length(length, rank, world_size)

    beyond = 1
    while share(beyond) <= local_length:
        beyond *= 2
    lengths = range(beyond + 1)
    return range(bisect_left(lengths, local_length, key=share), bisect_right(lengths, local_length, key=share))


def longest_length(local_length: int, layout: Layout, rank: int, world_size: int) -> int:
    """The longest global length of which `rank` owns `local_length` tokens.

    >>> from cp_dtensor.spec.layouts import HeadTail
    >>> longest_length(2, HeadTail(), 0, 2)  # of 4 tokens rank 0 has 1 + 1, of 5 it has 2 + 1
    4
    """
    if layout.only_length is not None:
        return layout.only_length
    return _lengths_with_share(local_length, layout, rank, world_size).stop - 1


def _refuse_whole_queries(local: list[int], found: int, declared: tuple[int, ...]) -> None:
    """Refuses queries of a whole buffer's length on every rank, which are probably not sharded; on every rank alike."""
    if len(local) > 1 and len({*local}) == 1 and local[0] in declared:
        raise ValueError(
            f"got queries of {local[0]} tokens on each of {len(local)} ranks, as long as a whole buffer of the context "
            f"(lengths {declared}), expected this rank's part: a tensor becomes its shard where it is one of buffers, "
            "the very object (no copy or slice of it), or by context_parallel_shard. If there is a sequence of "
            f"{found} tokens in all, announce it: context_parallel(..., seq_len={found})"
        )


def _refuse_single_queries(local: list[int], local_kv: list[int], found: int) -> None:
    """Refuses one query and more keys on every rank, which are those of generation; on every rank alike."""
    if len(local) > 1 and {*local} == {1} and min(local_kv) > 1:
        raise ValueError(
            f"got one query and {min(local_kv)} keys on each of {len(local)} ranks, as in generation (generate(), "
            "with a cache of keys), expected this rank's part of the queries: generate outside of the context, each "
            "rank with all keys. If there is a sequence of "
            f"{found} queries, announce it: context_parallel(..., seq_len={found})"
        )


@lru_cached
def _known_lengths(
    q_local: int, kv_local: int, lengths: tuple[int, int] | None, declared: tuple[int, ...], layout: Layout, rank: int,
    world_size: int,
) -> tuple[int, int] | None:  # fmt: skip
    """The global lengths that the caller passed or declared, None if ranks have to exchange theirs."""
    if lengths is None:
        known_q = known_length(q_local, declared, layout, rank, world_size)
        # Where queries are exchanged, so are keys: an undeclared length is not refused on some ranks only.
        known_kv = None if known_q is None else known_length(kv_local, declared, layout, rank, world_size)
        return None if known_q is None or known_kv is None else (known_q, known_kv)
    for what, total, local in (("query", lengths[0], q_local), ("key", lengths[1], kv_local)):
        refuse_other_lengths(layout, total, f"{what} length")
        expected = layout.local_length(total, rank, world_size)
        if local != expected:
            raise ValueError(
                f"{what} length does not fit: got {local} local tokens on rank {rank} of {world_size}, "
                f"expected {expected} of {total} tokens in {layout}"
            )
    return lengths
