"""Block sizes of the attention kernels, by head dim, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockConfig:
    """Block sizes and compiler options of one kernel."""

    block_rows: int
    block_columns: int
    warps: int
    stages: int
    """Blocks in flight or in use at once, of those that the kernel's loop reads."""
    tma: bool = False
    """True to read these blocks by tensor descriptors, which takes fewer registers; needs `can_use_tma`."""
    precision: str = "ieee"
    """`input_precision` of `triton.language.dot` for float32; "ieee" does not use tensor cores."""

    def constants(self) -> dict[str, object]:
        """Return the kernel's constants and Triton's options."""
        return {
            "BLOCK_ROWS": self.block_rows, "BLOCK_COLUMNS": self.block_columns, "TMA": self.tma,
            "PRECISION": self.precision, "num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True,
        }  # fmt: skip


@dataclass(frozen=True)
class BackwardConfig:
    """Block sizes of the two kernels of a backward pass."""

    dq: BlockConfig
    """Config of the dQ kernel, whose loop reads K and V."""
    dkv: BlockConfig
    """Config of the dK/dV kernel, whose loop reads Q and the gradient of the output."""


# Configs of the forward, dQ and dK/dV kernels by padded head dim.

# Head dims 64 and 128: the fastest of those measured on an H200. The others are not measured; they fit 227 KiB of
# shared memory and do not spill registers without a bias. A test compiles those of 128.
_HOPPER = dict.fromkeys(
    (16, 32, 64), (BlockConfig(128, 64, 4, 3), BlockConfig(128, 64, 4, 3), BlockConfig(64, 64, 4, 3))
) | {
    128: (BlockConfig(128, 128, 8, 3), BlockConfig(128, 64, 8, 3), BlockConfig(64, 128, 8, 3)),
    256: (BlockConfig(128, 64, 8, 2), BlockConfig(64, 64, 8, 2), BlockConfig(32, 64, 8, 2)),
}
# Not measured. These fit the 99 KiB of shared memory that some GPUs have.
_SMALL = dict.fromkeys(
    (16, 32, 64), (BlockConfig(128, 64, 4, 3), BlockConfig(64, 64, 4, 3), BlockConfig(64, 64, 4, 3))
) | {
    128: (BlockConfig(128, 64, 8, 2), BlockConfig(64, 32, 4, 2), BlockConfig(32, 64, 8, 2)),
    256: (BlockConfig(64, 32, 4, 2), BlockConfig(32, 32, 4, 1), BlockConfig(32, 32, 4, 1)),
}
# float32 is multiplied as three TF32 products (Ootomo and Yokota, "Recovering single precision accuracy from Tensor
# Cores", 2022). Measured on an H200: 42 TFLOP/s forward, 32 backward, errors at most 1.7 times those of torch's
# float32. Products without tensor cores ("ieee") are 7 times slower, since their blocks do not fit the registers.
_TF32_64, _TF32_32 = (BlockConfig(rows, 32, 4, 2, precision="tf32x3") for rows in (64, 32))
_HOPPER_FLOAT32 = dict.fromkeys((16, 32, 64), (_TF32_64, _TF32_64, _TF32_32)) | {
    128: (BlockConfig(128, 32, 8, 2, precision="tf32x3"), _TF32_32, _TF32_32)
}
_SMALL_FLOAT32 = dict.fromkeys((16, 32, 64, 128), (_TF32_32, _TF32_32, _TF32_32))


def default_config(k: Tensor, v: Tensor, has_bias: bool = False, draws_each: bool = False) -> BlockConfig:
    """Return the forward config for keys (B, Hkv, T, D) and values (B, Hkv, T, Dv).

    `draws_each`: True if there is dropout at positions that are not in runs; each element then calls Philox.
    """
    large = _is_large(k.device)
    dim = padded(max(k.size(3), v.size(3)))
    return _configs(large, k.dtype, dim, has_bias, draws_each, large and can_use_tma(k, v), False)[0]


def default_backward_config(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, has_bias: bool = False, takes_registers: bool = False
) -> BackwardConfig:
    """Return the backward configs for a tile's tensors and the gradient of its output (B, H, S, Dv).

    `takes_registers`: True with capped logits, and with dropout as in `default_config`.
    """
    large = _is_large(k.device)
    dim = padded(max(k.size(3), v.size(3)))
    tma_kv, tma_q = large and can_use_tma(k, v), large and can_use_tma(q, grad_out)
    return _configs(large, k.dtype, dim, has_bias, takes_registers, tma_kv, tma_q)[1]


@cache
def _configs(
    large: bool, dtype: torch.dtype, dim: int, has_bias: bool, draws_each: bool, tma_kv: bool, tma_q: bool
) -> tuple[BlockConfig, BackwardConfig]:
    """Return the forward and backward configs. `tma_kv`, `tma_q`: True to read K and V, or Q and dO, by descriptors."""
    if dtype == torch.float32:
        forward, dq, dkv = (_HOPPER_FLOAT32 if large else _SMALL_FLOAT32)[dim]
    else:
        forward, dq, dkv = (_HOPPER if large else _SMALL)[dim]
        if has_bias:  # it goes through shared memory
            forward = replace(forward, block_columns=max(32, forward.block_columns // 2))
            dq, dkv = (replace(x, stages=min(2, x.stages)) for x in (dq, dkv))
        if draws_each and dim <= 128:  # Philox takes registers; measured for 64 and 128
            forward = replace(forward, block_rows=64, block_columns=min(64, forward.block_columns), warps=4)
        if draws_each and dim <= 64:
            dq = replace(dq, block_rows=64)
        elif draws_each:
            dkv = replace(dkv, block_rows=32)
    return replace(forward, tma=tma_kv), BackwardConfig(dq=replace(dq, tma=tma_kv), dkv=replace(dkv, tma=tma_q))


def can_use_tma(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors of these can be made: at least one row, and 16-byte alignment."""
    for x in tensors:
        size, (first, second, third, _) = x.itemsize, x.stride()
        if x.numel() == 0 or x.data_ptr() % 16 or min(first, second, third) <= 0:
            return False
        if first * size % 16 or second * size % 16 or third * size % 16:
            return False
    return True


def padded(head_dim: int) -> int:
    """Return the power of two that kernels compute with; a matrix product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU has tensor cores for bfloat16, which the kernels need."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _is_large(device: torch.device) -> bool:
    """Return True for GPUs with tensor descriptors and Hopper's shared memory, and for Triton's interpreter."""
    return device.type != "cuda" or (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
