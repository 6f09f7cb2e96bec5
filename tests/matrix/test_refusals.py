"""Bad arguments at every front: refused by name, alike on all ranks, before any collective."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import kinds, recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import HeadTail
from matrix.features import Case, Tensors
from matrix.fronts import FRONTS, case_of
from matrix.worlds import REFUSALS, WORLDS, leaves_of, mesh_of

WORLD = WORLDS["threads(2)"]
Change = Callable[[Tensors], dict[str, Any]]


@dataclass(frozen=True)
class Bad:
    """A bad argument."""

    message: str
    """A regular expression of what every front says."""
    fronts: frozenset[str]
    """Fronts that can be given it."""
    tensors: Change = lambda _x: {}
    """Tensors of a rank in place of those of the case."""
    case: Callable[[Case], Case] = lambda case: case
    mesh: Callable[[Any], Any] = lambda mesh: mesh
    compares: bool = False
    """True if it shows only when ranks compare their calls, in a collective."""


def _fronts(names: str) -> frozenset[str]:
    chosen = frozenset(names.split())
    assert chosen <= FRONTS.keys()
    return chosen


def _takes(*features: str) -> frozenset[str]:
    """Fronts that can express features."""
    return frozenset(name for name in FRONTS if not FRONTS[name].lacks & set(features))


ALL = frozenset(FRONTS)
SHARDS = _fronts("function ring ulysses context module flex flex_context provider unified torch_experimental")
"""Fronts of (B, H, S, D) shards."""
DTENSORS = _fronts("dtensor dtensor_sdpa")
FLEX = _fronts("flex flex_context")
FLASH = _fronts("zigzag usp")
DROP_INS = FLASH | _fronts("ring_documents zigzag_documents llama3 torchtitan")
PACKED = _fronts("varlen varlen_attn") | DROP_INS
FUNCTIONS = _fronts("function ring ulysses varlen mla flex zigzag")
CONTEXTS = _fronts("context module varlen_attn flex_context provider unified")
METHODS = _fronts("function context buffers module dtensor varlen varlen_attn mla flex_context provider")
MESHES = FUNCTIONS | CONTEXTS - {"unified"} | {"buffers"}


def _each(change: Callable[[torch.Tensor], torch.Tensor], *names: str, odd: bool = False) -> Change:
    """Changes these tensors, or q, k and v; on rank 1 only if `odd`."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        new = change(tensor.detach())
        return new.requires_grad_(new.is_floating_point())

    def change_all(x: Tensors) -> Tensors:
        of = [name for name in names or ("q", "k", "v", "latent", "k_rope") if name in x]
        return {} if odd and not dist.get_rank() else {name: changed(x[name]) for name in of}

    return change_all


def _case(**fields: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, **fields)


def _odd(**fields: Any) -> Callable[[Case], Case]:
    """Changes the case on rank 1."""
    return lambda case: replace(case, **fields) if dist.get_rank() else case


def _other_axes(_mesh: Any) -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))


def _equal(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), dtype=tensor.dtype).view_as(tensor).sin()


HEADS = r"query heads .*to be a multiple of key heads|number of query heads to be a multiple of kv heads"
FEW_DIMS = r"of four dims \(batch, .*k \(4, (12, 8|8, 12)\)|of three dims \(tokens, .*k \(8, (12|24)\)"
LAYOUT = r"expected layout to be a Layout such as HeadTail\(\) or None, got <class"
MASK = r"expected mask to be a Mask such as .* got str|expects within to be one mask such as .* got 'causal'"
METHOD = "unknown method: got 'rings', expected one of 'auto', 'ring', 'ulysses', 'hybrid'"
ROWS = r"expected attn_mask to have this rank's query rows .*; got \(2, 4, 12, 23\)"
ROWS += "|expected attn_mask with the 24 keys of all ranks"
SINKS = (
    r"expected sinks, one for each of this rank's query heads, \(4,\); got torch.float32 \(3,\)|does not take the sinks"
)
TRANSPORT = "unknown rotate method: got 'pigeons', expected one of 'allgather', 'alltoall'"
DTYPES = "(expected|must have) one dtype"

BAD: dict[str, Bad] = {
    # What a rank sees by itself
    "q is a list": Bad(
        "expected q to be a torch.Tensor, got list", _fronts("function ring ulysses mla flex"), lambda _: {"q": [1.0]}
    ),
    "k of three dims": Bad(
        FEW_DIMS, _fronts("function ring ulysses flex varlen") | DROP_INS, _each(lambda k: k[0], "k")
    ),
    "v of another dtype": Bad(DTYPES, SHARDS | DTENSORS | PACKED, _each(torch.Tensor.float, "v")),
    "integers": Bad(
        "expected a floating dtype; got torch.int64|one dtype", SHARDS | DTENSORS | PACKED | {"mla"},
        _each(torch.Tensor.long),
    ),
    "k on another device": Bad(
        "expected one device for q, k and v; got cpu, meta, cpu|the same device type",
        SHARDS | DTENSORS | PACKED, _each(lambda k: k.to("meta"), "k"),
    ),
    "k of another batch size": Bad(
        r"expected one batch size \(dim 0\).* k \(1, ", SHARDS | FLASH, _each(lambda k: k[:1], "k")
    ),
    "k of another head dim": Bad(
        r"expected one head dim \(dim [23]\) for q and k; got .*, 4\), v", SHARDS | PACKED,
        _each(lambda k: k[..., :4], "k"),
    ),
    "v of another length": Bad(
        "expected (one sequence length .* for k and v|as many tokens .* in v as in k)", SHARDS | PACKED,
        _each(lambda v: v[:, :, :-1], "v"),
    ),
    "key heads that do not divide": Bad(
        HEADS, SHARDS | DTENSORS | PACKED, _each(lambda x: x[:, :3], "k", "v"), _case(heads=(4, 3), enable_gqa=True)
    ),
    "no batch rows": Bad(
        "expected at least one batch row, head( and head dim|, R)", SHARDS | FLASH | {"mla"},
        _each(lambda x: x[:0]),
    ),
    "scale is NaN": Bad(
        "expected a finite scale, got nan|scale must be greater than 0, got nan", ALL, case=_case(scale=math.nan)
    ),
    "dropout above 1": Bad(
        "expected dropout_p between 0 and 1, got 1.5", _takes("dropout"),
        case=_case(dropout_p=1.5),
    ),
    "softcap below 0": Bad(
        "expected softcap to be a finite number of at least 0.0, .* got -1.0", _takes("softcap") - FLEX,
        case=_case(softcap=-1.0),
    ),
    "deterministic is a number": Bad(
        "expected deterministic to be True or False, got 1", _takes("deterministic"), case=_case(deterministic=1)
    ),
    "mask is text": Bad(MASK, _takes("union") - FLEX, case=_case(mask="causal")),
    "layout is a class": Bad(LAYOUT, FUNCTIONS - {"zigzag"} | CONTEXTS, case=_case(layout=HeadTail)),
    "unknown method": Bad(METHOD, METHODS, case=_case(method="rings")),
    "unknown transport": Bad(TRANSPORT, METHODS | {"ring", "flex", "unified"}, case=_case(transport="pigeons")),
    "negative length": Bad("expected seq_len to be .* got -1", FUNCTIONS | CONTEXTS, case=_case(declared=-1)),
    "a broken length": Bad("expected seq_len to be .* got .*1.5", FUNCTIONS | CONTEXTS, case=_case(declared=(24, 1.5))),
    "a wrong length": Bad(
        "query length does not fit: got 12 local tokens on rank . of 2, expected 15 of 30", FUNCTIONS,
        case=_case(declared=30), compares=True,
    ),
    "mesh is a name": Bad("DeviceMesh of one dim or a ProcessGroup, .*; got str", MESHES, mesh=lambda _: "cp"),
    "mesh with other axes": Bad(
        r"expected a mesh of one dim.*got 2 dims", MESHES, mesh=_other_axes
    ),
    "bias of integers": Bad(
        "expected a boolean or floating attn_mask; got torch.int64", _takes("float_bias"),
        _each(torch.Tensor.long, "bias"), _case(bias="float"),
    ),
    "bias of another shape": Bad(
        ROWS, _takes("float_bias"), _each(lambda bias: bias[..., :-1], "bias"), _case(bias="float"), compares=True
    ),
    "sinks of another shape": Bad(SINKS, _takes("sinks") - {"dtensor"}, lambda _: {"sinks": torch.zeros(3)}),
    "sinks of integers": Bad(
        r"expected sinks of a floating dtype.*got torch.int64 \(4,\)", _takes("sinks"),
        lambda _: {"sinks": torch.ones(4, dtype=torch.int64)},
    ),
    # What ranks find by comparing their first calls; calls of DTensors are not compared
    "lengths of no total": Bad(
        r"disagree about global \(queries, keys\): rank 1 says \(18, 18\), the others \(24, 24\)\. .*pass seq_len=",
        SHARDS - {"torch_experimental"} | FLASH, _each(lambda x: x[:, :, :9], odd=True), _case(declared=False),
        compares=True,
    ),
    "whole tensors": Bad(
        "are equal on all 2 ranks", SHARDS - FLEX | FLASH | {"varlen", "mla"}, _each(_equal),
        _case(declared=False, is_causal=True), compares=True,
    ),
    "another scale": Bad(
        "disagree about scale: rank 1 says 0.7, the others 0.", ALL - DTENSORS, case=_odd(scale=0.7), compares=True
    ),
    "another dtype": Bad(
        "disagree about dtype: rank 1 says 'torch.float32', the others 'torch.float64'", SHARDS,
        _each(torch.Tensor.float, odd=True), compares=True,
    ),
    "causal on one rank": Bad(
        "disagree about mask: rank 1 says", ALL - DTENSORS - FLEX, case=_odd(is_causal=True), compares=True
    ),
}  # fmt: skip
CELLS = [(name, bad) for name in FRONTS for bad in BAD if name in BAD[bad].fronts]


def refusal(name: str, bad: Bad) -> tuple[str, str]:
    """Returns type and message of the refusal, which must be alike on all ranks and come before any collective."""
    usual, front = case_of(name, (), WORLD.size), FRONTS[name]
    assert usual is not None

    def body(rank: int) -> tuple[str, str, bool]:
        case, mesh = bad.case(usual), mesh_of(WORLD)
        x, _ = leaves_of(replace(usual, bias=case.bias), mesh)
        x |= bad.tensors(x)
        given = bad.mesh(mesh)
        seen = len(kinds(collectives, rank))
        try:
            with front.around(case, given, x):
                seen = len(kinds(collectives, rank))  # ranks compare their contexts
                front.call(case, given, x)
        except (*REFUSALS, UserWarning) as error:  # functions warn of whole tensors, contexts refuse them
            early = bad.compares or len(kinds(collectives, rank)) == seen
            # Each rank names itself.
            return type(error).__name__, re.sub("on rank [01] of", "on rank . of", str(error)), early
        raise AssertionError("not refused")

    with front.patch(False), recorded_collectives(of_first_calls=True) as collectives:
        by_rank = run_ranks(WORLD.size, body)
    assert len(set(by_rank)) == 1, by_rank
    kind, message, early = by_rank[0]
    assert early, f"refused after a collective: {message}"
    return kind, message


@pytest.mark.parametrize(("name", "bad"), CELLS)
def test_bad_arguments(name: str, bad: str) -> None:
    _, message = refusal(name, BAD[bad])
    assert re.search(BAD[bad].message, message), message
