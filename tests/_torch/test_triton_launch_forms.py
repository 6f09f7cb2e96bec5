"""Cache keys of launches: equal keys have the same compiled form of a kernel and the same parameters.

Tiles of other lengths share the compiled forms, so that nothing is compiled in the middle of a run.

Run as a script, this file makes random calls of all launchers without a GPU: Triton specializes a kernel for their
arguments and launches nothing. Triton's interpreter, in which other tests run kernels, does not specialize.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from support.compiled_subprocess import run_uninterpreted

_CALLS, _NEIGHBOURS = 25, 20
_Option = TypeVar("_Option")


class Forms:
    """Records the compiled form and the descriptors of each launch at the first use of its cache key."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[Any, Any] = {}
        self._known: dict[Any, str] = {}
        self.times: Counter[str] = Counter()
        """Returns by kernel how often a form was cached already, and the number of forms."""
        self.compiled: defaultdict[str, set[str]] = defaultdict(set)
        """Returns by kernel all that Triton compiled it for."""

    def launch(self, launch: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Stand-in for `Launch.__call__`."""
        from triton.runtime.jit import create_function_from_signature
        from triton.tools.tensor_descriptor import TensorDescriptor

        from cp_dtensor._torch.triton_launch import _alignments

        kernel = launch._kernel
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        arguments: list[Any] = list(tensors)
        described = []
        for index, block in enumerate(launch._blocks):
            if block is not None:
                arguments[index] = TensorDescriptor.from_tensor(tensors[index], list(block))
                described.append((tuple(tensors[index].shape), tensors[index].stride()))
        _, specialization, options = self._binders[kernel](*arguments, *launch._numbers, **launch._constants)
        form = repr((specialization, options, described))
        key = (launch, _alignments([x.data_ptr() for x in tensors]))
        self.compiled[kernel.__name__].add(repr((specialization, options)))
        self.times[f"{kernel.__name__} {'again' if key in self._known else 'new'}"] += 1
        assert self._known.setdefault(key, form) == form, kernel.__name__


def checked(make: Any) -> Any:
    """Wraps a cached maker of launches: a cached launch equals a new one, down to the types of its numbers."""

    def contents(made: Any) -> list[str]:
        launches = made if isinstance(made, tuple) else (made,)
        return [repr((x._kernel, x._grid, x._numbers, sorted(x._constants.items()), x._blocks)) for x in launches]

    def get(*values: Any) -> Any:
        found = make(*values)
        assert contents(found) == contents(make.__wrapped__(*values))
        return found

    return get


class Calls:
    """Makes calls by random choices, and calls with all but one of these choices."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._given: list[float] = []
        self._taken: list[float] = []

    def make(self, call: Callable[[], None]) -> None:
        self._given, self._taken = [], []
        call()
        first = self._taken
        for _ in range(_NEIGHBOURS):
            self._given, self._taken = first.copy(), []
            self._given[self._random.randrange(len(first))] = self._random.random()
            call()

    def choice(self, options: Sequence[_Option]) -> _Option:
        taken = len(self._taken)
        self._taken.append(self._given[taken] if taken < len(self._given) else self._random.random())
        return options[int(self._taken[-1] * len(options))]

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Makes a tensor in one of two orders of dims, at an address that is a multiple of 16 or not."""
        last = shape[-1] + self.choice((0, 0, 0, 8, 1))
        order = self.choice((0, 0, 1))
        whole = list(shape[:-1]) + [last]
        if order and len(shape) == 4:
            whole[1], whole[2] = whole[2], whole[1]
        shift = self.choice((0, 0, 0, 1, 8))
        size = torch.Size(whole).numel()
        memory = torch.zeros(size + shift, dtype=dtype)[shift:].view(whole)[..., : shape[-1]]
        return memory.transpose(1, 2) if order and len(shape) == 4 else memory

    def attention(self) -> None:
        from cp_dtensor.attention.masked import RowMask
        from cp_dtensor.attention.triton.backward import launch_attention_backward, launch_attention_delta
        from cp_dtensor.attention.triton.dropout import Dropout
        from cp_dtensor.attention.triton.forward import launch_attention_forward

        choice, tensor = self.choice, self.tensor
        batch, heads, rows, columns = choice((1, 2)), choice((1, 2)), choice((1, 16, 33)), choice((16, 33))
        dtype = choice((torch.float16, torch.float32))
        q, grad, out = (tensor(batch, heads, rows, 16, dtype=dtype) for _ in range(3))
        k, v = (tensor(batch, 1, columns, 16, dtype=dtype) for _ in range(2))
        lse, delta = (tensor(batch, heads, rows) for _ in range(2))
        kind = choice(("full", "causal", "rows", "batches"))
        lo = self.integers(*((batch,) if kind == "batches" else ()), rows)
        mask = RowMask(lo=lo, hi=lo + columns) if kind in ("rows", "batches") else RowMask()
        mask = RowMask(causal_offset=choice((0, 1, 16, -100))) if kind == "causal" else mask
        bias = choice((None, None, torch.bool, torch.float32, torch.float64, torch.float16))
        if bias is not None:
            shape = (choice((1, batch)), choice((1, heads)), choice((1, rows)), choice((1, columns)))
            bias = tensor(*shape, dtype=bias)
        dropout = None
        if choice((True, False, False)):
            positions = (self.integers(*choice(((), (1,), (batch,))), length) for length in (rows, columns))
            dropout = Dropout(choice((0.5, 1.0)), torch.tensor(1), *positions, choice((0, 1)), choice((0, 1)))
        options: dict[str, Any] = {"bias": bias, "dropout": dropout}
        scale = choice((1.0, 0.25, 1))
        launch_attention_forward(out, lse, q, k, v, mask, scale, **options)
        launch_attention_delta(delta, grad, out)
        gradients = [tensor(*x.shape, dtype=choice((dtype, torch.float32))) for x in (q, k, v)]
        launch_attention_backward(*gradients, grad, q, k, v, lse, delta, mask, scale, **options)

    def integers(self, *shape: int) -> torch.Tensor:
        return self.tensor(*shape).to(torch.int32) if self.choice((True, False)) else torch.zeros(shape).int()

    def combination(self) -> None:
        from cp_dtensor.attention.triton.merge import launch_merge, launch_sum

        choice, tensor = self.choice, self.tensor
        shape = (choice((1, 2)), choice((1, 2)), choice((1, 16, 20)), choice((8, 16)))
        dtypes = (torch.float16, torch.float32)
        out, base = (tensor(*shape, dtype=choice(dtypes)) for _ in range(2))
        lse, base_lse = (tensor(*shape[:3]) for _ in range(2))
        spans = [choice(((0, shape[2]), (shape[2] - 1, shape[2]))) for _ in range(choice((0, 1, 2)))]
        of_parts = [(*shape[:2], stop - start) for start, stop in spans]
        parts = [
            (span, tensor(*part, shape[3], dtype=choice(dtypes)), tensor(*part))
            for span, part in zip(spans, of_parts, strict=True)
        ]
        launch_merge(out, lse, base, base_lse, parts)
        stacks = [(span, torch.stack([part] * choice((1, 2)))) for span, part, _ in parts]
        launch_sum(out, base, stacks)

    def copies(self) -> None:
        from cp_dtensor.comm.triton_kernels import MAX_TARGETS, PIECE_FIELDS, launch_copies

        choice = self.choice
        dtypes = (torch.float16, torch.float32)
        targets = [self.tensor(4, 64, dtype=choice(dtypes)) for _ in range(choice(range(1, MAX_TARGETS + 1)))]
        pieces = torch.zeros(choice((1, 16, 3)), PIECE_FIELDS, dtype=torch.int64)
        launch_copies(pieces, choice((1, 16, 4000)), choice((16, 256)), targets, choice((1, 4)))

    def flags(self) -> None:
        from cp_dtensor.comm.triton_kernels import flag_addresses, flag_launch

        flag_launch(torch.tensor(flag_addresses([], [], [0, 0], self.choice((1, 40)))))(self.choice((1, 2**30)))

    def rows(self) -> None:
        from cp_dtensor.comm.triton_kernels import launch_rows

        dtype, heads, length = self.choice((torch.float16, torch.float32)), self.choice((1, 16)), 5
        k, v = (self.tensor(1, heads, length, self.choice((16, 24)), dtype=dtype) for _ in "kv")
        memory = self.tensor(length * heads * (k.size(3) + v.size(3)), dtype=dtype)
        launch_rows(k, v, memory, (self.choice((0, 1, 2)), length), length, heads)


def tile_of_a_ring(rows: int, columns: int, first: int) -> None:
    """Launches all kernels of a tile under a mask, whose rows begin at row `first` of a rank's; and sends its keys."""
    from cp_dtensor.attention.masked import RowMask
    from cp_dtensor.attention.triton.backward import launch_attention_backward, launch_attention_delta
    from cp_dtensor.attention.triton.forward import launch_attention_forward
    from cp_dtensor.attention.triton.merge import launch_merge, launch_sum
    from cp_dtensor.comm.triton_kernels import launch_rows

    def normal(heads: int, length: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros(1, length, heads, 64, dtype=dtype).transpose(1, 2)

    whole = first + rows + 7
    of_rank, lse_of_rank, delta_of_rank = normal(4, whole), torch.zeros(1, 4, whole), torch.zeros(1, 4, whole)
    q, lse, delta = (x[:, :, first : first + rows] for x in (of_rank, lse_of_rank, delta_of_rank))
    k, out, part_lse = normal(2, columns), normal(4, rows), torch.zeros(1, 4, rows)
    mask = RowMask(lo=torch.zeros(rows).int(), hi=torch.full((rows,), columns).int())
    launch_attention_forward(out, part_lse, q, k, k, mask, 0.125)
    launch_attention_delta(torch.zeros(1, 4, rows), q, out)
    launch_attention_backward(out, *(normal(2, columns) for _ in "kv"), q, q, k, k, lse, delta, mask, 0.125)
    sums, span = normal(4, whole, torch.float32), (first, first + rows)
    launch_merge(sums, lse_of_rank, of_rank, lse_of_rank, [(span, out, part_lse)])
    launch_sum(sums, sums, [(span, out.unsqueeze(0))])
    sent = torch.zeros(2 * (columns + first) * 128, dtype=torch.float16)
    launch_rows(k, k, sent, (columns // 3, columns), columns + first, 1)


def main() -> None:
    from cp_dtensor._torch.triton_launch import Launch
    from cp_dtensor.attention.triton import backward as attention_backward
    from cp_dtensor.attention.triton import forward as attention_forward
    from cp_dtensor.attention.triton import merge
    from cp_dtensor.comm import triton_kernels

    names = ("_launch", "_launches", "_delta_launch", "_merge_launch", "_sum_launch", "_copy_launch", "_flag_launch")
    names += ("_rows_launch",)
    forms = Forms()
    Launch.__call__ = lambda self, *tensors: forms.launch(self, tensors)  # type: ignore[method-assign]
    for module in (attention_forward, attention_backward, triton_kernels, merge):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, checked(getattr(module, name)))
    calls = Calls()
    for _ in range(_CALLS):
        for call in (calls.attention, calls.combination, calls.copies, calls.flags, calls.rows):
            calls.make(call)
    for kernel, times in sorted(forms.times.items()):
        print(kernel, times)
    forms.compiled.clear()
    for rows, columns, first in ((300, 512, 0), (37, 1, 5), (128, 33, 16), (2048, 4000, 3), (33, 77, 1)):
        tile_of_a_ring(rows, columns, first)
    for kernel, found in sorted(forms.compiled.items()):
        print(kernel, "compiled", len(found))


def test_a_launch_has_one_form_for_each_alignment_and_a_tile_one_for_all_lengths() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip("this Triton sorts arguments in another way")
    printed = run_uninterpreted(__file__)
    again = [int(line.split()[2]) for line in printed.splitlines() if " again " in line]
    assert len(again) == 10, printed  # all kernels
    assert min(again) > 5, printed
    compiled = [line.split()[2] for line in printed.splitlines() if " compiled " in line]
    assert compiled == ["1"] * 8, printed  # all kernels of attention, merges, sums and rows


if __name__ == "__main__":
    main()
