"""Arguments of sequence operations: local tensors or DTensors, the context around a call, eager or compiled code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cp_dtensor.api.extension import (
    MOST_AXES,
    Mesh,
    Parts,
    SequenceRanks,
    around,
    both_masks,
    check_devices,
    check_tensors,
    checked_layout,
    checked_length,
    checked_sequence_dim,
    constant_in_trace,
    current,
    from_local,
    local_beside,
    made_of,
    parts_of,
    refuse_other_place,
    refuse_traced_transforms,
    sequence_ranks,
)
from cp_dtensor.layers.call import SequenceCall, document_edges
from cp_dtensor.layers.layer import Inputs, Moved, SequenceLayer, run_layer, traced_layer
from cp_dtensor.layers.package_kernels import refuse_equal_bits
from cp_dtensor.layers.rows import Shift
from cp_dtensor.spec.documents import ascending, edges_of_documents
from cp_dtensor.spec.layouts import Layout, TorchChunk
from cp_dtensor.spec.masks import Mask, is_integer

IN_CONTEXT = "the ranks of the context"
"""A `mesh` of calls that models make inside of a context."""


def checked_number(owner: str, name: str, value: Any, *, least: int | None = None) -> int:
    """Return an integer argument; refuse anything else, and numbers below `least`."""
    if not is_integer(value) or (least is not None and value < least):
        at_least = "" if least is None else f" >= {least}"
        raise ValueError(f"{owner} expects {name} to be an integer{at_least}, got {value!r}")
    return index(value)


_MAY_BE_EMPTY = ("batch", "tokens", "blocks", "states")


def check_given(
    owner: str, expected: Mapping[str, str], tensors: Mapping[str, torch.Tensor | None], *one_dtype: str,
    integers: str = "",
) -> None:  # fmt: skip
    """Refuse what is no tensor, and tensors whose dims and dtypes do not agree.

    Args:
        expected: for each tensor by name, its dims as words; dims of one word are equal in all tensors. Other possible
            dims follow a "|". After a "?" the tensor may be None. "heads" are a multiple of "groups", and there is at
            least one of most words.
        tensors: in an order in which each has known dims and new ones.
        one_dtype: names of tensors of one floating dtype.
        integers: the name of a tensor of int32 or int64.
    """
    given = {name: x for name, x in tensors.items() if x is not None or not expected[name].startswith("?")}
    check_tensors(owner, **given)
    known: dict[str, int] = {}
    dtypes = {name: x.dtype for name, x in given.items() if x is not None}
    for name, tensor in given.items():
        assert tensor is not None
        forms = [form.split() for form in expected[name].removeprefix("?").split("|")]
        for words in forms:
            fits = len(words) == tensor.dim()
            for word, size in zip(words, tensor.shape, strict=False):
                fits = fits and known.get(word, size) == size
            if fits:
                known.update(zip(words, tensor.shape, strict=True))
                break
        else:
            possible = " or ".join([f"({', '.join(words)})" for words in forms])
            sizes = ", ".join([f"{word} {size}" for word, size in known.items()])
            where = f", where {sizes}" if known else ""
            raise ValueError(f"{owner} expects {name} {possible}{where}; got {tuple(tensor.shape)}")
    wrong = [f"at least one of {word}" for word, size in known.items() if word not in _MAY_BE_EMPTY and not size]
    if not wrong and "groups" in known and known.get("heads", 0) % known["groups"]:
        wrong.append(f"a multiple of the {known['groups']} groups as heads")
    for names in [each.split() for each in one_dtype]:
        found = [dtypes[name] for name in names if name in dtypes]
        if len({*found}) > 1 or not all([dtype.is_floating_point for dtype in found]):  # noqa: C419, for Dynamo
            wrong.append(f"{', '.join(names)} of {'one' if len(found) > 1 else 'a'} floating dtype")
    if dtypes.get(integers, torch.int32) not in (torch.int32, torch.int64):
        wrong.append(f"{integers} of int32 or int64")
    if wrong:
        shown = ", ".join([f"{name} {dtypes[name]} {tuple(x.shape)}" for name, x in given.items() if x is not None])
        raise ValueError(f"{owner} expects {', and '.join(wrong)}; got {shown}")


def refuse_dtensors(owner: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse DTensors, which have no numbers of rows that differ between ranks as those of blocks and runs do."""
    for name, each in tensors.items():
        if isinstance(each, DTensor):
            raise TypeError(f"{owner} expects {name} to be a plain tensor, got a DTensor placed {each.placements}")


def moved_rows(
    owner: str, x: torch.Tensor, dim: int, row_map: Parts, mesh: Mesh | None, layout: Layout | None, cu_seqlens: Any,
    seq_len: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of a public function, `owner`; `row_map` is the class of a row map and its fields."""
    check_tensors(owner, x=x)
    dim = checked_sequence_dim(owner, x, dim)
    return layer(owner, [x], (Moved, (row_map, dim)), mesh, layout, cu_seqlens, seq_len, dim=dim)[0]


def layer(
    owner: str, tensors: Inputs, operation: Parts, mesh: Mesh | None, layout: Layout | None, cu_seqlens: Any,
    seq_len: int | None, *, dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the output of a layer, and its final state if it has one; `operation` is its class and fields.

    Args:
        tensors: the first one has this rank's tokens along a dim, and so has the output.
        dim: that dim; None for the one of all such operations.
    """
    kind: type[SequenceLayer] = operation[0]
    x, dims, dim = tensors[0], kind.dims, kind.dim if dim is None else dim
    check_devices(owner, tensors)
    place = _Place.of(owner, x, dim, mesh, layout, seq_len)
    local: list[Any] = [
        None if each is None else place.local_beside(owner, x, dims[0], each, letters)
        for each, letters in zip(tensors, dims, strict=True)
    ]
    if torch.compiler.is_dynamo_compiling():
        key, rows = _constants(
            owner, place.mesh, place.axes, parts_of(place.layout), place.seq_len, operation, cu_seqlens is None
        )
        if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
            cu_seqlens = torch.tensor(ascending(cu_seqlens, owner, "cu_seqlens"), dtype=torch.int64, device="cpu")
        known = -1 if place.seq_len is None else place.seq_len
        out, final = traced_layer(key, local, cu_seqlens, known, rows)
        keeps_rows = rows < 0
    else:
        call = _call(owner, place, made_of(operation), cu_seqlens)
        out, final = run_layer(call, local)
        keeps_rows = call.operation.keeps_rows
    return place.global_result(out, x, dim, None if keeps_rows else out.size(dim)), final


def runs_of_rank(mesh: Mesh, layout: Layout | None, cu_seqlens: Any, seq_len: int) -> list[tuple[int, int]]:
    """Return the runs of this rank within documents, for `local_runs`."""
    place = _Place(mesh, None, layout, index(checked_length(seq_len)))
    call = _call("local_runs", place, Moved(Shift(0), 0), cu_seqlens)
    call.check_edges(seq_len)
    call.operation.check(call, ())
    return call.sequences()[0][1].pieces(call.ranks.rank)


# Ranks, layout and documents


def _call(
    owner: str, place: _Place, operation: SequenceLayer, cu_seqlens: Any, *, traced: bool = False
) -> SequenceCall:
    """Return the call with what it takes over from the context around it.

    `traced` code cannot take over what may be different at the next call.
    """
    ranks, layout, mask = place.ranks(), place.layout, None
    lengths: tuple[int, ...] = ()
    edges = document_edges(owner, cu_seqlens)
    if place.mesh == IN_CONTEXT and operation.is_sparse:
        refuse_equal_bits(owner)
    context = around(owner, ranks, layout=layout is None, mask=cu_seqlens is None)
    if context is not None:
        outer = context.call
        if traced and context.varies and (cu_seqlens is None or outer.layout.only_length is not None):
            name = "mask= (Full() for none)" if operation.takes_mask else "cu_seqlens= ([0] for one document)"
            raise NotImplementedError(
                f"{owner}, in compiled code inside of a context whose mask or layout may differ at the next call, "
                f"takes over neither: pass layout= and {name}"
            )
        layout = outer.layout if layout is None else layout
        lengths = outer.lengths
        if cu_seqlens is None and operation.takes_mask:
            own: Any = operation
            operation = replace(own, mask=both_masks(outer.mask, own.mask))
        elif cu_seqlens is None and outer.mask is not None:
            edges = _documents_of(owner, outer.mask)
            mask = outer.mask if edges else None
    return SequenceCall(
        ranks, checked_layout(layout), lengths, owner=owner, operation=operation, mask=mask, seq_len=place.seq_len,
        edges=edges,
    )  # fmt: skip


@constant_in_trace
def _constants(
    owner: str, mesh: Any, axes: tuple[int, ...] | None, layout: Parts | None, seq_len: int | None, operation: Parts,
    inherits_documents: bool,
) -> tuple[str, int]:  # fmt: skip
    """Return the key of a call in compiled code, and the rows of its output, -1 for those of its first tensor."""
    refuse_traced_transforms()
    place = _Place(mesh, axes, made_of(layout), seq_len)
    call = _call(owner, place, made_of(operation), None if inherits_documents else (0,), traced=True)
    if call.edges:
        raise NotImplementedError(
            f"{owner}, in compiled code, does not take over documents of a context: pass cu_seqlens="
        )
    if call.operation.keeps_rows:
        return call.key, -1
    if seq_len is None:
        raise NotImplementedError(
            f"{owner}, in compiled code, expects seq_len, by which its result has a shape; got None"
        )
    return call.key, call.operation.row_map.rows_out(call.sequences()[0][1], call.ranks.rank)


def _documents_of(owner: str, mask: Mask) -> tuple[int, ...]:
    """Return the edges of the documents in the mask of a context; () if there are none.

    Raises:
        NotImplementedError: documents that `cu_seqlens` cannot have.
    """
    try:
        edges = edges_of_documents(mask)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{owner} takes over documents of a context that follow one another and are the same in all batch rows; "
            f"got {error}, in the mask {mask}: pass cu_seqlens= ([0] for one document)"
        ) from None
    return () if edges == (0,) else edges


@dataclass(frozen=True)
class _Place:
    """The ranks, the layout and the length of a call's tensors, as far as the arguments have them."""

    mesh: Any
    axes: tuple[int, ...] | None
    """Mesh axes over which DTensors are sharded along the sequence; None for local tensors."""
    layout: Layout | None
    seq_len: int | None

    @classmethod
    def of(
        cls, owner: str, x: torch.Tensor, dim: int, mesh: Mesh | None, layout: Layout | None, seq_len: int | None
    ) -> _Place:
        """Return the place of a call; refuse arguments that do not fit a DTensor, which knows its own."""
        if layout is not None:
            checked_layout(layout)
        if seq_len is not None:
            seq_len = index(checked_length(seq_len))
        if not isinstance(x, DTensor):
            return cls(mesh, None, layout, seq_len)
        length = x.size(dim)
        refuse_other_place(owner, x, mesh, layout, seq_len, length)
        axes = tuple([axis for axis, each in enumerate(x.placements) if isinstance(each, Shard) and each.dim == dim])
        ranks = math.prod([x.device_mesh.size(axis) for axis in axes])
        if (
            not axes
            or len(axes) > MOST_AXES
            or not all([isinstance(each, (Shard, Replicate, Partial)) for each in x.placements])  # noqa: C419, for Dynamo
        ):
            raise ValueError(
                f"{owner} expects a DTensor placed Shard({dim}), sharded along the sequence over one to three mesh "
                f"axes; got {x.placements}"
            )
        if len(axes) > 1 and length % ranks:
            raise NotImplementedError(
                f"{owner} of a DTensor that is sharded along the sequence over several mesh axes expects a multiple of "
                f"the {ranks} ranks as length, got {length}"
            )
        return cls(x.device_mesh, axes, TorchChunk(), length)

    def ranks(self) -> SequenceRanks:
        """Return the ranks that share the sequence."""
        if self.mesh == IN_CONTEXT:
            context = current()
            assert context is not None, "only calls inside of a context have no mesh of their own"
            return context.call.ranks
        if self.axes is None:
            return sequence_ranks(self.mesh)
        return SequenceRanks.along(self.mesh, self.axes)

    def local_beside(
        self, owner: str, x: torch.Tensor, dims_of_x: str, tensor: torch.Tensor, dims: str
    ) -> torch.Tensor:
        """Return the local part of a tensor whose dims are those of x by their letters.

        Its gradient is a share of this rank wherever x is sharded along a dim that the tensor does not have.
        """
        if not isinstance(x, DTensor):
            if isinstance(tensor, DTensor):
                raise TypeError(f"{owner} expects all tensors to be plain or all to be DTensors, got both")
            return tensor
        if not isinstance(tensor, DTensor):
            if any(isinstance(each, Shard) and dims_of_x[each.dim] in dims for each in x.placements):
                raise TypeError(
                    f"{owner} expects a DTensor for each tensor with a dim along which x is sharded, x placed "
                    f"{x.placements}; got a plain tensor of shape {tuple(tensor.shape)}"
                )
            return tensor
        if tensor.device_mesh != x.device_mesh:
            raise ValueError(f"{owner} expects DTensors on one mesh, got {x.device_mesh} and {tensor.device_mesh}")

        def dim_of(dim_of_x: int) -> int | None:
            return dims.index(dims_of_x[dim_of_x]) if dims_of_x[dim_of_x] in dims else None

        return local_beside(tensor, x.placements, dim_of)

    def global_result(self, out: torch.Tensor, x: torch.Tensor, dim: int, rows: int | None) -> torch.Tensor:
        """Return a result, as a DTensor placed as x if x is one, with `rows` on every rank; None: those of x."""
        if not isinstance(x, DTensor):
            return out
        shape = list(out.shape)
        for placement in x.placements:
            if isinstance(placement, Shard):
                shape[placement.dim] = x.size(placement.dim)
        if rows is not None:
            shape[dim] = rows * math.prod([x.device_mesh.size(axis) for axis in self.axes or ()])
        placements = [Replicate() if isinstance(each, Partial) else each for each in x.placements]
        return from_local(out, x.device_mesh, placements, tuple(shape))
