"""Time forwards of Wan's and Flux's transformers with random weights: ours and diffusers' own context parallel.

    torchrun --nproc-per-node 2 docs/scripts/diffusers_steps.py --tokens 32768 131072 --output run.csv

A few blocks of the sizes of Wan 2.1 14B and of FLUX.1. diffusers' own attention and that of one GPU are cuDNN's, its
fastest built-in backend. Each output is compared with that of one GPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from common import Rows, parser, step_row
from diffusers import ContextParallelConfig, FluxTransformer2DModel, WanTransformer3DModel

from cp_dtensor.integrations import diffusers as cp_diffusers
from cp_dtensor.tools.ranks import Device, Failed, Ranks, end, start
from cp_dtensor.tools.report import ERROR, times_of

METHODS = ("one-GPU", "diffusers-ring", "ours-ring", "diffusers-ulysses", "ours-ulysses")
TEXT, LATENT_ROWS = 512, 32
Made = tuple[Any, dict[str, torch.Tensor]]


def wan(tokens: int, heads: int, dim: int) -> Made:
    """Two blocks, and a latent video of `tokens` patches, 32 x 32 a frame."""
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=dim, ffn_dim=heads * dim * 27 // 10, num_layers=2, text_dim=4096
    )
    frames, side = max(tokens // LATENT_ROWS**2, 1), 2 * min(LATENT_ROWS, int(tokens**0.5))
    return model, {
        "hidden_states": torch.randn(1, 16, frames, side, side),
        "timestep": torch.full((1,), 500),
        "encoder_hidden_states": torch.randn(1, TEXT, 4096),
    }


def flux(tokens: int, heads: int, dim: int) -> Made:
    """A double block and two single ones, and `tokens` patches of an image after 512 of text."""
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=2, attention_head_dim=dim, num_attention_heads=heads,
        axes_dims_rope=(dim // 8, dim * 7 // 16, dim * 7 // 16),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, tokens, 64),
        "encoder_hidden_states": torch.randn(1, TEXT, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.full((1,), 0.5),
        "img_ids": torch.arange(tokens)[:, None].repeat(1, 3).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


MODELS = {"Wan": (wan, 40, 2), "Flux": (flux, 24, 3)}
"""Function, heads of 128 and blocks of each model."""


@contextmanager
def on_cpus(count: int) -> Iterator[None]:
    """Replace the number of accelerators, which diffusers checks."""
    with mock.patch("torch.accelerator.device_count", return_value=count):
        yield


def measure(ranks: Ranks, device: Device, name: str, tokens: int, method: str, repeats: int, first: list[Any]) -> Any:
    """Return a row of a model, length and method. `first` has the output of one GPU, and gets it from the first row."""
    make, heads, blocks = MODELS[name]
    heads, dim = (heads, 128) if device.is_gpu else (2, 32)
    gc.collect()
    ranks.together(device.synchronize)
    device.free_unused()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    with device.torch_device:
        torch.set_default_dtype(dtype)
        try:
            model, inputs = make(tokens, heads, dim)
        finally:
            torch.set_default_dtype(torch.float32)
    inputs = {key: x.float() if "ids" in key else x for key, x in inputs.items()}  # positions are exact in float32
    own = "_native_cudnn" if device.is_gpu else "native"
    if method != "one-GPU":
        model.set_attention_backend("cp_dtensor" if method.startswith("ours") else own)
        degree = f"{method.split('-')[1]}_degree"
        with nullcontext() if device.is_gpu else on_cpus(ranks.world_size):
            model.enable_parallelism(config=ContextParallelConfig(**{degree: ranks.world_size}))
    else:
        model.set_attention_backend(own)
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs[:] = [model(**inputs, return_dict=False)[0]]

    with torch.no_grad():
        ranks.together(forward)
        outputs.clear()
        peak = ranks.together(lambda: device.extra_bytes(forward))
        times = ranks.together(lambda: [device.time_ms(forward) for _ in range(repeats)])
    if method == "one-GPU":
        first[:] = outputs
    error = ((outputs[0] - first[0]).float().norm() / first[0].float().norm()).item() if first else float("nan")
    return times_of(times) | step_row(
        ranks.world_size, tokens=tokens, mask="full", layout="Contiguous", q_heads=heads, kv_heads=heads,
        head_dim=dim, method=method, mib=max((each or 0) for each in peak) / 2**20,
        note=f"{name}, {blocks} blocks; error {error:.1e}",
    )  # fmt: skip


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    command.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    command.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    command.add_argument("--repeats", type=int, default=3)
    options = command.parse_args()
    ranks, device = start("docs/scripts/diffusers_steps.py", sys.argv[1:], torch.cuda.is_available(), 300)
    cp_diffusers.register()
    rows, lost = Rows(options.output, ranks.rank == 0), None
    for name in options.models:
        for tokens in options.tokens:
            first: list[Any] = []
            for method in options.methods:
                if lost is not None:
                    continue
                try:
                    row = measure(ranks, device, name, tokens, method, options.repeats, first)
                except Failed as failure:
                    lost = None if failure.alike else failure
                    failed = {"status": ERROR, "median_ms": 0.0, "mib": 0.0, "note": str(failure)}
                    row = step_row(ranks.world_size, method=method, tokens=tokens, **failed)
                rows.add(f"{name} {tokens:8,} {method:18}", row)
    end(ranks, lost)


if __name__ == "__main__":
    main()
