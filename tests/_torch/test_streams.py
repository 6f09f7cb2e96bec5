"""Tensors made beside the current stream, with stand-ins for streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_dtensor._torch import cache
from cp_dtensor.engine import gather_kv

GPU = torch.device("cuda:0")


class Streams:
    """Records what is launched, waited for and noted on which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current, self.is_capturing, self.seen = "compute", False, list[tuple[str, str]]()
        beside = SimpleNamespace(synchronize=lambda: self.seen.append(("waited", "beside")))
        patch.setattr(cache, "_stream_beside", lambda device: beside)
        patch.setattr(cache, "capturing", lambda: self.is_capturing)
        patch.setattr(cache, "current_stream_handle", lambda device: hash(self.current))
        patch.setattr(cache, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", lambda stream: self.on("beside"))

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def tensor(self) -> Any:
        """A tensor made on the current stream."""
        self.seen.append(("made", self.current))
        return SimpleNamespace(record_stream=lambda stream: self.seen.append(("read", stream)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_the_host_waits_for_the_stream_beside_alone(fake: Streams) -> None:
    cache.Shared(GPU, fake.tensor, lambda tensor: [tensor])
    assert fake.seen == [("made", "beside"), ("waited", "beside")]
    assert fake.current == "compute"


def test_capture_sees_every_launch_and_notes_nothing(fake: Streams) -> None:
    fake.is_capturing = True
    cache.Shared(GPU, fake.tensor, lambda tensor: [tensor]).read()
    assert fake.seen == [("made", "compute")]
    fake.is_capturing = False


def test_cpus_have_no_streams(fake: Streams) -> None:
    cpu = torch.device("cpu")
    cache.Shared(cpu, fake.tensor, lambda tensor: [tensor]).read()
    assert fake.seen == [("made", "compute")]


def test_cached_tensors_are_complete_and_outlive_the_work_of_each_stream_that_reads_them(fake: Streams) -> None:
    def make(device: torch.device, key: object) -> Any:
        return fake.tensor()

    key = object()
    for name in ("compute", "other"):
        with fake.on(name):
            gather_kv.cached(make, GPU, key)
    assert fake.seen == [("made", "beside"), ("waited", "beside"), ("read", "compute"), ("read", "other")]


def test_each_reading_stream_is_noted_once(fake: Streams) -> None:
    shared = cache.Shared(GPU, lambda: [fake.tensor(), fake.tensor(), "no tensor"], lambda value: value[:2])
    for name in ("compute", "other", "compute", "other"):
        with fake.on(name):
            assert shared.read()[2] == "no tensor"
    made = [("made", "beside")] * 2 + [("waited", "beside")]
    assert fake.seen == [*made, *[("read", "compute")] * 2, *[("read", "other")] * 2]
