"""Silent errors that the tests must find: small edits of the package, and the tests that fail with each.

    python tests/mutants.py                   # apply each to a copy of the package, run the tests that name it
    python tests/mutants.py --matrix          # run tests/matrix instead
    python tests/mutants.py sinks softcap     # those whose names contain one of these words

Prints a line for each; the exit status is 1 if a mutant lives. `tests/test_mutants.py` checks that the list is true of
the code. Who changes a line that a mutant edits, edits the mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 3600


class Mutant(NamedTuple):
    """One edit of one place of the package, which raises no error by itself."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    killed_by: str
    """Tests, as arguments of pytest separated by spaces."""


MUTANTS = (
    Mutant(
        "ring step skipped",
        "the last hop of a ring computes nothing",
        "plan/plan.py",
        "(hop, tiling.tiles_against(rank, (rank - hop) % ranks)) for hop",
        "(hop, tiling.tiles_against(rank, (rank - hop) % ranks) * (hop < ranks - 1)) for hop",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "merge without maximum",
        "large logits overflow where partial results merge",
        "attention/merge.py",
        "rows_lse.copy_(torch.logaddexp(rows_lse, part_lse))",
        "rows_lse.copy_((rows_lse.exp() + part_lse.exp()).log())",
        "tests/attention/test_merge.py",
    ),
    Mutant(
        "sinks missing in backward",
        "backward normalises by keys alone",
        "engine/ring.py",
        "out, lse = modifiers.completed(out, lse)\n        return out, lse, (*arguments, out, lse)",
        "saved = *arguments, out, lse\n        return *modifiers.completed(out, lse), saved",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "softcap ignored in backward",
        "gradients lack the slope of tanh",
        "attention/masked.py",
        "slope = _by_kv_head(1 - (logits / softcap).square(), k) if softcap else None",
        "slope = None",
        "tests/attention/test_masked_attention.py",
    ),
    Mutant(
        "dropout of other heads",
        "each part of the heads drops like the first",
        "attention/modifiers.py",
        "first_head=self.first_head + heads[0],",
        "first_head=self.first_head,",
        "tests/matrix/test_matrix.py::test_features_together",
    ),
    Mutant(
        "dropout of other rows",
        "each part of the batch drops like the first",
        "attention/modifiers.py",
        "first_batch=self.first_batch + batch[0],",
        "first_batch=self.first_batch,",
        "tests/matrix/test_matrix.py::test_features_together",
    ),
    Mutant(
        "dropout drawn again in a recompute",
        "a checkpoint drops other weights than the forward that it repeats",
        "engine/arguments.py",
        "return torch.randint(1 << 62, (), dtype=torch.int64, device=device)",
        "return torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(id(object()) % 97))",
        "tests/engine/test_dropout_calls.py::test_recomputing_under_a_checkpoint_drops_the_same",
    ),
    Mutant(
        "query heads in another order",
        "kv heads serve every n-th query head, not n adjacent ones",
        "attention/masked.py",
        "return x.unflatten(1, (kv_heads, x.size(1) // kv_heads)).flatten(2, 3)",
        "return x.unflatten(1, (x.size(1) // kv_heads, kv_heads)).transpose(1, 2).flatten(2, 3)",
        "tests/attention/test_masked_attention.py",
    ),
    Mutant(
        "copies of kv heads in another order",
        "Ulysses sends a kv head to ranks that have other query heads",
        "comm/head_exchange.py",
        "x.repeat_interleave(kind.copies, dim=1)",
        "x.repeat(1, kind.copies, 1, 1)",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "modifiers of the first rank's heads",
        "every rank of Ulysses takes the sinks, bias and dropout of rank 0's heads",
        "engine/ulysses.py",
        "    heads = queries.heads[group.rank()]",
        "    heads = queries.heads[0]",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "gradient of a bias not summed",
        "of a bias that all heads share, the gradient is that of one rank's heads",
        "engine/ulysses.py",
        "target = target.sum(1, keepdim=True)",
        "target = target[:, :1]",
        "tests/engine/test_hidden_rows.py::test_over_ranks",
    ),
    Mutant(
        "window too wide",
        "a query sees one key more to the left",
        "spec/masks.py",
        "else self.left - offset",
        "else self.left - offset + 1",
        "tests/spec/test_masks.py",
    ),
    Mutant(
        "document too long",
        "a document's queries see the last key of the document before",
        "spec/documents.py",
        "band.last + first, band.lo + lo,",
        "band.last + first, max(band.lo + lo - 1, 0),",
        "tests/spec/test_masks.py",
    ),
    Mutant(
        "unread rows included",
        "gradients of received rows that no query reads are memory of something else",
        "engine/ring.py",
        "            if step.has_gaps:\n",
        "            if step.has_gaps and False:\n",
        "tests/api/test_context_attention.py",
    ),
    Mutant(
        "axes of a hybrid exchanged",
        "ranks of an inner axis have adjacent shards no longer",
        "plan/partition.py",
        "return by_rank[outer_rank * self.inner_size : (outer_rank + 1) * self.inner_size]",
        "return by_rank[outer_rank :: len(by_rank) // self.inner_size]",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "plans of other masks",
        "a call takes the cached plan of another mask",
        "engine/planner.py",
        "key = plan_fields(call), properties, allowed",
        "key = plan_fields(call)[:2] + plan_fields(call)[3:], properties, allowed",
        "tests/engine/test_call.py",
    ),
    Mutant(
        "compiled code without the context's mask",
        "code that was compiled in one context ignores the mask of the next",
        "engine/call.py",
        "mask = both_masks(around.mask, self.mask)",
        "mask = self.mask",
        "tests/compile/test_steps.py",
    ),
    Mutant(
        "layout not inherited",
        "layout=None in a context means HeadTail",
        "engine/contexts.py",
        "layout=outer.layout if layout else call.layout,",
        "layout=call.layout,",
        "tests/api/test_parallel_style.py",
    ),
    Mutant(
        "is_causal lost beside a mask",
        "a call with a mask and is_causal sees the future",
        "engine/call.py",
        "return both_masks(mask, Causal()) if is_causal else mask",
        "return (Causal() if mask is None else mask) if is_causal else mask",
        "tests/engine/test_call.py",
    ),
    Mutant(
        "context's mask lost",
        "calls in a context see more than its mask allows",
        "engine/contexts.py",
        "mask=own if asks else both_masks(self.call.mask, own)",
        "mask=own",
        "tests/api/test_context_attention.py",
    ),
    Mutant(
        "recompute in another context",
        "a checkpoint's recompute takes the context that is open then",
        "api/context.py",
        "return entered(context)(function)",
        "return lambda *args: entered(innermost() or context)(function)(*args)",
        "tests/api/test_saved_buffers.py::test_a_recompute_inside_of_the_next_context",
    ),
    Mutant(
        "buffers stay sharded after an error",
        "an exception in a context leaves its buffers shards",
        "api/buffers.py",
        "        try:\n            yield\n        finally:\n            with _lock:",
        "        yield\n        if True:\n            with _lock:",
        "tests/api/test_context.py",
    ),
    Mutant(
        "lengths not compared",
        "shards that are too short for seq_len= are attended to",
        "engine/agreement.py",
        "if layout.local_length(total, rank, size) != local:",
        "if layout.local_length(total, rank, size) > local:",
        "tests/engine/test_agreement.py",
    ),
    Mutant(
        "edges of keys ignored",
        "keys of packed documents are cut where queries are",
        "api/varlen.py",
        "queries if cu_seq_k is cu_seq_q else ascending",
        "queries if True else ascending",
        "tests/api/test_varlen.py",
    ),
    Mutant(
        "gradient of lse lost",
        "what lse is used for adds nothing to the gradients of q and k",
        "attention/lse.py",
        "is_small, 0) - factor * direction)",
        "is_small, 0) - 0 * factor * direction)",
        "tests/matrix/test_matrix.py::test_fronts_by_features",
    ),
    Mutant(
        "up-projection's gradient incomplete",
        "each step's share replaces those before",
        "attention/latent.py",
        "grad_up.add_(",
        "grad_up.copy_(",
        "tests/api/test_mla.py",
    ),
    Mutant(
        "deterministic ignored",
        "a deterministic call takes kernels that are not",
        "engine/planner.py",
        "is_deterministic(q, allowed, call.deterministic)",
        "is_deterministic(q, allowed, False)",
        "tests/engine/test_deterministic.py",
    ),
    Mutant(
        "sign of a scale lost",
        "a negative scale attends to the keys most like the query",
        "engine/arguments.py",
        "return q * -1, -scale",
        "return q, -scale",
        "tests/engine/test_masked_calls.py::test_at_the_edges",
    ),
    Mutant(
        "second derivative is zero",
        "through Ulysses, which saves no input",
        "engine/attend.py",
        "origin = t.q.new_empty(0) if ctx.done.plan.saves_rows_of_others else None",
        "origin = None",
        "tests/engine/test_second_derivatives.py",
    ),
    Mutant(
        "scores not rounded",
        "equal keys do not tie: their places in a product change last bits",
        "layers/indexer.py",
        'float("-inf"), dtype=torch.float32)',
        'float("-inf"), dtype=torch.float64)',
        "tests/layers/test_sparse.py",
    ),
    Mutant(
        "loss of the indexer",
        "gradients of the indexer's queries go through relu where it is 0",
        "layers/indexer_loss.py",
        "d_products.masked_fill_(block.products <= 0, 0.0)",
        "d_products.masked_fill_(block.products <= -1e9, 0.0)",
        "tests/layers/test_indexer_loss.py",
    ),
    Mutant(
        "block before the first",
        "the first block of a document pools zeros of the block before it",
        "layers/blocks.py",
        'gates = gates.masked_fill(is_none.unsqueeze(2), float("-inf"))',
        "gates = gates.masked_fill(is_none.unsqueeze(2), 0.0)",
        "tests/layers/test_pooled.py",
    ),
    Mutant(
        "index -1 a key",
        "what is not finite in a key reaches queries that did not choose it",
        "layers/chosen_reference.py",
        "padded, wide, of_group = F.pad(rows, (0, 0, 0, 0, 0, 1))",
        "padded, wide, of_group = torch.cat((rows, rows[:, :1]), 1)",
        "tests/layers/test_sparse.py",
    ),
    Mutant(
        "scores up to the first query's keys",
        "where positions of queries are not consecutive, some of their keys are not scored",
        "layers/cudnn_indexer.py",
        "offset = (ends - numbers[: stop - start]).amax().view(1) - 1",
        "offset = ends[:1] - 1",
        "tests/layers/test_sparse_kernels.py",
    ),
)


def apply(mutant: Mutant, package: Path) -> None:
    """Edit a copy of the package; the edited place must be there once."""
    path = package / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: expected once in {mutant.file}, got {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def outcome(mutant: Mutant | None, tests: list[str]) -> tuple[str, str]:
    """Return "killed", "lives" or "error", and the first test that failed or the last line of pytest.

    None is the package without an edit.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in ROOT.iterdir():
            if path.name in ("cp_dtensor", "tests"):
                shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith("."):
                (copy / path.name).symlink_to(path)
        if mutant is not None:
            apply(mutant, copy / "cp_dtensor")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "error", f"no end after {SECONDS} s"
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    # Other codes than 1 are those of pytest's own errors, such as a test that is not there.
    verdict = {0: "lives", 1: "killed"}.get(done.returncode, "error")
    return verdict, failed[1] if failed else last


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests on copies of the package with one error each.")
    parser.add_argument("names", nargs="*", help="words; mutants whose names contain one of them (all)")
    parser.add_argument("--matrix", action="store_true", help="run tests/matrix instead of the tests of each mutant")
    arguments = parser.parse_args()
    chosen = [each for each in MUTANTS if not arguments.names or any(word in each.name for word in arguments.names)]
    if arguments.matrix and (unedited := outcome(None, ["tests/matrix"]))[0] != "lives":
        print(f"tests/matrix fails without an edit, too: {unedited[1]}")
        return 1
    alive = 0
    for mutant in chosen:
        begun = time.perf_counter()
        verdict, by = outcome(mutant, ["tests/matrix"] if arguments.matrix else mutant.killed_by.split())
        alive += verdict != "killed"
        print(f"{mutant.name:40} {verdict:6} {time.perf_counter() - begun:6.1f} s  {by}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
