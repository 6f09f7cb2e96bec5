"""Masks that a call names by a number in a tensor, so that models and compiled code can pass them on.

A model makes a mask once and hands it to all layers, through activation checkpointing and compiled code, where only
tensors travel. The tensor is (1, 1, 1, 1) int64, which is no mask of SDPA itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from weakref import WeakValueDictionary

import torch

from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.spec.masks import Mask

_SHAPE = (1, 1, 1, 1)
_ATTRIBUTE = "_cp_dtensor_mask"
"""Attribute of the storage of a tensor that names a mask: the `NamedMask`, which lives as long as the storage."""


class NamedMask(ABC):
    """A mask that is known when a call runs."""

    @abstractmethod
    def mask_for(self, config: AttentionConfig) -> Mask:
        """The mask of the whole sequence; the first call with a configuration may be a collective."""


_numbers = count(1 << 40)  # far from results of arithmetic on other integers
_by_number: WeakValueDictionary[int, NamedMask] = WeakValueDictionary()


def name_of(mask: NamedMask) -> torch.Tensor:
    """A tensor that names a mask."""
    number = next(_numbers)
    name = torch.full(_SHAPE, number, dtype=torch.int64, device="cpu")
    setattr(name.untyped_storage(), _ATTRIBUTE, mask)
    _by_number[number] = mask
    return name


def is_name(tensor: torch.Tensor | None) -> bool:
    """True if a tensor names a mask, as far as its dtype and shape tell."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64 and tuple(tensor.shape) == _SHAPE


def named_mask(name: torch.Tensor) -> NamedMask:
    """The mask that a tensor names.

    Raises:
        RuntimeError: a tensor that was changed by the model, or outlived the mask.
    """
    mask = _by_number.get(int(name))
    if mask is None:
        raise RuntimeError(
            "a model changed the mask that was made for context-parallel attention, or kept it after its forward and "
            "backward: got an unknown mask. A mask of your own is an attn_mask of this rank's query rows and all keys"
        )
    return mask
