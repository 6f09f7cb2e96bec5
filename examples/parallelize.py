"""Parallelism of the model: one mesh, tensor parallelism, activation checkpointing, compilation, FSDP2.

Context parallelism changes no module: it is a context around forward and backward. FSDP2 shards parameters over the
ranks of context parallelism too, since each of them has other tokens and so its own part of every gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from config import ActivationCheckpoint, Compile, Config, Parallelism
from gated_delta_net import GatedDeltaNet
from llama import Llama
from sparse_attention import SparseAttention
from text_data import Batch
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

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    Mask,
    PerDocument,
    context_parallel,
)


class Ranks(ABC):
    """Interface of the training loop: the samples and tokens of a rank, and sums over ranks."""

    data_rank: int
    """Index of this rank's samples, 0 <= data_rank < data_ranks."""
    data_ranks: int

    @abstractmethod
    def shard_sequence(self, batch: Batch) -> AbstractContextManager[torch.Tensor | None]:
        """A context in which a batch is sharded and attention still covers whole sequences or documents.

        The context returns the `attn_mask` to pass to the model, or None.

        Args:
            batch: its tensors are sharded in place, and not restored, since they are used only once.
        """

    @abstractmethod
    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks that have different samples."""

    @abstractmethod
    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks that have different tokens: other samples, or other parts of the same samples."""


class OneRank(Ranks):
    """No parallelism, even if there is a process group."""

    data_rank = 0
    data_ranks = 1

    def shard_sequence(self, batch: Batch) -> AbstractContextManager[torch.Tensor | None]:
        return nullcontext(dense_mask(batch) if batch.documents else None)

    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        return value


class MeshRanks(Ranks):
    """The ranks of a mesh with axes "dp_shard", "cp" and "tp"; tensor-parallel ranks are neighbours.

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
        self._load_balancer = parallelism.context_parallel_load_balancer

    def shard_sequence(self, batch: Batch) -> AbstractContextManager[torch.Tensor | None]:
        if self.mesh["cp"].size() == 1 and not batch.documents:
            return nullcontext()
        mask = mask_of(batch)
        buffers = [batch.tokens, batch.labels, batch.positions]
        return context_parallel(
            self.mesh["cp"],
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=set(buffers),
            mask=mask,
            layout=layout_of(self._load_balancer, batch, mask),
            rotate_method=self._rotate_method,
        )

    def sum_over_samples(self, value: torch.Tensor) -> torch.Tensor:
        return _sum(value, self.mesh["dp_shard"])

    def sum_over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        return _sum(value, self.token_mesh)


def mask_of(batch: Batch) -> Mask | None:
    """The mask of packed samples, or None."""
    by_row = [Documents(edges, within=Causal()) for edges in batch.documents]
    if len(by_row) > 1:
        return Batched(by_row)
    return by_row[0] if by_row else None


def layout_of(load_balancer: str, batch: Batch, mask: Mask | None) -> Layout:
    """The layout of a load balancer's name."""
    if load_balancer == "balanced":
        return Balanced(mask or Causal(), batch.tokens.size(1))
    if load_balancer == "per_document":
        return PerDocument(batch.documents[0])
    return HeadTail() if load_balancer == "headtail" else Contiguous()


def dense_mask(batch: Batch) -> torch.Tensor:
    """The `attn_mask` (B, 1, S, S) for one device: causal within each document."""
    device = batch.tokens.device
    position = torch.arange(batch.tokens.size(1), device=device)
    edges = [torch.tensor(of_row, device=device) for of_row in batch.documents]
    document = torch.stack([torch.searchsorted(of_row, position, right=True) for of_row in edges])
    return ((document[:, :, None] == document[:, None, :]) & (position[:, None] >= position))[:, None]


def _sum(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


def parallelize(model: Llama, ranks: MeshRanks, config: Config) -> None:
    """Parallelizes `model` in place; before, it is whole and equal on every rank."""
    over_ranks(model, ranks.mesh["cp"])
    if ranks.mesh["tp"].size() > 1:
        apply_tensor_parallel(model, ranks.mesh["tp"])
    apply_activation_checkpointing(model, config.activation_checkpoint)
    if config.compile.enable:
        apply_compile(model, config.compile)
    apply_fsdp(model, ranks.token_mesh, getattr(torch, config.training.mixed_precision_param))


def over_ranks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lets layers that are not in torch see the tokens of all ranks of a mesh, in the layout and mask of a context."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet | SparseAttention):
            module.mesh = mesh


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shards heads and hidden units over the ranks; between the matrices, the local sequence."""
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
    """Checkpoints no layer, every n-th layer ("selective") or all layers ("full")."""
    if config.mode == "none":
        return
    every = 1 if config.mode == "full" else int(config.selective_ac_option)
    for number, (name, block) in enumerate(model.layers.items(), start=1):
        if number % every == 0:
            model.layers[name] = checkpoint_wrapper(block)


def apply_compile(model: nn.Module, config: Compile) -> None:
    """Compiles each layer by itself, without graph breaks; equal layers share compiled code."""
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
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
