"""Context-parallel inner attention for TorchTitan's `ContextParallelTransform` (main since August 2026).

    from cp_dtensor.integrations.torchtitan import inner_attention_map

    config = apply_transforms(config, [ContextParallelTransform(inner_attention_map=inner_attention_map())])

Each inner attention of TorchTitan that has packed documents or a block mask as metadata gets one of this library: K/V
travel while attention of earlier keys runs, where TorchTitan's own waits for an all-gather. Recurrent layers (GDN, KDA)
get TorchTitan's own. Its load balancers stay in use, and it refuses layers of other classes by name. Compiled code runs
this attention between graphs, so blocks cannot be compiled with `fullgraph=True`.

Older versions call torch's context parallel: for these call `redirect_imports()` of
`cp_dtensor.integrations.torch_experimental` (docs/integrations.md has a launch line for each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    Layout,
    Mask,
    context_parallel_attention,
    context_parallel_flex_attention,
)
from cp_dtensor.api.extension import Mesh, bottom_right_mask, heads_first_of_packed, never_compiled, sequence_ranks
from cp_dtensor.spec.balanced_layouts import OneLength
from cp_dtensor.spec.layouts import Span, joined_spans

__all__ = ["Metadata", "PermutedParts", "attention", "describe_installed", "inner_attention_map", "prepare_metadata"]

_ATTENTION = "torchtitan.models.common.attention"
_REPLACED = (
    "VarlenInnerAttention", "SlidingWindowVarlenInnerAttention", "FlexInnerAttention",
    "SlidingWindowFlexInnerAttention", "MLAVarlenInnerAttention", "MLAFlexInnerAttention", "MLAAttention",
)  # fmt: skip
_OF_LATENTS = (f"{_ATTENTION}.mla", "torchtitan.models.kimi_k3.attention")
"""Where versions have attention of latents. `MLAAttention`, the newest, projects them, and has an inner attention."""
_RECURRENT = {"InnerGDN": "gdn", "InnerKDA": "kda"}
"""Recurrent layers, and the end of the names of their modules."""


@dataclass(frozen=True, eq=False)
class Metadata:
    """The whole sequence's documents or block mask, and the order in which TorchTitan has sharded the tokens."""

    layout: Layout
    documents: tuple[int, ...] | None = None
    block_mask: BlockMask | None = None

    def annotate_spmd_types(self) -> None:
        """Do nothing: there are no tensors of this rank alone."""


def prepare_metadata(attention_metadata: Any, *, permutation: torch.Tensor | None, world_size: int) -> Metadata:
    """Return the metadata of a batch for all layers, from TorchTitan's of the whole sequence.

    `attention_metadata` is a `BlockMask`, or a named tuple with `cu_seq_q` and `cu_seq_k`, (documents + 1,) of packed
    tokens. `permutation` (1, S) has the position of each token, rank after rank; None is for adjacent parts. Both are
    read on the host, once for all layers of a batch.

    Raises:
        TypeError, ValueError: other metadata; documents of keys that are not those of queries; a permutation of
            another shape, or of a length that the `world_size` ranks do not divide evenly.
    """
    layout = _layout_of(permutation, world_size)
    if isinstance(attention_metadata, BlockMask):
        return Metadata(layout, block_mask=attention_metadata)
    edges = getattr(attention_metadata, "cu_seq_q", None)
    if not isinstance(edges, torch.Tensor):
        raise TypeError(
            "expected attention_metadata to be a BlockMask or to have cu_seq_q, got "
            f"{type(attention_metadata).__name__}"
        )
    documents = tuple(edges.tolist())
    if attention_metadata.cu_seq_k is not edges and tuple(attention_metadata.cu_seq_k.tolist()) != documents:
        raise ValueError("expected self-attention, with equal documents of queries and keys; got different ones")
    return Metadata(layout, documents)


@never_compiled
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh, metadata: Metadata,
    window_size: tuple[int, int] = (-1, 0), scale: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None, kernel_options: dict[str, Any] | None = None,
    out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of packed tokens that are sharded over the ranks of `mesh`.

    Args:
        q, k, v: (T, H, K), (T, Hkv, K) and (T, Hkv, V), this rank's tokens; equally many on every rank.
        metadata: of `prepare_metadata`.
        window_size: (left, right), numbers of keys around a query's own position that it sees in its document, -1 for
            all; (-1, 0) is causal. Block masks have windows of their own.
        score_mod, kernel_options: of `flex_attention`, for block masks only; positions are global.
        out_transform: a differentiable function of the output and of the log-sum-exp (T, H), whose result is returned.

    Returns:
        (T, H, V). Raises as `context_parallel_attention` and `context_parallel_flex_attention`.
    """
    is_flex, needs_lse = metadata.block_mask is not None, out_transform is not None
    if not is_flex and (score_mod or kernel_options):
        raise ValueError("expected score_mod and kernel_options with a BlockMask only, got them with documents")
    options: dict[str, Any] = {
        "mesh": mesh, "layout": metadata.layout, "scale": scale, "seq_len": q.size(0) * sequence_ranks(mesh).size,
        "return_lse": needs_lse, "enable_gqa": True,
    }  # fmt: skip
    views = heads_first_of_packed(q, k, v)
    result: Any
    if is_flex:
        result = context_parallel_flex_attention(
            *views, block_mask=metadata.block_mask, score_mod=score_mod, kernel_options=kernel_options,
            compiled=q.is_cuda, **options,
        )  # fmt: skip
    else:
        # The last query is at the last key: of one document it is the causal mask, for which there are fused kernels.
        is_causal = tuple(window_size) == (-1, 0)
        mask: Mask = Causal() if is_causal else bottom_right_mask(False, window_size)
        if metadata.documents not in (None, (0, options["seq_len"])):
            mask = Documents(metadata.documents, within=mask)
        result = context_parallel_attention(*views, mask=mask, **options)
    out, lse = result if needs_lse else (result, None)
    out = out[0].transpose(0, 1).contiguous()
    return out if out_transform is None or lse is None else out_transform(out, lse[0].t())


def inner_attention_map() -> dict[type, type]:
    """Return TorchTitan's inner attention classes, each with its class of this library; GDN and KDA with TorchTitan's.

    Raises:
        ImportError: TorchTitan is not installed, or is a version without `CPAttention` (0.3 and before), or none of its
            classes of attention is known.
    """
    attentions = import_module(_ATTENTION)
    try:
        bases = import_module(f"{_ATTENTION}.cp_attention")
    except ModuleNotFoundError as error:
        raise ImportError(f"expected a TorchTitan with {_ATTENTION}.cp_attention: {describe_installed()}") from error
    base = getattr(bases, "CPAttention", None) or bases.CPInnerAttention  # an earlier name
    modules = [attentions, *filter(None, map(_imported, _OF_LATENTS))]
    found = {name: value for module in modules for name, value in vars(module).items() if name.endswith("Attention")}
    if not found.keys() & {*_REPLACED}:
        raise ImportError(f"expected a TorchTitan with one of {', '.join(_REPLACED)}; got {', '.join(found)}")
    ours = {found[name]: _context_parallel_class(found[name], base) for name in _REPLACED if name in found}
    for name, module in _RECURRENT.items():
        inner = getattr(_imported(f"{_ATTENTION}.{module}"), name, None)
        own = getattr(_imported(f"{_ATTENTION}.cp_{module}"), f"ContextParallel{name}", None)
        if inner is not None and own is not None and issubclass(inner, attentions.InnerAttention):
            ours[inner] = own
    return ours


def _imported(name: str) -> Any:
    """Return a module of TorchTitan; None if this version lacks it, or a package that it needs is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _context_parallel_class(inner: type, base: type) -> type:
    """Return `inner` with its forward and metadata by this library."""
    spmd = import_module("spmd_types")

    def cp_group() -> Any:
        places = ("parallelism_context", "parallel_dims")  # the latter is earlier
        place = next(name for name in places if find_spec(f"torchtitan.distributed.{name}"))
        axis = import_module(f"torchtitan.distributed.{place}").MeshAxisName.CP
        group = import_module("torchtitan.distributed.spmd_types").spmd_mesh_group(axis)
        if group is None:
            raise RuntimeError("expected an active mesh with a context-parallel axis of several ranks, got none")
        return group

    of_latents, projects = inner.__name__.startswith("MLA"), hasattr(inner, "project_mla_kv")

    class ContextParallelInnerAttention(base, inner):
        """Inner attention of sequence shards by cp_dtensor."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config, inner.Config):  # type: ignore[name-defined]
            """Configuration of the class that this one replaces."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.attention_metadata_key = type(self)  # that of `inner` may be the class of a part

        @staticmethod
        def prepare_cp_metadata(attention_metadata: Any, *, permutation: torch.Tensor | None) -> Metadata:
            return prepare_metadata(attention_metadata, permutation=permutation, world_size=cp_group().size())

        def forward(
            self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, *, attention_metadata: Metadata,
            scale: float | None = None, score_mod: Any = None, enable_gqa: bool = False, out_transform: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            if projects:
                k_THK = self.project_mla_kv(k_THK)
            if of_latents:  # (T, H, keys without positions + V) and (T, positions), one for all heads
                k_shared = v_THV
                plain, v_THV = k_THK.tensor_split([q_THK.size(2) - k_shared.size(1)], dim=2)
                k_THK = torch.cat((plain, k_shared.unsqueeze(1).expand(-1, plain.size(1), -1)), dim=2)
            unknown = [name for name, value in kwargs.items() if value is not None]
            if unknown:
                raise NotImplementedError(f"context-parallel inner attention has no {', '.join(unknown)}")
            if not enable_gqa and q_THK.size(1) != k_THK.size(1):
                raise ValueError(
                    f"got {q_THK.size(1)} query and {k_THK.size(1)} kv heads, expected equally many without enable_gqa"
                )
            kernel = self.inner_attention if projects else self
            with spmd.no_typecheck():
                out = attention(
                    q_THK, k_THK, v_THV, mesh=cp_group(), metadata=attention_metadata, scale=scale,
                    window_size=kernel.window_size if attention_metadata.block_mask is None else (-1, 0),
                    score_mod=score_mod, kernel_options=getattr(kernel, "kernel_options", None) or None,
                    out_transform=out_transform,
                )  # fmt: skip
            if out_transform is None and spmd.is_type_checking():
                spmd.assert_type(out, spmd.get_local_type(q_THK), spmd.get_partition_spec(q_THK))
            return out

    ContextParallelInnerAttention.__name__ = f"ContextParallel{inner.__name__}"
    ContextParallelInnerAttention.__qualname__ = ContextParallelInnerAttention.__name__
    return ContextParallelInnerAttention


def _layout_of(permutation: torch.Tensor | None, world_size: int) -> Layout:
    """Return the layout of tokens that were permuted and then divided into adjacent parts."""
    if permutation is None:
        return Contiguous()
    if permutation.dim() != 2 or permutation.size(0) != 1 or permutation.size(1) % world_size:
        raise ValueError(
            f"expected permutation of shape (1, tokens), with tokens that {world_size} ranks divide evenly; got "
            f"{tuple(permutation.shape)}"
        )
    positions = permutation[0].tolist()
    share = len(positions) // world_size
    parts = [positions[rank * share : (rank + 1) * share] for rank in range(world_size)]
    if any(sorted(part) != part for part in parts):
        raise ValueError("expected a permutation in which the positions of each rank's tokens ascend; got another")
    runs = [joined_spans([(position, position + 1) for position in part]) for part in parts]
    return PermutedParts(tuple(map(tuple, runs)), len(positions))


@dataclass(frozen=True)
class PermutedParts(OneLength):
    """Each rank owns the runs of adjacent tokens that a permutation gives it.

    Args:
        runs: for each rank, the (start, stop) of its runs, in local order.
        seq_len: global number of tokens.

    >>> layout = PermutedParts((((0, 2), (6, 8)), ((2, 6),)), seq_len=8)
    >>> layout.local_length(8, 0, 2), layout.blocks(2)[1]
    (4, [(2, 6)])
    """

    runs: tuple[tuple[Span, ...], ...]
    seq_len: int

    def blocks(self, world_size: int) -> list[list[Span]]:
        if world_size != len(self.runs):
            raise ValueError(f"this layout divides tokens among {len(self.runs)} ranks, got {world_size}")
        return [list(part) for part in self.runs]


_SHARDING = "the sharding of tensors, the load balancers"
_GATHERS = "from torch; it gathers K/V of FlexAttention by torch's own operator"
_TAKES = (
    (
        "models/common/attention/cp_attention.py", "",
        f"(main) takes {_SHARDING} from torch, not attention: use "
        "cp_dtensor.integrations.torchtitan.inner_attention_map() in its ContextParallelTransform",
    ),
    (
        "distributed/context_parallel/api.py", "apply_cp_to_forward",
        f"(0.3) takes {_SHARDING} and the SDPA of DTensors {_GATHERS}, and refuses varlen attention",
    ),
    (
        "distributed/context_parallel/api.py", "",
        f"(between 0.3 and main) takes {_SHARDING} from torch, not attention, and has no place for another inner one",
    ),
    ("distributed/context_parallel.py", "_ContextParallel", f"(0.2.2) takes {_SHARDING} and SDPA {_GATHERS}"),
)  # fmt: skip
"""A file of a version of TorchTitan, a text in it, and what that version takes from torch; the first one counts."""


def describe_installed() -> str:
    """Return a sentence on what the installed TorchTitan takes from torch's context parallel; "" if there is none."""
    found = find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        return ""
    package = Path(next(iter(found.submodule_search_locations)))
    takes = "(0.2.1 or before) takes the context manager context_parallel from torch, all of it"
    for name, text, of_version in reversed(_TAKES):
        if (package / name).exists() and text in (package / name).read_text():
            takes = of_version
    return f"this TorchTitan {takes}"
