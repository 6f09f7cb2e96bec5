"""Training of a small model on the text of Python's standard library, with data, context and tensor parallelism.

    torchrun --nproc-per-node 2 examples/train.py --config examples/configs/debug.toml --check-parity

`examples/configs/packed.toml` trains on packed documents, with different lengths in every step,
`examples/configs/hybrid.toml` a model of three gated delta nets to one attention layer, and
`examples/configs/sparse.toml` one with learned sparse attention. Every field of the configuration can be set on the
command line: `--training.seq_len 1024`. `--check-parity` trains the same model on the same samples once more, without
any parallelism, and compares the losses of the first steps.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import checkpoint
import torch
import torch.distributed as dist
from config import Config, ConfigError, load_config
from gated_delta_net import Hybrid
from llama import Llama
from metrics import Reporter
from packed_data import data_of
from parallelize import MeshRanks, OneRank, Ranks, parallelize
from sparse_attention import Sparse
from text_data import IGNORE, VOCAB_SIZE, Batch, Data, standard_library_text
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from validate import resolved

PARITY_STEPS = 10
# Largest allowed difference of a loss. Only the order of additions differs; bfloat16 runs are compared with float32.
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float64": 1e-10}


@dataclass(frozen=True)
class Learner:
    """Model and optimizer, which a training step changes, and the ranks."""

    model: Llama
    optimizer: torch.optim.Optimizer
    ranks: Ranks


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, over all ranks: mean loss per token and norm of the gradient, both scalars."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--config", help="TOML file; what it leaves out has the default in examples/config.py")
    parser.add_argument("--check-parity", action="store_true", help="compare with one rank; exit status 1 on failure")
    arguments, overrides = parser.parse_known_args()
    # With tensor parallelism the logits are a view; no code writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    try:
        config = resolved(load_config(arguments.config, overrides), int(os.environ.get("WORLD_SIZE", "1")))
        with process_group() as device:
            return run(config, device, arguments.check_parity)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"configuration: {error}", file=sys.stderr)
        return 2


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Opens the default process group, of torchrun's ranks or of this process alone; yields this rank's device."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= local_ranks:
        device, backend = torch.device("cuda", local_rank), "cuda:nccl,cpu:gloo"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.barrier()  # a rank that ends closes connections that others may still use
    dist.destroy_process_group()


def run(config: Config, device: torch.device, check_parity: bool) -> int:
    """Trains from the start, or from a checkpoint, to the last step; returns the exit status."""
    data = data_of(config, standard_library_text())
    check_same_text(data)
    origin = checkpoint.origin_of(config, data.fingerprint)
    ranks = MeshRanks(config.parallelism, device.type)
    compute_dtype = getattr(torch, config.training.mixed_precision_param)
    torch.set_default_dtype(torch.promote_types(compute_dtype, torch.float32))  # of weights and of RoPE's table
    learner = make_learner(config, ranks, device)
    start = checkpoint.step_to_load(config)
    if start >= config.training.steps:
        raise ConfigError(
            f"training.steps: expected more than the {start} steps of the checkpoint to go on from, got "
            f"{config.training.steps}; checkpoint.load_step 0 starts afresh"
        )
    announce(config, device, learner, start)
    if start:
        checkpoint.load(config, start, learner.model, learner.optimizer, origin)

    results: list[StepResult] = []
    with Reporter(config, dist.get_rank(), device, first_step=start + 1) as reporter:
        for step in range(start + 1, config.training.steps + 1):
            result = train_step(learner, data, config, step)
            results.append(result)
            reporter.step(step, result.loss, result.grad_norm, learning_rate(config, step))
            last = step == config.training.steps
            if config.checkpoint.enable and (last or step % config.checkpoint.interval == 0):
                checkpoint.save(config, step, learner.model, learner.optimizer, origin)
    if not check_parity:
        return 0
    return 0 if parity(config, device, data, origin, start, results[:PARITY_STEPS]) else 1


def make_learner(config: Config, ranks: Ranks, device: torch.device) -> Learner:
    """Makes the model, equal under any parallelism: every rank makes the whole model before it is sharded."""
    torch.manual_seed(config.training.seed)
    make = {"llama3": Llama, "hybrid": Hybrid, "sparse": Sparse}[config.model.name]
    model = make(config.model, VOCAB_SIZE, config.training.seq_len).to(device)
    if isinstance(ranks, MeshRanks):
        parallelize(model, ranks, config)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    return Learner(model, optimizer, ranks)


def train_step(learner: Learner, data: Data, config: Config, step: int) -> StepResult:
    """Trains one step on one global batch: forward, backward, clipping and update."""
    model, ranks, training = learner.model, learner.ranks, config.training
    device = model.freqs_cis.device
    for group in learner.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    learner.optimizer.zero_grad()

    batches = data.batches(
        step, training.global_batch_size, training.local_batch_size, ranks.data_rank, ranks.data_ranks
    )
    tokens_to_learn = ranks.sum_over_samples(count_tokens_to_learn(batches).to(device))
    local_loss = torch.zeros((), device=device)
    for batch in batches:
        here = batch.to(device)
        with ranks.shard_sequence(here) as attn_mask:
            # Divided by the number of tokens of all ranks, so that the sum over ranks is the mean under any layout.
            loss = sum_of_token_losses(model(here.tokens, here.positions, attn_mask), here.labels)
            loss = (loss + model.index_loss) / tokens_to_learn
            loss.backward()
        local_loss += loss.detach()

    grad_norm = clip_gradients(model, training.max_norm)
    learner.optimizer.step()
    return StepResult(ranks.sum_over_tokens(local_loss), grad_norm)


def count_tokens_to_learn(batches: list[Batch]) -> torch.Tensor:
    return torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum()


def sum_of_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (B, S, vocab) logits with (B, S) labels, summed over tokens, in float32 at least."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips gradients to `max_norm` (0: no clipping); returns the norm of the whole gradient before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def learning_rate(config: Config, step: int) -> float:
    """The learning rate: linear warmup, then decay to `min_lr_factor` of the peak at the last step."""
    schedule, peak = config.lr_scheduler, config.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(config.training.steps - schedule.warmup_steps, 1)
    remaining = 1 - progress if schedule.decay_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining)


def parity(
    config: Config,
    device: torch.device,
    data: Data,
    origin: checkpoint.Origin,
    start: int,
    results: list[StepResult],
) -> bool:
    """Runs `compare_with_one_rank` on rank 0; returns its result on all ranks."""
    verdict = [True]
    if dist.get_rank() == 0:
        verdict = [compare_with_one_rank(config, device, data, origin, start, results)]
    dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def compare_with_one_rank(
    config: Config,
    device: torch.device,
    data: Data,
    origin: checkpoint.Origin,
    start: int,
    results: list[StepResult],
) -> bool:
    """Repeats the steps after `start` without parallelism; prints and returns whether the losses agree."""
    alone = make_learner(config, OneRank(), device)
    if start:
        checkpoint.load(config, start, alone.model, alone.optimizer, origin, one_rank=True)
    pairs = [(result, train_step(alone, data, config, start + n)) for n, result in enumerate(results, start=1)]
    loss_difference = max(abs(ours.loss - theirs.loss).item() for ours, theirs in pairs)
    norm_difference = max(abs(ours.grad_norm / theirs.grad_norm - 1).item() for ours, theirs in pairs)
    tolerance = PARITY_TOLERANCE[config.training.mixed_precision_param]
    holds = loss_difference <= tolerance
    print(
        f"parity {'holds' if holds else 'FAILS'}: over steps {start + 1} to {start + len(results)}, the loss differs "
        f"from that of one rank by at most {loss_difference:.1e} (tolerance {tolerance:.0e}), the norm of the gradient "
        f"by a factor of at most 1 + {norm_difference:.1e}",
        flush=True,
    )
    return holds


def check_same_text(data: Data) -> None:
    """Refuses ranks on machines whose standard libraries differ: they would train on different text."""
    fingerprints: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(fingerprints, data.fingerprint)
    if len(set(fingerprints)) > 1:
        raise ConfigError(f"expected the same Python on all machines, got texts with checksums {fingerprints} per rank")


def announce(config: Config, device: torch.device, learner: Learner, start: int) -> None:
    if dist.get_rank() != 0:
        return
    degrees, training = config.parallelism, config.training
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    if device.type == "cpu" and torch.cuda.is_available():
        print(f"CPU: there are only {torch.cuda.device_count()} GPUs for {os.environ['LOCAL_WORLD_SIZE']} local ranks")
    print(
        f"{parameters / 1e6:.2f} M parameters on {dist.get_world_size()} {device.type} ranks: "
        f"dp_shard {degrees.data_parallel_shard_degree} x cp {degrees.context_parallel_degree} "
        f"({degrees.context_parallel_rotate_method}, {degrees.context_parallel_load_balancer}) x "
        f"tp {degrees.tensor_parallel_degree}; {training.global_batch_size} samples of {training.seq_len} tokens a step"
        + (f", packed documents ({config.packing.documents})" if config.packing.documents != "none" else "")
        + (f"; going on from step {start}" if start else ""),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
