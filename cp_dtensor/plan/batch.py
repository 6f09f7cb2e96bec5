"""Documents of a batch, spread over steps and groups of ranks of any size.

All ranks compute one step after another, and wait for the slowest group of each. Long documents need many ranks, for
their memory or their time; short ones lose by exchanges what they gain, so they share one rank. The search fills groups
up to each of several durations of a step, or balances documents over each of several divisions of the ranks, and takes
the fastest of these plans. To move single documents after that saved 1% by prediction, and took 0.1 to 20 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    found = [search.first_fit(target) for target in search.targets()]
    found += map(search.balanced, islice(_divisions(ranks, ranks), _DIVISIONS))
    return min((tuple(map(search.placed, steps)) for steps in found), key=_total)


def _total(steps: Steps) -> float:
    return sum(max(group.seconds for group in groups) for groups in steps)


class _Search:
    def __init__(self, lengths: Sequence[int], ranks: int, tokens_per_rank: int, seconds: Seconds) -> None:
        self.lengths, self.ranks, self.tokens_per_rank = lengths, ranks, tokens_per_rank

        @lru_cache(maxsize=1 << 16)
        def group_seconds(documents: tuple[int, ...], size: int) -> float:
            return seconds([lengths[document] for document in documents], size)

        self.seconds = group_seconds
        self.by_length = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))

    def least_ranks(self, documents: Sequence[int]) -> int:
        """Return how many ranks the documents need to fit into memory."""
        return max(1, -(-sum(self.lengths[document] for document in documents) // self.tokens_per_rank))

    def placed(self, groups: _Groups) -> tuple[RankGroup, ...]:
        """Return the groups of a step on ranks, none of them idle, the largest first."""
        sizes = [self.least_ranks(group) for group in groups]
        times = [self.seconds(group, size) for group, size in zip(groups, sizes, strict=True)]
        while spare := self.ranks - sum(sizes):
            group = max(range(len(groups)), key=times.__getitem__)
            more = next(
                (n for n in range(1, spare + 1) if self.seconds(groups[group], sizes[group] + n) < times[group]), 0
            )
            if not more:  # the slowest group gets no faster, by exchanges: another one takes a rank
                more, group = 1, min(range(len(groups)), key=lambda g: self.seconds(groups[g], sizes[g] + 1))
            sizes[group] += more
            times[group] = self.seconds(groups[group], sizes[group])
        found, first = [], 0
        for size, documents in sorted(zip(sizes, groups, strict=True), reverse=True):
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


def _divisions(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield descending sizes of groups that add up to the ranks, each at most `most`."""
    if not ranks:
        yield ()
    for size in range(min(ranks, most), 0, -1):
        for rest in _divisions(ranks - size, size):
            yield (size, *rest)


def _with(documents: tuple[int, ...], document: int) -> tuple[int, ...]:
    return tuple(sorted((*documents, document)))
