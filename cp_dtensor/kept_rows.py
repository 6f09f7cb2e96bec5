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
    """A call that has run forward, and what it has saved, or nothing if that is not to be kept; copies have neither."""

    def __init__(self, call: AttentionCall | None = None, rows: Tensors = ()) -> None:
        self.call = call
        self.rows = rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()


def keeps_rows(call: AttentionCall, q: torch.Tensor) -> bool:
    """Whether what a call saves is worth keeping and may be kept here: not where a CUDA graph is made.

    A graph's memory is written again at each replay, and Inductor wants to know of all of it; what is kept elsewhere is
    gone by then. What other calls save is what the operator got and gave, which autograd keeps if need be.
    """
    return call.saves_rows_of_others and not (q.is_cuda and _torch_private.is_in_cuda_graph(q.device))


def keep(keeper: torch.Tensor, call: AttentionCall, rows: Tensors) -> None:
    """Keeps a call, and what it has saved if that is to be kept, as long as `keeper`."""
    setattr(keeper, _NAME, Kept(call, rows))
    setattr(keeper, "__getstate__", dict)  # noqa: B010  # what is pickled of a tensor besides its data: nothing


def kept(keeper: torch.Tensor) -> Kept:
    """What the tensor keeps: nothing if it is not the one that forward has returned."""
    found: Kept | None = getattr(keeper, _NAME, None)
    return found or Kept()
