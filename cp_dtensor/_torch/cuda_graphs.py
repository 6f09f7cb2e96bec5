"""Whose memory is allocated while CUDA graphs are made, by the user or by Inductor.

Before Inductor captures code it runs it once in the memory of its graphs, and refuses tensors that are alive there
afterwards and that the code did not return. What the first call of a kind prepares for all later ones is such a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from cp_dtensor._torch.tensors import no_modes

T = TypeVar("T")


def is_in_cuda_graph(device: torch.device) -> bool:
    """Whether what is launched and allocated on a CUDA device belongs to a CUDA graph that is being made."""
    return torch.cuda.is_current_stream_capturing() or _is_in_memory_of_graphs(device)


def is_before_capture(device: torch.device) -> bool:
    """Whether Inductor runs this code for the last time before it captures it.

    This is known by the stream: who allocates, or prepares something, on another one meanwhile is not found out.
    """
    return _is_in_memory_of_graphs(device) and not torch.cuda.is_current_stream_capturing()


def prepared(make: Callable[[], T]) -> T:
    """`make()`, plain tensors that outlive the call and are of use to whoever comes by, whatever goes on around."""

    def made() -> T:
        with no_modes(), torch.inference_mode(False), torch.no_grad():
            return make()

    if not torch.cuda.is_initialized():
        return made()
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_before_capture(device):
        return made()

    def made_on_device() -> T:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # streams of other threads know nothing of what this one's launches need
            result = made()
            torch.cuda.synchronize()
        return result

    # Only what this thread allocates comes from the graphs' memory.
    with ThreadPoolExecutor(1) as another_thread:
        return another_thread.submit(made_on_device).result()


def _is_in_memory_of_graphs(device: torch.device) -> bool:
    """Whether Inductor runs code for the last time before it captures it, or captures it."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    name = "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, name) or torch._C._is_key_in_tls(name)):
        return False
    container = trees.get_obj(trees.local, name).get(device.index)
    graphs = None if container is None else container.tree_manager
    return graphs is not None and bool(graphs.stream == torch.cuda.current_stream(device))
