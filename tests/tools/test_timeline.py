"""The timeline of a call: parts of a GPU's trace, and a trace of two ranks on CPUs with its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.docs_scripts import FOLDER, docs_script
from support.forked_programs import launch

timeline = docs_script("timeline")


def event(category: str, name: str, start: float, duration: float, thread: int = 1, **args: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def launched(number: int, host: float, name: str, start: float, stream: int, thread: int = 1) -> list[dict[str, Any]]:
    """A launch on the host and what it does on the GPU, for 5 us."""
    category = "gpu_memcpy" if name == "Memcpy DtoD" else "kernel"
    return [
        event("cuda_runtime", "cudaLaunchKernel", host, 1, thread, correlation=number),
        event(category, name, start, 5, 0, correlation=number, stream=stream),
    ]


def test_kernels_have_the_names_of_the_blocks_that_launched_them() -> None:
    """The GPU works later than the host; backward is launched by another thread."""
    labels = [
        ("tile (0, 4) x (0, 4), heads (0, 2)", 10, 1),
        ("pull K/V", 20, 1),
        ("wait for K/V", 30, 1),
        ("tile (0, 4) x (0, 4), heads (0, 2)", 40, 1),
        ("merge", 50, 1),
        ("tile (0, 4) x (0, 4), heads (2, 4)", 60, 1),
        ("backward of tile (0, 4) x (0, 4), heads (0, 4)", 110, 2),
        ("sum dQ", 120, 2),
    ]
    events = [event("user_annotation", f"cp_dtensor: {text}", start, 8, thread) for text, start, thread in labels]
    events += [event("user_annotation", "timeline: backward", 100, 50), event("cpu_op", "aten::mm", 0, 200)]
    events += [event("user_annotation", "cp_dtensor: sum dK/dV", 121, 3, thread=2)]  # inside of another block
    names = ["flash", "Memcpy DtoD", "copy", "flash", "merge_kernel", "flash", "flash_bwd", "add"]
    for number, (name, (_, start, thread)) in enumerate(zip(names, labels, strict=True)):
        events += launched(number, start + 2, name, 1000 + 10 * number, 13 if number == 1 else 7, thread)
    events += launched(90, 61, "pass_flags_kernel", 1100, 7) + launched(91, 90, "fill", 1110, 7)
    parts = timeline.parts_of({"traceEvents": events, "baseTimeNanoseconds": 2_000_000}, "ring")
    assert [(part.name, part.stream, part.backward) for part in parts] == [
        (timeline.OWN, "stream 7", False),
        (timeline.KV, "stream 13", False),
        (timeline.KV, "stream 7", False),
        (timeline.OTHERS, "stream 7", False),
        (timeline.SUMS, "stream 7", False),
        (timeline.OWN, "stream 7", False),
        (timeline.OWN, "stream 7", True),
        (timeline.SUMS, "stream 7", True),
        (timeline.FLAG, "stream 7", False),
        (timeline.REST, "stream 7", False),
    ]
    assert [(part.start, part.duration) for part in parts[:2]] == [(3000, 5), (3010, 5)]
    whole = timeline.parts_of({"traceEvents": events}, "ulysses")
    assert [part.name for part in whole if part.name.startswith("attention")] == [timeline.WHOLE] * 4


def test_two_ranks_record_both_calls(tmp_path: Path) -> None:
    options = ("--record", "timeline.json", "--device", "cpu", "--seq-len", "64")
    launch(2, FOLDER / "timeline.py", *options, folder=tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    assert recorded["about"]["ranks"] == 2
    expected = {"ring": [timeline.OWN, timeline.OTHERS] * 2, "ulysses": [timeline.WHOLE] * 2}
    for method, attention in expected.items():
        assert len(recorded[method]) == 2
        for parts in recorded[method]:
            starts = [start for _, _, start, _, _ in parts]
            assert starts == sorted(starts)
            # Of the parts in a row, which are tiles of one step, one counts.
            names = [(name, backward) for name, _, _, _, backward in parts if name.startswith("attention")]
            assert [name for name, _ in dict.fromkeys(names)] == attention
            assert all(duration >= 0 for _, _, _, duration, _ in parts)
            assert {name for name, *_ in parts} <= {*timeline.COLOURS} - {timeline.REST}
        assert min(parts[0][2] for parts in recorded[method]) == 0
    timeline.draw(recorded, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("device", "devices", "text"),
    [("CPU", 1, "over gloo"), ("H100", 1, "share one H100 and take turns"), ("H100", 2, "2 x H100: kernels")],
)
def test_the_title_says_what_was_traced(device: str, devices: int, text: str) -> None:
    about = {"ranks": 2, "device": device, "devices": devices, "torch": "2.11", "seq_len": 64, "heads": [8, 2]}
    assert text in timeline._title({**about, "head_dim": 64, "dtype": "float32"})
