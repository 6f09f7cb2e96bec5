"""Training steps of models of transformers: this library, torch's context parallel, gathered keys, and none.

torchrun --nproc-per-node 2 docs/scripts/model_steps.py --tokens 32768 --models Qwen3-like --packed 4096

All methods train equal models with random weights, one after the other, sharded by FSDP2.

- provider: `attn_implementation="cp_dtensor"` inside of `context_parallel`
- plain: `attn_implementation="sdpa"` inside of `context_parallel`
- torch: "sdpa" inside of torch's `context_parallel`, by cuDNN or FlashAttention-2, with accelerate's hooks, which drop
  masks; so it has no windows and documents
- gathered: what torch does for FlexAttention. Every rank gathers all keys, and compiled FlexAttention masks them by
  global positions. On CPUs, where FlexAttention has no gradients, it holds all logits.
- whole: no context parallelism. Every rank computes the whole sequence by "sdpa" ("eager" for sinks).

Prints Markdown; ends with status 1 if losses differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from cp_dtensor import context_parallel, context_parallel_shard, local_positions
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, register
from cp_dtensor.tools.ranks import Device, start
from cp_dtensor.tools.report import table_of

TOY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
TOY_WINDOWS: dict[str, Any] = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
ABOUT_1B: dict[str, dict[str, Any]] = {
    "Qwen3-like": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    },
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
METHODS = ("whole", "torch", "gathered", "plain", "provider")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative difference of losses."""


class Gathered:
    """Attention function of transformers: local queries, keys and values of all ranks, sinks by the lse."""

    def __init__(self, mesh: Any, positions: torch.Tensor) -> None:
        tokens, device = positions.size(1), positions.device
        self.group = mesh.get_group()
        self.queries = local_positions(mesh, tokens, device=device)
        shards = [torch.empty_like(self.queries) for _ in range(mesh.size())]
        dist.all_gather(shards, self.queries, group=self.group)
        self.keys = torch.cat(shards)
        self.documents = (positions[0] == 0).cumsum(0)
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
        query, key = self.queries[query], self.keys[key]
        seen = (query >= key) & (self.documents[query] == self.documents[key])
        return seen if window is None else seen & (query - key < window)

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


def model_of(family: str, attention: str, mesh: Any, options: argparse.Namespace) -> Any:
    """A model with equal weights in every call, sharded by FSDP2."""
    import transformers

    kinds = {"Qwen3-like": "Qwen3", "Gemma-3-like": "Gemma3", "gpt-oss-like": "GptOss"}
    kind: Any = getattr(transformers, f"{kinds[family]}ForCausalLM")
    sizes = {**ABOUT_1B[family], **(TOY if options.toy else {})}
    if options.toy and family != "Qwen3-like":
        sizes |= TOY_WINDOWS
    config = kind.config_class(**sizes, max_position_embeddings=1 << 20, pad_token_id=0, attention_dropout=0.0)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model: Any = kind(config)
    if options.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = MixedPrecisionPolicy(
        param_dtype=None if options.toy else torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.model.layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        if mesh.device_type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return model.train()


def attention_of(method: str, family: str) -> str:
    """The attention implementation of a method."""
    if method == "whole":
        return "eager" if family == "gpt-oss-like" else "sdpa"
    return {"provider": register, "gathered": lambda: "gathered"}.get(method, lambda: "sdpa")()


def is_possible(method: str, family: str, packed: int) -> bool:
    """Return whether a method computes the masks and sinks of a model."""
    if packed and family == "gpt-oss-like":  # transformers gives its masks no position ids
        return False
    if method == "torch":
        return family == "Qwen3-like" and not packed and torch.cuda.is_available()  # it has no kernels on CPUs
    return method != "plain" or family != "gpt-oss-like"


def trainer_of(
    method: str, family: str, options: argparse.Namespace, mesh: Any, positions: torch.Tensor
) -> tuple[Callable[[int], torch.Tensor], int]:
    """One training step of a number as a function, and the number of parameters."""
    model = model_of(family, attention_of(method, family), mesh, options)
    if method == "torch":
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    vocabulary = model.config.vocab_size

    def loss_of(batch: ModelBatch) -> torch.Tensor:
        logits = model(**batch.inputs, use_cache=False).logits
        assert batch.shift_labels is not None
        if method != "whole":
            return causal_lm_loss(logits, batch.shift_labels, mesh=mesh)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.shift_labels.flatten())

    def step(number: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, vocabulary, (1, options.tokens), generator=random).to(positions.device)
        batch = ModelBatch(input_ids=tokens, labels=tokens, position_ids=positions)
        context: Any = nullcontext()
        if method in ("plain", "provider"):
            context = context_parallel(mesh, **batch.buffers)
        elif method == "torch":
            context = torch_context_parallel(mesh, **batch.buffers)
        elif method == "gathered":
            shards = context_parallel_shard(mesh, **batch.buffers)
            batch.inputs = dict(zip(batch.inputs, shards[:-1], strict=True))
            batch.shift_labels = shards[-1]
        kernels = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
        with context, kernels if method == "torch" else nullcontext():
            loss = loss_of(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, sum(each.numel() for each in model.parameters())


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
    """Measure each model with each method, and compare losses.

    Raises:
        SystemExit: losses differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-steps", type=int, default=3, help="steps before them")
    parser.add_argument("--models", nargs="+", choices=ABOUT_1B, default=[*ABOUT_1B])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--packed", type=int, default=0, help="tokens of each packed document; 0: one document")
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing")
    parser.add_argument("--toy", action="store_true", help="tiny models, in float32")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    _, memory, _ = start("docs/scripts/model_steps.py", sys.argv[1:], on_gpu, 600, may_share_gpus=True)
    device = memory.torch_device
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.float32 if options.toy else torch.bfloat16
    import transformers

    positions = (torch.arange(options.tokens, device=device) % (options.packed or options.tokens))[None]
    transformers.AttentionInterface.register("gathered", Gathered(mesh, positions))
    transformers.AttentionMaskInterface.register("gathered", lambda **_: None)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    packed = f" in documents of {options.packed}" if options.packed else ""
    how = f"{str(dtype)[6:]}, FSDP2" + ", gradient checkpointing" * options.checkpoint
    about = (
        f"{options.tokens} tokens{packed}, {mesh.size()} ranks, {name}, {how}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}"
    )
    rows: list[dict[str, str]] = []
    differ = False
    for family in options.models:
        expected: list[float] = []
        for method in options.methods:
            if not is_possible(method, family, options.packed):
                continue
            gc.collect()  # the model before refers to itself
            memory.synchronize()
            dist.barrier()
            memory.free_unused()
            row = {"model": family, "attention": method}
            rows.append(row)
            try:
                step, parameters = trainer_of(method, family, options, mesh, positions)
                losses, times, peak = measured(step, options, memory)
            except torch.OutOfMemoryError:  # on every rank: all hold the same number of tokens
                row |= {"parameters": "", "ms a step (median)": "out of memory"}
                continue
            finally:
                step = None  # type: ignore[assignment]
            row |= {
                "parameters": f"{parameters / 1e6:.0f}M", "ms a step (median)": f"{statistics.median(times):.1f}",
                "least": f"{min(times):.1f}", "GiB at most": f"{peak:.1f}", "first loss": f"{losses[0]:.5f}",
                "last loss": f"{losses[-1]:.5f}",
            }  # fmt: skip
            expected = expected or losses
            one, other = torch.tensor(expected), torch.tensor(losses)
            differ |= not bool(((one - other).abs() <= TOLERANCE[dtype] * one.abs()).all())
    if dist.get_rank() == 0:
        names = [*dict.fromkeys(name for row in rows for name in row)]
        print(f"{about}\n\n{table_of([{name: row.get(name, '') for name in names} for row in rows])}")
        print("\nlosses differ" if differ else "\nlosses are equal")
    dist.destroy_process_group()
    if differ:
        sys.exit(1)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        main()
