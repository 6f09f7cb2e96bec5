"""Functions that stand for kernels of transformers' layers in contexts, called as a model would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import context_parallel, gated_delta_rule, kda
from cp_dtensor.integrations.transformers.layers import KERNELS, facts_of

ONE = torch.ones(1, 2, 1, 1)


def test_the_scale_of_a_delta_rule() -> None:
    def body(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        q, k, v = (torch.randn(1, 4, 1, 3, generator=generator) for _ in range(3))
        g, beta = -torch.rand(1, 4, 1, generator=generator), torch.rand(1, 4, 1, generator=generator)
        rules: Any = (("chunk_gated_delta_rule", gated_delta_rule, g), ("chunk_kda", kda, g[..., None].expand_as(k)))
        with context_parallel(dist.group.WORLD, seq_len=8):  # type: ignore[arg-type]
            for name, rule, decays in rules:
                for options in ({}, {"scale": 0.25}):
                    out, state = KERNELS[name](None, q, k, v, g=decays, beta=beta, **options)
                    assert state is None
                    assert torch.equal(out, rule(q, k, v, decays, beta, mesh=dist.group.WORLD, **options))

    run_ranks(2, body)


STEP = ONE[..., 0]
# A kernel, its arguments, and what is said of them.
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    *(
        ("causal_conv1d_fn", (STEP, ONE[0, :, 0]), {name: True}, f"a convolution in context_parallel .*{name}")
        for name in ("initial_states", "return_final_states", "final_states_out", "seq_idx")
    ),
    (
        "mamba_chunk_scan_combined", (ONE, STEP, STEP[0, 0], ONE, ONE), {"chunk_size": 2, "z": ONE},
        "a state-space layer in context_parallel expects z to be None",
    ),
    (
        "chunk_kda", (ONE, ONE, ONE, ONE, STEP), {"use_gate_in_kernel": False, "A_log": ONE},
        r"a linear-attention layer .* expects A_log to be None, got a tensor",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "tensors", "options", "message"), REFUSED)
def test_arguments_are_refused_by_name(
    kernel: str, tensors: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        KERNELS[kernel](None, *tensors, **options)


def test_a_call_of_a_model_looks_at_each_class_once() -> None:
    class Layer(nn.Linear):
        pass

    assert facts_of(Layer(1, 1)) is facts_of(Layer(1, 1)), "the facts of a class are kept, for other models as well"
