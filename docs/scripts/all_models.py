"""Runs small models of every causal and masked language model of transformers on two processes of this machine.

python docs/scripts/all_models.py --columns plain provider "plain packed" packed "plain padded" padded

Each is compared with one process as in docs/models.md. Prints a line for each model and column, and the numbers of
models that are right and refused; ends with status 1 if one is wrong. Models of which no small configuration is found,
and those that fail in float64 by themselves, are left out with the error.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Runs all models.

    Raises:
        SystemExit: a model is wrong.
    """
    from support.model_cells import COLUMNS, run_cell
    from support.processes import Processes
    from support.ranks import RanksFailed
    from transformers.models.auto import modeling_auto

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=["plain", "provider"])
    parser.add_argument("--models", nargs="+", help="names of classes; default: all")
    options = parser.parse_args()
    every = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    found = {name for names in every for name in names.values() if isinstance(name, str)}
    processes, counts, wrong = Processes(2, timeout=120), Counter[str](), []
    for model in options.models or sorted(found):
        for column in options.columns:
            try:
                (cell,) = {*processes.run(run_cell, model, column)}
                kind = "right" if cell == "right" else "refused"
            except RanksFailed as failed:
                cause = failed.__cause__
                kind = "wrong" if isinstance(cause, AssertionError) else "left out"
                cell = f"{kind}: {type(cause).__name__}: {cause}".partition("\n")[0]
            counts[kind] += 1
            if kind == "wrong":
                wrong.append(f"{model}, {column}")
            print(f"{model}, {column}: {cell}", flush=True)
    processes.stop()
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()), *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
