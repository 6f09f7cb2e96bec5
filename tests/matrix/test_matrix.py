"""Every front with every feature, against dense attention in float64, or refused by name."""

from __future__ import annotations

import pytest
from matrix.fronts import CELLS, FRONTS, case_of
from matrix.worlds import WORLDS, run_threads

REFUSALS = TypeError, ValueError, NotImplementedError, RuntimeError


def _cell(name: str, features: tuple[str, ...], world: str) -> None:
    case = case_of(name, features, WORLDS[world].size)
    assert case is not None
    messages = [FRONTS[name].refuses[feature] for feature in features if feature in FRONTS[name].refuses]
    if not messages:
        run_threads(name, case, WORLDS[world])
        return
    with pytest.raises(REFUSALS, match="|".join(messages)):  # not RanksFailed: alike on all ranks
        run_threads(name, case, WORLDS[world])


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_fronts_by_features(name: str, feature: str) -> None:
    _cell(name, (feature,), "threads(2)")
