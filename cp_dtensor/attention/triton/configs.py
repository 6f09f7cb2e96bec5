"""How the attention kernels cut up a tile: the one table of block sizes, by head dim and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class ForwardConfig:
    """How one kernel cuts up a tile; what it computes does not depend on it."""

    block_rows: int
    block_columns: int
    warps: int
    stages: int
    """Blocks of what its loop reads that are in flight or in use at once."""
    tma: bool = False
    """Read what its loop reads by tensor descriptors, which takes fewer registers; only where `can_use_tma` says so."""
    precision: str = "ieee"
    """Of products of float32, see `triton.language.dot`; "ieee" does not use tensor cores."""


@dataclass(frozen=True)
class BackwardConfig:
    """Those of the two kernels of a backward pass."""

    dq: ForwardConfig
    """Its loop reads K and V."""
    dkv: ForwardConfig
    """Its loop reads Q and the gradient of the output."""


# For head dims 64 and 128 the fastest of those measured on an H200; others are guesses that fit: 227 KiB of shared
# memory, and no spills without a bias. A test compiles those of 128.
_HOPPER_FORWARD = {
    16: ForwardConfig(128, 64, 4, 3),
    32: ForwardConfig(128, 64, 4, 3),
    64: ForwardConfig(128, 64, 4, 3),
    128: ForwardConfig(128, 128, 8, 3),
    256: ForwardConfig(128, 64, 8, 2),
}
_HOPPER_BACKWARD = {
    16: BackwardConfig(ForwardConfig(128, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    32: BackwardConfig(ForwardConfig(128, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    64: BackwardConfig(ForwardConfig(128, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    128: BackwardConfig(ForwardConfig(128, 64, 8, 3), ForwardConfig(64, 128, 8, 3)),
    256: BackwardConfig(ForwardConfig(64, 64, 8, 2), ForwardConfig(32, 64, 8, 2)),
}
# Guesses. These fit the 99 KiB of shared memory that some GPUs have.
_SMALL_FORWARD = {
    16: ForwardConfig(128, 64, 4, 3),
    32: ForwardConfig(128, 64, 4, 3),
    64: ForwardConfig(128, 64, 4, 3),
    128: ForwardConfig(128, 64, 8, 2),
    256: ForwardConfig(64, 32, 4, 2),
}
_SMALL_BACKWARD = {
    16: BackwardConfig(ForwardConfig(64, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    32: BackwardConfig(ForwardConfig(64, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    64: BackwardConfig(ForwardConfig(64, 64, 4, 3), ForwardConfig(64, 64, 4, 3)),
    128: BackwardConfig(ForwardConfig(64, 32, 4, 2), ForwardConfig(32, 64, 8, 2)),
    256: BackwardConfig(ForwardConfig(32, 32, 4, 1), ForwardConfig(32, 32, 4, 1)),
}

# float32 is multiplied as three products of TF32 (Ootomo and Yokota, "Recovering single precision accuracy from Tensor
# Cores", 2022), measured likewise: 42 TFLOP/s forward and 32 backward, and errors at most 1.7 times those of torch's
# float32. Products without tensor cores ("ieee") are 7 times slower: their blocks do not fit the registers.
_TF32_64, _TF32_32 = (ForwardConfig(rows, 32, 4, 2, precision="tf32x3") for rows in (64, 32))
_HOPPER_FORWARD_FLOAT32 = {
    16: _TF32_64,
    32: _TF32_64,
    64: _TF32_64,
    128: ForwardConfig(128, 32, 8, 2, precision="tf32x3"),
}
_HOPPER_BACKWARD_FLOAT32 = {
    16: BackwardConfig(_TF32_64, _TF32_32),
    32: BackwardConfig(_TF32_64, _TF32_32),
    64: BackwardConfig(_TF32_64, _TF32_32),
    128: BackwardConfig(_TF32_32, _TF32_32),
}
_SMALL_FORWARD_FLOAT32 = dict.fromkeys(_HOPPER_FORWARD_FLOAT32, _TF32_32)
_SMALL_BACKWARD_FLOAT32 = dict.fromkeys(_HOPPER_FORWARD_FLOAT32, BackwardConfig(_TF32_32, _TF32_32))


def default_config(k: torch.Tensor, v: torch.Tensor, has_bias: bool = False, draws_each: bool = False) -> ForwardConfig:
    """The forward config for keys (B, Hkv, T, D) and values (B, Hkv, T, Dv).

    `draws_each`: there is dropout at positions that are not in runs, so each element draws its own random numbers.
    """
    large = _is_large(k.device)
    return _forward_config(large, k.dtype, _block_dim(k, v), has_bias, draws_each, large and can_use_tma(k, v))


@cache
def _forward_config(
    large: bool, dtype: torch.dtype, dim: int, has_bias: bool, draws_each: bool, tma: bool
) -> ForwardConfig:
    if dtype == torch.float32:
        config = (_HOPPER_FORWARD_FLOAT32 if large else _SMALL_FORWARD_FLOAT32)[dim]
    else:
        config = (_HOPPER_FORWARD if large else _SMALL_FORWARD)[dim]
        if has_bias:  # which goes through shared memory
            config = replace(config, block_columns=max(32, config.block_columns // 2))
        if draws_each and dim <= 128:  # which takes registers; measured for 64 and 128
            config = replace(config, block_rows=64, block_columns=min(64, config.block_columns), warps=4)
    return replace(config, tma=tma)


def default_backward_config(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    has_bias: bool = False,
    draws_each: bool = False,
) -> BackwardConfig:
    """The backward configs for a tile's tensors and the gradient of its output (B, H, S, Dv); as `default_config`."""
    large = _is_large(k.device)
    tma_dq, tma_dkv = large and can_use_tma(k, v), large and can_use_tma(q, grad_out)
    return _backward_config(large, k.dtype, _block_dim(k, v), has_bias, draws_each, tma_dq, tma_dkv)


@cache
def _backward_config(
    large: bool, dtype: torch.dtype, dim: int, has_bias: bool, draws_each: bool, tma_dq: bool, tma_dkv: bool
) -> BackwardConfig:
    if dtype == torch.float32:
        config = (_HOPPER_BACKWARD_FLOAT32 if large else _SMALL_BACKWARD_FLOAT32)[dim]
        dq, dkv = config.dq, config.dkv
    else:
        config = (_HOPPER_BACKWARD if large else _SMALL_BACKWARD)[dim]
        dq, dkv = config.dq, config.dkv
        if has_bias:
            dq, dkv = (replace(x, stages=min(2, x.stages)) for x in (dq, dkv))
        if draws_each and dim <= 64:
            dq = replace(dq, block_rows=64)
        elif draws_each:
            dkv = replace(dkv, block_rows=32)
    return BackwardConfig(dq=replace(dq, tma=tma_dq), dkv=replace(dkv, tma=tma_dkv))


def can_use_tma(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors of these can be made: they want at least one row, and 16-byte alignment."""
    for x in tensors:
        size, (first, second, third, _) = x.itemsize, x.stride()
        if x.numel() == 0 or x.data_ptr() % 16 or min(first, second, third) <= 0:
            return False
        if first * size % 16 or second * size % 16 or third * size % 16:
            return False
    return True


def padded(head_dim: int) -> int:
    """The power of two that the kernels compute with; a matrix product takes no less than 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has those for bfloat16, for which the kernels are made."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _is_large(device: torch.device) -> bool:
    """Whether it is a GPU with descriptors and Hopper's shared memory; the interpreter takes anything."""
    return device.type != "cuda" or (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def _block_dim(k: torch.Tensor, v: torch.Tensor) -> int:
    """What tables go by."""
    return padded(max(k.size(3), v.size(3)))
