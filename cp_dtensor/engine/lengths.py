"""What the ranks of an axis tell each other before a call: their lengths, and in debug mode everything that must agree.

A rank knows only the length of its own shard, which does not determine the global length: a shard of 5 tokens out of
2 ranks may belong to 9 or to 10. Where the global length is not known from buffers, from DTensor or from the caller,
one small all-gather on the host finds it.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise

import torch

from cp_dtensor.attention.backends.select import allowed_backends, is_deterministic
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.validation import refuse_other_lengths
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


@dataclass(frozen=True)
class CallFacts:
    """What one rank says of a call. All but the local lengths must be equal on every rank."""

    q_length: int
    kv_length: int
    batch_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    mask: str
    attn_mask: str
    sinks: str
    dropout_p: float
    scale: float
    layout: str
    method: str
    rotate_method: str
    deterministic: bool
    requires_grad: bool
    declared_q: int
    declared_kv: int
    """Global lengths that the caller has said, -1 if none."""
    returns_lse: bool = False
    """Whether lse travels home too, where heads are exchanged: for the caller, or for the backward of compiled code."""
    compiled: bool = False
    """Whether this rank runs compiled code, which does not know whose gradients are wanted."""
    attn_mask_has_rows: bool = False
    """Whether rows of an attn_mask travel, where heads are exchanged: it has one for each query, not one for all."""

    def encoded(self) -> list[int]:
        """The fields as int64 words: floats by their bits, text by its first bytes."""
        return [word for field in fields(self) for word in _encode(getattr(self, field.name))]

    @classmethod
    def decoded(cls, words: list[int]) -> CallFacts:
        """The inverse of `encoded`."""
        values = []
        for field in fields(cls):
            kind = str(field.type)
            size = _TEXT_WORDS if kind == "str" else 1
            values.append(_decode(kind, words[:size]))
            words = words[size:]
        return cls(*values)  # type: ignore[arg-type]


_TEXT_WORDS = 5  # 40 bytes tell all layouts, dtypes and rotations apart
_LOCAL_FIELDS = ("q_length", "kv_length")


def exchange(facts: CallFacts, ranks: SequenceRanks, device: torch.device) -> list[tuple[int, int]]:
    """Tells all ranks what each one says; returns the local (q, kv) lengths of every rank.

    Runs on the host where their groups have a CPU backend; otherwise on `device`, which it waits for.

    Raises:
        ValueError: on every rank alike, if the ranks disagree; names the ranks and what they say.
    """
    said = [CallFacts.decoded(words) for words in ranks.gather_integers(facts.encoded(), device)]
    _refuse_disagreement(said)
    return [(other.q_length, other.kv_length) for other in said]


def global_length(lengths: list[int], layout: Layout, what: str) -> int:
    """The global length whose division over the ranks gives `lengths`.

    Raises:
        ValueError: on every rank alike, if the layout divides no length so.
    """
    world_size = len(lengths)
    total = sum(lengths) if layout.only_length is None else layout.only_length
    expected = [layout.local_length(total, rank, world_size) for rank in range(world_size)]
    if lengths != expected:
        raise ValueError(
            f"the ranks' {what} lengths are not those of {layout}: got {lengths} on ranks 0 to {world_size - 1}, "
            f"expected {expected} for {total} tokens in all"
        )
    return total


def checked_only_length(local_length: int, layout: Layout, rank: int, world_size: int) -> int:
    """The length of a layout for one length, of which this rank's shard must be a part.

    Raises:
        ValueError: a shard that is not.
    """
    assert layout.only_length is not None
    expected = layout.local_length(layout.only_length, rank, world_size)
    if local_length != expected:
        raise ValueError(
            f"got {local_length} local tokens on rank {rank} of {world_size}, expected {expected}: this "
            f"{type(layout).__name__} divides sequences of {layout.only_length} tokens only, queries, keys and values "
            "alike; attention over other lengths, or to keys of another length, needs another layout"
        )
    return layout.only_length


@lru_cache(maxsize=1024)
def known_length(
    local_length: int, declared: tuple[int, ...], layout: Layout, rank: int, world_size: int
) -> int | None:
    """The declared global length that this rank's shard belongs to, or None if the ranks have to exchange lengths.

    All ranks must come to the same answer, each from its own local length. So None where some length could look like
    one declared length on one rank and like another elsewhere; and a length that is not declared is refused where it
    may look like a declared one on other ranks.

    Raises:
        ValueError: such a length, and one that is not the layout's only one.
    """
    if layout.only_length is not None:  # known without any exchange
        return checked_only_length(local_length, layout, rank, world_size)
    look_alikes = {length: _look_alikes(length, layout, world_size) for length in sorted(declared)}
    if any(one[1] >= next_one[0] for one, next_one in pairwise(look_alikes.values())):
        return None
    for length in declared:
        if layout.local_length(length, rank, world_size) == local_length:
            return length
    possible = _lengths_with_share(local_length, layout, rank, world_size)
    confusing = [
        length for length, (first, last) in look_alikes.items() if possible[0] <= last and possible[-1] >= first
    ]
    if confusing:
        raise ValueError(
            f"got {local_length} local tokens on rank {rank} of {world_size}, which is the share of {possible[0]} to "
            f"{possible[-1]} tokens in {layout}, but of no buffer's length {declared}; other ranks may take theirs for "
            f"a share of {confusing[0]}. Announce every length that attention runs over: context_parallel(..., "
            "seq_lens=...)"
        )
    return None


def _look_alikes(length: int, layout: Layout, world_size: int) -> tuple[int, int]:
    """The smallest and the largest global length of which some rank owns as many tokens as of `length`."""
    spans = [
        _lengths_with_share(layout.local_length(length, rank, world_size), layout, rank, world_size)
        for rank in range(world_size)
    ]
    return min(span[0] for span in spans), max(span[-1] for span in spans)


def _lengths_with_share(local_length: int, layout: Layout, rank: int, world_size: int) -> range:
    """The global lengths of which `rank` owns `local_length` tokens; shares grow with the length in every layout."""

    def share(length: int) -> int:
        return layout.local_length(length, rank, world_size)

    beyond = 1
    while share(beyond) <= local_length:
        beyond *= 2
    lengths = range(beyond + 1)
    return range(bisect_left(lengths, local_length, key=share), bisect_right(lengths, local_length, key=share))


def odd_ones(said: list[int]) -> str:
    """The ranks that do not say what most of them do, "" if there are none.

    >>> odd_ones([7, 7, 8, 7, 9])
    '2, 4'
    """
    usual = max(said, key=said.count)
    return ", ".join(str(rank) for rank, each in enumerate(said) if each != usual)


def _refuse_disagreement(everyone: list[CallFacts]) -> None:
    if any(facts.compiled for facts in everyone):
        everyone = [_without_gradients(facts) for facts in everyone]
    disagreements: list[str] = []
    for field in fields(CallFacts):
        if field.name in _LOCAL_FIELDS or (field.name == "compiled" and not disagreements):  # which is told as a reason
            continue
        if field.name == "attn_mask_has_rows" and any(facts.q_length == 1 for facts in everyone):
            continue  # of a single query it cannot be seen, and rows travel in any case
        said = [getattr(facts, field.name) for facts in everyone]
        usual = max(said, key=said.count)
        odd = [f"rank {rank} says {value!r}" for rank, value in enumerate(said) if not _are_equal(value, usual)]
        if odd:
            disagreements.append(f"{field.name}: {', '.join(odd)}, the others {usual!r}{_hint(field.name, said)}")
    if disagreements:  # all of them: what comes first may follow from another, as heads that were expanded for a mask
        raise ValueError(f"the ranks of the context-parallel axis disagree about {'; about '.join(disagreements)}")


def _hint(field: str, said: list[str]) -> str:
    """Masks of other numbers of keys are mostly of each rank's own keys, of which ranks have unequally many."""
    numbers_of_keys = {text.partition(" :, ")[2].partition(")")[0] for text in said} if field == "attn_mask" else {""}
    return "" if len(numbers_of_keys - {""}) < 2 else " (expected the keys of the whole sequence)"


def _without_gradients(facts: CallFacts) -> CallFacts:
    """What a rank that runs compiled code can say; others may not, as where some ranks compile what others do not."""
    attn_mask, sinks = (text.replace(" grad", "") for text in (facts.attn_mask, facts.sinks))
    return replace(facts, requires_grad=False, attn_mask=attn_mask, sinks=sinks)


def _are_equal(first: object, second: object) -> bool:
    """Also two NaNs, so that ranks with the same wrong scale are not told that it differs."""
    return first == second or (first != first and second != second)


def _encode(value: object) -> list[int]:
    if isinstance(value, float):
        return list(struct.unpack("q", struct.pack("d", value)))
    if isinstance(value, str):
        if len(value) > 8 * _TEXT_WORDS:  # keep long texts apart that begin alike
            value = f"{value[: 8 * _TEXT_WORDS - 9]}~{zlib.crc32(value.encode()):08x}"
        return list(struct.unpack(f"{_TEXT_WORDS}q", value.encode()[: 8 * _TEXT_WORDS].ljust(8 * _TEXT_WORDS, b"\0")))
    assert isinstance(value, int)
    return [int(value)]


def _decode(kind: str, words: list[int]) -> object:
    if kind == "float":
        return struct.unpack("d", struct.pack("q", words[0]))[0]
    if kind == "str":
        return struct.pack(f"{_TEXT_WORDS}q", *words).rstrip(b"\0").decode(errors="replace")
    return bool(words[0]) if kind == "bool" else words[0]


# The global lengths of a call: known beforehand, or found by the ranks together.


def global_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionConfig,
    mask: Mask,
    modifiers: Modifiers,
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
    layout = settings.layout
    rank, world_size = settings.ranks.rank, settings.ranks.size
    if not settings.debug:
        if lengths is not None:
            _check_local_lengths(q.size(2), k.size(2), lengths, layout, rank, world_size)
            return lengths
        # On a GPU the exchange may have to wait for the device; on a CPU it costs little beside the attention.
        declared = settings.declared_lengths if q.is_cuda and settings.declared_lengths else ()
        known_q, known_kv = (known_length(tensor.size(2), declared, layout, rank, world_size) for tensor in (q, k))
        if known_q is not None and known_kv is not None:
            return known_q, known_kv
    facts = CallFacts(
        q_length=q.size(2), kv_length=k.size(2), batch_size=q.size(0), q_heads=q.size(1), kv_heads=k.size(1),
        head_dim=q.size(3), v_head_dim=v.size(3), dtype=str(q.dtype), mask=repr(mask),
        attn_mask=modifiers.described(q), sinks=modifiers.described_sinks(values=settings.debug),
        dropout_p=modifiers.dropout_p, scale=scale,
        layout=repr(layout), method=settings.method, rotate_method=settings.transport.name,
        deterministic=is_deterministic(q, allowed_backends(), settings.deterministic),
        requires_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        declared_q=-1 if lengths is None else lengths[0], declared_kv=-1 if lengths is None else lengths[1],
        returns_lse=gives_lse and _may_exchange_heads(q, settings), compiled=compiled,
        attn_mask_has_rows=modifiers.has_rows and settings.method in ("ulysses", "hybrid"),  # "auto" is a ring then
    )  # fmt: skip
    everyone = exchange(facts, settings.ranks, q.device)
    found = (
        global_length([q_local for q_local, _ in everyone], layout, "query"),
        global_length([kv_local for _, kv_local in everyone], layout, "key"),
    )
    if lengths is not None and lengths != found:
        raise ValueError(f"got seq_len={lengths} for (queries, keys), but the ranks' shards are of {found} tokens")
    if lengths is None and settings.lengths_vary:
        _refuse_whole_queries([q_local for q_local, _ in everyone], found[0], settings.declared_lengths or ())
    return found


def _may_exchange_heads(q: torch.Tensor, settings: AttentionConfig) -> bool:
    """Whether lse may travel. In rings it does not, which is what "auto" takes over one axis of CPUs."""
    method = settings.method
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
