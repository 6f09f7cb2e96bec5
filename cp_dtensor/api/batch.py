"""`plan_batch`: documents of one batch, spread over steps and groups of ranks that fit their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor.api.explain import check_numbers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.submeshes import submesh
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine.agreement import compare
from cp_dtensor.engine.arguments import expect
from cp_dtensor.engine.call import Sharding
from cp_dtensor.engine.choose import estimates
from cp_dtensor.engine.planner import call_spec
from cp_dtensor.plan.batch import RankGroup, plan_steps
from cp_dtensor.plan.cluster import Cluster, Hardware, Tier
from cp_dtensor.plan.cost import BACKWARD
from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import HeadTail, Layout
from cp_dtensor.spec.masks import Causal, is_integer

_POINTS = 4
"""Lengths an octave at which attention is estimated; times of others lie between."""


@dataclass(frozen=True)
class BatchStep:
    """What this rank computes in one step of a plan: the documents of its group, packed into one row."""

    groups: tuple[RankGroup, ...]
    """All groups of the step: `first` rank, `size`, `documents` and predicted `seconds` of each."""
    mesh: DeviceMesh = field(repr=False)
    """The ranks of this rank's group, along an axis "cp"."""
    documents: tuple[int, ...]
    """Indices in the batch."""
    lengths: tuple[int, ...]
    """Tokens of each of these documents."""
    scale: float
    """Factor of the sum of this rank's token losses, after which gradients that are averaged over all ranks of the
    batch's mesh, as DDP and FSDP do, are those of the mean loss of the batch in one process."""

    @property
    def seconds(self) -> float:
        """Predicted time of the slowest group."""
        return max(group.seconds for group in self.groups)

    @property
    def mask(self) -> Documents:
        """Causal attention inside of each document."""
        return Documents.from_lengths(self.lengths, within=Causal())

    @property
    def layout(self) -> Layout:
        """A layout that gives the ranks of the group equal work."""
        return HeadTail() if len(self.lengths) == 1 else Balanced(self.mask, sum(self.lengths))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return (1, tokens, ...) from tensors (length, ...) of every document of the batch; others are not read."""
        parts = [tensors[document] for document in self.documents]
        for document, part, length in zip(self.documents, parts, self.lengths, strict=True):
            expect(part.shape[:1] == (length,), f"document {document} to have {length} tokens", f"got {part.shape}")
        return torch.cat(parts)[None]

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return (1, tokens) int64: the position of each token in its document."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])[None]


@dataclass(frozen=True)
class BatchPlan(Sequence[BatchStep]):
    """The steps of a batch, which all ranks compute one after another. `str()` is a table."""

    steps: tuple[BatchStep, ...]

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def seconds(self) -> float:
        """Predicted time of a layer, forward and backward, for all steps."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        rows = [("step", "ranks of groups", "documents", "ms a layer", "idle")]
        for number, step in enumerate(self.steps):
            sizes = " + ".join(str(group.size) for group in step.groups)
            documents = " + ".join(str(len(group.documents)) for group in step.groups)
            ranks = sum(group.size for group in step.groups)
            busy = sum(group.size * group.seconds for group in step.groups) / (ranks * step.seconds)
            rows.append((str(number), sizes, documents, f"{1e3 * step.seconds:.3g}", f"{1 - busy:.0%}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@lru_cached
def _estimated(length: int, size: int, heads: tuple[int, int, int], hardware: Hardware) -> float:
    """Return the seconds of causal attention to one document, forward and backward, on `size` ranks."""
    q_heads, kv_heads, head_dim = heads
    q, kv = torch.Size((1, q_heads, 0, head_dim)), torch.Size((1, kv_heads, 0, head_dim))
    partition = LayoutPartition(HeadTail(), length, length, 1, size)
    spec = call_spec(partition, Causal(), q, kv, kv, torch.bfloat16, torch.device("cpu"))
    found = estimates(spec, Cluster(hardware, (Tier.of(hardware, size),)), ROTATE_METHODS["auto"])
    return min(each.seconds for each in found.values())


def _attention_seconds(length: int, size: int, heads: tuple[int, int, int], hardware: Hardware) -> float:
    """Return the time of a document between those of the two nearest lengths that are estimated."""
    octave = _POINTS * math.log2(length)
    below, above = (round(2 ** (point / _POINTS)) for point in (math.floor(octave), math.floor(octave) + 1))
    low, high = (_estimated(point, size, heads, hardware) for point in (below, above))
    return low + (high - low) * (length - below) / (above - below) if above > below else low


def plan_batch(
    lengths: Sequence[int], mesh: DeviceMesh, *, tokens_per_rank: int, q_heads: int, kv_heads: int | None = None,
    head_dim: int = 128, parameters: int | None = None, targets: int | None = None, hardware: Hardware | str = "H200",
) -> BatchPlan:  # fmt: skip
    """Spread the documents of a batch over steps, and the ranks of each step over groups that share documents.

    A long document gets as many ranks as its memory or its attention needs, and short ones are packed on one rank: they
    would lose more by exchanges than they gain. All ranks take part in each step (none is left without documents), so
    FSDP's and DDP's collectives stay in step. Every rank passes equal arguments and gets an equal plan; a collective
    compares the arguments.

    Args:
        lengths: tokens of each document of the whole batch, at least 1.
        mesh: the ranks that share the batch, along one axis (flatten data and context parallel axes for it).
        tokens_per_rank: most tokens of a rank in a step: what its memory holds.
        q_heads, kv_heads, head_dim: of attention; kv_heads None is as many as q_heads.
        parameters: those of a layer that a token uses; None is 12 (q_heads * head_dim)^2. With the former they give the
            ratio of the cost of attention to all else.
        targets: tokens of the batch that have a label; None is all. It is the divisor in `scale`.
        hardware: GPU and links, as `explain` takes them.

    Raises:
        TypeError, ValueError: arguments that do not fit, or differ between ranks; a document that does not fit into the
            memory of all ranks.

    Each step is a context of its own (examples/batch_plan.py):

        for step in plan_batch(lengths, mesh, tokens_per_rank=8192, q_heads=32, kv_heads=8):
            buffers = [step.pack(tokens), step.pack(labels), step.positions()]
            with context_parallel(
                step.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], mask=step.mask, layout=step.layout
            ):
                (step.scale * loss_sum(model, *buffers)).backward()
        optimizer.step()

    Source: as NVIDIA's Dynamic Context Parallelism and ByteScale (arXiv:2502.21231), with groups of any size.
    """
    expect(isinstance(mesh, DeviceMesh) and mesh.ndim == 1, "a mesh with one axis", f"got {mesh!r}")
    facts = {
        "lengths": list(lengths), "tokens_per_rank": tokens_per_rank, "heads": (q_heads, kv_heads, head_dim),
        "parameters": parameters, "targets": targets, "hardware": hardware,
    }  # fmt: skip
    # Otherwise groups would differ, and wait for each other.
    compare(Sharding(SequenceRanks(mesh.get_group()), debug=True), "plan_batch", None, lambda: facts)
    kv_heads = q_heads if kv_heads is None else kv_heads
    parameters = 12 * (q_heads * head_dim) ** 2 if parameters is None else parameters
    check_numbers(
        torch.bfloat16, tokens_per_rank=tokens_per_rank, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        parameters=parameters,
    )  # fmt: skip
    expect(q_heads % kv_heads == 0, "q_heads to be a multiple of kv_heads", f"got {q_heads} and {kv_heads}")
    lengths = list(lengths)
    good = bool(lengths) and all(is_integer(length) and length >= 1 for length in lengths)
    expect(good, "lengths to be positive integers, one at least", f"got {lengths!r}")
    most = mesh.size() * tokens_per_rank
    longest = max(lengths)
    expect(longest <= most, f"documents of at most {mesh.size()} ranks x {tokens_per_rank} tokens", f"got {longest}")
    targets = sum(lengths) if targets is None else targets
    expect(is_integer(targets) and targets >= 1, "targets to be an integer >= 1", f"got {targets!r}")
    found = Hardware.of(hardware) if isinstance(hardware, str) else hardware
    expect(isinstance(found, Hardware), "hardware to be a Hardware or the name of one", f"got {hardware!r}")
    unlaunched = replace(found, launch=0.0)  # documents of a group are one call, so launches count once
    heads = q_heads, kv_heads, head_dim
    attention = cache(partial(_attention_seconds, heads=heads, hardware=unlaunched))

    def seconds(documents: Sequence[int], size: int) -> float:
        rows = -(-sum(documents) // size)
        products = 6 * parameters * rows / found.flops  # 2 FLOPs a parameter and token in forward, 4 in backward
        launches = found.launch * (1 + BACKWARD) * (1 if size == 1 else size + 1)
        return products + launches + sum(attention(length, size) for length in documents)

    rank = mesh.get_local_rank()
    steps = []
    for groups in plan_steps(lengths, mesh.size(), tokens_per_rank, seconds):
        mine = next(group for group in groups if group.first <= rank < group.first + group.size)
        ranks = submesh(mesh, [group.size for group in groups])
        of_mine = tuple(lengths[document] for document in mine.documents)
        steps.append(BatchStep(groups, ranks, mine.documents, of_mine, mesh.size() / targets))
    return BatchPlan(tuple(steps))
