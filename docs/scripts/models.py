"""Writes docs/models.md: runs the support matrix on two processes of this machine, with one or several versions.

pip install -c constraints.txt -e '.[test,transformers]' && python docs/scripts/models.py
python docs/scripts/models.py --transformers 5.10.4 5.24.0
python docs/scripts/models.py --matrix --transformers 5.24.0

The first command writes the matrix of the version that is installed. The second one installs each version into a folder
of its own, runs the matrix there, and writes its row of the table of versions: the cells that differ from the matrix.
The third one does both. `--short` runs a few families and writes nothing; status 1 means that cells differ.
`--families NAME ...` runs these alone, and keeps the other rows of the matrix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))
INTRODUCTION = """# Models of transformers

After this page you know what works with your model. The [README](../README.md#in-your-training) has the recipe; a whole
program that compares two CPU ranks with one process:

```sh
torchrun --nproc-per-node 2 examples/integrations/transformers_two_ranks.py
```

Each cell was run: a model of the family with two or three layers and random weights (float64, {length} tokens, windows
and chunks of {window}) made one training step on {ranks} ranks in `HeadTail()`. "right": its loss and every gradient
equal those of one process to 1e-5. "refused": an error names the reason on every rank. No cell may be wrong.

- plain context: `with context_parallel(...)` around a model with "sdpa", or as it comes if it has no "sdpa"
- provider, and the columns after it: `attn_implementation=cp_dtensor.integrations.transformers.register()`
- compiled: `torch.compile(model)`; checkpointed: gradient checkpointing, not reentrant
- packed: position ids that begin again. Encoders, gpt-oss and Falcon do not read documents from them: there documents
  attend to each other, as in one process, unless the context gets `mask=Documents(...)`
- padded: an `attention_mask` with zeros at the right in one batch row and at the left in another

`cp_dtensor.integrations.transformers.check_model(model)` lists the reasons for a model at hand. Versions: {versions}.

"""
VERSIONS = """## Versions of transformers

`python docs/scripts/models.py --transformers VERSION` runs the matrix with another version. The extra `transformers`
ends before the first minor version that was not run; another version is warned of. Cells that differ:

| transformers | cells run | not as above |
|---|---|---|
"""
SHORT_FAMILIES = ("Llama", "Gemma 3", "Llama 4", "DeepSeek-V3", "BERT")
SHORT_COLUMNS = ("plain", "plain packed", "packed", "padded")
ABSENT = "this version does not have it"

IMAGES = """
## Images and sound

A model with vision or audio towers is called with what its processor returns, whole on every rank:

```python
batch = ModelBatch.from_processor(processor_output, shard_images=True)  # with labels, not shifted
with context_parallel(mesh, **batch.buffers):
    logits = model(**batch.inputs, use_cache=False).logits  # of this rank's tokens
    loss = causal_lm_loss(logits, batch.shift_labels)
    loss.backward()
```

The model's own code makes embeddings, positions (also those of three axes) and masks of image blocks of the whole
sequence, as in one process. Attention there is each rank's own. Where the model calls its language model, all arguments
become this rank's shards, also `deepstack_visual_embeds`. Gradients reach the towers through the embeddings, and their
mean over ranks is that of one process. It is one forward, so FSDP2 and checkpointing work as ever. Compile layers, or
the language model, not the whole model.

- `shard_images=True` divides images, frames and sounds over the ranks by patches, and gathers the embeddings: a step of
  Qwen3-VL 2B with 32,768 tokens, half of them of images, takes 1,679 ms on two H200s, and 2,017 without
  (`2xH200-vision`)
- without images, the call is the same
- packed: position ids as in one process; where positions have three axes, four rows, of which text is the first

Refused by name: images beside `input_ids` that are a buffer; `shard_images=True` of MiniMax M3 VL before transformers
5.23, in whose tower images of one call attend to each other; towers that are called by hand inside of a context; models
without a language model of their own (Idefics 1). An encoder of sound (Whisper) is called before the context, and its
results are sharded: `encoder_outputs=(context_parallel_shard(mesh, [states], [1])[0],)`.

Cells as above, also with the towers' gradients. The images have 16, 8 and 8 patches, where a family takes several
sizes, and are in both rows of the batch; a video of three frames is in the same column, where a family takes video.

"""


def cells_here(short: bool, families: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Run the cells of some families, () for all, with the version that is imported here, and return them."""
    from support.model_cells import COLUMNS, MULTIMODAL_COLUMNS, run_cell, run_multimodal_cell
    from support.models import FAMILIES, is_in_this_version
    from support.multimodal import FROM_PROCESSORS
    from support.processes import Processes

    processes, cells = Processes(2, timeout=600), {}
    tables: list[tuple[Any, Any, Any]] = [(FAMILIES, COLUMNS, run_cell)]
    tables.append((FROM_PROCESSORS, MULTIMODAL_COLUMNS, run_multimodal_cell))
    if short:
        tables = [(SHORT_FAMILIES, SHORT_COLUMNS, run_cell)]
    for known, columns, run in tables:
        for family, column in itertools.product(known, columns):
            if families and family not in families:
                continue
            if is_in_this_version(family):
                (cells[family, column],) = {*processes.run(run, family, column)}
            else:
                cells[family, column] = ABSENT
            print(f"{family}, {column}: {cells[family, column]}", file=sys.stderr, flush=True)
    processes.stop()
    return cells


def cells_with(version: str, short: bool) -> dict[tuple[str, str], str]:
    """Install a version of transformers into a folder, and return the cells that a process with it has run."""
    with tempfile.TemporaryDirectory() as folder:
        # numpy stays that of the environment, against which torch was built.
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, f"transformers=={version}"]
        subprocess.run(command, check=True)
        for each in Path(folder).glob("numpy*"):
            shutil.rmtree(each)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, __file__, "--print-cells", *(["--short"] if short else [])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert found["transformers"] == version, found["transformers"]
    return {(family, column): cell for family, column, cell in found["cells"]}


def row_of(version: str, cells: dict[tuple[str, str], str], published: dict[tuple[str, str], str]) -> str:
    """Return the row of a version in the table of versions."""
    differ: dict[tuple[str, str], list[str]] = {}
    for (family, column), cell in cells.items():
        if cell != published[family, column]:
            cell = re.sub("layer_types has '\\w+', ", "", cell)  # families with one reason stand together
            differ.setdefault((family, cell), []).append(column)
    families: dict[str, list[str]] = {}
    for (family, cell), columns in differ.items():
        is_whole_row = columns == [column for each, column in cells if each == family]
        families.setdefault(cell + ("" if is_whole_row else f" ({', '.join(columns)})"), []).append(family)
    texts = [f"{', '.join(names)}: {text}" for text, names in families.items()]
    run = sum(cell != ABSENT for cell in cells.values())
    return f"| {version} | {run} | {'; '.join(texts) or 'none'} |"


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", nargs="+", metavar="VERSION", help="versions to install and run")
    parser.add_argument("--matrix", action="store_true", help="write the matrix, too; the default without versions")
    parser.add_argument("--short", action="store_true", help="a few families; status 1 if cells differ from the page")
    parser.add_argument("--families", nargs="+", default=(), metavar="NAME", help="rows of the matrix to run again")
    parser.add_argument("--print-cells", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from support.model_cells import COLUMNS, MULTIMODAL_COLUMNS, cells_of, table

    if options.print_cells:
        import transformers

        cells = cells_here(options.short)
        rows = [[family, column, cell] for (family, column), cell in cells.items()]
        print(json.dumps({"transformers": transformers.__version__, "cells": rows}))
        return
    matrix, _, versions = PAGE.read_text().partition(VERSIONS)
    if options.matrix or not options.transformers:
        import torch
        import transformers
        from support.models import FAMILIES, LENGTH, WIDE_WINDOW
        from support.multimodal import FROM_PROCESSORS

        here = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        about = INTRODUCTION.format(length=LENGTH, window=WIDE_WINDOW, ranks=2, versions=here)
        cells, tables = cells_here(options.short, options.families), []
        for families, titles in ((FAMILIES, COLUMNS), (FROM_PROCESSORS, MULTIMODAL_COLUMNS)):
            known = {**(cells_of(matrix, titles) if options.families else {}), **cells}
            shown = {key: known[key] for key in itertools.product(families, titles) if key in known}
            tables.append(table(shown, titles))
        of_text, of_images = tables
        matrix = f"{about}{of_text}\nWritten by `python docs/scripts/models.py`.\n{IMAGES}{of_images}\n"
    published = cells_of(matrix, COLUMNS) | cells_of(matrix, MULTIMODAL_COLUMNS)
    by_version = {row.split(" | ")[0].strip("| "): row for row in re.findall(r"^\| \d.*$", versions, re.M)}
    for version in options.transformers or ():
        by_version[version] = row_of(version, cells_with(version, options.short), published)
        print(by_version[version], flush=True)
    if options.short:
        sys.exit(any(not by_version[version].endswith("| none |") for version in options.transformers or ()))
    lines = (by_version[each] for each in sorted(by_version, key=lambda each: [*map(int, each.split("."))]))
    PAGE.write_text(f"{matrix}{VERSIONS}{chr(10).join(lines)}\n")


if __name__ == "__main__":
    main()
