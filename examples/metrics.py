"""Reports of a run: a progress bar on a terminal, plain lines elsewhere, and a file of JSON lines."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch
from config import Config

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


@dataclass(frozen=True)
class Report:
    """Numbers of one step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    memory_gib: float
    """Peak memory of this rank so far: of its GPU, or of the process on CPUs."""


class Reporter:
    """Shows and stores reports on rank 0; does nothing on other ranks."""

    def __init__(self, config: Config, rank: int, device: torch.device, first_step: int) -> None:
        self._speaks = rank == 0
        self._device = device
        self._log_freq = config.metrics.log_freq
        self._last_step = config.training.steps
        self._tokens_per_step = config.training.global_batch_size * config.training.seq_len
        self._file = self._open(config, first_step) if self._speaks and config.metrics.jsonl_file else None
        shows_bar = self._speaks and tqdm is not None and sys.stderr.isatty()
        self._bar = tqdm(total=self._last_step, initial=first_step - 1, unit="step") if shows_bar else None
        self._since = (time.perf_counter(), first_step - 1)

    @staticmethod
    def _open(config: Config, first_step: int) -> Path:
        path = Path(config.job.dump_folder) / config.metrics.jsonl_file
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = path.read_text().splitlines(keepends=True) if first_step > 1 and path.exists() else []
        # A resumed run repeats the steps after its checkpoint.
        path.write_text("".join(line for line in earlier if json.loads(line)["step"] < first_step))
        return path

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Reports every `log_freq`-th step and the last; waits for the GPU only then."""
        if not self._speaks or (step % self._log_freq and step != self._last_step):
            return
        report = Report(step, loss.item(), grad_norm.item(), lr, self._speed(step), _memory_gib(self._device))
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(report)) + "\n")
        numbers = f"loss {report.loss:.4f}, {report.tokens_per_second:,.0f} tokens/s, {report.memory_gib:.2f} GiB"
        if self._bar is not None:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            print(f"step {step}/{self._last_step}: {numbers}", flush=True)

    def _speed(self, step: int) -> float:
        """The tokens per second of all ranks since the last report."""
        (then, step_then), now = self._since, time.perf_counter()
        self._since = (now, step)
        return (step - step_then) * self._tokens_per_step / (now - then)


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
