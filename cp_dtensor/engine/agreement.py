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

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.cache import GroupCache, capturing
from cp_dtensor.attention.backends.select import allowed_backends, is_deterministic
from cp_dtensor.comm.calls import COMPARISON, begin_pass
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.base import OF_HEADS, Tensors
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
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None, function: str = "attention"
) -> tuple[int, int]:
    """Return the global (queries, keys) of a call. The ranks compare the first call of each signature.

    Args:
        needs_lse: True if the call returns the log-sum-exp.
        needs_grads: True for each of `t` whose gradient is needed; None in compiled code, which does not know.
        function: what is computed; each has signatures of its own.
    """
    if call.placed is not None and call.pair is not None:  # DTensors have equal facts on all ranks
        return call.pair
    (q, k, v), pair, refusal = t[:3], None, None
    local = q.size(2), k.size(2)
    try:
        pair = _pair_of(call, *local)
    except ValueError as error:  # the others may be about to compare
        refusal = error
    is_declared = call.pair is not None or call.layout.only_length is not None
    is_declared = is_declared or (pair is not None and {*pair} <= {*call.lengths})
    dims = q.size(1), k.size(1), q.size(3), v.size(3), q.dtype

    def facts() -> Facts:
        lengths = pair or f"refused: {local[0]} and {local[1]} local tokens"
        return {"function": function, _LENGTHS: lengths, **_facts_of_call(call, t, needs_lse, needs_grads, pair)}

    # Programs that measure may draw equal shards. Compiled code may have shards of any origin.
    may_be_whole = (call.in_context or not is_declared) and needs_grads is not None and refusal is None
    signature = function, *options_in_signature(call), dims, is_declared or local
    compare(call, signature, q, facts, (q, k, v) if may_be_whole else (), t.bias, refusal=refusal)
    assert pair is not None  # or there was a refusal
    return pair


def _pair_of(call: Call, q_local: int, kv_local: int) -> tuple[int, int]:
    q_given, kv_given = call.pair or (None, None)
    q_len, kv_len = length_of(call, q_local, "query", q_given), length_of(call, kv_local, "key", kv_given)
    is_one_query = call.in_context and call.pair is None and call.ranks.size > 1 and q_local == 1 < kv_local
    if is_one_query and q_len not in call.lengths:
        raise ValueError(
            f"got one query and {kv_local} keys on each of {call.ranks.size} ranks, as in generation (generate(), with "
            "a cache of keys), expected this rank's part of the queries: generate outside of the context, each "
            f"rank with all keys. If there is a sequence of {q_len} queries, announce it: "
            f"context_parallel(..., seq_len={q_len})"
        )
    return q_len, kv_len


def length_of(sharding: Sharding, local: int, of: str = "sequence", seq_len: int | None = None) -> int:
    """Return the global length of which this rank has `local` tokens, by its layout and what is declared.

    Args:
        of: "query" or "key", for messages.
        seq_len: the length, if the call itself has it.

    Raises:
        ValueError: a shard that fits no declared length and is not that of ranks x local tokens; one that fits two
            declared lengths, on any rank; a tensor of a whole buffer's length.
    """
    ranks = sharding.ranks
    return _length_of(sharding.layout, sharding.lengths, ranks.rank, ranks.size, local, of, seq_len)


@lru_cached
def _length_of(
    layout: Layout, declared: tuple[int, ...], rank: int, size: int, local: int, of: str, seq_len: int | None
) -> int:
    if seq_len is not None:
        refuse_other_lengths(layout, seq_len, f"{of} length")
    does_not_fit = f"{of} length does not fit: got {local} local tokens on rank {rank} of {size}"
    only = layout.only_length if seq_len is None else seq_len
    if only is not None:
        expected = layout.local_length(only, rank, size)
        if local != expected:
            name = f"this {type(layout).__name__}, which divides sequences of this length only"
            where = layout if layout.only_length is None else name
            raise ValueError(f"{does_not_fit}, expected {expected} of {only} tokens in {where}")
        return only
    shards = {length: shard_lengths(layout, length, size) for length in declared}
    for one, other in combinations(declared, 2):  # alike on every rank
        is_either = local in (shards[one][rank], shards[other][rank])
        if is_either and any(x == y for x, y in zip(shards[one], shards[other], strict=True)):
            raise ValueError(
                f"{does_not_fit}: sequences of {one} and {other} tokens, both declared, have equally long shards on "
                "some ranks. Pad one of them, or call context_parallel_attention with seq_len="
            )
    for length in declared:
        if shards[length][rank] == local:
            return length
    total = local * size
    if layout.local_length(total, rank, size) != local:
        raise ValueError(
            f"{does_not_fit}, which are the share of no declared length ({', '.join(map(str, declared)) or 'none'}) in "
            f"{layout}: pass seq_len= to the call or the context"
        )
    if size > 1 and of != "key" and local in declared:  # of whole keys, results are right
        raise ValueError(
            f"{of} length does not fit: got {local} local tokens on each of {size} ranks, as many as a whole buffer of "
            f"the context has (lengths {declared}), expected this rank's part: a tensor becomes its shard where it is "
            "one of buffers, the very object (no copy or slice of it), or by context_parallel_shard. If there is a "
            f"sequence of {total} tokens in all, announce it: context_parallel(..., seq_len={total})"
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
    shards: tuple[Tensor, ...] = (), bias: Tensor | None = None, *, refusal: Exception | None = None,
) -> None:  # fmt: skip
    """Refuse, on every rank alike, facts that differ between ranks: the first of each signature, or all with `debug`.

    Not while a CUDA graph is captured or code is traced, nor over torch's fake process groups.

    Args:
        signature: what the code determines and not the data, so that ranks agree about what is the first.
        x: a tensor of the call, or on the device of a context's buffers.
        facts: makes the facts; may read tensors.
        shards: q, k and v, which are equal on all ranks only if they were not sharded.
        bias: with `debug`, equal rows on all ranks are refused, too.
        refusal: raised in any case, but after the others, which may be about to compare, have compared with this rank.
            The next call is the first of its signature then.
    """
    ranks = sharding.ranks
    key = ranks.inner, signature, sharding.in_context
    is_first = ranks.size > 1 and (sharding.debug or not _compared.has(ranks.outer, key))
    # Fake process groups: the other ranks have what this one has.
    is_fake = is_first and dist.get_backend(ranks.outer) == "fake"
    if not is_first or is_fake or capturing() or (x is not None and _torch.is_traced(x)):
        if refusal is not None:
            raise refusal
        return

    def compared() -> None:
        device = x.device if x is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with _torch.no_modes(), torch.no_grad():
            mine = facts()
            if x is not None:
                begin_pass(ranks, COMPARISON, x, debug=sharding.debug)
            rows = (bias,) if bias is not None and sharding.debug else ()
            contents = hash_of(mine), *_contents(shards), *_contents(rows)
            hashes, *by_rank = zip(*ranks.gather_integers([*contents], device), strict=True)
            if len({*hashes}) > 1:
                refuse_disagreement(ranks.gather_objects(mine, device))
        if all(by_rank[0]) and len({*by_rank[1]}) == 1:
            _refuse_whole(sharding, shards)
        if all(by_rank[2]) and len({*by_rank[3]}) == 1 and bias is not None:
            raise ValueError(
                f"attn_mask {tuple(bias.shape)} is equal on all ranks, although its rows differ and each rank has other"
                " queries: expected this rank's query rows, context_parallel_shard(mesh, [attn_mask], [-2]) of the "
                "whole"
            )

    if refusal is not None:
        with suppress(ValueError):
            compared()
        raise refusal
    if sharding.debug:
        compared()
    else:
        _compared.get(ranks.outer, key, compared)


def _contents(tensors: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return whether the rows (dim 2) of the last tensor differ, and the hash of all; (0, 0) for no tensors."""
    if not tensors:
        return 0, 0
    rows = tensors[-1].detach()
    are_equal = torch.equal(rows, rows[:, :, :1].expand_as(rows))
    return int(not are_equal), hash_of([_torch.content_hash(each) for each in tensors])


def _refuse_whole(sharding: Sharding, shards: tuple[Tensor, ...]) -> None:
    """Refuse tensors that are equal on all ranks, which each has whole: in a context with a mask.

    Elsewhere warn: programs that measure may draw equal shards, and without a mask, whole tensors give right results
    with n times the work on each of n ranks.
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
    found = disagreements(by_rank)
    if any(facts.get("compiled") for facts in by_rank):  # compiled code does not know which gradients are needed
        found = {name: text for name, text in found.items() if not name.endswith("requires_grad")}
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


def disagreements(by_rank: list[Facts]) -> dict[str, str]:
    """Return the facts that differ between ranks, by name: the text says which rank has which value.

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


# Facts


def options_in_signature(call: Call) -> tuple[object, ...]:
    """Return the options in signatures of contexts and calls: only the classes of layouts and masks, which vary."""
    return call.method, call.transport.name, type(call.layout), type(call.mask), call.deterministic


def facts_of_options(call: Call) -> Facts:
    """Return the facts that contexts and calls have in common."""
    return {
        "layout": repr(call.layout), "method": call.method, "rotate_method": call.transport.name,
        "mask": repr(call.mask or Full()), "deterministic": call.deterministic, "debug": call.debug,
    }  # fmt: skip


def _facts_of_call(
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None, pair: tuple[int, int] | None
) -> Facts:
    q, k, v = t[:3]
    exchanges_heads = call.method in ("ulysses", "hybrid")
    # Over one axis of CPUs "auto" is a ring, where lse does not travel.
    may_exchange = exchanges_heads or (call.method == "auto" and (q.is_cuda or call.ranks.inner is not None))
    needs = Tensors(*(needs_grads or [False] * len(t)))
    fewest = 0 if pair is None else min(shard_lengths(call.layout, pair[0], call.ranks.size))
    return {
        "batch_size": q.size(0), "q_heads": q.size(1), "kv_heads": k.size(1), "head_dim": q.size(3),
        "v_head_dim": v.size(3), "dtype": str(q.dtype), **facts_of_options(call),
        **dict(zip(FACTORS, call.factors(q.size(3)), strict=True)),
        "deterministic": is_deterministic(q, call.backends or allowed_backends(), call.deterministic),
        "attn_mask": _described_bias(t.bias, q, k, pair),
        **{name: described(getattr(t, name), values=call.debug) for name in (*OF_HEADS, "up")},
        "requires_grad": needs.q or needs.k or needs.v,
        **{f"{name} requires_grad": need for name, need in zip(t._fields[3:-1], needs[3:-1], strict=True)},
        # Where heads are exchanged, lse travels too: for the caller, or for the backward of compiled code.
        "returns_lse": needs_lse and may_exchange,
        "in_context": call.in_context,
        "compiled": needs_grads is None,
        # Where heads are exchanged, rows of an attn_mask travel; "auto" is a ring then. One query has one row.
        "attn_mask_has_rows": exchanges_heads and t.bias is not None and t.bias.size(2) != 1 and fewest > 1,
    }  # fmt: skip


def described(tensor: Tensor | None, shape: str = "", *, values: bool = False) -> str:
    """Return dtype and shape of a tensor that must be equal on all ranks.

    `values` adds a checksum, for which the host waits for the GPU.
    """
    if tensor is None:
        return "none"
    checksum = f" {_torch.content_hash(tensor) % (1 << 32):08x}" if values else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape or tuple(tensor.shape)}{checksum}"


def _described_bias(bias: Tensor | None, q: Tensor, k: Tensor, pair: tuple[int, int] | None) -> str:
    """Describe a bias without what depends on the local queries."""
    if bias is None:
        return "none"
    # With a single local query, a bias with rows looks like one without, so rows are left out.
    full = zip("BH", bias.shape[:2], q.shape[:2], strict=True)
    dims = [dim if size != 1 or of_q == 1 else "1" for dim, size, of_q in full]
    is_local = pair is not None and bias.size(3) == k.size(2) and bias.size(3) not in (1, pair[1])
    return described(bias, f"({', '.join(dims)}, :, {bias.size(3)})") + f", {_OF_THIS_RANK}" * is_local


# Warnings


def warn_once(ranks: SequenceRanks, kind: Hashable, text_of: str | Callable[[], str | None]) -> None:
    """Warn of a probable mistake on this rank, at the first of its kind. No collective.

    `text_of` may be a function that reads tensors, and returns None if there is no mistake.
    """

    def check() -> None:
        with _torch.no_modes(), torch.no_grad():
            text = text_of if isinstance(text_of, str) else text_of()
        if text is not None:
            warnings.warn(text, stacklevel=4)

    if not capturing():
        _compared.get(ranks.outer, ("warned", kind), check)


def warn_of_zeros_and_ones(bias: Tensor) -> None:
    """Warn of a floating attn_mask of zeros and ones, which are added to the logits. Reads the tensor."""
    if bias.dtype == torch.bool or bias.requires_grad or not bias.numel() or capturing():
        return
    with _torch.no_modes(), torch.no_grad():
        edges = [float(edge) for edge in torch.aminmax(bias)]
        # After the edges, since it takes memory.
        if edges == [0, 1] and bool(((bias == 0) | (bias == 1)).all()):
            warnings.warn(
                f"attn_mask {tuple(bias.shape)} of {bias.dtype} has zeros and ones only, which are added to the logits "
                "and mask nothing: pass attn_mask.bool() if 1 stands for a key that is seen",
                stacklevel=4,
            )
