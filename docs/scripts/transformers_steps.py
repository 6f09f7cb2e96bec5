"""Time whole steps of a Qwen3 of 1.1B parameters in three programs, with torch's context parallel and with ours.

    torchrun --nproc-per-node 2 docs/scripts/transformers_steps.py --seq-len 32768 --output run.csv
    torchrun --nproc-per-node 1 docs/scripts/transformers_steps.py --seq-len 32768 --output alone.csv

Programs: `loop`, a training loop with FSDP2, in which ours is the provider; `trainer`, transformers' Trainer; `sft`,
TRL's SFTTrainer, with accelerate's FSDP2. In the latter two ours is `cp_dtensor.integrations.accelerate.enable()`.
"torch-cuDNN" is torch's context parallel where cuDNN's attention comes first, "torch" where torch chooses; packed
documents are beyond it. "alone" is one GPU without context parallelism, whose layers are checkpointed to fit. Weights,
random tokens and learning rate are equal, so losses are comparable; those of Trainer are bfloat16. Prints a table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Rows, parser, start_gpus, step_row
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.tools.report import times_of

RUNS = (
    ("loop", "alone", False), ("loop", "alone", True), ("loop", "torch-cuDNN", False), ("sft", "torch-cuDNN", False),
    ("trainer", "torch-cuDNN", False), ("loop", "ours", False), ("trainer", "ours", False), ("sft", "ours", False),
    ("loop", "ours", True), ("trainer", "ours", True), ("sft", "ours", True), ("trainer", "torch", False),
    ("sft", "torch", False),
)  # fmt: skip
"""Programs, methods, and whether documents are packed."""
WARM_UP = 2
"""Steps that compile kernels and allocate memory."""
DOCUMENT, VOCABULARY, LEARNING_RATE = 4096, 32000, 1e-5
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 20,
}  # fmt: skip


def row_of(step: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of random tokens with labels that are not shifted, and its documents if they are packed."""
    tokens = torch.randint(0, VOCABULARY, (options.seq_len,), generator=torch.Generator().manual_seed(step))
    labels, positions = tokens.clone(), torch.arange(options.seq_len)
    if options.packed:
        positions %= DOCUMENT
        labels[positions == 0] = -100  # the first token of a document is not predicted
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def model_of(implementation: str) -> Any:
    """Return the model with equal random weights on every rank, in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SIZE, use_cache=False)
    config._attn_implementation = implementation
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).train()


class Steps:
    """Times and losses of steps."""

    def __init__(self) -> None:
        self.ends = list[float]()
        self.losses = list[float]()

    def end(self) -> None:
        """Note the time at which a step ends, all kernels included."""
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def loop(options: argparse.Namespace, steps: Steps) -> None:
    """Train by a loop with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from cp_dtensor import context_parallel
    from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, register

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = model_of(register() if options.method == "ours" else "sdpa")
    if options.method == "alone":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for step in range(options.steps):
        row = {name: each[None].cuda() for name, each in row_of(step, options).items()}
        batch = ModelBatch(**row)
        assert batch.shift_labels is not None
        context: Any = nullcontext
        if options.method == "ours":
            context = partial(context_parallel, mesh, **batch.buffers)
        elif options.method != "alone":
            from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

            context = partial(torch_context_parallel, mesh, **batch.buffers)
        count = (batch.shift_labels != -100).sum()
        with context():
            # transformers takes the positions of a shard for packed documents, unless it gets a mask.
            ones = {"attention_mask": torch.ones_like(batch.inputs["input_ids"])} if "torch" in options.method else {}
            logits = model(**batch.inputs, **ones, use_cache=False).logits
            loss = causal_lm_loss(logits, batch.shift_labels, mesh=mesh, num_items_in_batch=count)
            del logits
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
        steps.end()


def trainer(options: argparse.Namespace, steps: Steps) -> None:
    """Train by transformers' Trainer, or by TRL's SFTTrainer."""
    from accelerate.utils import ParallelismConfig
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noted(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            steps.losses += [logs["loss"]] if "loss" in logs else []

    arguments: dict[str, Any] = {
        "output_dir": "/tmp/transformers_steps", "parallelism_config": ParallelismConfig(cp_size=dist.get_world_size()),
        "fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        "bf16": True, "max_steps": options.steps, "per_device_train_batch_size": 1, "learning_rate": LEARNING_RATE,
        "optim": "adamw_torch_fused", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    rows: Any = [row_of(step, options) for step in range(options.steps)]
    model = model_of("sdpa")
    if options.program == "trainer":
        if not options.packed:
            rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
        made: Any = Trainer(model, TrainingArguments(**arguments), train_dataset=rows, callbacks=[Noted()])
    else:
        made = sft_trainer(model, arguments, rows, [Noted()], options)
    made.train()


def sft_trainer(model: Any, arguments: dict[str, Any], rows: Any, callbacks: Any, options: argparse.Namespace) -> Any:
    """Return an SFTTrainer, with a tokenizer that it needs and does not use."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0"))
    columns = {"input_ids": [row["input_ids"].tolist() for row in rows]}
    if options.packed:
        columns["seq_lengths"] = [[DOCUMENT] * (options.seq_len // DOCUMENT)] * len(rows)
    return SFTTrainer(
        model, SFTConfig(**arguments, padding_free=options.packed, max_length=None),
        train_dataset=Dataset.from_dict(columns), callbacks=callbacks,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
    )  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps; return a row, on every rank."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps = Steps()
    context: AbstractContextManager[Any] = nullcontext()
    if options.method == "torch-cuDNN":
        context = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
    if options.method == "ours" and options.program != "loop":
        from cp_dtensor.integrations.accelerate import enable

        context = enable()
    with context:
        (loop if options.program == "loop" else trainer)(options, steps)
    times = [(end - start) * 1e3 for start, end in zip(steps.ends, steps.ends[1:], strict=False)][WARM_UP - 1 :]
    by_rank = [[0.0]] * dist.get_world_size()
    dist.all_gather_object(by_rank, times)
    mib = torch.tensor(torch.cuda.max_memory_allocated() / 2**20, device="cuda")
    dist.all_reduce(mib, dist.ReduceOp.MAX)
    packages = {"loop": ("transformers",), "trainer": ("transformers", "accelerate")}
    about = step_row(
        dist.get_world_size(), tokens=options.seq_len, q_heads=SIZE["num_attention_heads"],
        kv_heads=SIZE["num_key_value_heads"], head_dim=SIZE["head_dim"], method=f"{options.program}-{options.method}",
        mib=mib.item(), note=f"Qwen3 of 1.1B{', checkpointed' if options.method == 'alone' else ''}; losses "
        + " ".join(f"{loss:.5f}" for loss in steps.losses),
    )  # fmt: skip
    for package in packages.get(options.program, ("transformers", "accelerate", "trl")):
        about["versions"] += f", {package} {importlib.metadata.version(package)}"
    if options.packed:
        about["mask"] = f"documents of {DOCUMENT}"
    return about | times_of(by_rank)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--seq-len", type=int, default=32768)
    command.add_argument("--steps", type=int, default=WARM_UP + 4, help=f"the first {WARM_UP} are not timed")
    options = command.parse_args()
    start_gpus()
    rank = dist.get_rank()
    rows = Rows(options.output, rank == 0)
    for options.program, options.method, options.packed in RUNS:
        if (options.method == "alone") != (dist.get_world_size() == 1):
            continue
        try:
            row = run(options)
        except Exception as error:  # the other runs are worth their time
            print(f"{options.program}: {options.method} failed on rank {rank}: {error!r:.500}", flush=True)
        else:
            rows.add(f"{row['mask']:18} {row['method']:20}", row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
