"""Runs recorded streams of all ranks in random interleavings that obey events and flags."""

from __future__ import annotations

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
