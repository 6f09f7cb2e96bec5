"""Import of the scripts that draw the pictures of the documents."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "scripts"


def docs_script(name: str) -> ModuleType:
    """Returns a module of docs/scripts; skips the tests without matplotlib."""
    pytest.importorskip("matplotlib", reason="needs the extra [tools]")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # the scripts import each other
    return importlib.import_module(name)
