"""Modules that stand for the optional packages on CPUs: the same functions, computed in plain torch operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cp_dtensor.attention.backends import cudnn_flex, first_use, flash4, packages, select
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend, expand_kv_heads
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiles import IntervalMask, KeyRun, ShapedMask, TileMask
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.intervals import IntervalBand
from cp_dtensor.spec.layouts import Contiguous, Segment
from cp_dtensor.spec.masks import Full

MATH = MathAttention()
HOPPER = CallSpec(
    LayoutPartition(Contiguous(), 8, 8, 1, 1), Full(), 1, 4, 2, 128, 128, "bfloat16", device="cuda", capability=(9, 0)
)
BLACKWELL, AMPERE = replace(HOPPER, capability=(10, 0)), replace(HOPPER, capability=(8, 0))
INTERVALS = replace(HOPPER, masking=Masking.INTERVALS)
MLA = replace(HOPPER, head_dim=192, q_heads=4, kv_heads=4)
VERSIONS = {flash4.PACKAGE.distribution: "4.0.0b36", cudnn_flex.PACKAGE.distribution: "1.32.0"}


@contextmanager
def fresh_process() -> Iterator[pytest.MonkeyPatch]:
    """Makes a process that has used no optional package, in which both seem to be installed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packages, "installed_version", VERSIONS.get)
        monkeypatch.setattr(first_use, "_verdicts", LRUCache())
        monkeypatch.setattr(flash4, "_launches", LRUCache())
        monkeypatch.setattr(cudnn_flex, "_planned", LRUCache(cudnn_flex.KEPT_BYTES, least=cudnn_flex._KEPT_PLANS))
        cached = flash4._functions, cudnn_flex._functions, select._choose, select.masked_by_shape, packages.log_missing
        for each in cached:
            each.cache_clear()
        yield monkeypatch
        for each in cached:
            each.cache_clear()


def install(patch: pytest.MonkeyPatch, flash: Any = None, flex: Any = None) -> None:
    """Makes modules importable; None is a package that fails to import."""
    patch.setitem(sys.modules, "flash_attn.cute.interface", flash)
    patch.setitem(sys.modules, "cudnn.flex_attention", flex)
    patch.setitem(sys.modules, "cudnn.flex_attention.execution", flex)


class AuxData(NamedTuple):
    """An argument of the package's compiled functions that is a tuple, without tensors in the adapter's calls."""

    tensors: tuple[Tensor, ...] | None = None
    scalars: tuple[float, ...] | None = None


class FlashModule(ModuleType):
    """`flash_attn.cute.interface`: wrappers that call functions of a cache, as the package's do.

    The functions of backward are three: one writes a workspace, one adds to another that must begin as zeros, and one
    writes the results.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[str] = []
        module = self

        def forward_kernel(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool, aux: AuxData
        ) -> None:
            assert aux == AuxData()
            result, new_lse = MATH.forward(*_heads_first(q, k, v), ShapedMask(is_causal=causal), scale)
            out.copy_(result.transpose(1, 2) * factor)
            lse.copy_(new_lse)

        def preprocess(out: Tensor, dout: Tensor, delta: Tensor) -> None:
            delta.copy_((out.float() * dout).sum(-1).transpose(1, 2))

        def kernel(
            tensors: tuple[Tensor, ...], delta: Tensor, sums: tuple[Tensor, ...], scale: float, causal: bool
        ) -> None:
            q, k, v, dout, lse = tensors
            q, k, v, dout = (x.float() for x in _heads_first(q, k, v, dout))
            wide_k, wide_v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
            logits = q @ wide_k.mT * scale
            if causal:
                logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
            weights = (logits - lse.unsqueeze(-1)).exp()
            grad = weights * (dout @ wide_v.mT - delta.unsqueeze(-1)) * scale
            for total, part in zip(sums, (grad @ wide_k, grad.mT @ q, weights.mT @ dout), strict=True):
                total += part.unflatten(1, (total.size(1), -1)).sum(2)

        def postprocess(total: Tensor, result: Tensor) -> None:
            result.copy_(total.transpose(1, 2) * factor)

        def _flash_attn_fwd(q: Any, k: Any, v: Any, softmax_scale: float, causal: bool, out: Any, lse: Any) -> None:
            module.calls.append("forward")
            cache = _flash_attn_fwd.compile_cache  # type: ignore[attr-defined]
            if (q.dtype, causal) not in cache:
                cache[q.dtype, causal] = forward_kernel
            cache[q.dtype, causal](
                q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, causal, AuxData()
            )

        def _bwd_preprocess(*arguments: Any) -> None:
            _bwd_preprocess.compile_cache["only"](*arguments)  # type: ignore[attr-defined]

        def _bwd_postprocess_convert(*arguments: Any) -> None:
            _bwd_postprocess_convert.compile_cache["only"](*arguments)  # type: ignore[attr-defined]

        def _flash_attn_bwd(
            q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, softmax_scale: float, causal: bool,
            deterministic: bool, dq: Any, dk: Any, dv: Any,
        ) -> None:  # fmt: skip
            module.calls.append("backward")
            delta = torch.empty_like(lse)
            sums = [x.new_zeros(x.transpose(1, 2).shape, dtype=torch.float32) for x in (dq, dk, dv)]
            _bwd_preprocess(out, dout, delta)

            def main(*values: Any) -> None:
                assert values[-1] == AuxData()
                kernel(values[:5], values[5], values[6:9], *values[9:-1])

            cache = _flash_attn_bwd.compile_cache  # type: ignore[attr-defined]
            if "only" not in cache:
                cache["only"] = main
            cache["only"](q.detach(), k.detach(), v.detach(), dout, lse, delta, *sums, softmax_scale, causal, AuxData())
            for total, result in zip(sums, (dq, dk, dv), strict=True):
                _bwd_postprocess_convert(total, result)

        for function, entries in (
            (_flash_attn_fwd, {}), (_flash_attn_bwd, {}), (_bwd_preprocess, {"only": preprocess}),
            (_bwd_postprocess_convert, {"only": postprocess}),
        ):  # fmt: skip
            function.compile_cache = entries  # type: ignore[attr-defined]
            setattr(self, function.__name__, function)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@dataclass(frozen=True)
class CompiledBackward:
    """The compiled functions of a backward of `FlexModule`."""

    preprocess: Any
    main: Any
    post_dq: Any
    post_dk: Any
    post_dv: Any
    """None without grouped heads, as `post_dk`: the main function writes dk and dv then."""
    workspace_specs: tuple[str, ...] = ("delta", "sums")


class FlexModule(ModuleType):
    """`cudnn.flex_attention`: plans are the end points, in memory that counts; kernels compute dense attention.

    With `skips` they do not write results of blocks of rows that see nothing ("rows"), or of blocks of columns that
    no row sees ("columns").
    """

    def __init__(self, factor: float = 1.0, plan_bytes: int = 1 << 20, skips: str = "") -> None:
        super().__init__("cudnn.flex_attention")
        self.compiled_name = "_compiled_kernel"
        """Name of the private attribute of kernels that has their compiled functions."""
        self.plans: list[SimpleNamespace] = []
        self.executed: list[str] = []
        """Calls of `execute`, which the package's wrappers are; compiled functions may be called without them."""
        module = self

        def create_mask_plan(mask_func: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Any:
            assert build_backward
            count = mask_func.size(1)
            assert count % 2 == 1
            assert mask_func.shape == (1, count, q.size(0) * q.size(1))
            assert mask_func.is_contiguous()
            ends = mask_func[0].unflatten(1, (q.size(0), -1))
            assert bool((ends.diff(dim=0) >= 0).all())
            assert 0 <= int(ends.min()) <= int(ends.max()) <= k.size(1)
            columns = torch.arange(k.size(1))
            seen = columns < ends[0, ..., None]
            for begin, end in ends[1:].unflatten(0, (-1, 2)):
                seen |= (columns >= begin[..., None]) & (columns < end[..., None])
            memory = torch.empty(plan_bytes, dtype=torch.uint8)
            module.plans.append(SimpleNamespace(seen=seen.unsqueeze(1), memory=memory, empty=memory[:0].clone()))
            return module.plans[-1]

        def forward_kernel(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, tables: tuple[Any, ...],
            counter: Tensor,
        ) -> None:  # fmt: skip
            assert (int(counter), counter.dtype) == (0, torch.int32)
            counter.fill_(7)
            seen = tables[1]
            result, new_lse, _ = _dense(q, k, v, seen, scale)
            written = _blocks(seen, -1) | (skips != "rows")
            out[written] = (result.transpose(1, 2) * factor).to(out.dtype)[written]
            lse.transpose(1, 2)[written] = new_lse.transpose(1, 2)[written]

        def preprocess(out: Tensor, dout: Tensor, delta: Tensor, sums_q: Tensor) -> None:
            delta.copy_((out.float() * dout).sum(-1).transpose(1, 2))
            sums_q.zero_()

        def backward_kernel(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, sums_q: Tensor, of_k: Tensor,
            of_v: Tensor, scale: float, tables: tuple[Any, ...],
        ) -> None:  # fmt: skip
            _, _, logits = _dense(q, k, v, tables[1], scale)
            q, k, v, dout = (x.float() for x in _heads_first(q, k, v, dout))
            weights = (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
            grad = weights * (dout @ expand_kv_heads(v, q.size(1)).mT - delta.unsqueeze(-1)) * scale
            sums_q += grad @ expand_kv_heads(k, q.size(1))
            for target, part in ((of_k, grad.mT @ q), (of_v, weights.mT @ dout)):
                if q.size(1) == k.size(1):
                    written = _blocks(tables[1], -2) | (skips != "columns")
                    target[written] = (part.transpose(1, 2) * factor).to(target.dtype)[written]
                else:
                    target += part.unflatten(1, (target.size(1), -1)).sum(2)

        def postprocess(total: Tensor, result: Tensor, tables: tuple[Any, ...], dim: int) -> None:
            written = _blocks(tables[1], dim) | (skips != ("rows" if dim == -1 else "columns"))
            result[written] = (total.transpose(1, 2) * factor).to(result.dtype)[written]

        class Kernel:
            workspace_size = 128

            def check_support(self) -> bool:
                return True

            def compile(self) -> None:
                setattr(self, module.compiled_name, forward_kernel)

        class FlexAttentionFwd(Kernel):
            def __init__(
                self, sample_q: Any, sample_k: Any, sample_v: Any, sample_o: Any, sample_mask_plan: Any, sample_lse: Any
            ) -> None:
                pass

            def execute(
                self, q_tensor: Any, k_tensor: Any, v_tensor: Any, o_tensor: Any, mask_plan: Any, lse_tensor: Any, *,
                workspace: Any, softmax_scale: float,
            ) -> None:  # fmt: skip
                module.executed.append("forward")
                counter = workspace[:4].view(torch.int32).zero_()
                inputs = q_tensor.detach(), k_tensor.detach(), v_tensor.detach(), o_tensor.detach(), lse_tensor
                getattr(self, module.compiled_name)(
                    *inputs, softmax_scale, (None, mask_plan.seen, mask_plan.empty), counter
                )

        class FlexAttentionBwd(Kernel):
            def __init__(
                self, sample_q: Any, sample_k: Any, sample_v: Any, sample_o: Any, sample_do: Any, sample_lse: Any,
                sample_dq: Any, sample_dk: Any, sample_dv: Any, sample_mask_plan: Any,
            ) -> None:  # fmt: skip
                self.has_groups = sample_q.size(2) > sample_k.size(2)

            def compile(self) -> None:
                post = postprocess if self.has_groups else None
                setattr(
                    self, module.compiled_name, CompiledBackward(preprocess, backward_kernel, postprocess, post, post)
                )

            def execute(
                self, q_tensor: Any, k_tensor: Any, v_tensor: Any, o_tensor: Any, do_tensor: Any, lse_tensor: Any,
                dq_tensor: Any, dk_tensor: Any, dv_tensor: Any, mask_plan: Any, *, workspace: Any, softmax_scale: float,
            ) -> None:  # fmt: skip
                module.executed.append("backward")
                compiled, tables = getattr(self, module.compiled_name), (None, mask_plan.seen, mask_plan.empty)
                grads = (dq_tensor, dk_tensor, dv_tensor)[: 3 if self.has_groups else 1]
                sizes = [lse_tensor.numel(), *(x.numel() for x in grads)]
                delta, *sums = torch.full((sum(sizes),), float("nan")).split(sizes)  # as the package: one buffer
                delta = delta.view(lse_tensor.shape)
                sums = [total.view(x.transpose(1, 2).shape) for total, x in zip(sums, grads, strict=True)]
                for total in sums[1:]:
                    total.zero_()
                compiled.preprocess(o_tensor, do_tensor, delta, sums[0])
                inputs = q_tensor.detach(), k_tensor.detach(), v_tensor.detach(), do_tensor, lse_tensor, delta
                of_keys = sums[1:] or (dk_tensor, dv_tensor)
                compiled.main(*inputs, sums[0], *of_keys, softmax_scale, tables)
                compiled.post_dq(sums[0], dq_tensor, tables, -1)
                if self.has_groups:
                    compiled.post_dk(sums[1], dk_tensor, tables, -2)
                    compiled.post_dv(sums[2], dv_tensor, tables, -2)

        self.create_mask_plan, self.FlexAttentionFwd, self.FlexAttentionBwd = (
            create_mask_plan, FlexAttentionFwd, FlexAttentionBwd,
        )  # fmt: skip

    @staticmethod
    def _plan_tensors(mask_plan: Any) -> tuple[Tensor, ...]:
        return mask_plan.memory, mask_plan.seen, mask_plan.empty


def _blocks(seen: Tensor, dim: int) -> Tensor:
    """(B, rows) or (B, columns): True in blocks of 128 of which one sees or is seen."""
    lines: Tensor = seen.squeeze(1).any(dim)
    return torch.cat([each.any(1, keepdim=True).expand_as(each) for each in lines.split(128, 1)], 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.float() for x in _heads_first(q, k, v))
    logits = (q @ expand_kv_heads(k, q.size(1)).mT * scale).masked_fill(~seen, float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return weights @ expand_kv_heads(v, q.size(1)), lse, logits


# Tiles


def tensors(
    rows: int = 300, columns: int = 300, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16)
) -> Any:
    """Returns q, k, v and the gradient of out of two batch rows."""
    shapes = (heads[0], rows, dims[0]), (heads[1], columns, dims[0]), (heads[1], columns, dims[1])
    return [torch.randn(2, *shape).bfloat16() for shape in (*shapes, (heads[0], rows, dims[1]))]


def both(backend: AttentionBackend, mask: TileMask, values: Any, scale: float = 0.25) -> list[Tensor]:
    """Returns the result of a tile and its gradients."""
    q, k, v, grad_out = values
    out, lse = backend.forward(q, k, v, mask, scale)
    return [out, lse, *backend.backward(grad_out, q, k, v, out, lse, mask, scale)]


def check(backend: AttentionBackend, mask: TileMask, values: Any, reference: AttentionBackend = MATH) -> None:
    """Compares the result of a tile and its gradients with those of a reference in float64."""
    got, want = both(backend, mask, values), both(reference, mask, [x.double() for x in values])
    for one, other in zip(got, want, strict=True):
        finite = other.isfinite()
        assert torch.equal(finite, one.isfinite())
        assert float((one[finite].double() - other[finite]).norm() / other[finite].norm().clamp(min=1)) < 1e-2


def interval_mask(rows: int = 300, columns: int = 300, batch: int = 1) -> IntervalMask:
    """Documents and a window, other ones in each batch row; some rows see nothing."""
    sets = tuple(
        (
            IntervalBand(10, 100 + row, 5, columns),
            IntervalBand(120 + row, rows - 20, 0, columns, left=50 + row, right=9),
        )
        for row in range(batch)
    )
    queries, keys = Segment.contiguous(0, rows), Segment.contiguous(0, columns)
    return IntervalMask((sets,), (queries,), (0, rows), KeyRun((keys,)), (0, columns))


def no_memory_for_a_plan(mask_func: Any, q: Any, k: Any, v: Any, *, build_backward: bool) -> None:
    """In place of `create_mask_plan`."""
    raise torch.OutOfMemoryError
