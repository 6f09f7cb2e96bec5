"""Absorbed MLA over chosen keys by kernels of packages: the forward of FlashMLA, the gradients of cuDNN.

The packages are sgl-flash-mla and nvidia-cudnn-frontend, for Hopper and datacenter Blackwell GPUs and bfloat16. What
they do not take, and kernels whose first results are wrong, is left to torch operations, one direction without the
other. Their kernels have one key head of 512 values and 64 rotary dims or none; smaller ones are padded by zeros.

Source: github.com/sgl-project/FlashMLA; github.com/NVIDIA/cudnn-frontend, `deepseek_sparse_attention`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import quiet
from cp_dtensor.layers.chosen_reference import Chosen, Gradients, error_of_kernels
from cp_dtensor.layers.package_kernels import PackageKernels, hopper_or_blackwell

_KERNELS = {
    "forward": PackageKernels("sgl-flash-mla", "flash_mla", "indexed_attention forward"),
    "backward": PackageKernels(
        "nvidia-cudnn-frontend", "cudnn.deepseek_sparse_attention", "indexed_attention backward"
    ),
}
_HEADS, _VALUES, _ROTARY, _KEYS = (64, 128), 512, 64, 128
"""Numbers of heads, dims of values and of rotary keys; numbers of chosen keys are multiples of the last one."""


def forward(q: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Compute `attend_chosen_reference` of one batch row and one group, without blocks and masks."""
    kernel = _KERNELS["forward"].load().flash_mla_sparse_fwd
    heads, value_dim, (keys, index) = q.size(1), chosen.value_dim, _keys(chosen)
    sink = None if chosen.sink is None else _padded_sink(chosen.sink, heads)
    # "Legacy" are the kernels for rotary keys, and all those for Hopper.
    out, _, lse = kernel(
        _queries(q, value_dim), keys.unsqueeze(1), index.unsqueeze(1), chosen.scale, _VALUES, sink, use_legacy=True
    )  # fmt: skip
    lse = lse.masked_fill_(lse == float("inf"), float("-inf"))  # of queries without keys
    return out[:, :heads, :value_dim].transpose(0, 1).unsqueeze(0), lse[:, :heads].T.unsqueeze(0)


def backward(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, chosen: Chosen) -> Gradients:
    """Compute `chosen_gradients_reference` of one batch row and one group, without blocks and masks."""
    kernel = _KERNELS["backward"].load().sparse_attention_backward_wrapper
    heads, value_dim, sink, (keys, index) = q.size(1), chosen.value_dim, chosen.sink, _keys(chosen)
    padded = [_queries(x, value_dim) for x in (q, out, grad_out)]
    padded_lse = _pad(lse[0].T, _heads(heads) - heads).contiguous()
    logits = _padded_sink(q.new_full((heads,), float("-inf")) if sink is None else sink, heads)
    found = kernel(padded[0], keys, *padded[1:], padded_lse, logits, index, softmax_scale=chosen.scale)
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


def _keys(chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Return rows (S, 512 or 576) and indices (T, a multiple of 128)."""
    index = _pad(chosen.indices[0, :, 0].int(), -chosen.indices.size(3) % _KEYS, -1)
    return _padded(chosen.rows[0, :, 0], chosen.value_dim).contiguous(), index.contiguous()


def _padded_sink(sink: Tensor, heads: int) -> Tensor:
    return _pad(sink.float(), _heads(heads) - heads, float("-inf"))


def _pad(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """Return x with `count` more elements in its last dim. `F.pad` of none would copy."""
    return F.pad(x, (0, count), value=value) if count else x


def _heads(count: int) -> int:
    return next(each for each in _HEADS if count <= each)


def serves(direction: str, q: Tensor, chosen: Chosen) -> bool:
    """Return whether the kernel of a package computes a direction; at first use a small problem is compared."""
    value_dim, count, has_sink = chosen.value_dim, chosen.indices.size(3), chosen.sink is not None
    rotary, refusal = q.size(3) - value_dim, hopper_or_blackwell(q)
    if q.dtype != torch.bfloat16 or q.size(1) > _HEADS[-1] or value_dim > _VALUES or rotary > _ROTARY:
        refusal = f"they need bfloat16, {_HEADS[-1]} heads, latents of {_VALUES} and {_ROTARY} rotary dims at most"
    kernel = q.size(1), value_dim, rotary, count, "sink" if has_sink else ""
    check = partial(_small_error, direction, q, count, has_sink, value_dim)
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
    chosen = Chosen(rows, index, sink, value_dim, q.size(3) ** -0.5)
    return error_of_kernels(direction, forward, backward, q, grad_out, chosen)
