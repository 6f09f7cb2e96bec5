"""Fixtures of tests of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.pretended_packages import fresh_process


@pytest.fixture
def fresh() -> Iterator[pytest.MonkeyPatch]:
    """Patches of a process that has used no optional package, in which both seem to be installed."""
    with fresh_process() as patch:
        yield patch
