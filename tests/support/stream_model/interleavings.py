"""Runs recorded streams of all ranks in random interleavings that obey events and flags."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from support.stream_model.recording import Group, Op


def run(group: Group, seed: int, shared_queues: bool = False) -> str | None:
    """Runs everything in an order that depends on the seed; returns what went wrong, None if nothing did.

    Streams have priorities that change now and then, so some lag far behind. With `shared_queues` all work of a rank
    runs in the order of submission, as may be the case for streams that share a hardware queue.
    """
    choice = random.Random(seed)
    waiting = [rank.submitted for rank in group.ranks] if shared_queues else list(group.lanes.values())
    order = [iter(lane) for lane in choice.sample(waiting, len(waiting))]
    heads = {lane: next(lane, None) for lane in order}
    machine = _Machine(group)
    while order:
        for lane in order:
            if (op := heads[lane]) is None or machine.do(op):
                break
        else:
            return f"no stream can go on: {[op[0] for op in heads.values() if op]}"
        for _ in range(choice.choice((1, 2, 4, 64))):
            op = heads[lane] = next(lane, None)
            if op is None or not machine.do(op):
                break
        else:
            heads[lane] = next(lane, None)
        if heads[lane] is None:
            order.remove(lane)
            del heads[lane]
        elif choice.random() < 0.25:
            order.remove(lane)
            order.insert(choice.randrange(len(order) + 1), lane)
        if machine.error:
            return machine.error
    return None if machine.flags == group.first_flags() else "flags are left in another state"


def run_with_death(group: Group, seed: int, dead: int) -> list[set[int]]:
    """Runs everything, but one rank stops at a random place of each of its streams, and a watchdog frees the others.

    Whenever no stream can go on, the watchdog of each rank that waits sets all flags of the rank.

    Returns:
        For each wait when that happens first, the ranks that have not set the flag.

    Raises:
        AssertionError: the streams of the ranks that live do not end.
    """
    choice = random.Random(seed)
    lanes = {lane: rank for rank, of_group in enumerate(group.ranks) for lane in of_group.lanes}
    left = {lane: list(reversed(ops)) for lane, ops in group.lanes.items()}
    for lane in group.ranks[dead].lanes:
        left[lane] = left[lane][choice.randint(0, len(left[lane])) :]
    machine, missing = _Machine(group), list[set[int]]()
    while any(left[lane] for lane, rank in lanes.items() if rank != dead):
        waiting, moved = [lane for lane, ops in left.items() if ops], False
        for lane in choice.sample(waiting, len(waiting)):
            while left[lane] and machine.do(left[lane][-1]):
                left[lane].pop()
                moved = True
        if moved:
            continue
        waits = [(lanes[lane], left[lane][-1]) for lane in waiting if lanes[lane] != dead]
        waits = [(rank, op[1]) for rank, op in waits if op[0] == "wait"]
        assert waits, "streams of ranks that live wait for events that never come"
        if not missing:
            missing = [group.missing(rank, address, machine.flags) for rank, address in waits]
        for rank, _ in waits:
            machine.flags.update(dict.fromkeys(itertools.chain(*group.awaited(rank)), 1))
    return missing


class _Machine:
    """Executes operations one after the other."""

    def __init__(self, group: Group) -> None:
        self._expected_writes = group.writes
        self._writes: Counter[tuple[tuple[int, str], int]] = Counter()
        self._versions: dict[tuple[int, str], int] = {}
        self._done: set[int] = set()
        self.flags = group.first_flags()
        self.error: str | None = None

    def do(self, op: Op) -> bool:
        """False if the stream has to wait."""
        match op:
            case "after", mark:
                return mark in self._done
            case "mark", mark:
                self._done.add(mark)
            case "wait", address, value:
                return self.flags[address] == value
            case "set", address, value:
                self.flags[address] = value
            case "write", place, version:
                self._versions[place] = version
                self._writes[place, version] += 1
            case "read", place, version, number:
                self._done.add(number)
                expected = self._expected_writes[place, version]
                if self._versions.get(place) != version:
                    self.error = f"{place}: version {self._versions.get(place)} was read, not {version}"
                elif self._writes[place, version] < expected:
                    self.error = f"{place}: version {version} was read before it was complete"
            case "use", numbers:
                if not self._done.issuperset(numbers):
                    self.error = "something was used before it had arrived"
        return True
