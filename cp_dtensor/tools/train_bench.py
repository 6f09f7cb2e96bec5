"""Training steps of a Llama with FSDP2, of this library and torch in turns; `python -m cp_dtensor train-bench`."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cp_dtensor.plan.cost import GPUS
from cp_dtensor.tools.bench import end
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.info import environment, gpu_name
from cp_dtensor.tools.llama import PRESETS, Llama, Size, initialise
from cp_dtensor.tools.measure import GroupLost, status_of
from cp_dtensor.tools.methods import splits_by_name
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    command_parser,
    mask_argument,
    positive,
    positive_number,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Failed, Ranks, start
from cp_dtensor.tools.report import (
    ERROR,
    MEASURED,
    NOTHING,
    OURS_PREFIX,
    REFUSED,
    TORCH_PREFIX,
    formatted,
    markdown_table,
    significant,
    slowest,
    spread,
)
from cp_dtensor.tools.torch_methods import (
    TORCH_RINGS,
    mesh_of_ranks,
    ring_refusal,
    ring_settings,
    torch_context_parallel,
)

_DESCRIPTION = """\
Measures whole training steps of a Llama-shaped model with FSDP2: this library's context parallel and torch's, in turns
in the same run. Exits with status 1 if their losses differ, a method failed, or none was measured.

    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 32768 131072 --compile
    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 131072 \\
        --mask "documents 2048" --layout Balanced --methods ours-auto ours-ulysses
    torchrun --nproc-per-node 2 -m cp_dtensor train-bench --preset toy --seq-lens 256 --device cpu --dtype float32
"""
_METHODS = ["torch-allgather", "torch-alltoall", "torch-allgather FA4", "ours-auto", "ours-symm_mem", "ours-ulysses"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Fused, as in TorchTitan. Small steps: without warm-up, those of 3e-4 make losses jump, and differences of rounding
    # grow to percents.
    "adamw": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Relative differences of losses and gradient norms up to which methods agree, by dtype."""


# Training


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

    @property
    def title(self) -> str:
        """The job in words."""
        size, case = self.size, self.case
        words = [f"{case.seq_len:,} tokens", f"{size.layers} layers of {size.dim:,}"]
        words += [f"{size.heads} query and {size.kv_heads} kv heads of {size.head_dim}", f"SwiGLU of {size.ffn:,}"]
        words += [f"vocabulary of {size.vocabulary:,}", case.mask, case.layout]
        words += [f"batch {case.batch}"] * (case.batch > 1) + [case.dtype, self.optimizer]
        words += ["checkpointing"] * (self.checkpointed or self.offloaded)
        return ", ".join(words + ["layer inputs in host memory"] * self.offloaded)


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
    """Return the methods of names such as "ours-auto Balanced" and "torch-allgather FA4", and compiled if asked for.

    Raises:
        ValueError: no method has one of the names.
    """
    known = {
        OURS_PREFIX + name: TrainMethod(OURS_PREFIX + name, split.context, split.refusal)
        for name, split in splits_by_name().items()
    }
    for ring in TORCH_RINGS:
        # The backward of torch's rings with cuDNN fails with tensors as models have them (see `torch_methods`).
        known[TORCH_PREFIX + ring] = TrainMethod(
            TORCH_PREFIX + ring, lambda _, device, buffers: torch_context_parallel(device, buffers), ring_refusal,
            partial(ring_settings, ring), contiguous=True,
        )  # fmt: skip
    if unknown := [name for name in names if name not in known]:
        short = [name for name in known if " " not in name or name.startswith(TORCH_PREFIX)]
        also = f"ours also with a layout, such as '{OURS_PREFIX}auto Balanced'"
        raise ValueError(f"unknown method {unknown[0]!r}: expected some of {', '.join(short)}; {also}")
    chosen = [known[name] for name in dict.fromkeys(names)]
    copies = [replace(method, name=f"{method.name} compiled", compiled=True) for method in chosen]
    return [*chosen, *(copies if compiled else ())]


class Trainer:
    """A model, its optimizer and its batch, which is the same in every step.

    FSDP2 averages gradients over the ranks, so each rank's loss is its sum of token losses times the number of ranks,
    divided by the tokens of all ranks.
    """

    def __init__(self, job: Job, method: TrainMethod, device: torch.device) -> None:
        self._case, self._method, self._device = job.case, method, device
        dtype, mesh = getattr(torch, job.case.dtype), mesh_of_ranks(device.type)
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
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        initialise(model.to_empty(device=device), job.seed)
        self._model, self._optimizer = model, OPTIMIZERS[job.optimizer](model.parameters())
        self._tokens = tokens_of(job, device)
        self._share = dist.get_world_size() / (job.case.batch * job.case.seq_len)
        self.losses: list[torch.Tensor] = []
        """This rank's loss of each step; the mean over the ranks is that of all tokens."""
        self.gradient_norm = float("nan")
        """Of the first step, of all gradients, on every rank."""

    def step(self) -> None:
        """Computes the loss and the gradients, updates the weights and frees the gradients."""
        tokens, labels = self._tokens[:, :-1].clone(), self._tokens[:, 1:].clone()
        positions = torch.arange(tokens.size(1), device=self._device).repeat(tokens.size(0), 1)
        with self._method.shards(self._case, self._device, (tokens, labels, positions)):
            loss = self._model(tokens, labels, positions) * self._share
            loss.backward()
        if not self.losses:
            norm = torch.nn.utils.get_total_norm(
                [each.grad for each in self._model.parameters() if each.grad is not None]
            )
            self.gradient_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        self.losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()


def tokens_of(job: Job, device: torch.device) -> torch.Tensor:
    """Draw (B, S + 1) tokens, equal on every rank; small ones more often, so that there is something to learn."""
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

    def prepare() -> None:
        trainers.append(Trainer(job, method, device.torch_device))
        for _ in range(warm):
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
    return Turn(samples, mean, trainers[0].gradient_norm, max(needed, default=None))


# Rows and report


@dataclass(frozen=True)
class TrainRow:
    """One method at one job."""

    job: Job
    method: str
    status: str
    """`MEASURED`, `REFUSED` or `ERROR`, as of attention's rows."""
    message: str = ""
    """Reason why there is no measurement."""
    turns: tuple[Turn, ...] = ()

    @property
    def slowest_ms(self) -> tuple[float, ...]:
        """The steps of all turns, of the rank with the largest median."""
        by_rank = zip(*(turn.samples_ms for turn in self.turns), strict=True)
        return slowest([sum(of_turns, ()) for of_turns in by_rank])

    @property
    def median_ms(self) -> float:
        """The slowest rank's median time of a step."""
        return statistics.median(self.slowest_ms)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.job.case.batch * self.job.case.seq_len / (self.median_ms * 1e-3)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory on the rank that needs most; None on CPUs."""
        return max((turn.peak_bytes for turn in self.turns if turn.peak_bytes is not None), default=None)


@dataclass(frozen=True)
class TrainResults:
    """All rows of a run, with hardware and versions (Markdown) and command line."""

    environment: str
    command: str
    world_size: int
    peak_tflops: float | None
    """Peak of a GPU, of which MFU is a part; None if it is not known."""
    rows: tuple[TrainRow, ...]

    def mfu_percent(self, row: TrainRow) -> float | None:
        """Return model FLOPs per second as a percentage of the peak of all GPUs."""
        case = row.job.case
        flops = row.job.size.step_flops(case.batch * case.seq_len, case.batch * case.pairs)
        peak = self.peak_tflops
        return None if peak is None else 100 * flops / row.median_ms / 1e9 / self.world_size / peak

    def _beside(self, row: TrainRow) -> list[TrainRow]:
        return [each for each in self.rows if each.job == row.job and each.status == MEASURED]

    def times_others(self, row: TrainRow) -> float | None:
        """Return the speedup over the fastest method that is not this library's, of those compiled like it."""
        compiled = row.method.endswith(" compiled")
        alike = [each for each in self._beside(row) if each.method.endswith(" compiled") == compiled]
        others = [each.median_ms for each in alike if not each.method.startswith(OURS_PREFIX)]
        return min(others) / row.median_ms if others else None

    def difference(self, row: TrainRow) -> float:
        """Return the largest relative difference of losses and gradient norms from the job's first measured turn."""
        first = self._beside(row)[0].turns[0]
        pairs = [(turn.gradient_norm, first.gradient_norm) for turn in row.turns]
        pairs += [pair for turn in row.turns for pair in zip(turn.losses, first.losses, strict=True)]
        differences = [abs(value - expected) / abs(expected) for value, expected in pairs]
        return max(differences, key=lambda each: each if each == each else float("inf"))  # NaN is the largest

    def disagreeing(self) -> list[TrainRow]:
        """Return the rows whose losses or gradient norms differ by more than their dtype explains."""
        measured = [row for row in self.rows if row.status == MEASURED]
        return [row for row in measured if not self.difference(row) <= TOLERANCES[row.job.case.dtype]]

    def to_json(self) -> str:
        """Return all rows as JSON, with the derived numbers."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        for row, shown in zip(self.rows, rows, strict=True):
            if row.status == MEASURED:
                shown |= {name: getattr(row, name) for name in ("median_ms", "tokens_per_second", "peak_bytes")}
                shown |= {name: getattr(self, name)(row) for name in ("mfu_percent", "times_others", "difference")}
                shown["spread_ms"] = spread(row.slowest_ms)
        return json.dumps({**vars(self), "rows": rows}, indent=1)


_COLUMNS = (
    "method", "ms", "20-80%", "tokens/s", "MFU %", "x torch", "peak GiB", "first loss", "last loss", "difference",
)  # fmt: skip
_EXPLANATION = """\
Times of whole training steps (forward, backward, update): medians of the slowest rank, with their 20th and 80th
percentiles, over the turns of a method. Methods take turns; each turn trains a new model with the same weights and
tokens. Parameters, gradients and optimizer state are sharded by FSDP2 over the ranks that share the sequence. tokens/s:
of all ranks. MFU: model FLOPs (6 for each token and matrix parameter, 12 for each pair that the mask allows, head,
layer and head dim; nothing that is computed again) as a part of the peak of all GPUs{peak}. x torch: speedup over the
fastest of torch's, compiled ones over compiled ones. Peak: memory in the timed steps of the rank that needs most, with
parameters and workspaces. Losses are the means over all tokens of the first step and the last. Difference: the largest
relative one of the losses of all steps, and of the norm of the first gradient, from those of the table's first method.
torch's context parallel gets attention inputs that are contiguous as (B, H, S, D), since its backward fails with
others, and has no mask of documents. `FA4`: after torch's `activate_flash_attention_impl("FA4")`. A name's second word
is the layout, where it is not that of the title."""


def train_markdown(results: TrainResults) -> str:
    """Return the report of a run."""
    peak = "" if results.peak_tflops is None else f", {results.peak_tflops:.0f} TFLOP/s each"
    title = f"# Training steps, {results.world_size} {'rank' if results.world_size == 1 else 'ranks'}"
    sections = [title, results.environment, f"`{results.command}`", _EXPLANATION.format(peak=peak)]
    for job in dict.fromkeys(row.job for row in results.rows):
        rows = [_cells(results, row) for row in results.rows if row.job == job]
        sections += [f"## {job.title}", markdown_table(_COLUMNS, rows)]
    return "\n\n".join(sections) + "\n"


def _cells(results: TrainResults, row: TrainRow) -> list[str]:
    if row.status != MEASURED:
        return [row.method, f"{row.status}: {row.message}", *[NOTHING] * (len(_COLUMNS) - 2)]
    low, high = map(significant, spread(row.slowest_ms))
    first, *_, last = row.turns[0].losses
    gib = None if row.peak_bytes is None else row.peak_bytes / 2**30
    return [
        row.method, significant(row.median_ms), f"{low}-{high}", f"{row.tokens_per_second:,.0f}",
        formatted(results.mfu_percent(row), "{:.1f}"), formatted(results.times_others(row), "{:.3f}"),
        formatted(gib, "{:.2f}"), f"{first:.4f}", f"{last:.4f}", f"{results.difference(row):.1e}",
    ]  # fmt: skip


# The command


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with a message if an option does not fit. Also has the jobs, methods and peak."""
    parser = command_parser("train-bench", _DESCRIPTION)
    what = parser.add_argument_group("model and methods").add_argument
    what("--preset", choices=PRESETS, default="1b", help="sizes; the next options change single ones")
    for field in dataclasses.fields(Size):
        what(f"--{field.name.replace('_', '-')}", type=positive)
    what("--seq-lens", type=positive, nargs="+", default=[32768], metavar="N", help="global lengths")
    what("--batch", type=positive, default=1)
    what("--dtype", choices=TOLERANCES, default="bfloat16", help="of forward and backward")
    what("--mask", type=mask_argument, nargs="+", default=["causal"], help=f"each a table: {MASK_HELP}")
    what("--layout", choices=LAYOUTS, default="HeadTail", help="partition of the tokens over the ranks")
    what("--optimizer", choices=OPTIMIZERS, default="adamw")
    what("--checkpoint", action="store_true", help="compute each layer again in backward")
    what("--offload", action="store_true", help="compute each layer again, from inputs in host memory")
    methods = "such as ours-auto 'ours-symm_mem Balanced' torch-allgather 'torch-allgather FA4'"
    what("--methods", nargs="+", default=_METHODS, metavar="NAME", help=methods)
    what("--compile", action="store_true", help="also measure every method with compiled layers")
    how = parser.add_argument_group("measurement").add_argument
    how("--rounds", type=positive, default=2, help="turns of each method")
    how("--steps", type=positive, default=5, help="timed steps of a turn")
    how("--warm-steps", type=positive, default=3, help="steps before them")
    how("--peak-tflops", type=positive_number, help="of a GPU, for MFU; default: the data sheet's, in bfloat16")
    how("--seed", type=int, default=0, help="of weights and tokens")
    how("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how("--timeout", type=positive_number, default=300, metavar="SECONDS", help="timeout of a collective")
    how("--output", type=Path, metavar="DIR", help="folder of train.json and train.md")
    options = parser.parse_args(arguments)
    options.use_gpu = uses_gpu(parser, options.device)
    if options.offload and options.compile:
        parser.error("--offload is for layers that are not compiled, got --compile too")
    changed = {field.name: getattr(options, field.name) for field in dataclasses.fields(Size)}
    size = replace(PRESETS[options.preset], **{name: value for name, value in changed.items() if value is not None})
    if size.dim % (2 * size.heads) or size.heads % size.kv_heads:
        got = f"dim {size.dim}, {size.heads} heads and {size.kv_heads} kv heads"
        parser.error(f"expected dim to be a multiple of 2 * heads, and heads of kv heads, got {got}")
    heads, given = Heads(size.heads, size.kv_heads), (options.optimizer, options.checkpoint, options.offload)
    cases = [
        Case(seq_len, heads, size.head_dim, options.batch, options.dtype, mask, options.layout, "auto")
        for mask, seq_len in product(options.mask, options.seq_lens)
    ]
    try:
        options.methods = train_methods(options.methods, options.compile)
        _ = [case.pairs for case in cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    options.jobs = list(dict.fromkeys(Job(size, case, *given, options.seed) for case in cases))
    name = gpu_name() if options.use_gpu and options.dtype in ("bfloat16", "float16") else None
    options.peak = options.peak_tflops or (None if name is None else GPUS[name].flops / 1e12)
    return options


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark of the command line; rank 0 prints a line for each turn, writes and prints the results."""
    options = parse_options(arguments)
    ranks, device, command = start("-m cp_dtensor train-bench", arguments, options.use_gpu, options.timeout)
    rows: dict[tuple[Job, str], TrainRow] = {}
    lost, folder = None, options.output

    def results() -> TrainResults:
        return TrainResults(environment(), command, ranks.world_size, options.peak, tuple(rows.values()))

    try:
        for row in _rows(options, ranks, device):
            rows[row.job, row.method] = row
            if ranks.rank:
                continue
            outcome = f"{row.median_ms:.4g} ms" if row.status == MEASURED else f"{row.status}: {row.message}"
            print(f"{row.job.title}: {row.method}: {outcome}", file=sys.stderr, flush=True)
            if folder is not None:  # so that a run that ends early keeps its rows
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "train.json").write_text(results().to_json() + "\n")
                (folder / "train.md").write_text(train_markdown(results()))
    except GroupLost as error:
        lost = error
    wrong = ", ".join(row.method for row in results().disagreeing())
    if ranks.rank == 0:
        print(train_markdown(results()), flush=True)
        if wrong:
            print(f"losses or gradient norms differ from the first method's: {wrong}", file=sys.stderr, flush=True)
    end(ranks, lost)
    statuses = {row.status for row in rows.values()}
    sys.exit(bool(wrong) or ERROR in statuses or MEASURED not in statuses)


def _rows(options: argparse.Namespace, ranks: Ranks, device: Device) -> Iterator[TrainRow]:
    """Yields each row after each turn of its method.

    Raises:
        GroupLost: no more can be measured.
    """
    for job in options.jobs:
        rows = {method.name: TrainRow(job, method.name, MEASURED) for method in options.methods}
        for _, method in product(range(options.rounds), options.methods):
            row, lost = rows[method.name], False
            if row.status != MEASURED:
                continue
            if (refusal := method.refusal(job.case, ranks.world_size)) is not None:
                row = replace(row, status=REFUSED, message=refusal)
            else:
                try:
                    turn = take_turn(job, method, ranks, device, warm=options.warm_steps, steps=options.steps)
                    row = replace(row, turns=(*row.turns, turn))
                except Failed as failure:
                    row = replace(row, status=status_of(failure), message=str(failure), turns=())
                    lost = not failure.alike
            rows[method.name] = row
            yield row
            if lost:
                raise GroupLost(f"{method.name}: {row.message}")
