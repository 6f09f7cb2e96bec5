"""How a model is spread over ranks: one mesh, then tensor parallelism, activation checkpointing, compilation, FSDP2.

Context parallelism changes no module. It is a context around forward and backward, and its ranks share in FSDP's
sharding of the parameters, for each of them sees other tokens and so has its own part of every gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from config import ActivationCheckpoint, Compile, Config, Parallelism
from llama import Llama
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cp_dtensor import Contiguous, HeadTail, context_parallel

LAYOUTS = {"headtail": HeadTail(), "none": Contiguous()}


class Ranks(ABC):
    """Who sees which samples and which tokens of them, as the training loop needs to know it."""

    data_rank: int
    """Which samples this rank sees, 0 <= data_rank < data_ranks."""
    data_ranks: int

    @abstractmethod
    def shard_sequence(
        self, tokens: torch.Tensor, labels: torch.Tensor, freqs_cis: torch.Tensor
    ) -> AbstractContextManager[None]:
        """Inside, each rank has only its part of the sequence, and attention still sees all of it.

        Args:
            tokens: (B, S), sharded in place. It is used only once, so it is not restored.
            labels: (B, S), likewise.
            freqs_cis: (S, D / 2), sharded in place and restored on exit.
        """

    @abstractmethod
    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that see different samples."""

    @abstractmethod
    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that see different tokens: other samples, or other parts of the same ones."""


class OneRank(Ranks):
    """No parallelism at all, whatever process group there may be."""

    data_rank = 0
    data_ranks = 1

    def shard_sequence(
        self, tokens: torch.Tensor, labels: torch.Tensor, freqs_cis: torch.Tensor
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        return value


class MeshRanks(Ranks):
    """The ranks of a mesh with axes "dp_shard", "cp" and "tp"; the innermost, tensor parallel, are neighbours.

    Args:
        parallelism: degrees whose product is the number of ranks.
        device_type: "cuda" or "cpu".
    """

    def __init__(self, parallelism: Parallelism, device_type: str) -> None:
        shape = (
            parallelism.data_parallel_shard_degree,
            parallelism.context_parallel_degree,
            parallelism.tensor_parallel_degree,
        )
        self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp_shard", "cp", "tp"))
        self.token_mesh = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        self.mesh._flatten("all")  # lets DTensor reduce the norm of the gradient in one collective
        self.data_rank = self.mesh.get_local_rank("dp_shard")
        self.data_ranks = self.mesh["dp_shard"].size()
        self._rotate_method = parallelism.context_parallel_rotate_method
        self._layout = LAYOUTS[parallelism.context_parallel_load_balancer]

    def shard_sequence(
        self, tokens: torch.Tensor, labels: torch.Tensor, freqs_cis: torch.Tensor
    ) -> AbstractContextManager[None]:
        if self.mesh["cp"].size() == 1:
            return nullcontext()
        return context_parallel(
            self.mesh["cp"],
            buffers=[tokens, labels, freqs_cis],
            buffer_seq_dims=[1, 1, 0],
            no_restore_buffers={tokens, labels},
            layout=self._layout,
            rotate_method=self._rotate_method,
        )

    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        return _sum(value, self.mesh["dp_shard"])

    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        return _sum(value, self.token_mesh)


def _sum(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def parallelize(model: Llama, ranks: MeshRanks, config: Config) -> None:
    """Spreads `model`, which is whole and the same on every rank, over the ranks, in place."""
    if ranks.mesh["tp"].size() > 1:
        apply_tensor_parallel(model, ranks.mesh["tp"])
    apply_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.enable:
        apply_compile(model, config.compile)
    apply_fsdp(model, ranks.token_mesh, getattr(torch, config.training.mixed_precision_param))


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Heads and hidden units are divided over the ranks; between the matrices, the (local) sequence is."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def apply_activation_checkpointing(model: Llama, config: ActivationCheckpoint) -> None:
    """Layers that keep only their input and are computed again in backward: none, every n-th, or all ("full")."""
    if config.mode == "none":
        return
    every = 1 if config.mode == "full" else int(config.selective_ac_option)
    for number, (name, block) in enumerate(model.layers.items(), start=1):
        if number % every == 0:
            model.layers[name] = checkpoint_wrapper(block)


def apply_compile(model: nn.Module, config: Compile) -> None:
    """Each layer by itself, without graph breaks: they are alike, so one is compiled and all are served."""
    for block in model.get_submodule("layers").children():
        block.compile(backend=config.backend, fullgraph=True)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shards parameters, gradients and optimizer state over `mesh`; gradients of its ranks are summed, not averaged.

    The loss of each rank is already divided by the global number of tokens, so the sum is the gradient of the mean.
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
