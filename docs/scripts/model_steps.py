"""Training steps of Gemma-3-like and gpt-oss-like models: this library against gathered keys and FlexAttention.

torchrun --nproc-per-node 2 docs/scripts/model_steps.py --tokens 32768

Both train equal models with random weights, one after the other, replicated by DistributedDataParallel. "provider" is
`attn_implementation="cp_dtensor"` inside of `context_parallel`. "gathered" is what torch's context parallel does for
FlexAttention: every rank gathers all keys, and compiled FlexAttention masks them by global positions. On CPUs, where
FlexAttention has no gradients, "gathered" holds all logits. Prints Markdown; ends with status 1 if losses differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from cp_dtensor import context_parallel, context_parallel_shard, local_positions
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, register
from cp_dtensor.tools.bench.report import table_of
from cp_dtensor.tools.ranks import Device, start

TOY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ABOUT_1B: dict[str, dict[str, Any]] = {
    "Gemma-3-like": {
        "hidden_size": 1536, "intermediate_size": 9216, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32768, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    },
    "gpt-oss-like": {
        "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768, "sliding_window": 128,
        "num_local_experts": 16, "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
    },
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative difference of losses."""


class Gathered:
    """Attention function of transformers: local queries, keys and values of all ranks, sinks by the lse."""

    def __init__(self, mesh: Any, tokens: int, device: torch.device) -> None:
        self.group = mesh.get_group()
        self.queries = local_positions(mesh, tokens, device=device)
        shards = [torch.empty_like(self.queries) for _ in range(mesh.size())]
        dist.all_gather(shards, self.queries, group=self.group)
        self.keys = torch.cat(shards)
        self.masks: dict[int | None, Any] = {}
        self.flex: Any = torch.compile(flex_attention)

    def __call__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: None, *,
        scaling: float, sliding_window: int | None = None, s_aux: torch.Tensor | None = None, **_others: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        k, v = (torch.cat(collectives.all_gather(x.contiguous(), self.group), 2) for x in (k, v))
        attend = self._by_flex_attention if q.is_cuda else self._by_logits
        out, lse = attend(q, k, v, scaling, sliding_window)
        if s_aux is not None:
            out = out * torch.sigmoid(lse - s_aux[:, None]).unsqueeze(-1).to(out.dtype)
        return out.transpose(1, 2).contiguous(), None

    def _sees(self, query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
        ahead = self.queries[query] - self.keys[key]
        return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)

    def _by_flex_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if window not in self.masks:
            self.masks[window] = create_block_mask(
                lambda b, h, query, key: self._sees(query, key, window), None, None, len(self.queries), len(self.keys),
                device=q.device,
            )  # fmt: skip
        mask = self.masks[window]
        out, found = self.flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, found.lse

    def _by_logits(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        query, key = (torch.arange(len(x), device=q.device) for x in (self.queries, self.keys))
        seen = self._sees(query[:, None], key[None], window)
        logits = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
        return logits.softmax(-1) @ v, logits.logsumexp(-1)


def model_of(family: str, toy: bool, attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with equal weights in every call."""
    import transformers

    kind: Any = transformers.Gemma3ForCausalLM if "Gemma" in family else transformers.GptOssForCausalLM
    sizes = {**ABOUT_1B[family], **(TOY if toy else {})}
    config = kind.config_class(**sizes, max_position_embeddings=1 << 17, pad_token_id=0, attention_dropout=0.0)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with device:
        model: Any = kind(config)
    model = model.to(dtype).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def trainer_of(
    method: str, family: str, options: argparse.Namespace, mesh: Any, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[int], torch.Tensor], int]:
    """One training step of a number as a function, and the number of parameters."""
    attention = register() if method == "provider" else method
    model = model_of(family, options.toy, attention, device, dtype)
    parameters = sum(each.numel() for each in model.parameters())
    replicated = DistributedDataParallel(model, process_group=mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    vocabulary = model.config.vocab_size

    def step(number: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, vocabulary, (1, options.tokens), generator=random).to(device)
        batch = ModelBatch(input_ids=tokens, labels=tokens)
        assert batch.shift_labels is not None
        if method == "provider":
            with context_parallel(mesh, **batch.buffers):
                loss = causal_lm_loss(replicated(**batch.inputs, use_cache=False).logits, batch.shift_labels)
                loss.backward()
        else:
            names = [*batch.inputs]
            *shards, labels = context_parallel_shard(mesh, [*batch.inputs.values(), batch.shift_labels], [1] * 3)
            inputs = dict(zip(names, shards, strict=True))
            loss = causal_lm_loss(replicated(**inputs, use_cache=False).logits, labels, mesh=mesh)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, parameters


def measured(
    step: Callable[[int], torch.Tensor], options: argparse.Namespace, memory: Device
) -> tuple[list[float], list[float], float]:
    """Losses of all steps; of the timed ones milliseconds on the slowest rank, and GiB at most."""
    device = memory.torch_device
    losses, times = [], []
    for number in range(options.warm_steps + options.steps):
        if device.type == "cuda" and number == options.warm_steps:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        losses.append(float(step(number)))  # waits for the GPU
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() + memory.mapped_bytes() if device.type == "cuda" else 0
    slowest = torch.tensor([*times, peak / 2**30], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    *times, peak = slowest.tolist()
    return losses, times[options.warm_steps :], peak


def main() -> None:
    """Measures both models with both methods, and compares losses.

    Raises:
        SystemExit: losses differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-steps", type=int, default=3, help="steps before them")
    parser.add_argument("--models", nargs="+", choices=ABOUT_1B, default=[*ABOUT_1B])
    parser.add_argument("--toy", action="store_true", help="tiny models, in float32")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    _, memory, _ = start("docs/scripts/model_steps.py", sys.argv[1:], on_gpu, 600, may_share_gpus=True)
    device = memory.torch_device
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.float32 if options.toy else torch.bfloat16
    import transformers

    transformers.AttentionInterface.register("gathered", Gathered(mesh, options.tokens, device))
    transformers.AttentionMaskInterface.register("gathered", lambda **_: None)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    about = (
        f"{options.tokens} tokens, {mesh.size()} ranks, {name}, {str(dtype)[6:]}, gradient checkpointing, torch "
        f"{torch.__version__}, transformers {transformers.__version__}"
    )
    rows: list[dict[str, str]] = []
    differ = False
    for family in options.models:
        by_method = {}
        for method in ("gathered", "provider"):
            gc.collect()  # the model before refers to itself
            memory.synchronize()
            dist.barrier()
            memory.free_unused()
            step, parameters = trainer_of(method, family, options, mesh, device, dtype)
            losses, times, peak = by_method[method] = measured(step, options, memory)
            rows.append(
                {
                    "model": family, "parameters": f"{parameters / 1e6:.0f}M", "attention": method,
                    "ms a step (median)": f"{statistics.median(times):.1f}", "least": f"{min(times):.1f}",
                    "GiB at most": f"{peak:.1f}", "first loss": f"{losses[0]:.5f}", "last loss": f"{losses[-1]:.5f}",
                }
            )  # fmt: skip
            del step
        one, other = (torch.tensor(by_method[method][0]) for method in by_method)
        differ |= bool(((one - other).abs() > TOLERANCE[dtype] * one.abs()).any())
    if dist.get_rank() == 0:
        print(f"{about}\n\n{table_of(rows)}")
        print("\nlosses differ" if differ else "\nlosses are equal")
    dist.destroy_process_group()
    if differ:
        sys.exit(1)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and DistributedDataParallel
        main()
