"""Ring attention on aten ops, and the merge of partial results, as torch's private templates expect them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor import _torch
from cp_dtensor._torch.experimental import aten_name
from cp_dtensor._torch.tensors import no_autocast
from cp_dtensor.attention.backends.select import backend_by_name
from cp_dtensor.attention.merge import merge
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.autograd import Attention, BoundCall
from cp_dtensor.engine.planner import plan_ring, shaped_spec
from cp_dtensor.engine.validation import check_qkv, positive_scale, refuse_unsupported_sdpa, softmax_scale
from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout
from cp_dtensor.spec.masks import Causal, Full


class Part(NamedTuple):
    """What of a rank's queries and of another's keys one call is about."""

    first_query: int
    """Queries from here on."""
    keys: int | None
    """That many of the first keys; None for all."""
    is_causal: bool


def part_of(rank: int, source: int, length: int, layout: Layout | None, world_size: int) -> Part | None:
    """What `rank` computes against the keys of `source`; None for nothing.

    Args:
        rank: of the queries.
        source: of the keys.
        length: global length.
        layout: `Contiguous()` or `HeadTail()` under a causal mask, None without a mask.
        world_size: number of ranks.
    """
    if layout is None:
        return Part(0, None, False)
    if rank == source:
        return Part(0, None, True)
    if layout != HeadTail():
        return Part(0, None, False) if source < rank else None
    if source < rank:  # all of our rows are behind its head, and none behind its tail
        return Part(0, layout.segments(length, source, world_size)[0].length, False)
    return Part(layout.segments(length, rank, world_size)[0].length, None, False)


class Shipment:
    """Tensors that go to one rank while others of the same shapes come from another; either may be nothing."""

    def __init__(
        self,
        outgoing: Sequence[torch.Tensor],
        to_rank: int | None,
        like: Sequence[torch.Tensor],
        from_rank: int | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._like = like
        device = like[0].device
        # As bytes, since groups do not know every dtype.
        sent = [tensor.contiguous().flatten().view(torch.uint8) for tensor in outgoing]
        self._sent = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in like) if from_rank is not None else 0
        self._received = torch.empty(size, dtype=torch.uint8, device=device)
        splits_in, splits_out = [0] * group.size(), [0] * group.size()
        if from_rank is not None:
            splits_in[from_rank] = size
        if to_rank is not None:
            splits_out[to_rank] = self._sent.numel()
        self._work = dist.all_to_all_single(
            self._received, self._sent, splits_in, splits_out, group=group, async_op=True
        )

    def arrived(self) -> list[torch.Tensor]:
        """Waits; the tensors that came, contiguous. None if none were to come."""
        self._work.wait()
        if not self._received.numel():
            return []
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._like]
        pieces = self._received.split(sizes)
        return [piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, self._like, strict=True)]


def keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(source rank, its keys, its values), the own ones first and then rank - 1, ...; the next are always on their way.

    They go straight from their owner, not from rank to rank.
    """
    rank, world_size = group.rank(), group.size()
    own = key.contiguous(), value.contiguous()

    def start(hop: int) -> Shipment | None:
        if hop == world_size:
            return None
        return Shipment(own, (rank + hop) % world_size, own, (rank - hop) % world_size, group)

    on_its_way = start(1)
    yield rank, own[0], own[1]
    for hop in range(1, world_size):
        assert on_its_way is not None
        source_key, source_value = on_its_way.arrived()
        on_its_way = start(hop + 1)
        yield (rank - hop) % world_size, source_key, source_value


def refuse_different_shapes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Refuses keys of different shapes on the ranks, where the group can compare them on the host.

    Raises:
        ValueError: on every rank alike.
    """
    # Elsewhere it would stall a GPU's launches.
    if group.size() == 1 or not (_torch.has_cpu_backend(group) or tensors[0].device.type == "cpu"):
        return
    mine = torch.tensor([size for tensor in tensors for size in tensor.shape], device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    said = [other.tolist() for other in everyone]
    if any(other != said[0] for other in said):
        raise ValueError(
            "expected tensors of the same shapes on every rank, got the sizes "
            + ", ".join(f"{sizes} on rank {rank}" for rank, sizes in enumerate(said))
        )


class _SDPAMerger:
    """Merges results of attention calls over different keys.

    Args:
        convert_to_f32: sums are in float32 (float64 for float64 results) whatever it is.
        seq_dim: the sequence dim of `out`, of which calls with `partial` concern the last rows.

    Rows that saw no key (lse -inf) count nothing, and stay zero where none of the calls saw one.
    """

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._seq_dim = seq_dim
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dtypes = (torch.float32, torch.float32)
        self._lse_has_last_dim = False

    def step(self, out: torch.Tensor, lse: torch.Tensor, partial: bool) -> None:
        """Adds the result of a call.

        Args:
            out: (B, H, S, D) in torch's own calls; any shape whose last dim is not of the sequence.
            lse: out's shape without its last dim, or with 1 instead of it; longer in dim 2 as padded by the efficient
                backend. Natural log of the softmax denominator.
            partial: the result is of the last rows only.

        Raises:
            ValueError: shapes that do not fit.
            RuntimeError: the first result is partial.
        """
        if partial and self._state is None:
            raise RuntimeError("expected the first result to be of all rows, got partial=True")
        self._dtypes = (out.dtype, lse.dtype)
        self._lse_has_last_dim = lse.dim() == out.dim()
        lse = lse.squeeze(-1) if self._lse_has_last_dim else lse
        lse = without_padding(lse, out)
        state_dtype = torch.promote_types(lse.dtype, torch.float32)
        if self._state is None:
            # Contiguous copies: what ops return is theirs.
            self._state = (
                out.to(state_dtype, copy=True, memory_format=torch.contiguous_format),
                lse.to(state_dtype, copy=True, memory_format=torch.contiguous_format),
            )
            return
        total_out, total_lse = self._state
        if partial:
            rows = out.size(self._seq_dim)
            first = total_out.size(self._seq_dim) - rows
            total_out, total_lse = (x.narrow(self._seq_dim, first, rows) for x in (total_out, total_lse))
        if total_out.shape != out.shape:
            raise ValueError(f"expected a result of shape {tuple(total_out.shape)}, got {tuple(out.shape)}")
        out, lse, total_out, total_lse = (x[(None,) * max(4 - out.dim(), 0)] for x in (out, lse, total_out, total_lse))
        merge(total_out, total_lse, total_out, total_lse, [((0, out.size(2)), out, lse.contiguous())])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)` over all keys, shaped as they came and in the dtypes of the last call.

        Raises:
            RuntimeError: there has been no call.
        """
        if self._state is None:
            raise RuntimeError("expected at least one result to have been merged")
        out, lse = (x.to(dtype) for x, dtype in zip(self._state, self._dtypes, strict=True))
        return out, lse.unsqueeze(-1) if self._lse_has_last_dim else lse


def without_padding(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(B, H, S) of an LSE that the efficient backend has padded to a multiple of 32 rows.

    Raises:
        ValueError: any other shape.
    """
    if out.dim() == 4 and lse.shape[:2] == out.shape[:2] and lse.size(-1) > out.size(2):
        lse = lse[..., : out.size(2)]
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"expected an lse of shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    return lse


_BACKENDS = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION",
    "_scaled_dot_product_flash_attention_for_cpu": "FLASH_ATTENTION",
    "_scaled_dot_product_efficient_attention": "EFFICIENT_ATTENTION",
    "_scaled_dot_product_cudnn_attention": "CUDNN_ATTENTION",
}


_SUFFIX = "_backward"


@dataclass(frozen=True)
class AtenOp:
    """A fused SDPA op or its backward: the ring is ours, tiles are computed by the op's backend."""

    name: str
    """Without the suffix of backwards."""

    def forward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Everything that the op returns; there is no random state without dropout. Differentiable.

        Args:
            group: the ranks of the ring.
            layout: the order of the tokens under a causal mask, None without a mask.
            query, key, value: (B, H, S, D), of equal shapes on all ranks.
            kwargs: those of the op.

        Raises:
            TypeError, ValueError: tensors that do not fit.
            NotImplementedError: masks, dropout, and what the backend refuses.
        """
        query, call = self._call(group, layout, query, key, value, kwargs)
        out, lse, _ = Attention.apply(query, key, value, None, None, NO_MODIFIERS, call, True)
        if self.name == "_scaled_dot_product_flash_attention_for_cpu":
            return out, lse
        state = query.new_empty(0, dtype=torch.int64)
        if self.name == "_scaled_dot_product_efficient_attention":
            return out, lse, state, state
        if self.name == "_scaled_dot_product_cudnn_attention":
            lse = lse.unsqueeze(-1)
        return out, lse, None, None, query.size(2), key.size(2), state, state, query.new_empty(0)

    def backward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Everything that the op's backward returns.

        Raises:
            as `forward`.
        """
        with torch.enable_grad():  # a scale of zero or less goes into the queries, and has a derivative
            given = query.detach().requires_grad_()
            scaled, call = self._call(group, layout, given, key, value, kwargs)
        lse = without_padding(lse.squeeze(-1) if lse.dim() == out.dim() else lse, out)
        with torch.no_grad(), no_autocast(query):
            saved = scaled.detach(), key, value, out, lse.contiguous()
            grads = call.plan.backward(grad_out, NO_MODIFIERS, saved, None, call.ranks, call.scale)
        grad_q, grad_k, grad_v = grads
        if scaled is not given:
            (grad_q,) = torch.autograd.grad(scaled, given, grad_q)
        grads = grad_q, grad_k, grad_v
        return (*grads, None) if self.name == "_scaled_dot_product_efficient_attention" else grads

    def _call(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, BoundCall]:
        mask = next((kwargs[name] for name in ("attn_bias", "attn_mask") if kwargs.get(name) is not None), None)
        refuse_unsupported_sdpa(mask, kwargs.get("dropout_p") or 0.0)
        if kwargs.get("return_debug_mask"):
            raise NotImplementedError("no rank has the attention weights of the whole sequence: got return_debug_mask")
        check_qkv(query, key, value, True)
        lengths = (query.size(2) * group.size(), key.size(2) * group.size())
        partition = LayoutPartition(layout or Contiguous(), *lengths, query.size(0), group.size())
        shapes = query.shape, key.shape, value.shape
        spec = shaped_spec(partition, Full() if layout is None else Causal(), *shapes, query.dtype, query.device)
        backend = backend_by_name(_BACKENDS[self.name], query.device.type)
        refusal = backend.refusal(spec)
        if refusal is not None:
            raise NotImplementedError(f"{self.name} cannot compute this attention ({spec}): {refusal}")
        query, scale = positive_scale(query, softmax_scale(query, kwargs.get("scale")))
        ranks = SequenceRanks(group)
        plan = plan_ring(spec, transport_by_name(None), backend, group if group.size() > 1 else None, ranks.rank)
        return query, BoundCall(plan, ranks, scale)


def as_aten_op(op: Any) -> AtenOp | None:
    """The fused SDPA op that `op` is, with or without overload, forward or backward; None for anything else."""
    name = (aten_name(op) or "").removesuffix(_SUFFIX)
    return AtenOp(name) if name in _BACKENDS else None
