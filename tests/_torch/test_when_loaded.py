"""Changes of modules that are loaded later."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib.util import find_spec, module_from_spec
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


def test_modules_that_are_found_before_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_first.py").write_text("def names():\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with when_loaded("found_first", lambda module: wrapped(module, "names", lambda original: ["changed"])):
        spec = find_spec("found_first")
        import found_first

        assert found_first.names() == ["changed"]
        assert sys.meta_path == before
    assert found_first.names() == []
    assert spec is not None
    assert spec.loader is not None
    late = module_from_spec(spec)
    spec.loader.exec_module(late)
    assert late.names() == []  # loaded after the end
    del sys.modules["found_first"]
