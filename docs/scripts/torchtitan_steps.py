"""Time whole steps of TorchTitan 0.2.2's Llama 3, with torch's context parallel and with ours, in turns.

    python docs/scripts/torchtitan_steps.py --gpus 2 --seq-lens 32768 65536 --output run.csv

TorchTitan runs as it comes. It trains on random tokens, so it needs no data and no tokenizer: time and memory of a step
do not depend on them. One seed gives both methods the same parameters and tokens, and the learning rate is low, since
random tokens teach nothing: so their losses are comparable. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Rows, parser, step_row

from cp_dtensor.tools.report import times_of

MODULES = {
    "torch": ["torchtitan.train"],
    "ours": ["cp_dtensor.integrations.torch_experimental", "torchtitan.train"],
}
STEP = re.compile(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+) +memory: +([\d.]+)GiB.*tps: +([\d,]+)")
WARM_UP = 2
"""Steps that compile kernels and allocate memory."""
VOCABULARY = 128256


def use_random_tokens() -> None:
    """Give TorchTitan's Llama 3 random tokens in place of a data set and a tokenizer."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models import llama3

    class RandomTokens(BaseDataLoader):
        def __init__(self, seq_len: int) -> None:
            self.seq_len = seq_len

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            generator = torch.Generator().manual_seed(0)
            while True:
                tokens = torch.randint(0, VOCABULARY, (1, self.seq_len + 1), generator=generator)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    llama3.build_text_dataloader = lambda job_config, **rest: RandomTokens(job_config.training.seq_len)
    llama3.build_hf_tokenizer = lambda job_config: None


def steps_of(log: str) -> list[tuple[float, ...]]:
    """Return step, loss, norm of the gradient, GiB and tokens/s a GPU of each line that TorchTitan logs of a step."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", log)
    return [tuple(float(each.replace(",", "")) for each in found) for found in STEP.findall(plain)]


def run(method: str, seq_len: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps in a process for each GPU; return a row."""
    given = {
        "model.name": "llama3", "model.flavor": options.flavor, "training.local_batch_size": 1,
        "training.seq_len": seq_len, "training.steps": WARM_UP + options.steps, "metrics.log_freq": 1,
        "parallelism.context_parallel_degree": options.gpus, "activation_checkpoint.mode": options.checkpointing,
        "debug.seed": 0, "optimizer.lr": 1e-6, "experimental.custom_import": Path(__file__).stem,
    }  # fmt: skip
    arguments = [str(each) for name, value in given.items() for each in (f"--{name}", value)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.gpus)]
    launch += ["--master-port", str(options.port), "-m", *MODULES[method], *arguments]
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    steps = steps_of(done.stdout)
    if done.returncode or len(steps) < WARM_UP + options.steps:
        raise RuntimeError(f"TorchTitan with {method} failed, status {done.returncode}:\n{done.stdout[-4000:]}")
    timed = {step: seq_len / options.gpus / speed * 1e3 for step, *_, speed in steps if step > WARM_UP}
    first, last = steps[0], steps[-1]
    times = times_of([[*timed.values()]])
    return times | step_row(
        options.gpus, tokens=seq_len, q_heads=32, kv_heads=8, head_dim=128, method=method,
        mib=max(gib for _, _, _, gib, _ in steps) * 1024,
        note=f"TorchTitan's Llama 3 {options.flavor}; checkpointing {options.checkpointing}; "
        f"{seq_len / options.gpus / times['median_ms'] * 1e3:.0f} tokens/s a GPU; losses {first[1]} to {last[1]}; "
        f"gradient norm {first[2]} to {last[2]}",
    )  # fmt: skip


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--gpus", type=int, default=2)
    command.add_argument("--seq-lens", type=int, nargs="+", default=[32768])
    command.add_argument("--flavor", default="8B", help="of Llama 3")
    command.add_argument("--steps", type=int, default=5, help=f"steps to time, after {WARM_UP} others")
    command.add_argument("--checkpointing", default="full", choices=("full", "selective", "none"))
    command.add_argument("--port", type=int, default=29500)
    options = command.parse_args()
    rows = Rows(options.output, True)
    for seq_len in options.seq_lens:
        for method in MODULES:
            rows.add(f"{seq_len:8} {method:6}", run(method, seq_len, options))


if __name__ == "__main__":
    main()
elif "torchtitan" in sys.modules:  # TorchTitan imports it by its name
    use_random_tokens()
