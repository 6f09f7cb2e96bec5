"""Training steps of a Llama with FSDP2, of this library and torch in turns; `python -m cp_dtensor train-bench`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cp_dtensor import GPUS
from cp_dtensor.tools.cases import Case, Heads, Method, grid
from cp_dtensor.tools.info import gpu_name
from cp_dtensor.tools.llama import PRESETS, Llama, Size, initialise
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import (
    MASK_HELP,
    command_parser,
    mask_argument,
    positive,
    positive_number,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row, measure_all, times_of
from cp_dtensor.tools.torch_methods import mesh_of_ranks

_DESCRIPTION = """\
Measures whole training steps of a Llama-shaped model with FSDP2: this library's context parallel and torch's, in turns
in the same run. Prints a table for each job. Exits with status 1 if their losses differ, a method failed, or none was
measured.

    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 32768 131072 --compile
    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 131072 \\
        --mask "documents 2048" --methods "ours-auto Balanced" "ours-ulysses Balanced"
    torchrun --nproc-per-node 2 -m cp_dtensor train-bench --preset toy --seq-lens 256 --device cpu --dtype float32

Columns: median, 20th and 80th percentile (low, high) of whole steps (forward, backward, update) of the slowest rank,
over the turns of a method. Each turn trains a new model with the same weights and tokens. Parameters, gradients and
optimizer state are sharded by FSDP2 over the ranks that share the sequence. tokens_per_second: of all ranks. tflops:
model FLOPs of a GPU (6 for each token and matrix parameter, 12 for each pair that the mask allows, head, layer and head
dim; nothing that is computed again), mfu_percent: of its peak. times_torch: speedup over the fastest of torch's,
compiled ones over compiled ones. mib: peak memory in the timed steps of the rank that needs most, with parameters and
workspaces. Losses are the means over all tokens. difference: the largest relative one of the losses of all steps, and
of the norm of the first gradient, from those of the first method. torch's context parallel gets attention inputs that
are contiguous as (B, H, S, D), since its backward fails with others, and has no mask of documents.
"""
_METHODS = ["torch-allgather", "torch-alltoall", "torch-allgather FA4", "ours-auto", "ours-symm_mem", "ours-ulysses"]
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Relative differences of losses and gradient norms up to which methods agree, by dtype."""
_DIFFERS = "losses or gradient norms differ from the first method's"


# Training


@dataclass(frozen=True)
class Job:
    """A training problem of all ranks together: a model, its attention, and what is computed again in backward."""

    size: Size
    case: Case
    checkpointed: bool = False

    def columns(self) -> Row:
        """Return the job as columns of a row."""
        note = f"{self.size.layers} layers of {self.size.dim} and {self.size.ffn}"
        return {**self.case.columns(), "pass": "step", "note": note + "; checkpointing" * self.checkpointed}

    @property
    def title(self) -> str:
        """The job in words."""
        return f"{self.case.title}, {self.columns()['note']}"


class Trainer:
    """A model, its optimizer and its batch, which is the same in every step.

    FSDP2 averages gradients over the ranks, so each rank's loss is its sum of token losses times the number of ranks,
    divided by the tokens of all ranks.
    """

    def __init__(self, job: Job, method: Method, device: torch.device) -> None:
        self._case, self._method, self._device = job.case, method, device
        dtype, mesh = getattr(torch, job.case.dtype), mesh_of_ranks(device.type)
        wide = torch.promote_types(dtype, torch.float32)
        with torch.device("meta"):
            causal = job.case.mask == "causal"
            model = Llama(job.size, is_causal=causal, contiguous=method.contiguous, checkpointed=job.checkpointed)
        model = model.to(wide)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
        for layer in model.layers:
            if method.compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        initialise(model.to_empty(device=device))
        self._model, self._optimizer = model, optimizer_of(model)
        self._tokens = tokens_of(job, device)
        self._share = dist.get_world_size() / (job.case.batch * job.case.seq_len)
        self.losses: list[torch.Tensor] = []
        """This rank's loss of each step; the mean over the ranks is that of all tokens."""
        self.gradient_norm = float("nan")
        """Of the first step, of all gradients, on every rank."""

    def step(self) -> None:
        """Compute the loss and the gradients, update the weights and free the gradients."""
        tokens, labels = self._tokens[:, :-1].clone(), self._tokens[:, 1:].clone()
        positions = torch.arange(tokens.size(1), device=self._device).repeat(tokens.size(0), 1)
        assert self._method.shards is not None
        with self._method.shards(self._case, self._device, [tokens, labels, positions]):
            loss = self._model(tokens, labels, positions) * self._share
            loss.backward()
        if not self.losses:
            norm = torch.nn.utils.get_total_norm([x.grad for x in self._model.parameters() if x.grad is not None])
            self.gradient_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        self.losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return a fused AdamW, as in TorchTitan.

    Its steps are small: without warm-up, those of 3e-4 make losses jump, and differences of rounding grow to percents.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def tokens_of(job: Job, device: torch.device) -> torch.Tensor:
    """Draw (B, S + 1) tokens, equal on every rank; small ones more often, so that there is something to learn."""
    generator = torch.Generator(device).manual_seed(0)
    uniform = torch.rand(job.case.batch, job.case.seq_len + 1, generator=generator, device=device)
    return (uniform**3 * job.size.vocabulary).long()


class Turn(NamedTuple):
    """The steps of one method, of all ranks."""

    samples_ms: list[list[float]]
    """The timed steps of each rank."""
    losses: list[float]
    """Of every step, also of those before the timed ones."""
    gradient_norm: float
    """Of the first step."""
    peak_bytes: int | None
    """Peak memory of the timed steps on the rank that needs most, with parameters and workspaces; None on CPUs."""


def take_turn(job: Job, method: Method, ranks: Ranks, device: Device, *, warm: int, steps: int) -> Turn:
    """Train a new model for `warm` steps (at least one) and `steps` timed ones.

    Raises:
        Failed: on every rank, if a step raised on any rank.
    """
    gc.collect()  # modules of former turns refer to themselves
    ranks.together(device.synchronize)
    device.free_unused()
    if method.compiled:
        torch.compiler.reset()  # methods would share Dynamo's limit of compilations, and their code
    trainers: list[Trainer] = []

    def prepare() -> None:
        trainers.append(Trainer(job, method, device.torch_device))
        for _ in range(warm):
            trainers[0].step()

    def timed() -> float:
        device.synchronize()
        dist.barrier()
        return device.time_ms(trainers[0].step)

    def run() -> tuple[int | None, list[float]]:
        with method.context(job.case, device.torch_device):
            samples: list[float] = []
            return device.extra_bytes(lambda: samples.extend(timed() for _ in range(steps)), prepare), samples

    peaks, samples = zip(*ranks.together(run), strict=True)
    losses = ranks.together(lambda: [loss.item() for loss in trainers[0].losses])
    mean = [sum(of_step) / len(of_step) for of_step in zip(*losses, strict=True)]
    return Turn([*samples], mean, trainers[0].gradient_norm, max(filter(None, peaks), default=None))


# Rows


def rows_of(job: Job, turns: dict[str, list[Turn]], ranks: int) -> list[Row]:
    """Return a row for each method, of its turns."""
    rows: list[Row] = []
    case, gpu = job.case, gpu_name() if job.case.dtype in ("bfloat16", "float16") else None
    flops = job.size.step_flops(case.batch * case.seq_len, case.batch * case.pairs)
    for name, of_method in turns.items():
        by_rank = zip(*(turn.samples_ms for turn in of_method), strict=True)
        times = times_of([[*chain.from_iterable(of_rank)] for of_rank in by_rank])
        tflops = flops / times["median_ms"] / ranks / 1e9
        memory = [turn.peak_bytes / 2**20 for turn in of_method if turn.peak_bytes is not None]
        differs = difference(of_method, next(iter(turns.values()))[0])
        rows.append(
            {
                "method": name, "status": MEASURED, **times, "tflops": tflops,
                "mfu_percent": None if gpu is None else 1e14 * tflops / GPUS[gpu].flops,
                "tokens_per_second": 1e3 * case.batch * case.seq_len / times["median_ms"], "times_torch": None,
                "mib": max(memory, default=None), "first_loss": f"{of_method[0].losses[0]:.4f}",
                "last_loss": f"{of_method[0].losses[-1]:.4f}", "difference": differs,
                "message": None if differs <= TOLERANCES[case.dtype] else _DIFFERS,
            }
        )  # fmt: skip
    for row in rows:
        compiled = row["method"].endswith(" compiled")
        torchs = [each for each in rows if each["method"].startswith("torch-")]
        alike = [each["median_ms"] for each in torchs if each["method"].endswith(" compiled") == compiled]
        row["times_torch"] = min(alike) / row["median_ms"] if alike else None
    return rows


def difference(turns: Sequence[Turn], reference: Turn) -> float:
    """Return the largest relative difference of losses and gradient norms of turns; NaN if there is one."""
    found, expected = (
        torch.tensor([[x.gradient_norm, *x.losses] for x in each], dtype=torch.float64) for each in (turns, [reference])
    )
    return ((found - expected) / expected).abs().max().item()


# The command


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exit with a message if an option does not fit. Also has the jobs and methods."""
    parser = command_parser("train-bench", _DESCRIPTION)
    what = parser.add_argument_group("model and methods").add_argument
    what("--preset", choices=PRESETS, default="1b", help="sizes of the model")
    what("--layers", type=positive, help="another number of layers than that of the preset")
    what("--seq-lens", type=positive, nargs="+", default=[32768], metavar="N", help="global lengths")
    what("--batch", type=positive, default=1)
    what("--dtype", choices=TOLERANCES, default="bfloat16", help="of forward and backward")
    what("--mask", type=mask_argument, nargs="+", default=["causal"], help=f"each a table: {MASK_HELP}")
    what("--checkpoint", action="store_true", help="compute each layer again in backward")
    methods = "such as ours-auto 'ours-symm_mem Balanced' torch-allgather 'torch-allgather FA4'"
    what("--methods", nargs="+", default=_METHODS, metavar="NAME", help=methods)
    what("--compile", action="store_true", help="also measure every method with compiled layers")
    how = parser.add_argument_group("measurement").add_argument
    how("--rounds", type=positive, default=2, help="turns of each method")
    how("--steps", type=positive, default=5, help="timed steps of a turn")
    how("--warm-steps", type=positive, default=3, help="steps before them")
    how("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how("--timeout", type=positive_number, default=300, metavar="SECONDS", help="timeout of a collective")
    how("--output", type=Path, metavar="FILE", help="CSV file of all rows")
    options = parser.parse_args(arguments)
    options.use_gpu = uses_gpu(parser, options.device)
    size = PRESETS[options.preset]
    size = replace(size, layers=options.layers or size.layers)
    cases = grid(
        heads=[Heads(size.heads, size.kv_heads, size.head_dim)], mask=options.mask, seq_len=options.seq_lens,
        batch=[options.batch], dtype=[options.dtype],
    )  # fmt: skip
    try:
        options.methods = methods_by_name(options.methods)
        if without := [method.name for method in options.methods if method.shards is None]:
            raise ValueError(f"--methods: {without[0]} is attention alone, without a context for models")
        _ = [case.pairs for case in cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    if options.compile:
        options.methods += [replace(each, name=f"{each.name} compiled", compiled=True) for each in options.methods]
    options.jobs = [Job(size, case, options.checkpoint) for case in cases]
    return options


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark of the command line; rank 0 prints a line for each turn, and the results."""
    options = parse_options(arguments)

    def measure(job: Job, ranks: Ranks, device: Device, rows: list[Row]) -> None:
        _measure(job, options, ranks, device, rows)

    rows = measure_all("-m cp_dtensor train-bench", arguments, options, options.jobs, measure)
    measured = [row for row in rows if row["status"] == MEASURED]
    sys.exit(not measured or any(row["status"] == ERROR or row["message"] == _DIFFERS for row in rows))


def _measure(job: Job, options: argparse.Namespace, ranks: Ranks, device: Device, rows: list[Row]) -> None:
    """Add the rows of a job.

    Raises:
        Failed: ranks failed differently, so that no more can be measured. The rows so far are there.
    """
    turns: dict[str, list[Turn]] = {}
    others: dict[str, Row] = {}
    lost: Failed | None = None
    for _, method in product(range(options.rounds), options.methods):
        name = method.name
        if name in others or lost is not None:
            continue
        if refusal := method.refusal(job.case, ranks.world_size):
            others[name] = {"status": REFUSED, "message": refusal}
            continue
        try:
            turn = take_turn(job, method, ranks, device, warm=options.warm_steps, steps=options.steps)
            turns.setdefault(name, []).append(turn)
            outcome = f"{times_of(turn.samples_ms)['median_ms']:.4g} ms"
        except Failed as failure:
            turns.pop(name, None)
            others[name] = {"status": REFUSED if failure.is_refusal else ERROR, "message": str(failure)}
            outcome, lost = str(failure), None if failure.alike else failure
        if ranks.rank == 0:
            print(f"{job.title}, {name}: {outcome}", file=sys.stderr, flush=True)
    found = [*rows_of(job, turns, ranks.world_size), *({"method": name, **other} for name, other in others.items())]
    layouts = {each.name: each.layout_column for each in options.methods}
    rows += [{**job.columns(), "layout": layouts[row["method"]], **row} for row in found]
    if lost is not None:
        raise lost
