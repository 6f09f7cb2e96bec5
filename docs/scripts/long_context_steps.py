"""Time steps of Qwen3-8B in the recipe of examples/integrations/long_context_qwen3.py, with ours and torch's attention.

    torchrun --nproc-per-node 2 docs/scripts/long_context_steps.py --tokens 32768 131072 --output run.csv

One process has one model with random weights, whose learning rate is 0: so all steps of a length have the same loss and
gradients. `ours` keeps attention's results in checkpoints, `ours-recomputed` does not, as `torch`: its context parallel
(cuDNN, all-gather) with the same tiles, checkpoints and loss. Lengths ascend until a step is out of memory.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Rows, parser, step_row
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, Qwen3ForCausalLM

from cp_dtensor.integrations.transformers import ModelBatch, register
from cp_dtensor.tools.cases import Case, Heads, Method
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.ranks import Device, Failed, Ranks, end, start
from cp_dtensor.tools.report import times_of
from cp_dtensor.tools.torch_methods import mesh_of_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import long_context_qwen3 as recipe

METHODS = {"ours": "ours-auto", "ours-recomputed": "ours-auto", "torch": "torch-allgather"}
"""The method of the benchmarks by that of this script."""


def torch_attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
    """Causal SDPA, as a function of transformers. Torch's context parallel needs contiguous tensors and gradients."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True)
    if out.requires_grad:
        out.register_hook(torch.Tensor.contiguous)
    return out.transpose(1, 2).contiguous(), None


class Steps:
    """The model, and steps of one method after the other."""

    def __init__(self, config: Any, optimizer: str, tile: int, device: Device) -> None:
        self.device, self.tile = device, tile
        self.mesh = mesh_of_ranks(device.torch_device.type)
        dtype = torch.float32
        if device.is_gpu:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen3

            apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False)
            dtype = torch.bfloat16
        torch.manual_seed(0)
        with device.torch_device:
            self.model: Any = Qwen3ForCausalLM._from_config(config, dtype=dtype).train()
        self.layers = self.model.model.layers
        self.forwards = [layer.forward for layer in self.layers]
        self.losses = recipe.prepared(self.model, self.mesh, tile=tile)
        more = {"fused": True} if optimizer == "AdamW" else {}
        self.optimizer = getattr(torch.optim, optimizer)(self.losses.parameters(), lr=0.0, **more)
        register()
        AttentionInterface.register("torch_contiguous", torch_attention)

    def use(self, method: str) -> None:
        """Make the layers attend by a method."""
        self.model.set_attn_implementation("torch_contiguous" if method == "torch" else "cp_dtensor")
        for layer, forward in zip(self.layers, self.forwards, strict=True):
            layer.forward = forward
            recipe.checkpoint_layer(layer, keep_attention=method == "ours")

    def step(self, case: Case, method: Method, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on (1, S) tokens; return this rank's share of the loss, and the norm of the gradients."""
        batch = ModelBatch(input_ids=tokens.clone(), labels=tokens)
        assert batch.shift_labels is not None
        assert method.shards is not None
        with method.shards(case, self.device.torch_device, batch.buffers["buffers"]):
            loss = self.losses(batch.shift_labels, **batch.inputs) / (tokens.numel() - 1)
            (loss * self.mesh.size()).backward()
        norm = nn.utils.get_total_norm([x.grad for x in self.losses.parameters() if x.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm


def measure(steps: Steps, ranks: Ranks, tokens: int, name: str, count: int) -> dict[str, Any]:
    """Return a row of a length and method: the median of steps after the first one, or of the only one."""
    device, config = steps.device, steps.model.config
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    case, (method,) = Case(tokens, heads), methods_by_name([METHODS[name]])
    steps.use(name)
    gc.collect()
    ranks.together(device.synchronize)
    device.free_unused()
    text = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    text = text.to(device.torch_device)
    if device.is_gpu:  # the host's pages are pinned now, not in the first step of a length; its allocator keeps them
        shape = (tokens // ranks.world_size, config.hidden_size)
        pinned = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for _ in steps.layers]
        del pinned
    if name == "torch" and ranks.world_size == 1:
        method = replace(method, shards=lambda *_: nullcontext())
    times, results = list[float](), list[tuple[torch.Tensor, torch.Tensor]]()
    with ExitStack() as stack:
        stack.enter_context(method.context(case, device.torch_device))

        def run() -> None:
            times.append(device.time_ms(lambda: results.append(steps.step(case, method, text))))

        peaks = ranks.together(lambda: [device.extra_bytes(run, 0) for _ in range(count)])
    first = max(each[0] for each in ranks.gather(times))
    loss = sum(ranks.gather(results[-1][0].item()))
    gib = max((peak or 0) for each in peaks for peak in each) / 2**30
    return times_of([each[1:] or each for each in ranks.gather(times)]) | step_row(
        ranks.world_size, tokens=tokens, q_heads=heads.q, kv_heads=heads.kv, head_dim=heads.dim, method=name,
        mib=gib * 1024,
        note=f"Qwen3 of {config.num_hidden_layers} layers, {type(steps.optimizer).__name__} in bfloat16, tiles of "
        f"{steps.tile}; loss {loss:.6f}; gradient norm {results[-1][1].item():.6f}; first step {first:.0f} ms",
    )  # fmt: skip


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    command.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    command.add_argument(
        "--steps", type=int, default=2, help="of each length; the first is not timed if there are more"
    )
    command.add_argument("--layers", type=int, help="of the model; all of Qwen3-8B by default")
    command.add_argument("--optimizer", default="AdamW", help="a name of torch.optim")
    command.add_argument("--tile", type=int, default=8192)
    command.add_argument("--tiny", action="store_true", help="a tiny model, for a try on CPUs")
    options = command.parse_args()
    ranks, device = start("docs/scripts/long_context_steps.py", sys.argv[1:], torch.cuda.is_available(), 900)
    config = recipe.TINY if options.tiny else recipe.QWEN3_8B
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    steps, failed = Steps(config, options.optimizer, options.tile, device), set[str]()
    rows = Rows(options.output, ranks.rank == 0)
    for tokens in options.tokens:
        for name in options.methods:
            if name in failed:
                continue
            try:
                row = measure(steps, ranks, tokens, name, options.steps)
            except Failed as failure:
                failed.add(name)
                steps.optimizer.zero_grad()
                if ranks.rank == 0:
                    print(f"{tokens:9,} {name:16} {failure}", flush=True)
                if not failure.alike:
                    end(ranks, failure)
            else:
                rows.add(f"{tokens:9,} {name:16}", row)
    end(ranks, None)


if __name__ == "__main__":
    main()
