"""The identity of tensors."""

from __future__ import annotations

import torch


def swap_identities(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchanges what two tensor objects are: data, shape, autograd state. References from C++ stay with the content.

    `torch.utils.swap_tensors` does the same but refuses tensors that autograd refers to, which is the very case here.
    """
    torch._C._swap_tensor_impl(first, second)
