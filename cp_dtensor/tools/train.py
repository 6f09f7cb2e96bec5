"""Training steps of one method: a new model with FSDP2 over the ranks that share the sequence, warm-up, timed steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cp_dtensor.tools.cases import Case
from cp_dtensor.tools.llama import Llama, Size, initialise
from cp_dtensor.tools.methods import splits_by_name
from cp_dtensor.tools.ranks import Device, Ranks
from cp_dtensor.tools.report import OURS_PREFIX, TORCH_PREFIX
from cp_dtensor.tools.torch_methods import (
    TORCH_RINGS,
    mesh_of_ranks,
    ring_refusal,
    ring_settings,
    torch_context_parallel,
)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Fused, as in TorchTitan. Small steps: without warm-up, those of 3e-4 make losses jump, and differences of rounding
    # grow to percents.
    "adamw": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}


@dataclass(frozen=True)
class Job:
    """A training problem of all ranks together."""

    size: Size
    case: Case
    """Its attention."""
    optimizer: str
    """Name in `OPTIMIZERS`."""
    checkpointed: bool
    """True to compute each layer again in backward."""
    offloaded: bool = False
    """True to compute each layer again, from inputs in host memory."""
    seed: int = 0


@dataclass(frozen=True)
class TrainMethod:
    """A context parallel, of this library or torch."""

    name: str
    shards: Callable[[Case, torch.device, Sequence[torch.Tensor]], AbstractContextManager[object]]
    """The context of forward and backward, in which (B, S) tensors are this rank's shards."""
    refusal: Callable[[Case, int], str | None]
    """The reason why a case on so many ranks is not measured; None if it is."""
    settings: Callable[[Case, torch.device], AbstractContextManager[object]] = lambda case, device: nullcontext()
    """The context around all steps."""
    contiguous: bool = False
    """True if attention gets contiguous (B, H, S, D) tensors."""
    compiled: bool = False


def train_methods(names: Sequence[str], compiled: bool) -> list[TrainMethod]:
    """The methods of names such as "ours-auto Balanced" and "torch-allgather FA4"; each also compiled, if asked for.

    Raises:
        ValueError: no method has one of the names.
    """
    ours = [TrainMethod(OURS_PREFIX + name, split.context, split.refusal) for name, split in splits_by_name().items()]
    # The backward of torch's rings with cuDNN fails with tensors as models have them (see `torch_methods`).
    torchs = [
        TrainMethod(
            TORCH_PREFIX + ring, lambda _, device, buffers: torch_context_parallel(device, buffers), ring_refusal,
            partial(ring_settings, ring), contiguous=True,
        )
        for ring in TORCH_RINGS
    ]  # fmt: skip
    known = {method.name: method for method in (*ours, *torchs)}
    if unknown := [name for name in names if name not in known]:
        short = [name for name in known if " " not in name or name.startswith(TORCH_PREFIX)]
        raise ValueError(
            f"unknown method {unknown[0]!r}: expected some of {', '.join(short)}; ours also with a layout, such as "
            f"'{OURS_PREFIX}auto Balanced'"
        )
    chosen = [known[name] for name in dict.fromkeys(names)]
    also = [replace(method, name=f"{method.name} compiled", compiled=True) for method in chosen]
    return [*chosen, *(also if compiled else ())]


class Trainer:
    """A model, its optimizer and its batch, which is the same in every step.

    FSDP2 averages gradients over the ranks, so each rank's loss is its sum of token losses times the number of ranks,
    divided by the tokens of all ranks.
    """

    def __init__(self, job: Job, method: TrainMethod, device: torch.device) -> None:
        self._case, self._method, self._device = job.case, method, device
        dtype = getattr(torch, job.case.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        with torch.device("meta"):
            model = Llama(
                job.size, is_causal=job.case.mask == "causal", contiguous=method.contiguous,
                checkpointed=job.checkpointed, offloaded=job.offloaded,
            ).to(wide)  # fmt: skip
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
        for layer in model.layers:
            if method.compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh_of_ranks(device.type), mp_policy=policy)
        fully_shard(model, mesh=mesh_of_ranks(device.type), mp_policy=policy)
        initialise(model.to_empty(device=device), job.seed)
        self.model = model
        self._optimizer = OPTIMIZERS[job.optimizer](model.parameters())
        self._tokens = tokens_of(job, device)
        self._share = dist.get_world_size() / (job.case.batch * job.case.seq_len)
        self.losses: list[torch.Tensor] = []
        """This rank's loss of each step; the mean over the ranks is that of all tokens."""

    def step(self) -> None:
        """Forward, backward and update."""
        self.forward_backward()
        self.update()

    def update(self) -> None:
        """Updates the weights and frees the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def forward_backward(self) -> None:
        """Computes the loss and the gradients."""
        tokens, labels = self._tokens[:, :-1].clone(), self._tokens[:, 1:].clone()
        positions = torch.arange(tokens.size(1), device=self._device).repeat(tokens.size(0), 1)
        with self._method.shards(self._case, self._device, (tokens, labels, positions)):
            loss = self.model(tokens, labels, positions) * self._share
            loss.backward()
        self.losses.append(loss.detach())

    def gradient_norm(self) -> float:
        """The norm of all gradients, on every rank."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def tokens_of(job: Job, device: torch.device) -> torch.Tensor:
    """(B, S + 1) random tokens, small ones more often, so that there is something to learn; equal on every rank."""
    generator = torch.Generator(device).manual_seed(job.seed)
    uniform = torch.rand(job.case.batch, job.case.seq_len + 1, generator=generator, device=device)
    return (uniform**3 * job.size.vocabulary).long()


@dataclass(frozen=True)
class Turn:
    """The steps of one method, of all ranks."""

    samples_ms: tuple[tuple[float, ...], ...]
    """The timed steps of each rank."""
    losses: tuple[float, ...]
    """Of every step, also of those before the timed ones."""
    gradient_norm: float
    """Of the first step."""
    peak_bytes: int | None
    """Peak memory of the timed steps on the rank that needs most, with parameters and workspaces; None on CPUs."""


def take_turn(job: Job, method: TrainMethod, ranks: Ranks, device: Device, *, warm: int, steps: int) -> Turn:
    """Trains a new model for `warm` steps (at least one) and `steps` timed ones.

    Raises:
        Failed: on every rank, if a step raised on any rank.
    """
    gc.collect()  # modules of former turns refer to themselves
    ranks.together(device.synchronize)
    device.free_unused()
    if method.compiled:
        torch.compiler.reset()  # methods would share Dynamo's limit of compilations, and their code
    trainers: list[Trainer] = []
    norms: list[float] = []

    def prepare() -> None:
        trainers.append(Trainer(job, method, device.torch_device))
        trainers[0].forward_backward()
        norms.append(trainers[0].gradient_norm())
        trainers[0].update()
        for _ in range(warm - 1):
            trainers[0].step()

    def timed() -> float:
        device.synchronize()
        dist.barrier()
        return device.time_ms(trainers[0].step)

    def run() -> tuple[int | None, tuple[float, ...]]:
        with method.settings(job.case, device.torch_device):
            samples: list[float] = []
            peak = device.extra_bytes(lambda: samples.extend(timed() for _ in range(steps)), prepare)
            return peak, tuple(samples)

    peaks, samples = zip(*ranks.together(run), strict=True)
    held = ranks.together(device.mapped_bytes)
    losses = ranks.together(lambda: [loss.item() for loss in trainers[0].losses])
    mean = tuple(sum(of_step) / len(of_step) for of_step in zip(*losses, strict=True))
    needed = [peak + more for peak, more in zip(peaks, held, strict=True) if peak is not None]
    return Turn(samples, mean, norms[0], max(needed, default=None))
