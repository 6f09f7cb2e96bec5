"""Comparison of what must be equal on all ranks: the facts of a context or a call, by their hash.

One small all-gather compares hashes; readable facts travel only where these differ. The first entry of each kind of
context and the first call of each kind are compared always, and all calls that exchange lengths; later ones with
`debug=True`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import refuse_transforms
from cp_dtensor._torch.cache import GroupCache, capturing
from cp_dtensor.attention.backends.select import allowed_backends, is_deterministic
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.calls import END_OF_CONTEXT, calls_of
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.spec.masks import Full, Mask

CallFacts = dict[str, object]
"""The facts of a context or a call on one rank that must be equal on every rank, by name."""
_compared = GroupCache[None]()
"""The kinds of contexts and calls that the ranks of a group have compared."""


def hash_of(facts: object) -> int:
    """Hash of the text of some facts: 64 bits, signed."""
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little", signed=True)


def odd_ones(values: list[int]) -> str:
    """The ranks whose value is not that of most ranks, "" if there are none.

    >>> odd_ones([7, 7, 8, 7, 9])
    '2, 4'
    """
    usual = max(values, key=values.count)
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)


def disagreements(by_rank: list[CallFacts]) -> dict[str, str]:
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


def compare_contexts(
    config: AttentionConfig, kind: Hashable, device: torch.device | None, others: Callable[[], CallFacts]
) -> None:
    """Refuses, on every rank alike, a context whose facts differ between ranks.

    Ranks exchange hashes at the first entry of each kind of context, with `debug` at every entry. A kind is what the
    code determines and not the data, so that ranks agree about it.

    Args:
        kind: of the arguments that are not in `config`.
        device: of a CUDA tensor among the arguments.
        others: makes the facts of these arguments, may read tensors.
    """
    ranks = config.ranks
    if ranks.size == 1:
        return

    def compare() -> None:
        where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with _torch.no_modes():
            facts = {**_facts_of(config), "mask": repr(config.mask), **others()}
            if len({*ranks.gather_integers(hash_of(facts), where)}) == 1:
                return
            found = disagreements(ranks.gather_objects(facts, where))
        hint = ""
        if any("buffer" in name for name in found):
            hint = (
                ". Expected the same whole tensors on every rank: ranks that share a sequence read the same data, and "
                "the context makes the shards. Tensors that are shards already are no buffers: pass seq_len to the "
                "context instead, or call context_parallel_attention"
            )
        raise ValueError(
            f"the ranks of the context-parallel axis disagree about {'; about '.join(found.values())}{hint}"
        )

    if config.debug:
        compare()
    else:
        of_config = config.method, config.transport.name, type(config.layout), type(config.mask)
        _compared.get(ranks.outer, (ranks.inner, *of_config, config.deterministic, kind), compare)


def _facts_of(config: AttentionConfig) -> CallFacts:
    return {
        "layout": repr(config.layout),
        "method": config.method,
        "rotate_method": config.transport.name,
        "deterministic": config.deterministic,
        "debug": config.debug,
    }


def end_context(config: AttentionConfig) -> None:
    """Counts the end of a context, which is the end of a step.

    Raises:
        PeerError: the ranks have made different calls.
    """
    for calls in calls_of(config.ranks):
        calls.begin(END_OF_CONTEXT, ends_step=True, debug=config.debug)


# Calls


def compare_first_call(ranks: SequenceRanks, kind: Hashable, x: Tensor, compare: Callable[[], object]) -> None:
    """Calls `compare`, a collective, at the first call of a kind; not while a graph is captured or code is traced.

    Args:
        kind: what the code determines and not the data, so that ranks agree about it.
        x: a tensor of the call.
    """
    key = "call", ranks.inner, kind
    if ranks.size == 1 or _compared.has(ranks.outer, key) or capturing() or _torch.is_traced(x) or _are_fake(ranks):
        return

    def without_modes() -> None:
        with _torch.no_modes():
            compare()

    _compared.get(ranks.outer, key, without_modes)


def facts_of_call(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask, modifiers: Modifiers,
    scale: float, lengths: tuple[int, int] | None, gives_lse: bool, compiled: bool,
) -> CallFacts:  # fmt: skip
    exchanges_heads = config.method in ("ulysses", "hybrid")
    # Over one axis of CPUs "auto" is a ring, where lse does not travel.
    may_exchange = exchanges_heads or (config.method == "auto" and (q.is_cuda or config.ranks.inner is not None))
    declared_q, declared_kv = lengths or (None, None)
    facts: CallFacts = {
        "batch_size": q.size(0),
        "q_heads": q.size(1),
        "kv_heads": k.size(1),
        "head_dim": q.size(3),
        "v_head_dim": v.size(3),
        "up": described(modifiers.up),
        "dtype": str(q.dtype),
        "mask": repr(mask),
        "attn_mask": _described_bias(modifiers.bias, q),
        "sinks": described(modifiers.sinks, values=config.debug),
        "dropout_p": float(modifiers.dropout_p),
        "softcap": modifiers.softcap,
        "scale": scale,
        **_facts_of(config),
        "deterministic": is_deterministic(q, allowed_backends(), config.deterministic),
        "requires_grad": torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        "declared_q": declared_q,
        "declared_kv": declared_kv,
        # Where heads are exchanged, lse travels too: for the caller, or for the backward of compiled code.
        "returns_lse": gives_lse and may_exchange,
        "in_context": config.lengths_vary,
        "compiled": compiled,
        # Where heads are exchanged, rows of an attn_mask travel; "auto" is a ring then.
        "attn_mask_has_rows": exchanges_heads and modifiers.bias is not None and modifiers.bias.size(2) != 1,
    }
    return _without_gradients(facts) if compiled else facts


def described(tensor: Tensor | None, *, values: bool = False) -> str:
    """Dtype and shape of a tensor that must be equal on all ranks; `values` adds a checksum, waiting for the GPU."""
    if tensor is None:
        return "none"
    checksum = f" {_torch.content_hash(tensor) % (1 << 32):08x}" if values else ""
    return f"{_dtype(tensor)} {tuple(tensor.shape)}{_grad(tensor)}{checksum}"


def _described_bias(bias: Tensor | None, q: Tensor) -> str:
    """A bias without what depends on the local queries."""
    if bias is None:
        return "none"
    # With a single local query, a bias with rows looks like one without, so rows are left out.
    full = zip("BH", bias.shape[:2], q.shape[:2], strict=True)
    dims = [dim if size != 1 or of_q == 1 else "1" for dim, size, of_q in full]
    return f"{_dtype(bias)} ({', '.join(dims)}, :, {bias.size(3)}){_grad(bias)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _grad(tensor: Tensor) -> str:
    return " grad" * (tensor.requires_grad and torch.is_grad_enabled())


def refuse_masks_of_local_keys(by_rank: list[CallFacts], local_kv: list[int]) -> None:
    """Refuses an attn_mask of a rank's own keys; first, since other facts may differ because of it."""
    texts = [str(facts["attn_mask"]) for facts in by_rank]
    keys = [text.partition(" :, ")[2].partition(")")[0] for text in texts]
    # One column is for all keys.
    local = [rank for rank, own in enumerate(local_kv) if own != 1 and keys[rank] == str(own) != str(sum(local_kv))]
    if local:
        raise ValueError(
            f"attn_mask has only this rank's keys on rank {', '.join(map(str, local))} ({texts[local[0]]}), expected "
            f"the keys of the whole sequence, {sum(local_kv)}: code that sees a shard has made it. Make the mask of "
            "the whole sequence and shard its query rows (context_parallel_shard(mesh, [attn_mask], [-2])), or give "
            "the context or the call a mask value, mask=..."
        )


def refuse_disagreement(by_rank: list[CallFacts], has_single_query: bool) -> None:
    """Names the facts that differ, the ranks and their values, on every rank alike.

    `has_single_query`: True if a rank has one query only, so that its attn_mask has one row in any case.
    """
    if any(facts["compiled"] for facts in by_rank):
        by_rank = [_without_gradients(facts) for facts in by_rank]
    found = disagreements(by_rank)
    if has_single_query:
        found.pop("attn_mask_has_rows", None)
    if {*found} <= {"compiled", "in_context"}:  # no mistakes by themselves, but maybe the reason of others
        return
    # All of them: the first may follow from another, as heads that were expanded for a mask.
    raise ValueError(f"the ranks of the context-parallel axis disagree about {'; about '.join(found.values())}")


def refuse_equal_rows(modifiers: Modifiers, config: AttentionConfig, fewest: int) -> None:
    """Refuses an attn_mask whose rows are equal on all ranks and differ from query to query; on every rank alike."""
    bias = modifiers.bias
    if bias is None or config.ranks.size == 1 or fewest < 2:
        return
    if _are_equal_and_vary(config.ranks, bias, bias):
        raise ValueError(
            f"attn_mask {tuple(bias.shape)} is equal on all ranks, although its rows differ and each rank has other "
            "queries: expected this rank's query rows, context_parallel_shard(mesh, [attn_mask], [-2]) of the whole"
        )


def refuse_equal_shards(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Mask, modifiers: Modifiers
) -> None:
    """Refuses q, k and v that are equal on all ranks: each has the whole tensors. Once for each kind of call,
    with `debug` always.

    The arguments but their values must be equal on all ranks, so that these agree about what is the first call. A
    warning outside of contexts, where programs that measure may draw equal shards, and without a mask, where whole
    tensors give right results with n times the work on each of n ranks.
    """
    ranks = config.ranks
    masked = mask != Full() or modifiers.bias is not None
    kind = (ranks.inner, type(mask), masked, q.size(1), k.size(1), q.size(3), v.size(3), q.dtype)

    def compare() -> None:
        if ranks.size == 1 or _are_fake(ranks):
            return
        if not _are_equal_and_vary(ranks, v, q, k, v):
            return
        text = (
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are equal on all {ranks.size} ranks, so "
            f"they count as {ranks.size} copies of the same tokens in one sequence: expected this rank's shards. A "
            "tensor becomes its shard where it is one of the context's buffers, the very object (no copy or slice of "
            "it), or by context_parallel_shard; attention of tensors that every rank has whole is left to each rank by "
            "cp_dtensor.api.extension.local_sdpa(queries_are_shards=False)"
        )
        if masked and config.lengths_vary:
            raise ValueError(text)
        warnings.warn(text, stacklevel=2)

    if config.debug:
        compare()
    else:
        _compared.get(ranks.outer, kind, compare)


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


def _are_fake(ranks: SequenceRanks) -> bool:
    """True for torch's fake process groups, whose other ranks have what this one has."""
    return dist.get_backend(ranks.outer) == "fake"


def _are_equal_and_vary(ranks: SequenceRanks, rows: Tensor, *tensors: Tensor) -> bool:
    """True if tensors are equal on all ranks, and `rows` (B, H, S, D) differ from row to row on all. A collective."""
    refuse_transforms()
    with _torch.no_modes(), torch.no_grad():
        rows = rows.detach()
        varies = not torch.equal(rows, rows[:, :, :1].expand_as(rows))
    mine = [hash_of([_torch.content_hash(each) for each in tensors]), int(varies)]
    hashes, vary = zip(*ranks.gather_integers(mine, rows.device), strict=True)
    return len({*hashes}) == 1 and all(vary)


def _without_gradients(facts: CallFacts) -> CallFacts:
    """The facts without those about gradients, which compiled code does not have."""
    without = {name: str(facts[name]).replace(" grad", "") for name in ("attn_mask", "sinks", "up")}
    return {**facts, "requires_grad": False, **without}
