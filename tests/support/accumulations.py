"""Random parts for tests of accumulators and of `place_sums`, and their sums in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.attention.accumulate import Accumulator, Part, Tensors
from cp_dtensor.spec.layouts import Span

BATCH, HEADS, ROWS, DIM = 2, 4, 6, 3
SHAPE = (BATCH, HEADS, ROWS, DIM)
ALL_BATCH, ALL_HEADS, ALL_ROWS = (0, BATCH), (0, HEADS), (0, ROWS)


@dataclass
class Add:
    """Arguments of `Accumulator.add`."""

    heads: Span
    parts: list[Part]
    is_last: bool


class Source:
    """Draws parts of one kind and dtype."""

    def __init__(self, kind: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.kind, self.dtype = kind, dtype
        self.state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._generator = torch.Generator().manual_seed(seed)

    def part(
        self,
        heads: Span = ALL_HEADS,
        rows: Span = ALL_ROWS,
        batch: Span = ALL_BATCH,
        stack: int = 0,
        wide: bool = False,
    ) -> Part:
        """Draws a part of `stack` stacked gradients (0: one, not stacked); `wide`: in the dtype of the state."""
        shape = (batch[1] - batch[0], heads[1] - heads[0], rows[1] - rows[0], DIM)
        if self.kind == "sum":
            tensors: Tensors = (self._normal(*([stack] if stack else []), *shape),)
        else:
            out, lse = self._normal(*shape), self._normal(*shape[:3])
            lse[:, :, ::3] = float("-inf")  # rows without keys
            tensors = out.masked_fill_(lse.isinf().unsqueeze(-1), 0.0), lse.to(self.state_dtype)
        return Part(batch, rows, (tensors[0].to(self.state_dtype if wide else self.dtype), *tensors[1:]))

    def accumulator(self, like: torch.Tensor | None = None) -> Accumulator:
        like = torch.empty(SHAPE, dtype=self.dtype) if like is None else like
        return Accumulator(like, self.state_dtype, floats_of_lse=int(self.kind == "merge"))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


def accumulated(source: Source, script: list[Add]) -> Tensors:
    """Returns the result; checks that no part is overwritten but first gradients."""
    accumulator = source.accumulator()
    before = [tensor.clone() for add in script for part in add.parts for tensor in part.tensors]
    begun: set[int] = set()
    lent: list[bool] = []
    for add in script:
        is_first = len(add.parts) == 1 and add.heads[0] not in begun
        begun.update(range(*add.heads))
        lent += [not (source.kind == "sum" and is_first) for part in add.parts for _ in part.tensors]
        accumulator.add(add.heads, list(add.parts), add.is_last)
    after = [tensor for add in script for part in add.parts for tensor in part.tensors]
    result = tuple(tensor.clone() for tensor in accumulator.result())
    assert all(torch.equal(old, new) for old, new, is_lent in zip(before, after, lent, strict=True) if is_lent)
    return result


def check(source: Source, script: list[Add]) -> None:
    """Adds all parts and compares with sums in float64: rounded once, apart from errors of the state's dtype."""
    exact, scale = float64_results(source.kind, script)
    got = accumulated(source, script)
    assert [tensor.dtype for tensor in got] == [source.dtype, source.state_dtype][: len(got)]
    assert not any(tensor.isnan().any() for tensor in got)
    assert_rounded_once(source, got[0], exact[0], scale)
    if source.kind == "merge":
        torch.testing.assert_close(got[1].double(), exact[1], rtol=0, atol=64 * torch.finfo(source.state_dtype).eps)


def assert_rounded_once(source: Source, got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> None:
    """Checks errors of one rounding; errors of the state are relative to `scale`, the sum of the added magnitudes."""
    narrow = torch.finfo(source.dtype)
    half_a_unit = narrow.eps / 2 * exact.abs().clamp(min=narrow.smallest_normal)
    error = (got.double() - exact).abs()
    allowed = half_a_unit + 32 * torch.finfo(source.state_dtype).eps * scale
    assert (error <= allowed).all(), f"off by up to {(error / allowed).max():.1f} times what is allowed"


def float64_results(kind: str, script: list[Add]) -> tuple[Tensors, torch.Tensor]:
    """Returns the result of a script in float64, and for each element the sum of its terms' magnitudes."""
    placed = [(add.heads, part) for add in script for part in add.parts]
    total, scale = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    lse = torch.full(SHAPE[:3], float("-inf"), dtype=torch.float64)

    def context(heads: Span, part: Part) -> tuple[slice, slice, slice]:
        return slice(*part.batch), slice(*heads), slice(*part.rows)

    if kind == "merge":
        for heads, part in placed:
            lse[context(heads, part)] = torch.logaddexp(lse[context(heads, part)], part.tensors[1].double())
    for heads, part in placed:
        terms = part.tensors[0].double()
        terms = terms if terms.dim() == 5 else terms.unsqueeze(0)
        if kind == "merge":
            terms = terms * (part.tensors[1].double() - lse[context(heads, part)]).exp().nan_to_num(0.0).unsqueeze(-1)
        total[context(heads, part)] += terms.sum(0)
        scale[context(heads, part)] += terms.abs().sum(0)
    return (total, lse) if kind == "merge" else (total,), scale
