"""The NaN fill of uninitialised memory that `conftest.py` installs for all tests."""

import threading

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_uninitialised_tensors_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3, dtype=dtype)
    made = [torch.empty(2, 3, dtype=dtype), torch.empty_like(like), like.new_empty((2, 3))]
    for tensor in made:
        assert tensor.shape == (2, 3)
        assert tensor.dtype == dtype
        assert tensor.isnan().all()


def test_memory_of_other_threads_is_nan_too() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(1).isnan().item()))
    thread.start()
    thread.join()
    assert seen == [True]


def test_arguments_and_devices_pass_through() -> None:
    assert torch.empty(2, requires_grad=True).requires_grad
    assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    with torch.inference_mode():
        assert torch.empty(2).isnan().all()
