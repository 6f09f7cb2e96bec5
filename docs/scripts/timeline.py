"""Timeline of a ring call and a Ulysses call, forward and backward: what each rank computes and transfers, and when.

torchrun --nproc-per-node 2 docs/scripts/timeline.py --record docs/benchmarks/timeline-cpu.json
python docs/scripts/timeline.py --trace docs/benchmarks/timeline-cpu.json --output docs/images/timeline.png

On GPUs the parts are kernels and copies, in the rows of their streams; ranks may share one GPU, where they take turns.
On CPUs they are blocks of the host's code: the waits there are for gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor import HeadTail, context_parallel_attention, context_parallel_shard
from cp_dtensor.tools.ranks import start as start_ranks

PREFIX, BACKWARD = "cp_dtensor: ", "timeline: backward"
"""Of the library's labels, and the label of the call's second half."""
WARM_CALLS = 4
OWN, OTHERS, WHOLE = "attention, own keys", "attention, keys of other ranks", "attention of some heads"
KV, GRADS, HEADS, FLAG, SUMS, REST = (
    "copy of K and V", "copy of dK and dV", "exchange of heads", "wait for a flag", "merge and sum", "other",
)  # fmt: skip
WAIT = "wait for the transfer"
NAMES = {
    "merge": SUMS, "sum dQ": SUMS, "sum dK/dV": SUMS, "place rows": HEADS, "wait for K/V": WAIT, "wait for dK/dV": WAIT,
    "send K/V": KV, "write K/V": KV, "pull K/V": KV, "pack dK/dV": GRADS, "send dK/dV": GRADS, "pull dK/dV": GRADS,
    "send heads": HEADS, "write heads": HEADS, "read heads": HEADS, "send rows": HEADS, "write rows": HEADS,
    "read rows": HEADS,
}  # fmt: skip
"""Names of parts by the labels of the library."""
COLOURS = {
    OWN: "#1f6fb4", OTHERS: "#7fb8da", WHOLE: "#4f5fb4", KV: "#2a9d8f", GRADS: "#7cc4a4", HEADS: "#e76f51",
    SUMS: "#f2b134", FLAG: "#9b72b0", WAIT: "#d6dade", REST: "#8d96a3",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A kernel, a copy or a block of the host's code; times in microseconds."""

    name: str
    stream: str
    start: float
    duration: float
    backward: bool


@dataclass(frozen=True)
class Shape:
    """The traced call."""

    seq_len: int
    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    head_dim: int
    dtype: str


# The trace


@dataclass(frozen=True)
class Block:
    """A labelled block of the host's code."""

    name: str
    thread: Any
    start: float
    stop: float


def parts_of(trace: dict[str, Any], method: str) -> list[Part]:
    """The parts of one call, from a Chrome trace of `torch.profiler`, in the order of their starts.

    A kernel or a copy has the name of the innermost labelled block that launched it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    second_half = next(event["ts"] for event in events if event["name"] == BACKWARD)
    blocks = _blocks(events, method)
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device:
        found = [
            Part(each.name, "host", each.start, each.stop - each.start, each.start >= second_half) for each in blocks
        ]
    else:
        launches = {
            event["args"]["correlation"]: event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
        }
        found = [_part(event, launches.get(event["args"].get("correlation")), blocks, second_half) for event in device]
    return sorted(
        (Part(p.name, p.stream, base + p.start, p.duration, p.backward) for p in found), key=lambda p: p.start
    )


def _part(event: dict[str, Any], launch: dict[str, Any] | None, blocks: Sequence[Block], second_half: float) -> Part:
    around = [
        each for each in blocks
        if launch is not None and each.thread == launch["tid"] and each.start <= launch["ts"] <= each.stop
    ]  # fmt: skip
    innermost = min(around, key=lambda each: each.stop - each.start, default=None)
    name = innermost.name if innermost else REST
    if "flags" in event["name"]:
        name = FLAG
    elif name == WAIT:
        name = KV  # what the host launches there is part of the transfer
    backward = launch is not None and launch["ts"] >= second_half
    return Part(name, f"stream {event['args']['stream']}", event["ts"], event["dur"], backward)


def _blocks(events: Sequence[dict[str, Any]], method: str) -> list[Block]:
    """The labelled blocks, in the order of their starts.

    Tiles of keys that travelled come between the label of the wait for them and the label of the sum of their results.
    """
    labelled = sorted(
        (event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)),
        key=lambda event: event["ts"],
    )
    blocks, travelled = [], False
    for event in labelled:
        text = event["name"].removeprefix(PREFIX)
        if "tile" in text:
            name = WHOLE if method == "ulysses" else OTHERS if travelled else OWN
        else:
            name = NAMES.get(text, REST)
        travelled = text == "wait for K/V" or (travelled and text not in ("merge", "sum dQ"))
        blocks.append(Block(name, event["tid"], event["ts"], event["ts"] + event["dur"]))
    return blocks


# Recording


def record(path: Path, shape: Shape, device: torch.device) -> None:
    """Writes the parts of both calls on all ranks to `path`. A collective."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q_heads, kv_heads = shape.heads
    whole = [
        torch.randn(1, heads, shape.seq_len, shape.head_dim, generator=generator).to(getattr(torch, shape.dtype))
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    ]
    shards = context_parallel_shard(mesh, [each.to(device) for each in whole], [2] * 4, HeadTail())
    *qkv, grad_out = (each.contiguous() for each in shards)
    q, k, v = (each.requires_grad_() for each in qkv)
    rotate = "symm_mem" if device.type == "cuda" else "allgather"

    def call(**options: Any) -> None:
        out = context_parallel_attention(
            q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, seq_len=shape.seq_len, layout=HeadTail(), **options
        )
        assert isinstance(out, torch.Tensor)
        with record_function(BACKWARD):
            torch.autograd.grad(out, (q, k, v), grad_out)

    calls: dict[str, Any] = {}
    for method, options in (("ring", {"method": "ring", "rotate_method": rotate}), ("ulysses", {"method": "ulysses"})):
        parts = parts_of(_trace(lambda options=options: call(**options), device), method)  # type: ignore[misc]
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, [astuple(each) for each in parts])
        begin = min(each[2] for of_rank in gathered for each in of_rank)
        calls[method] = [
            [
                [name, stream, round(start - begin, 1), round(duration, 1), backward]
                for name, stream, start, duration, backward in of_rank
            ]
            for of_rank in gathered
        ]
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, _names(device))
    if rank == 0:
        devices = {"device": names[0][0], "devices": len({*names})}
        about = {"ranks": ranks, **devices, "torch": torch.__version__, **asdict(shape)}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'"about": {json.dumps(about)}']
        for method, of_ranks in calls.items():
            rows = ",\n".join("[" + ",\n".join(map(json.dumps, of_rank)) + "]" for of_rank in of_ranks)
            lines.append(f'"{method}": [{rows}]')
        path.write_text("{" + ",\n".join(lines) + "}\n")


def _names(device: torch.device) -> tuple[str, str]:
    """The kind of the device, and what tells it from the other ranks' devices."""
    if device.type == "cpu":
        return "CPU", ""
    return torch.cuda.get_device_name(device), str(torch.cuda.get_device_properties(device).uuid)


def _trace(call: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """A Chrome trace of one warm call, which all ranks begin together."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARM_CALLS):
        call()
    for _ in range(2):  # the first trace of a process takes time to begin
        synchronize()
        dist.barrier()
        with profile(activities=activities) as profiler:
            dist.barrier()
            call()
            synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


# The picture


def draw(recorded: dict[str, Any], output: Path) -> None:
    """A panel for each call: rows of ranks and streams, bars of parts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    about = recorded["about"]
    titles = {"ring": 'method="ring"', "ulysses": 'method="ulysses"'}
    rows = {method: _rows(recorded[method]) for method in titles}
    heights = [len(rows[method]) for method in titles]
    figure, axes = plt.subplots(
        len(titles), 1, figsize=(12, 2.2 + 0.36 * sum(heights)), gridspec_kw={"height_ratios": heights}, squeeze=False
    )
    seen: set[str] = set()
    for axis, (method, title) in zip(axes[:, 0], titles.items(), strict=True):
        for place, (rank, stream) in enumerate(rows[method]):
            for name, of, start, duration, _ in recorded[method][rank]:
                if of == stream:
                    bar = [(start / 1e3, duration / 1e3)]
                    axis.broken_barh(bar, (place - 0.36, 0.72), facecolors=COLOURS[name], edgecolor="white", lw=0.3)
                    seen.add(name)
        begins = [start for of_rank in recorded[method] for _, _, start, _, backward in of_rank if backward]
        if begins:
            axis.axvline(min(begins) / 1e3, color="#22272e", linestyle="--", linewidth=1)
            axis.annotate(" backward", (min(begins) / 1e3, -0.5), fontsize=8, va="bottom", annotation_clip=False)
        axis.set_yticks(
            range(len(rows[method])), [f"rank {rank}, {stream}" for rank, stream in rows[method]], fontsize=8
        )
        axis.set_ylim(len(rows[method]) - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms", fontsize=9)
    figure.suptitle(_title(about), fontsize=11)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="lower center", ncol=5, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.6 / figure.get_size_inches()[1], 1, 1))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110, facecolor="white")
    plt.close(figure)


def _rows(of_ranks: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[int, str]]:
    """Rank and stream of each row; the stream with most attention first."""
    found = []
    for rank, parts in enumerate(of_ranks):
        attention: dict[str, float] = {}
        for name, stream, _, duration, _ in parts:
            attention[stream] = attention.get(stream, 0.0) + duration * name.startswith("attention")
        found += [(rank, stream) for stream in sorted(attention, key=lambda each: (-attention[each], each))]
    return found


def _title(about: dict[str, Any]) -> str:
    ranks, device = about["ranks"], about["device"]
    if device == "CPU":
        where = f"{ranks} CPU ranks over gloo: blocks of the host's code"
    elif about["devices"] < ranks:
        where = f"{ranks} ranks that share one {device} and take turns on it: kernels and copies"
    else:
        where = f"{ranks} x {device}: kernels and copies"
    heads = f"{about['heads'][0]} query and {about['heads'][1]} kv heads of {about['head_dim']}"
    return (
        f"One call on {where}\n{about['seq_len']:,} tokens, causal, {heads}, {about['dtype']}, torch {about['torch']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--record", type=Path, metavar="JSON", help="trace both calls, under torchrun")
    does.add_argument("--trace", type=Path, metavar="JSON", help="what --record wrote, to be drawn")
    parser.add_argument("--output", type=Path, default=Path("docs/images/timeline.png"))
    parser.add_argument("--seq-len", type=int, help="default: 32,768 on GPUs, 2,048 on CPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parsed = parser.parse_args()
    if parsed.trace:
        draw(json.loads(parsed.trace.read_text()), parsed.output)
        return
    if parsed.device == "cuda":
        shape = Shape(parsed.seq_len or 32768, (32, 8), 128, "bfloat16")
    else:
        shape = Shape(parsed.seq_len or 2048, (8, 2), 64, "float32")
    _, device, _ = start_ranks(
        "docs/scripts/timeline.py", sys.argv[1:], parsed.device == "cuda", 300, may_share_gpus=True
    )
    try:
        record(parsed.record, shape, device.torch_device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
