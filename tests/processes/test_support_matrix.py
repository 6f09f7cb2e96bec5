"""The table "Supported features" of the README: each cell runs on two ranks and equals one device in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import compiled
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cp_dtensor import (
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    disable_context_parallel_dispatcher,
    enable_context_parallel_dispatcher,
)

ROOT = Path(__file__).resolve().parents[2]
S = 11
ROWS: dict[str, dict[str, Any]] = {
    "full, causal, GQA, any length": {},
    "masks": {"mask": SlidingWindow(3, 0)},
    "attn_mask": {"bias": True},
    "learned sinks": {"sinks": True},
    "deterministic results": {"deterministic": True},
    "ring, Ulysses, hybrid": {"method": "ulysses"},
}
COLUMNS = ("SDPA in a context", "SDPA of DTensors", "functions, modules", "in torch.compile")
REFUSED = {
    ("learned sinks", "SDPA of DTensors"),
    ("learned sinks", "in torch.compile"),
}
"""Cells of the table with "in functions": SDPA in a context is refused there, and the function is run in its place."""


def inputs() -> dict[str, torch.Tensor]:
    """q, k, v, the gradient of out, an additive bias and sinks, equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (2, 4, S, 8),
        "k": (2, 2, S, 8),
        "v": (2, 2, S, 8),
        "grad": (2, 4, S, 8),
        "bias": (S, S),
        "sinks": (4,),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def one_device(row: dict[str, Any]) -> list[torch.Tensor]:
    """out, dq, dk, dv, and the gradients of bias and sinks that the row has, by the textbook formula."""
    tensors = {name: tensor.requires_grad_(name != "grad") for name, tensor in inputs().items()}
    q, k, v = (tensors[name] for name in "qkv")
    logits = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    logits = logits + tensors["bias"] if row.get("bias") else logits
    i, j = torch.arange(S)[:, None], torch.arange(S)
    hidden = (j > i) | (i - j > 3) if "mask" in row else j > i
    logits = logits.masked_fill(hidden, -torch.inf)
    if row.get("sinks"):
        column = tensors["sinks"].view(1, 4, 1, 1).expand(2, 4, S, 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    out = weights @ v.repeat_interleave(2, 1)
    leaves = [q, k, v, *(tensors[name] for name in ("bias", "sinks") if row.get(name))]
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors["grad"])]


def in_parallel(name: str, column: str, by_function: bool) -> list[torch.Tensor]:
    """The same on this rank: shards of out, dq, dk, dv and the gradient of bias, the sum of those of sinks."""
    row, whole = dict(ROWS[name]), inputs()
    of_dtensors, mesh = column == "SDPA of DTensors", init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    dims = {"q": 2, "k": 2, "v": 2, "grad": 2, "bias": 0}
    if of_dtensors:
        parts = {key: distribute_tensor(whole[key], mesh, [Shard(dim)]) for key, dim in dims.items()}
        parts["sinks"] = distribute_tensor(whole["sinks"], mesh, [Replicate()])
    else:
        parts = dict(
            zip(dims, context_parallel_shard(mesh, [whole[key] for key in dims], list(dims.values())), strict=True)
        )
        parts["sinks"] = whole["sinks"]
    leaves = [
        parts[key].requires_grad_() for key in ("q", "k", "v", *(key for key in ("bias", "sinks") if row.get(key)))
    ]
    bias, options = (parts["bias"] if row.pop("bias", False) else None), row
    if options.pop("sinks", False):
        options["sinks"] = parts["sinks"]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if by_function:
            ranks = {} if of_dtensors else {"mesh": mesh, "seq_len": S}
            return context_parallel_attention(
                q, k, v, is_causal=True, attn_mask=bias, enable_gqa=True, **{"method": "ring", **options, **ranks}
            )
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=True, enable_gqa=True)

    run = compiled(call) if column == "in torch.compile" else call
    if by_function:
        out = run(*leaves[:3])
    else:
        with context_parallel(mesh, seq_len=S, **options):
            out = run(*leaves[:3])
    results = [out.detach(), *torch.autograd.grad(out, leaves, parts["grad"])]
    if "sinks" in options and not of_dtensors:
        dist.all_reduce(results[-1])
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in results]


def cell(rank: int, name: str, column: str) -> None:
    """Compares one cell; where SDPA is refused, checks that, and compares the function."""
    of_dtensors = column == "SDPA of DTensors"
    refused = (name, column) in REFUSED
    if refused:
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            in_parallel(name, column, by_function=False)
    if of_dtensors:
        enable_context_parallel_dispatcher()
    try:
        found = in_parallel(name, column, by_function=refused or column == "functions, modules")
    finally:
        if of_dtensors:
            disable_context_parallel_dispatcher()
    expected = one_device(ROWS[name])
    if not of_dtensors:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        sharded = 5 if ROWS[name].get("bias") else 4
        dims = [2, 2, 2, 2, 0][:sharded]
        expected[:sharded] = context_parallel_shard(mesh, expected[:sharded], dims)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ROWS)
def test_cell(two_processes: Processes, name: str, column: str) -> None:
    two_processes.run(cell, name, column)


def test_the_readme_says_the_same() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("| | SDPA in a context"))
    table = [[each.strip() for each in line.strip("|").split("|")] for line in lines[start : lines.index("", start)]]
    header = [each.replace("`", "") for each in table[0]]
    said = {re.sub(r"[\[\]`]|\(\S+?\)", "", row[0]): row for row in table[2:]}
    for name in ROWS:
        (row,) = (row for text, row in said.items() if text.startswith(name))
        for column in COLUMNS:
            assert (row[header.index(column)] == "in functions") == ((name, column) in REFUSED), (name, column)
