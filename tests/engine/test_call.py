"""`Call`: every field matters to the plan, to compiled code or to a pass, and options are checked where they enter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, Documents, HeadTail, SlidingWindow
from cp_dtensor.attention.backends.select import allowed_backends
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.base import Tensors, modifiers_of
from cp_dtensor.engine.call import FACTORS, Call, call_of
from cp_dtensor.engine.planner import planned
from cp_dtensor.plan.partition import LayoutPartition

# Another value of each field, and what differs then: the key of compiled code, the cached plan (maybe an equal one),
# numbers beside the key, or modifiers of a pass. `ranks` are the groups that keys and plans belong to.
CHANGED: dict[str, tuple[Any, str]] = {
    "layout": (Contiguous(), "key plan"),
    "lengths": ((8,), "key plan"),
    "debug": (True, "key"),  # compares again
    "in_context": (True, "key plan"),  # compares again
    "context": ("of another", "key"),
    "mask": (SlidingWindow(2, 0), "key plan"),
    "method": ("ulysses", "key plan"),
    "transport": (transport_by_name("alltoall"), "key plan"),
    "pair": ((8, 8), "numbers plan"),
    "batch_size": (1, "plan"),  # is checked
    "scale": (0.7, "factors"),
    "softcap": (0.5, "factors plan modifiers"),
    "dropout_p": (0.5, "factors plan modifiers"),
    "first": ((1, 2), "numbers"),
    "deterministic": (True, "key plan"),
    "placed": (LayoutPartition(HeadTail(), 8, 8, 1, 2), "key plan"),
    "backends": (allowed_backends()._replace(enabled=(False, False, False, True)), "key plan"),
}


def test_every_field_makes_another_call() -> None:
    assert CHANGED.keys() == {each.name for each in fields(Call)} - {"ranks"}
    q = torch.randn(1, 2, 4, 8)
    t = Tensors(q, q, q)

    def seen(call: Call) -> dict[str, Any]:
        return {
            "key": call.key, "numbers": call.numbers, "factors": call.factors(8), "plan": planned(call, t).plan,
            "modifiers": modifiers_of(call, t),
        }  # fmt: skip

    def body(_rank: int) -> None:
        usual = Call.of(dist.group.WORLD, method="ring")
        before = seen(usual)
        assert seen(usual)["plan"] is before["plan"], "plans are cached"
        for name, (value, differs) in CHANGED.items():
            after = seen(replace(usual, **{name: value}))
            found = {each for each in ("key", "numbers", "factors", "modifiers") if after[each] != before[each]}
            found |= {"plan"} if after["plan"] is not before["plan"] else set()
            assert found == {*differs.split()}, name
        assert before["plan"] is planned(usual, t).plan

    run_ranks(2, body)


def test_keys_name_calls_and_leave_out_what_may_be_a_symbol() -> None:
    def body(_rank: int) -> None:
        call = Call.of(
            dist.group.WORLD,
            mask=Documents([0, 3, 8]),
            is_causal=True,
            seq_len=8,
            scale=0.3,
            softcap=2.0,
            dropout_p=0.1,
        )
        assert call_of(call.key, call.factors(8), call.numbers) == call
        assert "documents" not in call.key
        for changed in ({"pair": (9, 9)}, *({name: 0.25} for name in FACTORS), {"first": (1, 1)}):
            assert replace(call, **changed).key == call.key

    run_ranks(2, body)


def test_keys_name_the_groups_of_three_axes() -> None:
    def body(rank: int) -> None:
        call = Call.of(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("cp_gpu", "ulysses", "cp0")), method="ring")
        again = call_of(call.key).ranks
        assert again == call.ranks
        first, second, third = rank >> 2, rank >> 1 & 1, rank & 1
        assert again.rank == call.ranks.rank == 4 * first + 2 * third + second, "the axis of Ulysses is the inner one"
        assert call.ranks.members == (0, 2, 1, 3, 4, 6, 5, 7)
        outer, *inner = again.axes
        swapped = SequenceRanks.of_names(SequenceRanks(outer, *inner[::-1]).names)
        assert swapped.shares_sequence_with(call.ranks)
        assert not swapped.is_in_order_of(call.ranks), "the outer axis alone does not tell"

    run_ranks(8, body)


@pytest.mark.parametrize("mask", [None, SlidingWindow(3, 2), Documents([0, 3, 8])])
def test_is_causal_and_a_mask_both_hold(mask: Any) -> None:
    (made,) = run_ranks(1, lambda _: Call.of(dist.group.WORLD, mask=mask, is_causal=True).mask)
    assert made == (Causal() if mask is None else mask & Causal())
