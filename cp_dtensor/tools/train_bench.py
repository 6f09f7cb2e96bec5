"""Training steps of a Llama with FSDP2, of this library beside torch; `python -m cp_dtensor train-bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cp_dtensor import GPUS
from cp_dtensor.tools.cases import Case, Heads, Method
from cp_dtensor.tools.command import cases_and_methods, measure_all, measuring_parser, parsed
from cp_dtensor.tools.measure import Suite, compare
from cp_dtensor.tools.parsing import positive
from cp_dtensor.tools.report import ERROR, MEASURED, Row, gpu_name
from cp_dtensor.tools.torch_methods import mesh_of_ranks

_DESCRIPTION = """\
Measures whole training steps of a Llama-shaped model with FSDP2: this library's context parallel and torch's, in the
same run. Prints a table for each job. Exits with status 1 if their losses differ, a method failed, or none was
measured.

    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 32768 131072 --compile
    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 131072 \\
        --mask "documents 2048" --methods "ours-auto Balanced" "ours-ulysses Balanced"
    torchrun --nproc-per-node 2 -m cp_dtensor train-bench --preset toy --seq-lens 256 --device cpu --dtype float32

Each method trains a new model with the same weights and tokens. Parameters, gradients and optimizer state are sharded
by FSDP2 over the ranks that share the sequence. Columns are those of docs/benchmarks/README.md, for whole steps
(forward, backward, update). tflops: model FLOPs of a GPU (6 for each token and matrix parameter, 12 for each pair that
the mask allows, head, layer and head dim; nothing that is computed again), mfu_percent: of its peak. times_others:
speedup over the fastest of torch's. Losses are the means over all tokens. difference: the largest relative one of the
losses of all steps, and of the norm of the first gradient, from those of the first method. torch's context parallel
gets attention inputs that are contiguous as (B, H, S, D), since its backward fails with others, and has no mask of
documents.
"""
_DEFAULTS: dict[str, Any] = {
    "seq_lens": [32768], "repeats": 10, "check_up_to": 0, "methods": [
        "torch-allgather", "torch-alltoall", "torch-allgather FA4", "ours-auto", "ours-symm_mem", "ours-ulysses",
    ],
}  # fmt: skip
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Relative differences of losses and gradient norms up to which methods agree, by dtype."""
_ROPE_THETA = 500_000.0
_LOSS_TOKENS = 8192
"""Tokens whose logits are in memory at once: 4 GiB in float32 with a vocabulary of 128,256."""
_DIFFERS = "losses or gradient norms differ from the first method's"


# Model: RMSNorm, RoPE, grouped-query attention, SwiGLU. B batch, S sequence, H query heads, D head dim


@dataclass(frozen=True)
class Size:
    """Size of a model; `ffn` is the width of the SwiGLU."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """Dim of an attention head."""
        return self.dim // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: all but the embeddings and the norms.

        >>> f"{PRESETS['8b-layers'].matmul_parameters / 8:.3g}, with 1/8 of the head"
        '2.84e+08, with 1/8 of the head'
        """
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.ffn) + self.dim * self.vocabulary

    def step_flops(self, tokens: int, pairs: int) -> float:
        """Return model FLOPs of forward and backward: 6 for each token and parameter, 12 D for each pair, head, layer.

        What is computed again (in backward of attention, checkpointed layers and the loss) does not count. Source:
        PaLM, https://arxiv.org/abs/2204.02311, appendix B, which counts masked pairs too.

        Args:
            tokens: of all ranks.
            pairs: (query, key) pairs that the mask allows, of one head.
        """
        return 6.0 * tokens * self.matmul_parameters + 12.0 * self.layers * self.heads * self.head_dim * pairs


PRESETS: Mapping[str, Size] = MappingProxyType(
    {
        "toy": Size(2, 64, 4, 2, 128, 256),
        "1b": Size(16, 2048, 32, 8, 8192, 128_256),  # Llama 3.2 1B, with an output matrix of its own
        "8b-layers": Size(8, 4096, 32, 8, 14_336, 128_256),  # 8 of the 32 layers of Llama 3.1 8B
    }
)
"""Sizes by name."""


class Llama(nn.Module):
    """The loss of next-token prediction, with the same weights on every rank.

    Args:
        size: of the model.
        is_causal: argument of SDPA; False if a context has the mask.
        contiguous: True to pass attention contiguous (B, H, S, D) tensors, and such gradients.
        checkpointed: True to compute each layer again in backward.
    """

    def __init__(self, size: Size, **of_layers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(Layer(size, **of_layers) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Return the sum of the token losses of (B, S) tokens and their labels at their global positions."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        pieces = zip(x.flatten(0, 1).split(_LOSS_TOKENS), labels.flatten().split(_LOSS_TOKENS), strict=True)
        if labels.numel() <= _LOSS_TOKENS:
            return self._loss(*next(pieces))
        return torch.stack([checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]).sum()

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels, reduction="sum")


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, and feed-forward, each after a norm and added to its input."""

    def __init__(self, size: Size, *, is_causal: bool, contiguous: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.head_dim, self.is_causal, self.contiguous = size.head_dim, is_causal, contiguous
        self.checkpointed = checkpointed
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.dim, eps=1e-5) for _ in range(2))
        self.wq = nn.Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(size.heads * size.head_dim, size.dim, bias=False)
        self.w1, self.w3 = (nn.Linear(size.dim, size.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the (B, S, dim) rows after this layer."""
        # Inside of the module, which FSDP2 wraps: it gathers the weights once for both computations.
        return (
            checkpoint(self._rows, x, positions, use_reentrant=False) if self.checkpointed else self._rows(x, positions)
        )

    def _rows(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x), positions)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        q_BSHD, k_BSHD, v_BSHD = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (rotated(q_BSHD, positions), rotated(k_BSHD, positions), v_BSHD))
        if self.contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        # Looked up at each call, since torch's context parallel replaces it.
        out_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)
        if self.contiguous:
            out_BHSD = _ContiguousGradient.apply(out_BHSD)
        return self.wo(out_BHSD.transpose(1, 2).flatten(2))


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def rotated(x_BSHD: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE at (B, S) positions, in float32 at least: halves of a head are the pairs' first and second numbers."""
    exact = x_BSHD.to(torch.promote_types(x_BSHD.dtype, torch.float32))
    first, second = exact.chunk(2, -1)
    pairs = torch.arange(first.size(-1), device=exact.device, dtype=exact.dtype)
    angles = (positions[..., None] * _ROPE_THETA ** (-pairs / first.size(-1)))[:, :, None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(x_BSHD)


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
        with device:
            causal = job.case.mask == "causal"
            model = Llama(job.size, is_causal=causal, contiguous=method.contiguous, checkpointed=job.checkpointed)
        model = model.to(wide)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
        for layer in model.layers:
            if method.compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self._model, self._optimizer = model, optimizer_of(model)
        self._tokens = tokens_of(job, device)
        self._share = dist.get_world_size() / (job.case.batch * job.case.seq_len)
        self.results: list[Tensor] = []
        """Norm of the first step's gradients, then this rank's losses, whose means over the ranks are of all tokens."""

    def step(self) -> None:
        """Compute the loss and the gradients, update the weights and free the gradients."""
        tokens, labels = self._tokens[:, :-1].clone(), self._tokens[:, 1:].clone()
        positions = torch.arange(tokens.size(1), device=self._device).repeat(tokens.size(0), 1)
        assert self._method.shards is not None
        with self._method.shards(self._case, self._device, [tokens, labels, positions]):
            loss = self._model(tokens, labels, positions) * self._share
            loss.backward()
        if not self.results:
            norm = nn.utils.get_total_norm([x.grad for x in self._model.parameters() if x.grad is not None])
            self.results.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.results.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return a fused AdamW, as in TorchTitan.

    Its steps are small: without warm-up, those of 3e-4 make losses jump, and differences of rounding grow to percents.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def tokens_of(job: Job, device: torch.device) -> Tensor:
    """Draw (B, S + 1) tokens, equal on every rank; small ones more often, so that there is something to learn."""
    generator = torch.Generator(device).manual_seed(0)
    uniform = torch.rand(job.case.batch, job.case.seq_len + 1, generator=generator, device=device)
    return (uniform**3 * job.size.vocabulary).long()


def measure_job(methods: Sequence[Method], job: Job, suite: Suite, rows: list[Row]) -> None:
    """Add the rows of a job.

    Raises:
        Failed: ranks failed differently, so that no more can be measured. The rows so far are there.
    """
    first, reference = len(rows), list[float]()
    for method in methods:
        rows.append({**job.columns(), "layout": method.layout_column, "method": method.name})
        suite.attempt(job.title, rows[-1], partial(train, job, method, suite, reference))
    compare(rows[first:])


def train(job: Job, method: Method, suite: Suite, reference: list[float]) -> Row:
    """Train a new model; return the numbers of its row.

    `reference` has the first gradient norm and the losses of the first method, and gets them from it.

    Raises:
        Failed: on every rank, if a step raised on any rank.
    """
    case, ranks, device = job.case, suite.ranks, suite.device.torch_device
    with ExitStack() as stack:
        before = suite.begin(method)

        def prepare() -> Trainer:
            stack.enter_context(method.context(case, device))
            trainer = Trainer(job, method, device)
            trainer.step()  # compiles, and makes plans
            return trainer

        trainer = ranks.on_each(prepare)
        assert trainer is not None
        numbers = suite.measure(trainer.step, before=before)
    by_rank = ranks.together(lambda: [each.item() for each in trainer.results])
    found = [sum(each) / len(each) for each in zip(*by_rank, strict=True)]
    reference.extend(() if reference else found)
    differs, seconds = difference(found, reference), numbers["median_ms"] / 1e3
    tflops = job.size.step_flops(case.batch * case.seq_len, case.batch * case.pairs) / seconds / ranks.world_size / 1e12
    gpu = gpu_name() if case.dtype in ("bfloat16", "float16") else None
    return {
        **numbers, "tflops": tflops, "mfu_percent": None if gpu is None else 1e14 * tflops / GPUS[gpu].flops,
        "tokens_per_second": case.batch * case.seq_len / seconds, "times_others": None,
        "first_loss": f"{found[1]:.4f}", "last_loss": f"{found[-1]:.4f}", "difference": differs,
        "message": None if differs <= TOLERANCES[case.dtype] else _DIFFERS,
    }  # fmt: skip


def difference(found: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of numbers that both have; NaN if there is one."""
    pairs = torch.tensor([*zip(found, reference, strict=False)], dtype=torch.float64)
    return (pairs[:, 0] / pairs[:, 1] - 1).abs().max().item()


# The command


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exit with a message if an option does not fit. Also has the jobs and methods."""
    parser = measuring_parser("train-bench", _DESCRIPTION)
    parser.add_argument("--preset", choices=PRESETS, default="1b", help="sizes of the model")
    parser.add_argument("--layers", type=positive, help="another number of layers than that of the preset")
    parser.add_argument("--checkpoint", action="store_true", help="compute each layer again in backward")
    parser.add_argument("--compile", action="store_true", help="also measure every method with compiled layers")
    options = parsed(parser, arguments, **_DEFAULTS)
    size = PRESETS[options.preset]
    size = replace(size, layers=options.layers or size.layers)
    heads = Heads(size.heads, size.kv_heads, size.head_dim)
    cases = cases_and_methods(parser, options, compiled="", heads=[heads])
    if without := [method.name for method in options.methods if method.shards is None]:
        parser.error(f"--methods: {without[0]} is attention alone, without a context for models")
    options.jobs = [Job(size, case, options.checkpoint) for case in cases]
    return options


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark of the command line; rank 0 prints a line for each method, and the results."""
    options = parse_options(arguments)

    measure = partial(measure_job, options.methods)
    rows = measure_all("-m cp_dtensor train-bench", arguments, options, options.jobs, measure)
    measured = [row for row in rows if row["status"] == MEASURED]
    sys.exit(not measured or any(row["status"] == ERROR or row["message"] == _DIFFERS for row in rows))
