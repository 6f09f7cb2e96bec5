"""The hook of transformers in contexts, whenever a program imports transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forked_programs import launch

pytest.importorskip("transformers", reason="needs the extra [transformers]")

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


COMPILED_BEFORE = """
import torch
import torch.distributed as dist
from transformers import BertConfig, BertModel, Mamba2Config, Mamba2Model
from transformers import LlamaConfig, LlamaForSequenceClassification
from cp_dtensor import context_parallel
from cp_dtensor.integrations import accelerate

small = dict(hidden_size=16, num_hidden_layers=1, vocab_size=32, intermediate_size=32, num_attention_heads=2)
mamba = Mamba2Config(
    hidden_size=16, num_hidden_layers=1, vocab_size=32, num_heads=4, head_dim=8, state_size=8, n_groups=1
)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
bert = BertModel(BertConfig(**small)).eval()
llama = LlamaForSequenceClassification(LlamaConfig(**small, pad_token_id=0))
state = Mamba2Model(mamba).eval()
ids, no_positions = torch.arange(1, 9)[None], "BertModel got no position_ids inside of context_parallel"
with torch.no_grad():
    wanted = {model: model(ids).last_hidden_state for model in (bert, state)}
compiled = {model: torch.compile(model, backend="eager") for model in (bert, llama, state)}

def message(model):
    try:
        compiled[model](ids[:, :4])
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "ran"

def refusals():
    with torch.no_grad(), context_parallel(dist.group.WORLD, seq_len=8):
        assert no_positions in message(bert), message(bert)
        assert "LlamaForSequenceClassification would be wrong" in message(llama), message(llama)

def right(model, out):
    tokens = (0, 1, 6, 7) if rank == 0 else (2, 3, 4, 5)
    torch.testing.assert_close(out, wanted[model][:, list(tokens)])

def mixes_states():
    x = ids.clone()
    with torch.no_grad(), context_parallel(dist.group.WORLD, buffers=[x], buffer_seq_dims=[1]):
        right(state, compiled[state](x, use_cache=False).last_hidden_state)

def adds_positions():
    options = dict.fromkeys(("mask", "layout", "rotate_method", "sinks"))
    steps = accelerate._Steps(dist.group.WORLD, {**options, "method": "auto", "deterministic": False}, [bert])
    x = ids.clone()
    with torch.no_grad(), steps(buffers=[x], buffer_seq_dims=[1]):
        right(bert, compiled[bert](x).last_hidden_state)

refusals()
mixes_states()
adds_positions()
dist.barrier()
dist.destroy_process_group()
print("as eager models", rank)
"""


@pytest.mark.parametrize("order", ["before", "inside", "after"])
def test_transformers_is_imported_before_inside_or_after_a_context(order: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch(1, program, order, folder=tmp_path)


@pytest.mark.sweep
def test_models_that_were_compiled_before_the_first_context(tmp_path: Path) -> None:
    """Such code has kept a `__call__` that no patch reaches: refused, right, or given position ids as eager models."""
    pytest.importorskip("accelerate", reason="needs the extra [integrations]")
    program = tmp_path / "compiled_before.py"
    program.write_text(COMPILED_BEFORE)
    assert "as eager models" in launch(2, program, folder=tmp_path, timeout=120, imports=["transformers"])
