"""Global lengths of calls, and the comparison of what must be equal on all ranks.

Lengths are declared: by DTensors, `seq_len=`, a layout of one length or the buffers of a context. Where nothing
declares them, every rank has as many tokens. The ranks compare one hash at the first context or call of each signature,
with `debug=True` at every one; readable facts travel only where hashes differ. A signature is what code determines and
not the data, so that ranks agree about which call is its first; a local length that nothing declares is part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from hashlib import blake2b
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import refuse_transforms
from cp_dtensor._torch.cache import GroupCache, capturing
from cp_dtensor.attention.backends.select import allowed_backends, is_deterministic
from cp_dtensor.comm.calls import COMPARISON, END_OF_CONTEXT, begin_pass, calls_of
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import FACTORS, Call, Sharding, refuse_other_lengths
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import Layout, shard_lengths
from cp_dtensor.spec.masks import Full

Facts = dict[str, object]
"""What must be equal on all ranks, by name."""
_compared = GroupCache[None]()
"""The signatures of contexts and calls that the ranks of a group have compared."""


# Lengths


def agreed_pair(
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None
) -> tuple[int, int]:  # fmt: skip
    """Return the global (queries, keys) of a call. The ranks compare the first call of each signature.

    Args:
        needs_lse: True if the call returns the log-sum-exp.
        needs_grads: True for each of `t` whose gradient is needed; None in compiled code, which does not know.

    Raises:
        ValueError: local tensors that do not fit the lengths; calls that differ between ranks, on every rank alike.
    """
    ranks, local = call.ranks, (t.q.size(2), t.k.size(2))
    if call.placed is not None and call.pair is not None:  # DTensors have equal facts on all ranks
        return call.pair
    pair = refusal = None
    try:
        pair = _pair_of(call, *local)
    except ValueError as error:  # the others may be about to compare
        refusal = error
    is_declared = call.pair is not None or call.layout.only_length is not None
    is_declared = is_declared or (pair is not None and {*pair} <= {*call.lengths})
    dims = t.q.size(1), t.k.size(1), t.q.size(3), t.v.size(3), t.q.dtype
    signature = call.method, call.transport.name, type(call.layout), type(call.mask), dims, is_declared or local

    def facts() -> Facts:
        refused = f"refused: {local[0]} and {local[1]} local tokens"
        return {_LENGTHS: pair or refused, **_facts_of_call(call, t, needs_lse, needs_grads, pair)}

    # Programs that measure may draw equal shards. Compiled code may have shards of any origin.
    may_be_whole = (call.in_context or not is_declared) and needs_grads is not None
    shards = (t.q, t.k, t.v) if may_be_whole and refusal is None else ()
    compare(call, signature, t.q, facts, shards, refusal=refusal)
    assert pair is not None  # or there was a refusal
    if call.debug:
        _refuse_equal_rows(call, t.bias, min(shard_lengths(call.layout, pair[0], ranks.size)))
    return pair


def _pair_of(call: Call, q_local: int, kv_local: int) -> tuple[int, int]:
    ranks, layout = call.ranks, call.layout
    if call.pair is None:
        q_len, kv_len = length_of(call, q_local, "queries"), length_of(call, kv_local, "keys")
        if call.in_context and ranks.size > 1 and q_local == 1 < kv_local and q_len not in call.lengths:
            raise ValueError(
                f"got one query and {kv_local} keys on each of {ranks.size} ranks, as in generation (generate(), with "
                "a cache of keys), expected this rank's part of the queries: generate outside of the context, each "
                f"rank with all keys. If there is a sequence of {q_len} queries, announce it: "
                f"context_parallel(..., seq_len={q_len})"
            )
        return q_len, kv_len
    for what, total, local in (("query", call.pair[0], q_local), ("key", call.pair[1], kv_local)):
        refuse_other_lengths(layout, total, f"{what} length")
        expected = layout.local_length(total, ranks.rank, ranks.size)
        if local != expected:
            raise ValueError(
                f"{what} length does not fit: got {local} local tokens on rank {ranks.rank} of {ranks.size}, "
                f"expected {expected} of {total} tokens in {layout}"
            )
    return call.pair


def length_of(sharding: Sharding, local: int, what: str = "tokens") -> int:
    """Return the global length of which this rank has `local` tokens.

    Raises:
        ValueError: a shard that fits no declared length and is not that of ranks x local tokens; one that fits two
            declared lengths, on any rank; a tensor of a whole buffer's length.
    """
    ranks = sharding.ranks
    return _length_of(sharding.layout, sharding.lengths, ranks.rank, ranks.size, local, what)


@lru_cached
def _length_of(layout: Layout, declared: tuple[int, ...], rank: int, size: int, local: int, what: str) -> int:
    if layout.only_length is not None:
        expected = layout.local_length(layout.only_length, rank, size)
        if local != expected:
            raise ValueError(
                f"got {local} local tokens on rank {rank} of {size}, expected {expected}: this "
                f"{type(layout).__name__} divides sequences of {layout.only_length} tokens only, queries, keys and "
                "values alike; attention over other lengths, or to keys of another length, needs another layout"
            )
        return layout.only_length
    shards = {length: shard_lengths(layout, length, size) for length in declared}
    for one, other in combinations(declared, 2):  # alike on every rank
        is_either = local in (shards[one][rank], shards[other][rank])
        if is_either and any(x == y for x, y in zip(shards[one], shards[other], strict=True)):
            raise ValueError(
                f"got {local} {what} on rank {rank} of {size}: sequences of {one} and {other} tokens, both declared, "
                "have equally long shards on some ranks. Pad one of them, or call context_parallel_attention with "
                "seq_len="
            )
    for length in declared:
        if shards[length][rank] == local:
            return length
    total = local * size
    if layout.local_length(total, rank, size) != local:
        raise ValueError(
            f"got {local} {what} on rank {rank} of {size}, which are the share of no declared length "
            f"({', '.join(map(str, declared)) or 'none'}) in {layout}: pass seq_len= to the call or the context"
        )
    if size > 1 and what != "keys" and local in declared:  # of whole keys, results are right
        raise ValueError(
            f"got {local} {what} on each of {size} ranks, as long as a whole buffer of the context "
            f"(lengths {declared}), expected this rank's part: a tensor becomes its shard where it is one of buffers, "
            "the very object (no copy or slice of it), or by context_parallel_shard. If there is a sequence of "
            f"{total} tokens in all, announce it: context_parallel(..., seq_len={total})"
        )
    return total


def global_length(lengths: list[int], layout: Layout, what: str) -> int:
    """Return the global length that a layout divides into these local `lengths`; refuse others, alike on every rank."""
    total = sum(lengths) if layout.only_length is None else layout.only_length
    expected = list(shard_lengths(layout, total, len(lengths)))
    if lengths != expected:
        raise ValueError(
            f"the ranks' {what} lengths are not those of {layout}: got {lengths} on ranks 0 to {len(lengths) - 1}, "
            f"expected {expected} for {total} tokens in all"
        )
    return total


# Comparison


def compare(
    sharding: Sharding, signature: Hashable, x: Tensor | None, facts: Callable[[], Facts],
    shards: tuple[Tensor, ...] = (), *, refusal: ValueError | None = None,
) -> None:  # fmt: skip
    """Refuse, on every rank alike, facts that differ between ranks: the first of each signature, or all with `debug`.

    Not while a CUDA graph is captured or code is traced, nor over torch's fake process groups.

    Args:
        signature: what the code determines and not the data, so that ranks agree about what is the first.
        x: a tensor of the call, or on the device of a context's buffers.
        facts: makes the facts; may read tensors.
        shards: tensors that are equal on all ranks only if they were not sharded; the last one's rows are looked at.
        refusal: raised in any case, but after the others, which may be about to compare, have compared with this rank.
            The next call is the first of its signature then.

    Raises:
        ValueError: the refusal, which says more than what differs; facts that differ, or shards that are equal.
    """
    ranks = sharding.ranks
    key = ranks.inner, signature, sharding.in_context
    is_first = ranks.size > 1 and (sharding.debug or not _compared.has(ranks.outer, key))
    if not is_first or capturing() or (x is not None and _torch.is_traced(x)) or _are_fake(ranks):
        if refusal is not None:
            raise refusal
        return

    def compared() -> None:
        device = x.device if x is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with _torch.no_modes(), torch.no_grad():
            mine = facts()
            if x is not None:
                begin_pass(ranks, COMPARISON, x, debug=sharding.debug)
            contents = (
                [int(_vary(shards[-1])), hash_of([_torch.content_hash(each) for each in shards])] if shards else [0, 0]
            )
            gathered = ranks.gather_integers([hash_of(mine), *contents], device)
            hashes, vary, found = map(list, zip(*gathered, strict=True))
            if len({*hashes}) > 1:
                refuse_disagreement(ranks.gather_objects(mine, device))
        if all(vary) and len({*found}) == 1:
            _refuse_equal_shards(sharding, shards)

    if refusal is not None:
        with suppress(ValueError):
            compared()
        raise refusal
    if sharding.debug:
        compared()
    else:
        _compared.get(ranks.outer, key, compared)


def _vary(rows: Tensor) -> bool:
    """Return whether rows (B, H, S, D) differ."""
    return not torch.equal(rows, rows[:, :, :1].expand_as(rows))


def _refuse_equal_shards(sharding: Sharding, shards: tuple[Tensor, ...]) -> None:
    """Refuse tensors that are equal on all ranks, which each has whole.

    Raises:
        ValueError: in a context with a mask. Elsewhere a warning: programs that measure may draw equal shards, and
            without a mask, whole tensors give right results with n times the work on each of n ranks.
    """
    ranks, shapes = sharding.ranks.size, ", ".join(str(tuple(each.shape)) for each in shards)
    text = (
        f"q, k and v {shapes} are equal on all {ranks} ranks, so they count as {ranks} copies of the same tokens in "
        "one sequence: expected this rank's shards. A tensor is its shard where it is one of the context's buffers "
        "(the very object, no copy or slice of it), or by context_parallel_shard; attention of tensors that every rank "
        "has whole is left to each rank by cp_dtensor.api.extension.local_sdpa(queries_are_shards=False)"
    )
    if sharding.in_context and getattr(sharding, "mask", None) not in (None, Full()):
        raise ValueError(text)
    warnings.warn(text, stacklevel=2)


def _are_fake(ranks: SequenceRanks) -> bool:
    """Return whether these are torch's fake process groups, whose other ranks have what this one has."""
    return dist.get_backend(ranks.outer) == "fake"


def hash_of(facts: object) -> int:
    """Return the hash of the text of some facts: 64 bits, signed."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little", signed=True)


def refuse_disagreement(by_rank: list[Facts]) -> None:
    """Name the facts that differ, the ranks and their values, on every rank alike."""
    masks = [str(facts.get("attn_mask", "")) for facts in by_rank]
    if local := [rank for rank, text in enumerate(masks) if _OF_THIS_RANK in text]:
        raise ValueError(
            f"attn_mask has only this rank's keys on rank {', '.join(map(str, local))} ({masks[local[0]]}), expected "
            "the keys of the whole sequence: code that sees a shard has made it. Make the mask of the whole sequence "
            "and shard its query rows (context_parallel_shard(mesh, [attn_mask], [-2])), or give the context or the "
            "call a mask value, mask=..."
        )
    if any(facts.get("compiled") for facts in by_rank):
        by_rank = [_without_gradients(facts) for facts in by_rank]
    found = disagreements(by_rank)
    if {*found} <= {"compiled", "in_context"}:  # no mistakes by themselves, but maybe the reason of others
        return
    hint = ""
    if any("buffer" in name for name in found):
        hint = (
            ". Expected the same whole tensors on every rank: ranks that share a sequence read the same data, and the "
            "context makes the shards. Tensors that are shards already are no buffers: pass seq_len to the context "
            "instead, or call context_parallel_attention"
        )
    if {_LENGTHS, LENGTH} & {*found}:
        hint += ". Where nothing declares the lengths, all ranks have equally many tokens: pass seq_len="
    # All of them: the first may follow from another, as heads that were expanded for a mask.
    raise ValueError(f"the ranks of the context-parallel axis disagree about {'; about '.join(found.values())}{hint}")


_LENGTHS, LENGTH = "global (queries, keys)", "global length"
"""Names of facts: of attention, and of layers."""
_OF_THIS_RANK = "keys of this rank"


def odd_ones(values: list[int]) -> str:
    """The ranks whose value is not that of most ranks, "" if there are none.

    >>> odd_ones([7, 7, 8, 7, 9])
    '2, 4'
    """
    usual = max(values, key=values.count)
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)


def disagreements(by_rank: list[Facts]) -> dict[str, str]:
    """The facts that differ between ranks, by name: the text says which rank has which value.

    >>> disagreements([{"method": "ring"}, {"method": "ring"}, {"method": "ulysses"}])
    {'method': "method: rank 2 says 'ulysses', the others 'ring'"}
    """
    found = {}
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        values = [repr(facts.get(name)) for facts in by_rank]  # so that NaN equals NaN
        usual = max(values, key=values.count)
        odd = [f"rank {rank} says {_shortened(value)}" for rank, value in enumerate(values) if value != usual]
        if odd:
            found[name] = f"{name}: {', '.join(odd)}, the others {_shortened(usual)}"
    return found


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]} ... {text[-35:]}"


# Contexts


def compare_contexts(call: Call, signature: Hashable, device: torch.device | None, others: Callable[[], Facts]) -> None:
    """Refuse, on every rank alike, a context whose facts differ between ranks.

    Args:
        call: that of the context.
        signature: of the arguments that are not in `call`.
        device: of a CUDA tensor among the arguments.
        others: makes the facts of these arguments; may read tensors.
    """
    x = None if device is None else torch.empty(0, device=device)
    options = call.method, call.transport.name, type(call.layout), type(call.mask), call.deterministic
    compare(
        call,
        ("context", options, signature),
        x,
        lambda: {**_facts_of_options(call), "mask": repr(call.mask), **others()},
    )


def _facts_of_options(call: Call) -> Facts:
    return {
        "layout": repr(call.layout),
        "method": call.method,
        "rotate_method": call.transport.name,
        "deterministic": call.deterministic,
        "debug": call.debug,
    }


def end_context(call: Call) -> None:
    """Count the end of a context, which is the end of a step.

    Raises:
        PeerError: the ranks have made different calls.
    """
    for calls in calls_of(call.ranks):
        calls.begin(END_OF_CONTEXT, ends_step=True, debug=call.debug)


# Calls


def _facts_of_call(
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None, pair: tuple[int, int] | None
) -> Facts:
    q, k, v = t[:3]
    exchanges_heads = call.method in ("ulysses", "hybrid")
    # Over one axis of CPUs "auto" is a ring, where lse does not travel.
    may_exchange = exchanges_heads or (call.method == "auto" and (q.is_cuda or call.ranks.inner is not None))
    needs: Any = Tensors(*(needs_grads or [False] * len(t)))
    fewest = 0 if pair is None else min(shard_lengths(call.layout, pair[0], call.ranks.size))
    facts: Facts = {
        "batch_size": q.size(0),
        "q_heads": q.size(1),
        "kv_heads": k.size(1),
        "head_dim": q.size(3),
        "v_head_dim": v.size(3),
        "up": f"{described(t.up)}{' grad' * needs.up}",
        "dtype": str(q.dtype),
        "mask": repr(call.mask or Full()),
        "attn_mask": f"{_described_bias(t.bias, q, k, pair)}{' grad' * needs.bias}",
        "sinks": f"{described(t.sinks, values=call.debug)}{' grad' * needs.sinks}",
        **dict(zip(FACTORS, call.factors(q.size(3)), strict=True)),
        **_facts_of_options(call),
        "deterministic": is_deterministic(q, call.backends or allowed_backends(), call.deterministic),
        "requires_grad": needs.q or needs.k or needs.v,
        # Where heads are exchanged, lse travels too: for the caller, or for the backward of compiled code.
        "returns_lse": needs_lse and may_exchange,
        "in_context": call.in_context,
        "compiled": needs_grads is None,
        # Where heads are exchanged, rows of an attn_mask travel; "auto" is a ring then. One query has one row.
        "attn_mask_has_rows": exchanges_heads and t.bias is not None and t.bias.size(2) != 1 and fewest > 1,
    }
    return facts


def described(tensor: Tensor | None, *, values: bool = False) -> str:
    """Dtype and shape of a tensor that must be equal on all ranks; `values` adds a checksum, waiting for the GPU."""
    if tensor is None:
        return "none"
    checksum = f" {_torch.content_hash(tensor) % (1 << 32):08x}" if values else ""
    return f"{_dtype(tensor)} {tuple(tensor.shape)}{checksum}"


def _described_bias(bias: Tensor | None, q: Tensor, k: Tensor, pair: tuple[int, int] | None) -> str:
    """Describe a bias without what depends on the local queries."""
    if bias is None:
        return "none"
    # With a single local query, a bias with rows looks like one without, so rows are left out.
    full = zip("BH", bias.shape[:2], q.shape[:2], strict=True)
    dims = [dim if size != 1 or of_q == 1 else "1" for dim, size, of_q in full]
    is_local = pair is not None and bias.size(3) == k.size(2) and bias.size(3) not in (1, pair[1])
    whose = f", {_OF_THIS_RANK}" if is_local else ""
    return f"{_dtype(bias)} ({', '.join(dims)}, :, {bias.size(3)}){whose}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_equal_rows(call: Call, bias: Tensor | None, fewest: int) -> None:
    """Refuse an attn_mask whose rows are equal on all ranks and differ from query to query; on every rank alike."""
    if bias is None or call.ranks.size == 1 or fewest < 2:
        return
    refuse_transforms()
    with _torch.no_modes(), torch.no_grad():
        mine = [_torch.content_hash(bias), int(_vary(bias.detach()))]
        hashes, vary = zip(*call.ranks.gather_integers(mine, bias.device), strict=True)
    if len({*hashes}) == 1 and all(vary):
        raise ValueError(
            f"attn_mask {tuple(bias.shape)} is equal on all ranks, although its rows differ and each rank has other "
            "queries: expected this rank's query rows, context_parallel_shard(mesh, [attn_mask], [-2]) of the whole"
        )


def _without_gradients(facts: Facts) -> Facts:
    """The facts without those about gradients, which compiled code does not have."""
    without = {name: str(facts[name]).replace(" grad", "") for name in ("attn_mask", "sinks", "up")}
    return {**facts, "requires_grad": False, **without}


# Warnings


def warn_once(ranks: SequenceRanks, kind: Hashable, text_of: str | Callable[[], str | None]) -> None:
    """Warns of a probable mistake on this rank, at the first of its kind. No collective.

    Args:
        text_of: the text, or a function that may read tensors and returns the text, None if there is no mistake.
    """

    def check() -> None:
        with _torch.no_modes(), torch.no_grad():
            text = text_of if isinstance(text_of, str) else text_of()
        if text is not None:
            warnings.warn(text, stacklevel=4)

    if not capturing():
        _compared.get(ranks.outer, ("warned", kind), check)


def warn_of_zeros_and_ones(bias: Tensor, ranks: SequenceRanks) -> None:
    """Warns of a floating attn_mask of zeros and ones, which are added to the logits; once for each kind."""
    if bias.dtype == torch.bool or bias.requires_grad:
        return

    def find() -> str | None:
        if not bias.numel() or [float(edge) for edge in torch.aminmax(bias)] != [0, 1]:
            return None
        if not bool(((bias == 0) | (bias == 1)).all()):  # after the edges, since it takes memory
            return None
        return (
            f"attn_mask {tuple(bias.shape)} of {bias.dtype} has zeros and ones only, which are added to the logits and "
            "mask nothing: pass attn_mask.bool() if 1 stands for a key that is seen"
        )

    warn_once(ranks, ("zeros and ones", bias.dtype, bias.size(1), bias.size(2) == 1), find)
