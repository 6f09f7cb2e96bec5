"""A Flux and a Wan transformer of diffusers, with random weights, under context parallelism of cp_dtensor.

    pip install -c constraints.txt -e '.[integrations]'
    torchrun --nproc-per-node 4 examples/integrations/diffusers_four_ranks.py

Every rank also runs the same models alone, and compares outputs and the gradients of all weights: with a ring, with
Ulysses, with a hybrid of both, and with lengths that the ranks do not divide evenly. 4 GPUs if this machine has them,
otherwise CPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel, WanTransformer3DModel
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import Contiguous, context_parallel_unshard
from cp_dtensor.integrations import diffusers as cp_diffusers

RANKS = 4
LARGEST_ERROR = 1e-4  # of float32, relative to the largest value


def flux(text: int, image: int) -> tuple[Any, dict[str, Any]]:
    """A model with joint attention of `text` and `image` tokens, and its inputs."""
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, image, 4),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.arange(image)[:, None].repeat(1, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }
    return model, inputs


def wan(text: int, width: int) -> tuple[Any, dict[str, Any]]:
    """A model with self-attention of 3 * 2 * `width` tokens and cross-attention to text, and its inputs."""
    model = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 4, 2 * width),
        "timestep": torch.randint(0, 1000, (2,)),
        "encoder_hidden_states": torch.randn(2, text, 16),
    }
    return model, inputs


def out_and_gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The output, and the gradients of all weights for a fixed random gradient of the output."""
    out = model(**inputs, return_dict=False)[0]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    grads = torch.autograd.grad(out, list(model.parameters()), grad_out, allow_unused=True)
    return [out.detach(), *(torch.zeros(1, device=out.device) if grad is None else grad for grad in grads)]


@contextmanager
def on_cpus() -> Iterator[None]:
    """Replaces what diffusers does on accelerators only: it counts them, and gathers parts of unequal lengths."""

    def unshard(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        return context_parallel_unshard(mesh, [tensor], [dim], Contiguous())[0]

    with (
        mock.patch("torch.accelerator.device_count", return_value=RANKS),
        mock.patch("diffusers.hooks.context_parallel.PartitionAnythingSharder.unshard_anything", unshard),
    ):
        yield


def compare(name: str, made: tuple[Any, dict[str, Any]], config: ContextParallelConfig) -> None:
    """Runs a model alone and in parallel, and prints the largest error.

    Raises:
        AssertionError: the error is too large.
    """
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    model = made[0].to(device)
    inputs = {key: value.to(device) for key, value in made[1].items()}
    alone = out_and_gradients(model, inputs)
    model.set_attention_backend("cp_dtensor")
    with on_cpus() if device == "cpu" else nullcontext():
        model.enable_parallelism(config=config)
        together = out_and_gradients(model, inputs)
    for grad in together[1:]:  # each rank has the share of its own tokens
        dist.all_reduce(grad)
    error = max(
        ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()
        for got, wanted in zip(together, alone, strict=True)
    )
    assert error < LARGEST_ERROR, f"{name}: {error}"
    if dist.get_rank() == 0:
        print(f"{name}: largest error of out and gradients {error:.1e}", flush=True)


def main() -> None:
    """Compares both models under all methods."""
    if int(os.environ.get("WORLD_SIZE", 1)) != RANKS:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node {RANKS} {sys.argv[0]}")
    if torch.cuda.device_count() >= RANKS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    cp_diffusers.register()
    compare("Flux, ring", flux(8, 24), ContextParallelConfig(ring_degree=4))
    compare("Flux, hybrid", flux(8, 24), ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    compare("Flux, Ulysses, any length", flux(7, 22), ContextParallelConfig(ulysses_degree=4, ulysses_anything=True))
    compare("Wan, ring, any length", wan(5, 5), ContextParallelConfig(ring_degree=4, ring_anything=True))
    any_length: Any = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
    any_length.ring_anything = True  # the constructor refuses it with both degrees
    compare("Wan, hybrid, any length", wan(5, 5), any_length)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
