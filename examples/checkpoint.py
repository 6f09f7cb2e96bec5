"""Checkpoints of a run through `torch.distributed.checkpoint`: model, optimizer and step.

Every rank writes its own shards. A checkpoint can be loaded with any parallelism, also by one rank alone.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from config import Config, ConfigError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

Origin = dict[str, int]
"""Settings that determine the samples of a run. A checkpoint with another origin is refused."""


def origin_of(config: Config, text_fingerprint: int) -> Origin:
    return {
        "text fingerprint": text_fingerprint,
        "training.seq_len": config.training.seq_len,
        "training.global_batch_size": config.training.global_batch_size,
        "training.seed": config.training.seed,
        "packing fingerprint": zlib.crc32(repr(config.packing).encode()),
    }


def step_to_load(config: Config) -> int:
    """The step of the checkpoint to resume from, 0 to start from scratch."""
    folder, wanted = _folder(config), config.checkpoint.load_step
    # The metadata is written last, so a checkpoint without it was interrupted.
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata")]
    if not config.checkpoint.enable:
        return 0
    if wanted == -1:
        return max(steps, default=0)
    if wanted != 0 and wanted not in steps:
        raise ConfigError(f"checkpoint.load_step: expected one of {sorted(steps)} or -1 in {folder}, got {wanted}")
    return wanted


def save(config: Config, step: int, model: nn.Module, optimizer: Optimizer, origin: Origin) -> None:
    """Writes `step-<step>`; all ranks take part."""
    path = _folder(config) / f"step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)  # left by an earlier run
    dist.barrier()
    dcp.save(_state(model, optimizer, origin), checkpoint_id=str(path))


def load(
    config: Config, step: int, model: nn.Module, optimizer: Optimizer, origin: Origin, *, one_rank: bool = False
) -> None:
    """Reads `step-<step>` into model and optimizer; all ranks take part, unless `one_rank`."""
    state = _state(model, optimizer, dict.fromkeys(origin, 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected with `one_rank`
        dcp.load(state, checkpoint_id=str(_folder(config) / f"step-{step}"), no_dist=one_rank)
    different = {
        name: (state["origin"][name], origin[name]) for name in origin if state["origin"][name] != origin[name]
    }
    if different:
        listed = ", ".join(f"{name}: {there} there, {here} here" for name, (there, here) in different.items())
        raise ConfigError(f"checkpoint step-{step}: expected a checkpoint of this same run, got {listed}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _folder(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def _state(model: nn.Module, optimizer: Optimizer, origin: Origin) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "origin": dict(origin)}
