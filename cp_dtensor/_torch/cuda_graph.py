"""A function of tensors as a CUDA graph that is replayed with other tensors."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import current_stream, has_shared_elements

_capturing = Lock()


class Replay:
    """A function of CUDA tensors, captured once; each call copies arguments in, replays the graph, and copies results.

    Replays are independent: each reads only its own arguments, in any thread and on any stream. The graph keeps memory
    for the arguments, the results and all that the function allocates.
    """

    def __init__(self, function: Callable[..., Tensors], arguments: Tensors) -> None:
        """Capture `function(*arguments)`, which has just run; wait for the device and free unused memory of torch.

        A result that is an argument is, in each call, the argument itself.
        """
        device = arguments[0].device
        self._lock, self._stream = Lock(), current_stream(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), torch.no_grad(), _capturing:
            # Allocated before the capture: in it, a mode of torch would record a fill with NaN.
            self._arguments = tuple(map(_empty_like, arguments))
            with (
                torch.cuda.stream(self._stream),  # the thread returns to it, also if the capture cannot be ended
                # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
                torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"),
            ):
                results = function(*self._arguments)
        dtypes = dict.fromkeys(x.dtype for x in arguments)  # one kernel copies dense tensors of one dtype
        self._copied = [[place for place, x in enumerate(arguments) if x.dtype == dtype] for dtype in dtypes]
        places = {id(x): place for place, x in enumerate(self._arguments)}
        self._own = list({id(x): x for x in results if id(x) not in places}.values())
        places |= {id(x): place for place, x in enumerate(self._own, start=len(places))}
        self._places = [places[id(x)] for x in results]

    def __call__(self, *arguments: torch.Tensor) -> Tensors:
        """Return the results, as new tensors, for arguments with the shapes, strides and dtypes that were captured."""
        stream = current_stream(arguments[0].device)
        with self._lock:
            if self._stream != stream:
                stream.wait_stream(self._stream)  # earlier replays may still use the graph's memory
                for x in self._arguments:
                    x.record_stream(stream)
            self._stream = stream
            for places in self._copied:
                own, given = ([each[place] for place in places] for each in (self._arguments, arguments))
                torch._foreach_copy_(own, given)
            self._graph.replay()
            every = (*arguments, *[x.clone() for x in self._own])
        return tuple([every[place] for place in self._places])


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the strides of x, which decide kernels; dense where elements of x share memory."""
    strides = torch.empty_like(x, device="meta").stride() if has_shared_elements(x) else x.stride()
    return x.new_empty_strided(x.shape, strides)
