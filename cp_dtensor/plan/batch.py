"""Documents of a batch, spread over steps and groups of ranks of any size.

All ranks compute one step after another, and wait for the slowest group of each. Long documents need many ranks, for
their memory or their time; short ones lose by exchanges what they gain, so they share one rank. The search tries
several durations of a step, puts documents into groups no slower than that, and then moves single documents while the
sum of the steps gets less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

Seconds = Callable[[Sequence[int], int], float]
"""Predicted time of a group: from the lengths of its documents and its number of ranks."""
_Groups = tuple[tuple[int, ...], ...]
"""The documents, by index, of each group of a step."""
_TARGETS = 16
"""Durations of a step that are tried, between the shortest possible and all work at once."""
_DIVISIONS = 24
"""Divisions of the ranks into groups that are tried, from one group on."""
_TRIED = 3_000
"""Most moves of documents that are tried, so that the plan of a large batch stays cheap."""


@dataclass(frozen=True)
class RankGroup:
    """Neighbouring ranks that share the same documents during a step."""

    first: int
    size: int
    documents: tuple[int, ...]
    """Indices, in ascending order."""
    seconds: float


Steps = tuple[tuple[RankGroup, ...], ...]


def plan_steps(lengths: Sequence[int], ranks: int, tokens_per_rank: int, seconds: Seconds) -> Steps:
    """Return steps of groups whose predicted times add up to little. Every rank is in one group of each step.

    Args:
        lengths: tokens of each document, at most `ranks * tokens_per_rank` each.
        tokens_per_rank: most tokens of a rank in a step.

    >>> steps = plan_steps([8, 2, 2], 4, 4, lambda lengths, ranks: max(lengths) + sum(lengths) / ranks)
    >>> [[(group.size, group.documents) for group in step] for step in steps]
    [[(3, (0,)), (1, (1, 2))]]
    """
    search = _Search(lengths, ranks, tokens_per_rank, seconds)
    begun = [search.first_fit(target) for target in search.targets()]
    begun += map(search.balanced, islice(_divisions(ranks, ranks), _DIVISIONS))
    begun.sort(key=search.total)
    return tuple(map(search.placed, min(map(search.improved, begun), key=search.total)))


class _Search:
    def __init__(self, lengths: Sequence[int], ranks: int, tokens_per_rank: int, seconds: Seconds) -> None:
        self.lengths, self.ranks, self.tokens_per_rank = lengths, ranks, tokens_per_rank

        @lru_cache(maxsize=1 << 16)
        def group_seconds(documents: tuple[int, ...], size: int) -> float:
            return seconds([lengths[document] for document in documents], size)

        self.seconds = group_seconds
        self.step = lru_cache(maxsize=1 << 12)(self._step)
        self.tried = 0
        self.by_length = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))

    def least_ranks(self, documents: Sequence[int]) -> int:
        """Return how many ranks the documents need to fit into memory."""
        return max(1, -(-sum(self.lengths[document] for document in documents) // self.tokens_per_rank))

    def _step(self, groups: _Groups) -> tuple[float, tuple[int, ...]]:
        """Return the time of a step and the ranks of each group; infinite if they do not fit."""
        sizes = [self.least_ranks(group) for group in groups]
        if sum(sizes) > self.ranks:
            return float("inf"), ()
        times = [self.seconds(group, size) for group, size in zip(groups, sizes, strict=True)]
        while spare := self.ranks - sum(sizes):  # no rank is idle
            group = max(range(len(groups)), key=times.__getitem__)
            more = next(
                (n for n in range(1, spare + 1) if self.seconds(groups[group], sizes[group] + n) < times[group]), 0
            )
            if not more:  # the slowest group gets no faster, by exchanges: another one takes a rank
                more, group = 1, min(range(len(groups)), key=lambda g: self.seconds(groups[g], sizes[g] + 1))
            sizes[group] += more
            times[group] = self.seconds(groups[group], sizes[group])
        return max(times), tuple(sizes)

    def total(self, steps: Iterable[_Groups]) -> float:
        """Return the time of all steps."""
        return sum(self.step(groups)[0] for groups in steps if groups)

    def placed(self, groups: _Groups) -> tuple[RankGroup, ...]:
        """Return the groups of a step on ranks, the largest first."""
        found, first = [], 0
        for size, documents in sorted(zip(self.step(groups)[1], groups, strict=True), reverse=True):
            found.append(RankGroup(first, size, documents, self.seconds(documents, size)))
            first += size
        return tuple(found)

    def targets(self) -> Iterator[float]:
        """Yield durations of a step to try, evenly spaced in their logarithm."""
        least = max(self.seconds((document,), self.ranks) for document in self.by_length)
        most = sum(self.seconds((document,), self.least_ranks((document,))) for document in self.by_length)
        for index in range(_TARGETS):
            yield least * (max(most, least) / least) ** (index / (_TARGETS - 1))

    def first_fit(self, target: float) -> list[_Groups]:
        """Return steps of groups that take at most the target, where their longest document alone does."""
        groups: list[tuple[tuple[int, ...], int]] = []
        rooms: list[int] = []  # tokens for which each group has memory
        for document in self.by_length:
            for index, (documents, size) in enumerate(groups):
                if self.lengths[document] > rooms[index]:
                    continue
                joined = _with(documents, document)
                if self.seconds(joined, size) <= target:
                    groups[index] = joined, size
                    rooms[index] -= self.lengths[document]
                    break
            else:
                size = self._size_within(document, target)
                groups.append(((document,), size))
                rooms.append(size * self.tokens_per_rank - self.lengths[document])
        steps: list[tuple[_Groups, int]] = []
        for documents, size in sorted(groups, key=lambda group: -group[1]):
            for index, (others, used) in enumerate(steps):
                if used + size <= self.ranks:
                    steps[index] = (*others, documents), used + size
                    break
            else:
                steps.append(((documents,), size))
        return [others for others, _ in steps]

    def balanced(self, sizes: tuple[int, ...]) -> list[_Groups]:
        """Return steps of groups of these sizes: each document goes to the fastest so far that has memory."""
        groups: list[tuple[float, int, tuple[int, ...], int]] = []  # time, index, documents, tokens that fit
        ranks: list[int] = []
        for document in self.by_length:
            length = self.lengths[document]
            if all(length > room for *_, room in groups):
                fits = length <= sizes[0] * self.tokens_per_rank
                ranks += sizes if fits else (self.ranks,)
                groups += [(0.0, at, (), ranks[at] * self.tokens_per_rank) for at in range(len(groups), len(ranks))]
            _, at, documents, room = min(group for group in groups if group[3] >= length)
            documents = _with(documents, document)
            groups[at] = self.seconds(documents, ranks[at]), at, documents, room - length
        steps, used = list[_Groups](), self.ranks
        for (_, _, documents, _), size in zip(groups, ranks, strict=True):
            if used == self.ranks:
                steps.append(())
                used = 0
            steps[-1], used = (*steps[-1], documents), used + size
        return [tuple(documents for documents in groups if documents) for groups in steps]

    def _size_within(self, document: int, target: float) -> int:
        """Return the fewest ranks with which a document takes at most the target, else the number that is fastest."""
        sizes = range(self.least_ranks((document,)), self.ranks + 1)
        fitting = (size for size in sizes if self.seconds((document,), size) <= target)
        return next(fitting, None) or min(sizes, key=lambda size: self.seconds((document,), size))

    def improved(self, steps: list[_Groups]) -> list[_Groups]:
        """Move documents, one at a time or two in exchange, as long as that makes the sum of the steps less."""
        while change := self._better(steps):
            steps = _changed(steps, change)
        return steps

    def _better(self, steps: list[_Groups]) -> dict[int, _Groups] | None:
        """Return the first change that makes the sum of the steps less, if there is one."""
        for change in self._changes(steps):
            if self.tried == _TRIED:
                return None
            self.tried += 1
            before = self.total(steps[index] for index in change)
            if self.total(change.values()) < before * (1 - 1e-9):
                return change
        return None

    def _changes(self, steps: list[_Groups]) -> Iterator[dict[int, _Groups]]:
        """Yield changed steps, by index: one document is elsewhere, alone or in exchange. Slow groups come first."""
        order = sorted(range(len(steps)), key=lambda index: -self.step(steps[index])[0])
        timed = [
            (self.seconds(group, size), here, group)
            for here in order
            for group, size in zip(steps[here], self.step(steps[here])[1], strict=True)
        ]
        for _, here, source in sorted(timed, key=lambda each: -each[0]):
            for document in source:
                rest = _without(source, document)
                left = _replaced(steps[here], {source: rest})
                for there in order:
                    others = left if there == here else steps[there]
                    yield {here: left, there: (*others, (document,))}
                    for group in steps[there]:
                        if group == source:
                            continue
                        yield {here: left, there: _replaced(others, {group: _with(group, document)})}
                        for exchanged in group:
                            mine, theirs = _with(rest, exchanged), _with(_without(group, exchanged), document)
                            both = {source: mine, group: theirs}
                            yield {here: _replaced(steps[here], both), there: _replaced(steps[there], both)}


def _divisions(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield descending sizes of groups that add up to the ranks, each at most `most`."""
    if not ranks:
        yield ()
    for size in range(min(ranks, most), 0, -1):
        for rest in _divisions(ranks - size, size):
            yield (size, *rest)


def _changed(steps: list[_Groups], change: Mapping[int, _Groups]) -> list[_Groups]:
    """Return the steps that are left after a change."""
    return [groups for groups in (change.get(index, groups) for index, groups in enumerate(steps)) if groups]


def _with(documents: tuple[int, ...], document: int) -> tuple[int, ...]:
    return tuple(sorted((*documents, document)))


def _without(documents: tuple[int, ...], document: int) -> tuple[int, ...]:
    return tuple(other for other in documents if other != document)


def _replaced(groups: _Groups, by: Mapping[tuple[int, ...], tuple[int, ...]]) -> _Groups:
    """Return the groups, some of them replaced; those of which nothing is left are dropped."""
    return tuple(each for each in (by.get(group, group) for group in groups) if each)
