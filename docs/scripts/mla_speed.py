"""Multi-head latent attention by what ranks send: latents, or keys and values of all heads; in turns.

torchrun --nproc-per-node 2 docs/scripts/mla_speed.py --heads 16 128 --seq-lens 8192 32768 --json mla.json

Head dims of DeepSeek-V3: latents of 512, 64 rotary dims, heads of 192/128. Causal, bfloat16, `HeadTail`, with the
gradient of the up-projection. "latents": `context_parallel_mla`, which sends 576 values of a token. "K/V": a linear
layer expands the latents, and `context_parallel_attention` sends 320 values of a token and head. "auto" is what
`context_parallel_mla` takes by itself, which may be to expand latents before it sends K/V. Without GPUs it runs a small
case, which tests this program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from turns import finish, in_turns

from cp_dtensor import context_parallel_attention, context_parallel_mla
from cp_dtensor.tools.parsing import positive
from cp_dtensor.tools.ranks import start

GPU = torch.cuda.is_available()
LATENT, PLAIN, ROTARY, VALUE = (512, 128, 64, 128) if GPU else (32, 8, 8, 8)
HEADS, TOKENS = ([16, 128], [8192, 32_768]) if GPU else ([4], [256])
FORWARD, BOTH = "forward", "both"
Tensors = tuple[torch.Tensor, ...]
Way = tuple[str, str]
"""The tensors that ranks send, "latents" or "K/V", and the method."""


def attention(heads: int, seq_len: int, device: torch.device) -> dict[Way, Callable[[str], Tensors]]:
    """For each way a function of the passes: out, and after both also the gradients of the rank's inputs and of up."""
    alike, own = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))

    def normal(*shape: int, generator: torch.Generator = own) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)

    rows, group = seq_len // dist.get_world_size(), dist.group.WORLD
    assert group is not None
    q, grad_out = (normal(1, rows, heads, dim).transpose(1, 2) for dim in (PLAIN + ROTARY, VALUE))
    latent, k_rope = normal(1, rows, LATENT), normal(1, rows, ROTARY)
    up = normal(heads * (PLAIN + VALUE), LATENT, generator=alike) * LATENT**-0.5
    leaves = [x.requires_grad_() for x in (q, latent, k_rope, up)]
    options: dict[str, Any] = {"mesh": group, "is_causal": True, "seq_len": seq_len}

    def send_latents(method: str) -> Any:
        return context_parallel_mla(q, latent, k_rope, up=up, method=method, **options)

    def send_kv(method: str) -> Any:
        keys, values = F.linear(latent, up).unflatten(2, (heads, -1)).transpose(1, 2).split((PLAIN, VALUE), -1)
        keys = torch.cat((keys, k_rope.unsqueeze(1).expand(-1, heads, -1, -1)), -1)
        return context_parallel_attention(q, keys, values, method=method, **options)

    def run(send: Callable[[str], Any], method: str, passes: str) -> Tensors:
        with torch.set_grad_enabled(passes == BOTH):
            out = send(method)
        return (out, *torch.autograd.grad(out, leaves, grad_out)) if passes == BOTH else (out,)

    ways = [("latents", send_latents, each) for each in ("auto", "ring", "ulysses")]
    ways += [("K/V", send_kv, each) for each in ("ring", "ulysses")]
    return {(sent, method): partial(run, send, method) for sent, send, method in ways}


def main(arguments: Sequence[str]) -> None:
    """Measures all cases; rank 0 prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=positive, nargs="+", default=HEADS)
    parser.add_argument("--seq-lens", type=positive, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    ranks, device, command = start("docs/scripts/mla_speed.py", arguments, GPU, 300)
    rows: list[dict[str, object]] = []
    for heads in options.heads:
        for seq_len in options.seq_lens:
            ways = attention(heads, seq_len, device.torch_device)
            calls = {(*way, each): partial(call, each) for way, call in ways.items() for each in (FORWARD, BOTH)}
            for (sent, method, passes), measured in in_turns(calls, ranks, device).items():
                what = {"heads": heads, "tokens": seq_len, "sent": sent, "method": method, "passes": passes}
                rows.append(what | measured)
            device.free_unused()
    finish(rows, ranks, command, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
