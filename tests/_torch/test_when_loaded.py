"""Changes of modules that are loaded later."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cp_dtensor._torch import when_loaded, wrapped


def test_two_changes_of_one_module_end_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_later.py").write_text("def names():\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)

    def named(name: str) -> Any:
        return lambda module: wrapped(module, "names", lambda original: [*original(), name])

    with ExitStack() as first:
        first.enter_context(when_loaded("loaded_later", named("first")))
        with when_loaded("loaded_later", named("second")):
            import loaded_later

            assert loaded_later.names() == ["first", "second"]
        assert loaded_later.names() == ["first"]
    assert loaded_later.names() == []
    del sys.modules["loaded_later"]
