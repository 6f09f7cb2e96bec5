"""Absorbed MLA over chosen keys by kernels of packages: the forward of FlashMLA, the gradients of cuDNN.

The packages are sgl-flash-mla and nvidia-cudnn-frontend, for Hopper and datacenter Blackwell GPUs and bfloat16. What
they do not take, and kernels whose first results are wrong, is left to torch operations, one direction without the
other. Their kernels have one key head of 512 values and 64 rotary dims or none; smaller ones are padded by zeros.

Source: github.com/sgl-project/FlashMLA; github.com/NVIDIA/cudnn-frontend, `deepseek_sparse_attention`.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import quiet, wrong_result
from cp_dtensor.layers.chosen_reference import attend_chosen_reference, chosen_gradients_reference
from cp_dtensor.layers.package_kernels import PackageKernels, hopper_or_blackwell

_KERNELS = {
    "forward": PackageKernels("sgl-flash-mla", "flash_mla", "indexed_attention forward"),
    "backward": PackageKernels("nvidia-cudnn-frontend", "cudnn", "indexed_attention backward"),
}
_HEADS, _VALUES, _ROTARY, _KEYS = (64, 128), 512, 64, 128
"""Numbers of heads, dims of values and of rotary keys; numbers of chosen keys are multiples of the last one."""


def attend_chosen(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attend_chosen_reference` of one batch row and one group, without blocks and `seen`."""
    if not _serves("forward", q, indices, sink, value_dim):
        return attend_chosen_reference(q, rows, indices, sink, value_dim, scale)
    return _forward(q, rows, indices, sink, value_dim, scale)


def chosen_gradients(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `chosen_gradients_reference` of one batch row and one group, without blocks and `seen`."""
    given = grad_out, q, rows, indices, sink, out, lse, scale
    if not _serves("backward", q, indices, sink, out.size(3)):
        return chosen_gradients_reference(*given)
    return _backward(*given)


def _forward(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = _module("forward").flash_mla_sparse_fwd
    heads, (keys, index) = q.size(1), _keys(rows, indices, value_dim)
    sink = None if sink is None else _padded_sink(sink, heads)
    # "Legacy" are the kernels for rotary keys, and all those for Hopper.
    out, _, lse = kernel(
        _queries(q, value_dim), keys.unsqueeze(1), index.unsqueeze(1), scale, _VALUES, sink, use_legacy=True
    )  # fmt: skip
    lse = lse.masked_fill_(lse == float("inf"), float("-inf"))  # of queries without keys
    return out[:, :heads, :value_dim].transpose(0, 1).unsqueeze(0), lse[:, :heads].T.unsqueeze(0)


def _backward(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    kernel = _module("backward").sparse_attention_backward_wrapper
    heads, value_dim, (keys, index) = q.size(1), out.size(3), _keys(rows, indices, out.size(3))
    padded = [_queries(x, value_dim) for x in (q, out, grad_out)]
    padded_lse = _pad(lse[0].T, _heads(heads) - heads).contiguous()
    logits = _padded_sink(q.new_full((heads,), float("-inf")) if sink is None else sink, heads)
    found = kernel(padded[0], keys, *padded[1:], padded_lse, logits, index, softmax_scale=scale)
    dq, d_rows = (_unpadded(found[name], value_dim, q.size(3)) for name in ("dq", "dkv"))
    d_sink = None if sink is None else found["d_sink"][:heads].to(sink.dtype)
    return dq[:, :heads].transpose(0, 1).unsqueeze(0), d_rows.unsqueeze(0).unsqueeze(2), d_sink


def _padded(x: Tensor, value_dim: int) -> Tensor:
    """Return x (..., value_dim or more dims), its values and its rotary dims padded by zeros."""
    rotary = x.size(-1) - value_dim
    if value_dim < _VALUES:
        x = torch.cat((_pad(x[..., :value_dim], _VALUES - value_dim), x[..., value_dim:]), -1)
    return _pad(x, _ROTARY - rotary) if rotary else x


def _unpadded(x: Tensor, value_dim: int, dim: int) -> Tensor:
    """Return x (..., `dim`) of the result of `_padded`."""
    if x.size(-1) == dim:
        return x
    return torch.cat((x[..., :value_dim], x[..., _VALUES : _VALUES + dim - value_dim]), -1)


def _queries(x: Tensor, value_dim: int) -> Tensor:
    """Return (T, 64 or 128, 512 or 576), as kernels take x (1, H, T, D); no copy of what is such memory."""
    x = _padded(x[0].transpose(0, 1), value_dim)
    return _pad(x.mT, _heads(x.size(1)) - x.size(1)).mT.contiguous()


def _keys(rows: Tensor, indices: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return (S, 512 or 576) and (T, a multiple of 128) of rows (1, S, 1, D) and indices (1, T, 1, K)."""
    index = _pad(indices[0, :, 0].int(), -indices.size(3) % _KEYS, -1)
    return _padded(rows[0, :, 0], value_dim).contiguous(), index.contiguous()


def _padded_sink(sink: Tensor, heads: int) -> Tensor:
    return _pad(sink.float(), _heads(heads) - heads, float("-inf"))


def _pad(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Return x with `count` more elements in its last dim. `F.pad` of none would copy."""
    return F.pad(x, (0, count), value=value) if count else x


def _heads(count: int) -> int:
    return next(each for each in _HEADS if count <= each)


def _module(direction: str) -> Any:
    name = {"forward": "flash_mla", "backward": "cudnn.deepseek_sparse_attention"}[direction]
    return importlib.import_module(name)


def _serves(direction: str, q: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int) -> bool:
    """Return whether the kernel of a package computes a direction; at first use a small problem is compared."""
    rotary, refusal = q.size(3) - value_dim, hopper_or_blackwell(q)
    if q.dtype != torch.bfloat16 or q.size(1) > _HEADS[-1] or value_dim > _VALUES or rotary > _ROTARY:
        refusal = f"they need bfloat16, {_HEADS[-1]} heads, latents of {_VALUES} and {_ROTARY} rotary dims at most"
    kernel = q.size(1), value_dim, rotary, indices.size(3), "sink" if sink is not None else ""
    check = partial(_small_error, direction, q, indices.size(3), sink is not None, value_dim)
    return _KERNELS[direction].serve(q, refusal, kernel, check, adds_in_any_order=direction == "backward")


@quiet()  # packages are imported and compile
def _small_error(direction: str, q: Tensor, count: int, has_sink: bool, value_dim: int) -> str:
    """Compare a small problem with float64; "" if it is right. Some queries have few keys, one has none."""
    generator = torch.Generator(q.device).manual_seed(0)
    heads, tokens, keys = q.size(1), 16, count + 200

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, device=q.device).to(q.dtype)

    q, rows = normal(tokens, heads, q.size(3)).transpose(1, 2), normal(keys, 1, q.size(3))
    grad_out, sink = normal(tokens, heads, value_dim).transpose(1, 2), normal(heads)[0] if has_sink else None
    index = torch.rand(1, tokens, 1, keys, generator=generator, device=q.device).argsort(3)[..., :count].int()
    index[:, 3, :, 5:] = -1
    index[:, 4] = -1
    scale = q.size(3) ** -0.5
    wide = q.double(), rows.double(), index, None if sink is None else sink.double()
    out, lse = attend_chosen_reference(*wide, value_dim, scale)
    if direction == "forward":
        return wrong_result(("out", "lse"), _forward(q, rows, index, sink, value_dim, scale), (out, lse))
    got = _backward(grad_out, q, rows, index, sink, out.to(q.dtype), lse.float(), scale)
    expected = chosen_gradients_reference(grad_out.double(), *wide, out, lse, scale)
    names, count = ("dq", "d_rows", "d_sink"), 2 + has_sink
    return wrong_result(names[:count], got[:count], expected[:count])  # type: ignore[arg-type]
