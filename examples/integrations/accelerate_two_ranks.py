"""Training with accelerate's context parallel on cp_dtensor: causal, then packed documents under a window.

    pip install -c constraints.txt -e '.[integrations]'
    torchrun --nproc-per-node 2 examples/integrations/accelerate_two_ranks.py

Every rank also trains the same model alone on whole sequences, and compares losses and gradients. On GPUs, one for
each rank, `Accelerator` gets `parallelism_config=` and an FSDP2 plugin, as accelerate documents. On CPUs over gloo
accelerate averages gradients by DDP.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, TorchContextParallelConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from cp_dtensor import Documents, Mask, SlidingWindow
from cp_dtensor.integrations import accelerate as cp_accelerate

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS = 61, 32, 4, 48, 2, 2
DOCUMENTS, WINDOW = (0, 19, 30, LENGTH), 9
DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", 2)) else "cpu"


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Maps (B, S, width) to (B, S, width); `seen` is the whole mask (S, S) of a rank that is alone."""
        qkv = self.qkv(self.norms[0](hidden)).unflatten(2, (3, HEADS, -1))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        hidden = hidden + self.proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean loss of (B, S) tokens at (B, S) positions."""
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, seen)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def fresh_model() -> Model:
    """A model with equal weights each time, in float64, so that results differ by rounding only."""
    torch.manual_seed(0)
    return Model().double()


def data() -> DataLoader:
    """Batches of (B, S) tokens and the tokens that follow them."""
    text = torch.randint(VOCABULARY, (BATCH * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=BATCH)


def one_rank(seen: torch.Tensor | None) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Loss and gradients of each step, on whole sequences."""
    model = fresh_model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history = []
    for tokens, labels in data():
        positions = torch.arange(LENGTH, device=DEVICE).expand(BATCH, -1)
        loss = model(tokens.to(DEVICE), positions, labels.to(DEVICE), seen)
        loss.backward()
        history.append((loss.detach(), [torch.clone(x.grad) for x in model.parameters() if x.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return history


def accelerator_of(config: ParallelismConfig) -> Accelerator:
    """An accelerator with context parallelism, which accelerate refuses on CPUs although the rest works."""
    if DEVICE == "cuda":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        return Accelerator(parallelism_config=config, fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh("cpu")
    return accelerator


def train(accelerator: Accelerator, mask: Mask | None, seen: torch.Tensor | None) -> None:
    """Trains under `mask` with accelerate, and under `seen` alone, and compares.

    Raises:
        AssertionError: a loss or a gradient differs from that of one rank.
    """
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    expected = one_rank(seen)
    steps = 0
    for step, (tokens, labels) in enumerate(loader):
        positions = torch.arange(LENGTH, device=DEVICE).repeat(BATCH, 1)
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers), mask=mask
        ):
            loss = model(tokens, positions, labels)  # mean over half of each sequence
            accelerator.backward(loss)
        assert tokens.shape == (BATCH, LENGTH // 2)
        whole_loss, whole_grads = expected[step]
        mean_loss = accelerator.reduce(loss.detach(), "mean")
        torch.testing.assert_close(mean_loss, whole_loss, rtol=1e-10, atol=1e-10)
        for parameter, grad in zip(model.parameters(), whole_grads, strict=True):
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-10)
        accelerator.print(f"step {step}: loss {mean_loss.item():.6f}, one rank {whole_loss.item():.6f}")
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == STEPS
    accelerator.free_memory()


def main() -> None:
    """Trains with a causal mask, and with packed documents under a window, which accelerate alone cannot."""
    accelerator = accelerator_of(
        ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy="alltoall"))
    )
    with cp_accelerate.enable():
        train(accelerator, None, None)
        at = torch.arange(LENGTH, device=DEVICE)
        document = torch.bucketize(at, torch.tensor(DOCUMENTS, device=DEVICE), right=True)
        distance = at[:, None] - at
        seen = (document[:, None] == document) & (distance >= 0) & (distance < WINDOW)
        train(accelerator, Documents(DOCUMENTS) & SlidingWindow(WINDOW - 1, 0), seen)
    accelerator.print("losses and gradients are those of one rank")
    accelerator.end_training()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    main()
