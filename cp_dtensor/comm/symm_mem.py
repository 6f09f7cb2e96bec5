"""KV transport by copy engines through symmetric memory: an all-gather that takes no multiprocessors.

Each rank writes its rows of K/V to its symmetric buffer. The other ranks pull the rows that they attend to, stage by
stage: their copy engines read the buffer on a separate CUDA stream. The gradients of these rows travel back in the same
way. No multiprocessor moves data or waits, so attention kernels have all of them.

For each pair of ranks and both kinds of rows, flags (see `Flag`) order the use of a buffer:

    writer:  wait for TAKEN; write the rows; set READY at the reader
    reader:  wait for READY; pull;           set TAKEN at the writer

Pairs that exchange no rows in a call pass the flags too, since their previous call may have exchanged some.

A rank writes on the current stream, before its local tile, which leaves no multiprocessor to a kernel on another
stream until it ends. A rank pulls on a stream of the workspace; the host submits that after the tiles of a step, so
that the tiles need not wait for the host. In the order of submission, no wait depends on work that any rank submits
after that wait, so streams that share a hardware queue cannot deadlock.

Memory: as all-gather; also, in symmetric memory, this rank's K/V and one stage of gradients.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor._torch.cuda_driver import copy_bytes
from cp_dtensor._torch.tensors import TRITON_AVAILABLE, current_stream, cut
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.collective import DEFAULT_STAGING, AllGather, Staging
from cp_dtensor.comm.flags import Flag
from cp_dtensor.comm.symm_mem_workspace import Workspace
from cp_dtensor.comm.transport import Contribution, GradTransfers, HeadBlocks, KvTransfers, KVTransport, row_width
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Step, TilePlan
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.logs import log_once

if TRITON_AVAILABLE:
    from cp_dtensor.comm.triton_kernels import launch_rows


@dataclass(frozen=True)
class SymmetricMemory(KVTransport):
    """All-gather by copy engines; where the ranks cannot share memory, `AllGather`."""

    staging: Staging = DEFAULT_STAGING

    name = "symm_mem"
    transfers_ahead = 1  # pulls are on a stream of their own, which waits for no tile
    slows_compute = False

    def for_call(self, spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        return self if self.is_available(group, device) else AllGather(self.staging)

    def is_available(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether the ranks can share memory; log once that they cannot.

        The first call for a group may be a collective.
        """
        obstacle = workspaces.p2p_obstacle(group, device)
        if obstacle is not None:
            log_once("comm", logging.WARNING, f"symmetric memory is not available ({obstacle}): using all-gather")
        return obstacle is None

    def plan(self, spec: CallSpec, rank: int) -> TilePlan:
        return self.staging.plan(spec, rank)

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        steps = plan.backward if backward else plan.forward
        return _PulledKv(k, v, plan, steps, _workspace(k, v, plan, backward, group))

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, group: dist.ProcessGroup) -> GradTransfers:
        return _PulledGrads(k, v, plan, _workspace(k, v, plan, True, group))


def _workspace(k: torch.Tensor, v: torch.Tensor, plan: TilePlan, backward: bool, group: dist.ProcessGroup) -> Workspace:
    head_bytes, grad_bytes = row_width(k, v, (0, 1)) * k.itemsize, 0
    if backward:
        widest = max(step.heads[1] - step.heads[0] for step in plan.backward if step.transfer is not None)
        grad_bytes = plan.most_rows * widest * head_bytes
    return workspaces.workspace(group, k.device, plan.rows.longest * k.size(1) * head_bytes, grad_bytes)


class _PulledKv(KvTransfers):
    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, steps: Sequence[Step], workspace: Workspace
    ) -> None:
        self._like, self._plan, self._workspace = k, plan, workspace
        self._stream = current_stream(k.device)
        stages = [step.heads for step in steps if step.transfer is not None]
        # A stage has the same offset on every rank: the one that the longest shard needs.
        self._pitch = plan.rows.longest
        head_bytes = row_width(k, v, (0, 1)) * k.itemsize
        self._widths = [(stop - start) * head_bytes for start, stop in stages]
        self._next_stage = 0
        with label("write K/V"):
            workspace.follow(self._stream)
            workspace.flags.submit(self._stream, wait=Flag.KV_TAKEN)
            _write_rows(k, v, plan, stages, workspace.kv(k.dtype))
            workspace.flags.submit(self._stream, signal=Flag.KV_READY)
        self._next_rows, self._is_pulled = self._rows_of_next_stage(), False

    def _rows_of_next_stage(self) -> torch.Tensor | None:
        """Allocate the next stage. Earlier uses of the memory end before the event `memory_is_free`."""
        if self._next_stage == len(self._widths):
            return None
        rows = self._like.new_empty(self._plan.rows.total, self._widths[self._next_stage] // self._like.itemsize)
        self._workspace.memory_is_free.record(self._stream)
        return rows

    def tiles_launched(self) -> None:
        if self._next_rows is None or self._is_pulled:
            return
        workspace, width = self._workspace, self._widths[self._next_stage]
        workspace.in_flight[id(self)] = self._next_rows
        stage_start = self._pitch * sum(self._widths[: self._next_stage])
        with label("pull K/V"):
            workspace.kv_stream.wait_event(workspace.memory_is_free)
            if self._next_stage == 0:
                workspace.flags.submit(workspace.kv_stream, wait=Flag.KV_READY, overlaps=True)
            stream, target, route = workspace.kv_stream.cuda_stream, self._next_rows.data_ptr(), self._plan.routes[None]
            for (_, peer, (start, stop)), row in zip(route.recv, route.recv_from, strict=True):
                source = workspace.kv_address(peer) + stage_start + row * width
                copy_bytes(stream, target + start * width, source, (stop - start) * width)
            self._next_stage += 1
            if self._next_stage == len(self._widths):
                workspace.flags.submit(workspace.kv_stream, signal=Flag.KV_TAKEN, overlaps=True)
            workspace.kv_arrived.record(workspace.kv_stream)
        self._is_pulled = True

    def receive(self) -> torch.Tensor:
        self.tiles_launched()  # for steps without tiles
        rows = self._next_rows
        assert rows is not None
        self._stream.wait_event(self._workspace.kv_arrived)
        del self._workspace.in_flight[id(self)]
        self._next_rows, self._is_pulled = self._rows_of_next_stage(), False
        return rows


def _write_rows(k: torch.Tensor, v: torch.Tensor, plan: TilePlan, stages: Sequence[Span], memory: torch.Tensor) -> None:
    """Write the rows that other ranks attend to, for each stage of heads."""
    head_counts, pitch = [stop - start for start, stop in stages], plan.rows.longest
    if TRITON_AVAILABLE and k.is_cuda and len({*head_counts}) == 1:
        if plan.send_spans:  # rows between two spans are written, too: one launch costs less
            launch_rows(k, v, memory, (plan.send_spans[0][0], plan.send_spans[-1][1]), pitch, head_counts[0])
        return
    blocks = HeadBlocks((k, v), head_counts, pitch, memory)
    for span in plan.send_spans:
        blocks.write([cut(x, None, None, span) for x in (k, v)], stages, span[0])


class _PulledGrads(GradTransfers):
    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, workspace: Workspace) -> None:
        self._k, self._plan, self._workspace = k, plan, workspace
        self._stream = current_stream(k.device)
        heads = [step.heads for step in plan.backward if step.transfer is not None]
        columns = row_width(k, v, (0, 1))
        self._widths = deque((stop - start) * columns for start, stop in heads)
        self._in_flight: deque[tuple[list[Contribution], torch.cuda.Event]] = deque()

    def buffer(self) -> torch.Tensor:
        plan, workspace = self._plan, self._workspace
        workspace.follow(self._stream)
        workspace.flags.submit(self._stream, wait=Flag.GRAD_TAKEN)
        width = self._widths[0]
        return workspace.grads(self._k.dtype)[: plan.rows.total * width].view(-1, width)

    def send(self) -> None:
        route, workspace = self._plan.routes[None], self._workspace
        columns = self._widths.popleft()
        width = columns * self._k.itemsize
        workspace.flags.submit(self._stream, signal=Flag.GRAD_READY)
        contributions = [
            Contribution(rows := pieces[0].rows, self._k.new_empty(len(pieces), rows[1] - rows[0], columns))
            for pieces in route.grads
        ]
        # The stage before this one is received before this one, so two events in turns are enough.
        arrived = workspace.grads_arrived[len(self._widths) % 2]
        self._in_flight.append((contributions, arrived))
        workspace.in_flight[id(self)] = self._in_flight
        workspace.memory_is_free.record(self._stream)
        with label("pull dK/dV"):
            workspace.grad_stream.wait_event(workspace.memory_is_free)
            workspace.flags.submit(workspace.grad_stream, wait=Flag.GRAD_READY, overlaps=True)
            stream = workspace.grad_stream.cuda_stream
            for pieces, firsts, (_, stack) in zip(route.grads, route.grads_from, contributions, strict=True):
                target, count = stack.data_ptr(), stack.size(1) * width
                for (_, peer, _), first_row in zip(pieces, firsts, strict=True):
                    copy_bytes(stream, target, workspace.grads_address(peer) + first_row * width, count)
                    target += count
            workspace.flags.submit(workspace.grad_stream, signal=Flag.GRAD_TAKEN, overlaps=True)
            arrived.record(workspace.grad_stream)

    def receive(self) -> Sequence[Contribution]:
        contributions, arrived = self._in_flight.popleft()
        self._stream.wait_event(arrived)
        if not self._in_flight:
            del self._workspace.in_flight[id(self)]
        return contributions
