"""What a compiled forward pass hands to its backward besides the results of its operator.

Compiled code keeps tensors whose shapes it knows, which those of exchanged heads are not. So they are kept by a tensor
that it does keep, as an attribute of its storage: autograd, AOTAutograd and checkpoint policies save that very tensor
or an alias of it, and all is freed with the last of these. Where another tensor arrives (a copy, of offloading hooks
say, or what a CUDA graph has written), there is nothing on it, and backward decides the call and brings the rows
together again.
"""

from __future__ import annotations

import torch

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import AttentionCall, Tensors

_NAME = "_cp_dtensor_kept"


class Kept:
    """A call that has run forward, and what it has saved, or nothing if that is not to be kept."""

    def __init__(self, call: AttentionCall | None = None, rows: Tensors = ()) -> None:
        self.call = call
        self.rows = rows


def keeps_rows(call: AttentionCall, q: torch.Tensor) -> bool:
    """Whether what a call saves is worth keeping and may be kept here: not where a CUDA graph is made.

    A graph's memory is written again at each replay, and Inductor wants to know of all of it; what is kept elsewhere is
    gone by then. What other calls save is what the operator got and gave, which autograd keeps if need be.
    """
    return call.saves_rows_of_others and not (q.is_cuda and _torch_private.is_in_cuda_graph(q.device))


def keep(keeper: torch.Tensor, call: AttentionCall, rows: Tensors) -> None:
    """Keeps a call, and what it has saved if that is to be kept, as long as the memory of `keeper`."""
    setattr(keeper.untyped_storage(), _NAME, Kept(call, rows))


def kept(keeper: torch.Tensor) -> Kept:
    """What the tensor keeps: nothing if it is not the one that forward has returned, or an alias of it."""
    found: Kept | None = getattr(keeper.untyped_storage(), _NAME, None)
    return found or Kept()
