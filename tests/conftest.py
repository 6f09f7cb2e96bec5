"""Settings of the whole test session."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from support.cases import choose_cases
from support.nan_memory import poisoned_empty
from support.processes import GPU_RANKS, Processes, freeze_modules, started

GPUS = torch.cuda.device_count()

if not GPUS:
    # Triton reads this when a kernel is defined, so it is set before any module of kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Ranks are threads or processes on few cores, so more threads in each make them slower. The variable is for processes
# that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Collectives and first calls of kernels may take long, which is no failure.
hypothesis.settings.register_profile("cp_dtensor", deadline=None, print_blob=True)
hypothesis.settings.load_profile("cp_dtensor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweeps", action="store_true", help="run the sweeps, too: rarer cases, minutes of them")
    about = "cases of each random test that compares attention with a reference; a failing one is printed as a call"
    parser.addoption("--cases", type=int, metavar="N", help=about)
    about = "how long tests/matrix/test_soak.py draws cases; default: a few cases"
    parser.addoption("--minutes", type=float, metavar="N", help=about)
    about = (
        "run tests of several GPUs also where there is one, which ranks share; those that need NCCL are skipped then"
    )
    parser.addoption("--share-gpu", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    choose_cases(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--sweeps"):
        sweeps = {item for item in items if item.get_closest_marker("sweep")}
        config.hook.pytest_deselected(items=[*sweeps])
        items[:] = [item for item in items if item not in sweeps]
    shared = GPUS and config.getoption("--share-gpu")
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            needed = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
            nccl = marker.kwargs.get("nccl", False)
            of_nccl = ", since NCCL wants one for each rank" if nccl else ""
            reason = f"needs {needed} CUDA GPU{'s' if needed > 1 else ''}{of_nccl}, this machine has {GPUS}"
            item.add_marker(pytest.mark.skipif(needed > GPUS and (nccl or not shared), reason=reason))


def pytest_collection_finish() -> None:
    freeze_modules()


def pytest_runtest_teardown() -> None:
    freeze_modules()  # those that tests import, such as the compiler's


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules tell of objects that the interpreter's end does not free


@pytest.fixture(scope="session", autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    with poisoned_empty():
        yield


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Processes]:
    """Two processes, started by the first test that uses them, for all files."""
    yield from started(2, timeout=250)


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Processes]:
    """Four processes, started by the first test that uses them, for all files."""
    yield from started(4, timeout=120)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    """Processes on GPUs of their own with NCCL (or on one, with gloo), for one file."""
    yield from started(GPU_RANKS, timeout=120, backend="nccl")


@pytest.fixture(scope="module")
def slow_gpus() -> Iterator[Processes]:
    """As `gpus`, for bodies that compile much or compute long."""
    yield from started(GPU_RANKS, timeout=280, backend="nccl")


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Processes]:
    """Two processes on GPUs, however many ranks `gpus` has."""
    yield from started(2, timeout=300, backend="nccl")


@pytest.fixture
def fresh() -> Iterator[pytest.MonkeyPatch]:
    """Patches of a process that has used no optional package, in which both seem to be installed."""
    from support.pretended_packages import fresh_process  # imports kernels, which `TRITON_INTERPRET` decides about

    with fresh_process() as patch:
        yield patch
