"""Hooks of other programs in contexts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import ContextParallel, context_parallel
from cp_dtensor.api.extension import register_context_hook


class Hook:
    """Keeps its calls; its patches are entered and left."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    @contextmanager
    def _patch(self) -> Iterator[None]:
        self.calls.append("entered")
        try:
            yield
        finally:
            self.calls.append("left")

    def patches(self) -> Iterator[AbstractContextManager[object]]:
        yield self._patch()
        if self.fails:
            raise OSError("a patch that fails")

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        if "refused" in arguments:
            raise NotImplementedError("a function of `refused` is compiled")

    def module(self, module: nn.Module) -> bool:
        self.calls.append("module")
        return isinstance(module, nn.Linear)


hook = Hook()
NAME = f"{__name__}:hook"


@pytest.fixture(autouse=True)
def _other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "other_program.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    hook.calls.clear()
    hook.fails = False
    yield
    sys.modules.pop("other_program", None)


def in_context() -> None:
    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD, seq_len=8):  # type: ignore[arg-type]
            if rank == 0:
                hook.calls.append("inside")
            dist.barrier()

    run_ranks(2, body)


def test_patches_hold_in_contexts_once_the_program_is_loaded() -> None:
    with register_context_hook("other_program", NAME):
        in_context()
        assert hook.calls == ["inside"]
        import other_program  # noqa: F401

        in_context()
        assert hook.calls == ["inside", "entered", "inside", "left"]
    in_context()
    assert hook.calls[4:] == ["inside"], "the lease has ended"


def test_patches_before_one_that_fails_are_left() -> None:
    import other_program  # noqa: F401

    hook.fails = True
    with register_context_hook("other_program", NAME), pytest.raises(OSError, match="a patch that fails"):
        run_ranks(1, lambda _: context_parallel(dist.group.WORLD, seq_len=8).__enter__())  # type: ignore[arg-type]
    assert hook.calls == ["entered", "left"]


def test_modules_and_compiled_functions_are_brought_to_hooks() -> None:
    import other_program  # noqa: F401

    def body(_rank: int) -> None:
        layer = ContextParallel()._apply(nn.Linear(2, 2), dist.group.WORLD)  # type: ignore[arg-type]
        assert hook.calls == ["module", "entered"], "the patches hold as long as the layer"
        del layer
        compiled = torch.compile(lambda refused: refused + 1, backend="eager")
        with (
            context_parallel(dist.group.WORLD, seq_len=8),  # type: ignore[arg-type]
            pytest.raises(NotImplementedError, match="a function of `refused` is compiled"),
        ):
            compiled(torch.ones(1, 2))

    with register_context_hook("other_program", NAME):
        run_ranks(1, body)
    assert hook.calls == ["module", "entered", "left", "entered", "left"]


@pytest.mark.parametrize("name", ["module", "module:", ":hook", "a:b:c"])
def test_names_of_hooks_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f'expected hook to be "module:name", got {name!r}'):
        register_context_hook("other_program", name)


def test_a_hook_that_is_added_again_is_the_same_one() -> None:
    """As by `importlib.reload(cp_dtensor)`: its patches are entered once, until the last lease is closed."""

    def body(_rank: int) -> None:
        with context_parallel(dist.group.WORLD, seq_len=4):
            assert hook.calls == ["entered"]

    import other_program  # type: ignore[import-not-found]  # noqa: F401

    with register_context_hook("other_program", NAME):
        register_context_hook("other_program", NAME).close()
        with register_context_hook("other_program", NAME):
            run_ranks(1, body)
    assert hook.calls == ["entered", "left"]
