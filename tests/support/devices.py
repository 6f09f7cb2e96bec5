"""Where kernels run: in Triton's interpreter on machines without a GPU, and only there; compiled on the others."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import GPUS

no_gpu = pytest.mark.skipif(GPUS > 0, reason="the kernel is compiled for the GPU of this machine")
interpreter = pytest.param("cpu", marks=no_gpu, id="interpreter")
interpreted = pytest.mark.parametrize("device", [interpreter])
all_devices = pytest.mark.parametrize("device", [interpreter, pytest.param("cuda", marks=pytest.mark.gpu, id="triton")])


def each_implementation(name: str, reference: Any, launch: Any) -> pytest.MarkDecorator:
    """Parametrize a test by `name` and "device": the torch operations and the launch of a kernel, on CPU and GPU."""
    return pytest.mark.parametrize(
        (name, "device"),
        [
            pytest.param(reference, "cpu", id="torch"),
            pytest.param(launch, "cpu", marks=no_gpu, id="interpreter"),
            pytest.param(reference, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
            pytest.param(launch, "cuda", marks=pytest.mark.gpu, id="triton"),
        ],
    )
