"""Time whole steps of a Qwen3-VL with random weights whose sequence has text and images, with and without shard_images.

    torchrun --nproc-per-node 2 docs/scripts/vision_steps.py --output run.csv
    torchrun --nproc-per-node 1 docs/scripts/vision_steps.py --output one.csv
    torchrun --nproc-per-node 2 docs/scripts/vision_steps.py --toy --device cpu

The sizes are those of Qwen3-VL 2B. FSDP2 shards the parameters over the ranks that share the sequence, layers are
computed again in backward, and tokens and pixels are random. One seed gives all methods the same parameters and inputs.
On one GPU there is no context, and attention is transformers' "sdpa". Prints a line for each method.
"""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from common import Rows, parser, start_gpus, step_row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from cp_dtensor import context_parallel
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, register
from cp_dtensor.tools.report import times_of

WARM_UP = 2
"""Steps that compile kernels and allocate memory."""
PATCHES = [(64, 64), (48, 80), (80, 48), (32, 128)]
"""Heights and widths of images in patches of 16 pixels; four patches are a token."""
IMAGE, VIDEO, START, END = range(4)
TEXT: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "rope_parameters":
    {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
TOY: tuple[dict[str, Any], ...] = (
    {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
     "num_key_value_heads": 2, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 3, 3]}},
    {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64,
     "deepstack_visual_indexes": [0]},
)  # fmt: skip


def model_of(options: argparse.Namespace, mesh: Any, attention: str) -> Any:
    """Return a model with the same parameters in every call, sharded by FSDP2."""
    text, vision = TOY if options.toy else (TEXT, VISION)
    config = Qwen3VLConfig(
        text_config={**text, "vocab_size": options.vocabulary, "max_position_embeddings": options.tokens},
        vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Qwen3VLForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [*model.model.visual.blocks, *model.model.language_model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def inputs_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return what a processor would: half of the tokens are those of images, with text between them."""
    random, sizes, used = torch.Generator().manual_seed(0), list[tuple[int, int]](), 0
    for height, width in itertools.cycle([(4, 4), (2, 6)] if options.toy else PATCHES):
        if used + height * width // 4 > options.tokens // 2:
            break
        sizes.append((height, width))
        used += height * width // 4
    ids = torch.randint(4, options.vocabulary, (1, options.tokens), generator=random)
    gap = (options.tokens - used) // (len(sizes) + 1)
    start = gap
    for height, width in sizes:
        ids[0, start - 1], ids[0, start : start + height * width // 4] = START, IMAGE
        start += height * width // 4 + gap
    pixels = torch.randn(sum(h * w for h, w in sizes), 3 * 2 * 16 * 16, generator=random)
    given = {
        "input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in sizes]), "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip
    return {name: each.to(options.device) for name, each in given.items()}


def run(options: argparse.Namespace, method: str) -> dict[str, Any]:
    """Train some steps; return a row."""
    world, is_gpu = dist.get_world_size(), options.device == "cuda"
    mesh = init_device_mesh(options.device, (world,), mesh_dim_names=("cp",))
    model = model_of(options, mesh, register() if world > 1 else "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=is_gpu)
    given, seconds, losses, norms = inputs_of(options), list[float](), list[float](), list[float]()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + options.steps):
        batch: Any = ModelBatch.from_processor(given, shard_images=method == "shard_images")
        dist.barrier()
        begin = time.perf_counter()
        with context_parallel(mesh, **batch.buffers) if world > 1 else nullcontext():
            logits = model(**batch.inputs, use_cache=False).logits
            loss = causal_lm_loss(logits, batch.shift_labels, mesh=mesh)
            del logits
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        slowest = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    times = [1e3 * each for each in seconds[WARM_UP:]]
    images, patches = len(given["image_grid_thw"]), len(given["pixel_values"])
    parameters = sum(each.numel() for each in model.parameters())
    text = model.config.text_config
    return times_of([times]) | step_row(
        world, tokens=options.tokens, q_heads=text.num_attention_heads, kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim, method=method, mib=torch.cuda.max_memory_allocated() / 2**20 if is_gpu else 0,
        note=f"Qwen3-VL of {parameters / 1e9:.2f}B, vocabulary {options.vocabulary}; checkpointing; {images} images "
        f"of {patches} patches; losses {losses[0]:.5f} to {losses[-1]:.5f}; gradient norm {norms[0]:.4f} to "
        f"{norms[-1]:.4f}",
    )  # fmt: skip


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, default=32768)
    command.add_argument("--vocabulary", type=int, default=151936)
    command.add_argument("--steps", type=int, default=5, help=f"steps to time, after {WARM_UP} others")
    command.add_argument("--toy", action="store_true", help="a small model")
    command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = command.parse_args()
    if options.device == "cuda":
        start_gpus()
    else:
        dist.init_process_group("gloo")
    rows = Rows(options.output, dist.get_rank() == 0)
    for method in ("all images", "shard_images") if dist.get_world_size() > 1 else ("one GPU",):
        rows.add(f"{method:12}", run(options, method))
        if options.device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
