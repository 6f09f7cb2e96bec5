"""Plans of scans: documents of pieces."""

from __future__ import annotations

from typing import Any, ClassVar

from cp_dtensor import Contiguous
from cp_dtensor.layers.rows import SequenceLayout
from cp_dtensor.layers.scan import scan_plan


class Position(int):
    """An integer that counts how often such integers are compared."""

    compared: ClassVar[int] = 0

    def _count(self) -> None:
        Position.compared += 1

    def __lt__(self, other: Any) -> bool:
        self._count()
        return int(self) < int(other)

    def __le__(self, other: Any) -> bool:
        self._count()
        return int(self) <= int(other)

    def __gt__(self, other: Any) -> bool:
        self._count()
        return int(self) > int(other)


def test_documents_without_tokens_and_tokens_without_documents() -> None:
    sequence = SequenceLayout(Contiguous(), 12, 2, edges=(1, 2, 2, 8, 8, 10))
    assert scan_plan(sequence, 0, False).documents == (None, 0, 2)
    assert scan_plan(sequence, 1, False).documents == (2, 4, None)


def test_comparisons_of_many_documents_are_not_the_square_of_their_number() -> None:
    edges = tuple(map(Position, range(0, 1202, 2)))
    plan = scan_plan(SequenceLayout(Contiguous(), 1200, 2, edges=edges), 0, True)
    assert plan.documents == tuple(range(300))
    assert Position.compared < 600 * 600 / 4
