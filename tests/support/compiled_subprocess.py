"""Programs in a new process in which Triton compiles; importing Triton selects compiler or interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_uninterpreted(*arguments: str, timeout: float = 200) -> str:
    """Returns the output of `python ARGUMENTS`; raises AssertionError with its errors if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = f"{tests.parent}{os.pathsep}{tests}"  # the package of this checkout
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
