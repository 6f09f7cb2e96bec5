"""What a compiled forward pass hands to its backward besides the results of its operator.

Compiled code keeps tensors whose shapes it knows, which those of exchanged heads are not. So they are kept by a tensor
that it does keep, as an attribute: autograd and AOTAutograd save that very tensor, with its Python object, and all is
freed with it. Where another tensor arrives (a copy, of offloading hooks say, or what a CUDA graph has written), there
is nothing on it, and backward decides the call and brings the rows together again.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import AttentionCall, Tensors

_NAME = "_cp_dtensor_kept"


class Kept:
    """A call that has run forward, and what it has saved; copies have neither."""

    def __init__(self, call: AttentionCall | None = None, saved: Tensors = ()) -> None:
        self.call = call
        self.saved = saved
        """Empty: nothing but what the operator got and gave, or it is not kept."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()


def keep(keeper: torch.Tensor, call: AttentionCall, saved: Tensors) -> None:
    """Keeps a call and what it has saved as long as `keeper`.

    Rows of other ranks are not kept if a CUDA graph would own their memory: it is written again at each replay, and
    Inductor wants to know of all of it. What is saved otherwise is the operator's, which autograd keeps if need be.
    """
    rows = saved if call.saves_rows_of_others and not _in_cuda_graph(saved) else ()
    setattr(keeper, _NAME, Kept(call, rows))
    setattr(keeper, "__getstate__", dict)  # noqa: B010  # what is pickled of a tensor besides its data: nothing


def kept(keeper: torch.Tensor) -> Kept:
    """What the tensor keeps: nothing if it is not the one that forward has returned."""
    found: Kept | None = getattr(keeper, _NAME, None)
    if found is None:
        return Kept()
    return Kept(found.call) if _in_cuda_graph(found.saved) else found  # graphs may not read what outlives them


def _in_cuda_graph(tensors: Tensors) -> bool:
    return bool(tensors) and tensors[0].is_cuda and _torch_private.is_in_cuda_graph(tensors[0].device)
