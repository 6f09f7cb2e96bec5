"""Configuration of attention, and checks of arguments before a call launches anything."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import _torch
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.plan.partition import LayoutPartition, SequencePartition
from cp_dtensor.spec.layouts import HeadTail, Layout, shard_lengths
from cp_dtensor.spec.masks import Causal, Full, Mask, is_integer, mask_intersection

METHODS = ("auto", "ring", "ulysses", "hybrid")
"""Methods of attention over the ranks that share a sequence."""
Mesh = DeviceMesh | dist.ProcessGroup
# One of these words, alone or before a separator or digit: "sparse" and "split_dp" are no sequence axes.
_SEQUENCE_AXIS = re.compile(r"(ring|ulysses|cp|sp|seq|sequence|context)([_\d-].*)?")


def sequence_ranks(mesh: Mesh | None) -> SequenceRanks:
    """The ranks that share a sequence.

    Args:
        mesh: a DeviceMesh of one dim or a process group; or a DeviceMesh of two dims whose names begin with the word
            "ring", "ulysses", "cp", "sp", "seq", "sequence" or "context" (as "cp_node" and "cp2" do, and "sparse" does
            not). Other names are refused, since they may be those of data parallelism. The inner axis, whose ranks own
            adjacent parts of the sequence, is the one whose name begins with "ulysses", else the second.

    Raises:
        TypeError: anything else.
        ValueError: a mesh of other dims, one of two inner axes, or one that this rank is not part of.
        NotImplementedError: a mesh of other devices than CPUs and CUDA devices.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return SequenceRanks(mesh)
    if mesh is cast(Any, dist.GroupMember.NON_GROUP_MEMBER):  # an object of no documented type
        raise ValueError("this rank is not part of the process group: new_group returned no group here")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "expected mesh to be a DeviceMesh of one dim or a ProcessGroup, or a DeviceMesh of two axes that share the "
            f"sequence; got {type(mesh).__name__}"
        )
    if mesh.device_type not in ("cpu", "cuda"):
        raise NotImplementedError(f"expected a mesh of CPUs or CUDA devices, got {mesh.device_type}")
    ndim, names = mesh.ndim, mesh.mesh_dim_names or ()
    if ndim > 2 or (ndim == 2 and not (names and all(map(_SEQUENCE_AXIS.fullmatch, names)))):
        sequence = [name for name in names if _SEQUENCE_AXIS.fullmatch(name)][-2:] or list(names[-1:])
        hint = "init_device_mesh(..., mesh_dim_names=...) and mesh['cp']"
        if sequence:
            hint = f"mesh[{', '.join(map(repr, sequence))}]"
        raise ValueError(
            "expected a mesh of one dim, the context-parallel axis, or of two whose names say that they share the "
            f"sequence, such as ('ring', 'ulysses') or ('cp_node', 'cp_gpu'); got {ndim} dims "
            f"(names {mesh.mesh_dim_names}, shape {tuple(mesh.shape)}). Pass those axes of it, such as {hint}"
        )
    if ndim == 2 and all(map(is_ulysses_axis, names)):
        raise ValueError(
            'expected at most one axis whose name begins with "ulysses", the inner one, beside an outer one such as '
            f"'ring'; got names {mesh.mesh_dim_names}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    if ndim == 1:
        return SequenceRanks(mesh.get_group())
    inner = inner_axis(mesh)
    return SequenceRanks.along(mesh, (1 - inner, inner))


def axis_names(mesh: Mesh) -> tuple[str, ...]:
    """The names of the axes of a mesh that `sequence_ranks` takes, the outer one first."""
    if isinstance(mesh, dist.ProcessGroup) or not mesh.mesh_dim_names:
        return ("the group",)
    names: tuple[str, ...] = mesh.mesh_dim_names
    return names[::-1] if mesh.ndim == 2 and inner_axis(mesh) == 0 else names


def inner_axis(mesh: DeviceMesh) -> int:
    """The index of the inner one of two axes."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    return next((axis for axis, name in enumerate(names) if is_ulysses_axis(name)), 1)


def is_ulysses_axis(name: str) -> bool:
    """True if a name begins with the word "ulysses"."""
    found = _SEQUENCE_AXIS.fullmatch(name)
    return found is not None and found[1] == "ulysses"


def checked_method(method: str) -> str:
    """`method`; refuses other names than those of `METHODS`."""
    if method not in METHODS:
        raise ValueError(f"unknown method: got {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    return method


def ranks_and_method(mesh: Mesh | None, method: str) -> tuple[SequenceRanks, str]:
    """The ranks without axes of one rank, and the method without them.

    Refuses what `sequence_ranks` refuses, unknown methods, and methods that need another number of axes.
    """
    checked_method(method)
    ranks = sequence_ranks(mesh)
    if ranks.inner is None:
        if method == "hybrid":
            raise ValueError(
                f'method "hybrid" expects a mesh of two dims, got one axis of {ranks.size} ranks: make one with '
                'init_device_mesh(..., mesh_dim_names=("ring", "ulysses"))'
            )
        return ranks, method
    if method == "ulysses":
        raise ValueError(
            f'method "ulysses" expects a mesh of one dim, got two axes of {ranks.outer.size()} x {ranks.inner.size()} '
            'ranks: pass one axis, or use "hybrid"'
        )
    if ranks.inner.size() == 1:
        return SequenceRanks(ranks.outer), "ring" if method == "hybrid" else method
    if ranks.outer.size() == 1:
        return SequenceRanks(ranks.inner), "ulysses" if method == "hybrid" else method
    return ranks, method


def checked_layout(layout: Layout | None) -> Layout:
    """`layout`, or `HeadTail()` if None; refuses anything else, such as the class itself."""
    if layout is None:
        return HeadTail()
    if not isinstance(layout, Layout):
        raise TypeError(f"expected layout to be a Layout such as HeadTail() or None, got {layout!r}")
    return layout


def checked_bool(name: str, value: object) -> bool:
    """`value`; refuses anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, got {value!r}")
    return value


@dataclass(frozen=True)
class AttentionConfig:
    """Partition of a sequence, and the method and KV transport of its ranks."""

    ranks: SequenceRanks
    layout: Layout
    method: str
    """One of `METHODS`."""
    transport: TransportMethod
    """The KV transport of rings."""
    deterministic: bool = False
    """True if results must be equal in every run, also without `torch.use_deterministic_algorithms`."""
    debug: bool = False
    """True if the ranks compare at every call what must agree."""
    replay: bool = False
    """True if passes that come again are replayed as CUDA graphs."""
    mask: Mask | None = None
    """The mask of all calls, combined with the mask of each call."""
    declared_lengths: tuple[int, ...] | None = None
    """Known global lengths: of a context's buffers, or of a module. Other lengths are found by exchange."""
    batch_size: int | None = None
    """The batch size of a context's buffers, where the layout partitions batch rows differently."""
    lengths_vary: bool = False
    """True if the next context of this kind may have other `declared_lengths` and another `mask`, as each batch of
    packed documents has. Compiled code serves all of these contexts, so it reads both when it runs."""
    placed: SequencePartition | None = None
    """The partition of DTensors, by their placements; `layout` is not used then."""

    @classmethod
    def of(
        cls, mesh: Mesh | None, method: str, layout: Layout | None, rotate_method: str | None, *, debug: bool,
        deterministic: bool = False, replay: bool = False,
    ) -> AttentionConfig:  # fmt: skip
        """The configuration of public arguments, which are checked."""
        ranks, method = ranks_and_method(mesh, method)
        transport = transport_by_name(rotate_method)
        deterministic, replay = checked_bool("deterministic", deterministic), checked_bool("replay", replay)
        return cls(ranks, checked_layout(layout), method, transport, deterministic, debug, replay)

    def partition(self, lengths: tuple[int, int], batch_size: int) -> SequencePartition:
        """The partition of a call with these global (queries, keys)."""
        if self.placed is None:
            return LayoutPartition(self.layout, *lengths, batch_size, self.ranks.size)
        if (self.placed.q_len, self.placed.kv_len, self.placed.batch_size) == (*lengths, batch_size):
            return self.placed
        return self.placed.resized(*lengths, batch_size)


def check_batch_size(q: torch.Tensor, config: AttentionConfig) -> None:
    """Refuses batches of another size than the context's buffers, if the layout partitions batch rows differently."""
    if config.batch_size not in (None, q.size(0)):
        raise ValueError(
            f"{config.layout} divides batch rows differently, so attention needs the batch size of the "
            f"buffers, {config.batch_size}; got q of shape {tuple(q.shape)}"
        )


# Arguments


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    """Refuses queries, keys and values whose types, (B, H, S, D) shapes, dtypes, devices or head counts do not fit."""
    check_tensors(q=q, k=k, v=v)
    check = _refuse_unfit.__wrapped__ if _torch.is_traced(q) else _refuse_unfit  # sizes in a trace cannot be hashed
    check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device), bool(enable_gqa))


def check_tensors(owner: str | None = None, /, **tensors: object) -> None:
    """Refuses anything but tensors, by name; `owner` is the public function, for the message."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            expected = "expected" if owner is None else f"{owner} expects"
            raise TypeError(f"{expected} {name} to be a torch.Tensor, got {type(tensor).__name__}")


def check_devices(owner: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Refuses tensors on several devices, or on others than CPUs and CUDA devices; "meta" tensors have no values."""
    first = None
    for tensor in tensors:
        if tensor is None:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first or first.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{owner} expects tensors on one device, a CPU or a CUDA device; got tensors on {first}"
                + (f" and {tensor.device}" if tensor.device != first else "")
            )


def refuse_dtensors(**tensors: torch.Tensor | None) -> None:
    """Refuses DTensors where functions take local shards."""
    for name, tensor in tensors.items():
        placements = None if type(tensor) is torch.Tensor else getattr(tensor, "placements", None)
        if placements is not None:
            raise TypeError(
                f"expected {name} to be a plain tensor, this rank's own, got a DTensor placed {placements}: "
                "pass what is local of it (to_local()); "
                "F.scaled_dot_product_attention takes q, k, v and attn_mask as DTensors"
            )


@lru_cache(maxsize=1024)  # arguments that passed are not checked again
def _refuse_unfit(
    shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], devices: tuple[torch.device, ...], enable_gqa: bool
) -> None:
    q, k, v = shapes
    received = f"got q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    expect(len(q) == len(k) == len(v) == 4, "q, k and v of four dims (batch, heads, sequence, head_dim)", received)
    expect(len(set(dtypes)) == 1, "one dtype for q, k and v", f"got {', '.join(map(str, dtypes))}")
    expect(dtypes[0].is_floating_point, "a floating dtype", f"got {dtypes[0]}")
    expect(len(set(devices)) == 1, "one device for q, k and v", f"got {', '.join(map(str, devices))}")
    expect(devices[0].type in ("cpu", "cuda"), "q, k and v on a CPU or a CUDA device", f"got {devices[0]}")
    expect(q[0] == k[0] == v[0], "one batch size (dim 0) for q, k and v", received)
    expect(q[3] == k[3], "one head dim (dim 3) for q and k", received)
    expect(k[2] == v[2], "one sequence length (dim 2) for k and v", received)
    expect(k[1] == v[1], "as many value heads as key heads (dim 1)", received)
    expect(0 not in (q[0], q[1], k[1], q[3], v[3]), "at least one batch row, head and head dim", received)
    expect(enable_gqa or k[1] in (q[1], 1), "as many key heads as query heads, one, or enable_gqa=True", received)
    if q[1] % k[1]:
        raise ValueError(f"enable_gqa=True expects query heads to be a multiple of key heads; {received}")


def expect(fits: bool, expected: str, received: str) -> None:
    """Refuses arguments that do not fit, by a ValueError."""
    if not fits:
        raise ValueError(f"expected {expected}; {received}")


def refuse_other_lengths(layout: Layout, length: int, what: str) -> None:
    """Refuses another length than the only one of a layout; the message begins with `what`."""
    if layout.only_length not in (None, length):
        raise ValueError(
            f"{what}: got {length} tokens, but this {type(layout).__name__} divides sequences of {layout.only_length} "
            "tokens only"
        )


def checked_seq_len(seq_len: int | tuple[int, int]) -> tuple[int, int]:
    """The global lengths of queries and keys; refuses anything but a length or a pair of lengths."""
    pair = tuple(seq_len) if isinstance(seq_len, (tuple, list)) else (seq_len, seq_len)
    if len(pair) != 2 or not all(is_integer(length) and length >= 0 for length in pair):
        raise ValueError(f"expected seq_len to be a length >= 0 or a pair of lengths (queries, keys), got {seq_len!r}")
    return pair[0], pair[1]


def checked_length(length: int, what: str = "seq_len") -> int:
    """`length`, a global length; refuses anything but integers >= 0."""
    if not is_integer(length) or length < 0:
        raise ValueError(f"expected {what} to be an integer >= 0, got {length!r}")
    return length


def checked_lengths_of(layout: Layout, seq_len: int | Iterable[int] | None) -> tuple[int, ...]:
    """The global lengths that `seq_len` declares, ascending; refuses those that `layout` does not divide."""
    several: Any = () if seq_len is None else seq_len
    if not isinstance(several, Iterable) or isinstance(several, torch.Tensor):
        several = (several,)
    lengths = {checked_length(length) for length in several}
    for length in lengths:
        refuse_other_lengths(layout, length, "seq_len")
    return tuple(sorted(lengths))


# Masks, dropout and sinks
_TO_SHARD = "context_parallel_shard(mesh, [attn_mask], [-2]) makes it of a whole one"


def refuse_unsupported_sdpa(attn_mask: torch.Tensor | None, dropout_p: float) -> None:
    """Refuses arguments that fused operators do not support on sequence shards, while SDPA itself does."""
    mask = None if attn_mask is None else f"a mask of shape {tuple(attn_mask.shape)}, expected None"
    dropout = f"dropout_p={dropout_p}, expected 0.0" if dropout_p else None
    for name, received in (("attn_mask", mask), ("dropout", dropout)):
        if received:
            raise NotImplementedError(
                f"{name} is not supported by this operator on sequence shards: got {received}; "
                "F.scaled_dot_product_attention takes it"
            )


def checked_mask(mask: object, is_causal: bool) -> Mask:
    """The intersection of a call's mask and `is_causal`; refuses other than mask values."""
    if mask is not None and not isinstance(mask, Mask):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        hint = "; pass tensors as attn_mask" if isinstance(mask, torch.Tensor) else ""
        raise TypeError(f"expected mask to be a Mask such as SlidingWindow(1024, 0), got {got}{hint}")
    of_call = Causal() if is_causal else Full()
    return of_call if mask is None else mask_intersection(mask, of_call)


def checked_dropout_p(dropout_p: float) -> float:
    """`dropout_p`; refuses anything but a probability."""
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"expected dropout_p to be a number between 0 and 1, got {dropout_p!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"expected dropout_p between 0 and 1, got {dropout_p}")
    return float(dropout_p)


def checked_softcap(softcap: float) -> float:
    """`softcap`; refuses anything but a finite number of at least 0."""
    if not isinstance(softcap, (int, float)):
        raise TypeError(f"expected softcap to be a number, 0.0 for none, got {softcap!r}")
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"expected softcap to be a finite number of at least 0.0, which is none, got {softcap}")
    return float(softcap)


def checked_sinks(sinks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`sinks` (H,), one logit for each query head of q (B, H, S, D); refuses other types, heads and devices."""
    check_tensors(sinks=sinks)
    received = f"got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device} for q {tuple(q.shape)}"
    expect(sinks.is_floating_point(), "sinks of a floating dtype", received)
    one_of_each = f"one sink for each of this rank's query heads, ({q.size(1)},)"
    expect(tuple(sinks.shape) == (q.size(1),), one_of_each, received)
    expect(sinks.device == q.device, f"sinks on the device of q, {q.device}", received)
    return sinks


def four_dims_of_mask(attn_mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`attn_mask` as (B or 1, H or 1, S or 1, key positions or 1), not expanded.

    Refuses other types and devices, and dims that do not broadcast to those of q.
    """
    check_tensors(attn_mask=attn_mask)
    received = f"got {attn_mask.dtype} {tuple(attn_mask.shape)} on {attn_mask.device} for q {tuple(q.shape)}"
    if attn_mask.dtype == torch.int64 and attn_mask.dim() == 4:
        received += (
            ". In a model of transformers, int64 is the dtype of a tensor that names a mask of the whole sequence; a "
            "model that pads or joins it (DeepSeek-V4) cannot be used in context_parallel"
        )
    expect(attn_mask.dtype == torch.bool or attn_mask.is_floating_point(), "a boolean or floating attn_mask", received)
    expect(attn_mask.device == q.device, f"attn_mask on the device of q, {q.device}", received)
    fits = attn_mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(attn_mask.shape[-2::-1], q.shape[2::-1], strict=False)
    )
    if not fits or attn_mask.dim() < 1:
        of_other_rows = attn_mask.dim() > 1 and attn_mask.size(-2) not in (1, q.size(2))
        hint = f". {_TO_SHARD}" if of_other_rows else ""
        raise ValueError(
            "expected attn_mask to broadcast to (batch, heads, this rank's queries, keys of the whole sequence); "
            f"{received}{hint}"
        )
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def check_bias(
    q: torch.Tensor, bias: torch.Tensor | None, lengths: tuple[int, int], layout: Layout | None = None,
    ranks: SequenceRanks | None = None,
) -> None:  # fmt: skip
    """Refuses an attn_mask (four dims) without the keys of the whole sequence, or whose rows are not those of q.

    `layout` is that of `ranks`; None if it is known to be the same in every batch row. Where batch rows are divided
    differently and some rank has a single query, whose mask looks alike with and without query rows, the ranks compare
    their numbers of rows.
    """
    if bias is None:
        return
    q_len, kv_len = lengths
    if bias.size(3) not in (1, kv_len):
        hint = _TO_SHARD
        if bias.size(2) == 1 < q.size(2):  # a padding mask, for example: there are no rows to shard
            hint = "One that is the same for all queries is passed whole"
        raise ValueError(
            f"expected attn_mask to have this rank's query rows ({q.size(2)}, in layout order) and the {kv_len} keys "
            f"of the whole sequence, in the order of their positions; got {tuple(bias.shape)}. {hint}"
        )
    if layout is None or ranks is None or bias.size(0) > 1 or len(layout.batch_groups(q.size(0))) == 1:
        return
    local = shard_lengths(layout, q_len, ranks.size)
    most_rows = bias.size(2)
    if min(local) <= 1 < q_len:
        # If no rank has more than one query, no rank can tell: refused.
        most_rows = max(ranks.gather_integers([most_rows], q.device))[0] if max(local) > 1 else q_len
    if most_rows > 1:
        raise ValueError(
            f"{layout} gives this rank other queries in some batch rows than in others, so an attn_mask with query "
            f"rows needs all {q.size(0)} batch rows; got {tuple(bias.shape)}. Expand it before it is sharded"
        )


def softmax_scale(q: torch.Tensor, scale: float | None) -> float:
    """The factor of the logits; 1 / sqrt(D) if None. Refuses NaN and infinity."""
    if scale is None:
        return 1.0 / math.sqrt(q.size(3))
    if not abs(scale) < math.inf:
        raise ValueError(f"expected a finite scale, got {scale}")
    return float(scale)


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float]:
    """`(q, scale)` of equal logits with scale > 0: kernels mask before they scale, and -inf times 0 is NaN.

    A scale of None is 1 / sqrt(D); NaN and infinity are refused.
    """
    scale = softmax_scale(q, scale)
    if scale < 0:
        return q * -1, -scale
    return (q * 0, 1.0) if scale == 0 else (q, scale)
