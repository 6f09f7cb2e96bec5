"""What a run says on stderr while it runs."""

from __future__ import annotations

import sys
from typing import Any

from cp_dtensor.tools.bench.rows import MEASURED, Row


class Progress:
    """Counts rows: with a bar on a terminal if tqdm is installed, else with a line each.

    Args:
        total: rows to come.
        visible: false on all ranks but one.
    """

    def __init__(self, total: int, visible: bool) -> None:
        self._total = total
        self._visible = visible
        self._done = 0
        self._bar: Any = _bar(total) if visible else None

    def row(self, row: Row) -> None:
        """Says that a row is finished."""
        self._done += 1
        if not self._visible:
            return
        outcome = f"{row.median_ms:.3g} ms" if row.status == MEASURED else f"{row.status}: {row.message}"
        case = f"{row.case.heads.q}:{row.case.heads.kv} heads, {row.case.seq_len:,}"
        text = f"{case}, {row.pass_name}, {row.baseline}: {outcome}"
        if self._bar is None:
            print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)
            self._bar.update()

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(total=total, unit="row", file=sys.stderr, dynamic_ncols=True)
