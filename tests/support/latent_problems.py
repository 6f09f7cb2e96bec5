"""Problems of multi-head latent attention, and their results on one device in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Layout, context_parallel_mla
from support.masked_checks import place
from support.masked_problems import MaskedProblem, Tensors
from support.problems import assert_close, normals, shard
from support.ranks import run_ranks

NAMES = ("out", "dq", "d latent", "d k_rope", "lse")


def keys_and_values(latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor, heads: int, head_dim: int) -> Tensors:
    """Returns k and v of every head by the definition, head by head."""
    plain = head_dim - k_rope.size(2)
    weights = up.view(heads, -1, up.size(1))
    k = [torch.cat((latent @ each[:plain].T, k_rope), -1) for each in weights]
    v = [latent @ each[plain:].T for each in weights]
    return torch.stack(k, 1), torch.stack(v, 1)


@dataclass(frozen=True)
class LatentProblem(MaskedProblem):
    """A problem in global terms; `head_dim` is Dn + Dr, and `q_heads` are all heads."""

    q_heads: int = 3
    head_dim: int = 5
    rotary_dim: int = 2
    value_dim: int = 4
    latent_dim: int = 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.q_heads)

    def draw(self, seed: int) -> Tensors:
        """Draws q, latent, k_rope, up, the gradient of out, and the bias if there is one; equal on every rank."""
        normal = normals(seed)
        rows = self.q_heads * (self.head_dim - self.rotary_dim + self.value_dim)
        _, _, _, _, *bias = super().draw(seed)
        return (
            normal(self.batch, self.q_heads, self.q_len, self.head_dim),
            normal(self.batch, self.kv_len, self.latent_dim),
            normal(self.batch, self.kv_len, self.rotary_dim),
            normal(rows, self.latent_dim),
            normal(self.batch, self.q_heads, self.q_len, self.value_dim),
            *bias,
        )

    def results(self, tensors: Tensors, sinks: torch.Tensor | None = None) -> tuple[Tensors, torch.Tensor]:
        """Returns (out, dq, d latent, d k_rope, lse), and d up."""
        q, *leaves, grad_out = (tensor.clone().requires_grad_() for tensor in tensors[:5])
        kv = keys_and_values(*leaves, self.q_heads, self.head_dim)
        found = self.reference(q.detach(), *(x.detach() for x in kv), grad_out.detach(), *tensors[5:], sinks=sinks)
        out, dq, dk, dv, lse = found[:5]
        of_latent, of_rope, of_up = torch.autograd.grad(kv, leaves, (dk, dv))
        return (out, dq, of_latent, of_rope, lse), of_up

    def shards(self, tensors: Tensors, layout: Layout, rank: int, size: int) -> Tensors:
        """Returns a rank's shards of the tensors of `draw`; `up` is whole."""
        q, latent, k_rope, up, grad_out, *bias = tensors
        return (
            shard(q, layout, rank, size),
            shard(latent, layout, rank, size, 1),
            shard(k_rope, layout, rank, size, 1),
            up.clone(),
            shard(grad_out, layout, rank, size),
            *(self.shard_bias(each, layout, rank, size) for each in bias),
        )


@dataclass(frozen=True)
class LatentCase:
    """Problem with a layout and options of the call."""

    problem: LatentProblem
    layout: Layout
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


def _attend(rank: int, cases: list[LatentCase], shape: tuple[int, ...], names: tuple[str, ...]) -> list[Any]:
    """Returns this rank's rank in the sequence, its results as `LatentProblem.results`, and its share of d up."""
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=names), []
    here = place(list(mesh.get_coordinate() or []), names, shape)
    for case in cases:
        problem = case.problem
        q, latent, k_rope, up, grad_out, *bias = problem.shards(problem.draw(case.seed), case.layout, here, mesh.size())
        leaves = [tensor.requires_grad_() for tensor in (q, latent, k_rope, up)]
        out, lse = context_parallel_mla(
            q, latent, k_rope, up=up, mesh=mesh, layout=case.layout, mask=problem.mask, is_causal=problem.is_causal,
            attn_mask=bias[0] if bias else None, scale=problem.scale, sinks=problem.draw_sinks(case.seed),
            softcap=problem.softcap, return_lse=True,
            **{"seq_len": (problem.q_len, problem.kv_len), **dict(case.options)},
        )  # fmt: skip
        *grads, of_up = torch.autograd.grad(out, leaves, grad_out)
        found.append((here, (out.detach(), *grads, lse), of_up))
    return found


def check_latents(cases: list[LatentCase], shape: tuple[int, ...], names: tuple[str, ...] = ("cp",)) -> None:
    """Checks several cases on one set of ranks, since starting ranks takes longer than a case."""
    size = torch.Size(shape).numel()
    for case, *by_rank in zip(cases, *run_ranks(size, _attend, cases, shape, names), strict=True):
        expected, whole_up = case.problem.results(case.problem.draw(case.seed), case.problem.draw_sinks(case.seed))
        for here, results, _ in by_rank:
            for name, got, whole in zip(NAMES, results, expected, strict=True):
                dim = 1 if whole.dim() == 3 and name != "lse" else 2
                assert_close(got, shard(whole, case.layout, here, size, dim), f"{name} of place {here} of {case}")
        assert_close(torch.stack([of_up for _, _, of_up in by_rank]).sum(0), whole_up, f"d up of {case}")
