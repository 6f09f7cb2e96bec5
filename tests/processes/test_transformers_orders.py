"""The hook of transformers in contexts, whenever a program imports transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra [transformers]")

TESTS = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys
import threading
order = sys.argv[1]
if order == "before":
    import transformers.models.llama.modeling_llama
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from cp_dtensor import context_parallel

importing = threading.Lock()
HOOK = "cp_dtensor.integrations.transformers.hooks"

def call(_rank):
    with importing:  # Python lets two threads see a package that puts another module in its place
        from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, attn_implementation="sdpa",
    )
    try:
        LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    except ValueError as error:
        assert "got no position_ids inside of context_parallel" in str(error), error
        return "refused"
    return "ran"

def in_context(rank, then):
    with context_parallel(dist.group.WORLD, seq_len=8):
        return then(rank)

def is_loaded(_rank):
    return HOOK in sys.modules

assert not is_loaded(0)
if order != "before":
    assert "transformers" not in sys.modules
    if order == "after":
        assert run_ranks(2, in_context, is_loaded) == [False, False]
        assert run_ranks(2, call) == ["ran", "ran"]
        assert not is_loaded(0), "no context was open when transformers was imported"
assert run_ranks(2, in_context, call) == ["refused", "refused"]
assert is_loaded(0)
assert run_ranks(2, call) == ["ran", "ran"]
assert run_ranks(2, in_context, call) == ["refused", "refused"]
"""


@pytest.mark.parametrize("order", ["before", "inside", "after"])
def test_transformers_is_imported_before_inside_or_after_a_context(order: str) -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
