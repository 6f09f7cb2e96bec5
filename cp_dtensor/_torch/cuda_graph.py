"""A function of tensors as a CUDA graph that is replayed with other tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import current_stream, no_modes


class Replay:
    """A function of CUDA tensors, captured once; each call copies arguments in, replays the graph, and copies results.

    A replay leaves nothing behind that a later one needs. The graph keeps memory for the arguments, the results and all
    that the function allocates.
    """

    def __init__(self, function: Callable[..., Tensors], arguments: Tensors) -> None:
        """Captures `function(*arguments)`, which must have run before. Waits for the device; computes nothing.

        A result that is an argument is, in each call, the argument itself.
        """
        with no_modes(), torch.inference_mode(False), torch.no_grad():
            self._arguments = tuple([torch.empty_like(x) for x in arguments])
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(arguments[0].device)  # torch's own may be on another device
            # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                results = function(*self._arguments)
        dtypes = dict.fromkeys(x.dtype for x in arguments)  # one kernel copies tensors of one dtype
        self._copied = [[place for place, x in enumerate(arguments) if x.dtype == dtype] for dtype in dtypes]
        places = {id(x): place for place, x in enumerate(self._arguments)}
        self._own = list({id(x): x for x in results if id(x) not in places}.values())
        places |= {id(x): place for place, x in enumerate(self._own, start=len(places))}
        self._places = [places[id(x)] for x in results]
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *arguments: torch.Tensor) -> Tensors:
        """The results for arguments with the shapes, strides and dtypes of those that were captured, as new tensors."""
        stream = current_stream(arguments[0].device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # it may still read and write the graph's memory
        self._stream = stream
        for places in self._copied:
            torch._foreach_copy_([self._arguments[place] for place in places], [arguments[place] for place in places])
        self._graph.replay()
        every = (*arguments, *[x.clone() for x in self._own])
        return tuple([every[place] for place in self._places])
