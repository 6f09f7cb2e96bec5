"""Configuration of a run: TorchTitan's sections and fields, from a TOML file and `--section.field value` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what was received and what is expected."""


@dataclass(frozen=True)
class Job:
    dump_folder: str = "./outputs"
    """Folder of checkpoints and metrics."""


@dataclass(frozen=True)
class Model:
    name: str = "llama3"
    """"llama3", "hybrid" with gated delta nets, or "sparse" with an indexer that selects keys."""
    attention_every: int = 4
    """n: every n-th layer of a hybrid has attention."""
    index_topk: int = 64
    """Keys of a query in sparse attention."""
    latent_dim: int = 64
    """Compressed keys and values of a token in sparse attention."""
    dim: int = 128
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 352
    """Width of the SwiGLU."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Optimizer:
    name: str = "AdamW"
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: int = 10
    decay_type: str = "cosine"
    """"cosine" or "linear", from the end of the warmup to the last step."""
    min_lr_factor: float = 0.1
    """Learning rate of the last step, relative to `optimizer.lr`."""


@dataclass(frozen=True)
class Training:
    dataset: str = "stdlib"
    seq_len: int = 512
    """Tokens per sample, before context parallelism divides them."""
    local_batch_size: int = 8
    """Samples per data-parallel rank and forward pass."""
    global_batch_size: int = -1
    """Samples per step over all ranks, by gradient accumulation if needed. -1: one forward pass."""
    steps: int = 60
    max_norm: float = 1.0
    """Gradients are clipped to this norm; 0: no clipping."""
    mixed_precision_param: str = "float32"
    """Precision of forward and backward: "float32", "bfloat16" or "float64". Weights are at least float32."""
    seed: int = 0


@dataclass(frozen=True)
class Packing:
    documents: str = "none"
    """Content of a sample. "none": a window of the text as one sequence. Otherwise packed documents, each with its own
    attention and positions: "files", the files in the window, or "lognormal", pieces of the text of random lengths."""
    median_length: int = 128
    """Tokens of the median document, if "lognormal"."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of their lengths."""


@dataclass(frozen=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    """-1: the number of ranks divided by the other degrees."""
    context_parallel_degree: int = 1
    context_parallel_rotate_method: str = "auto"
    context_parallel_load_balancer: str = "headtail"
    """Layout of the tokens: "headtail", "none" (contiguous), or one made for the documents of each step: "balanced" or
    "per_document"."""
    tensor_parallel_degree: int = 1


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: str = "none"
    """"none", "selective" or "full"."""
    selective_ac_option: str = "2"
    """n: "selective" recomputes every n-th layer."""


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    folder: str = "checkpoint"
    """In `job.dump_folder`."""
    interval: int = 500
    """Steps between checkpoints; the last step always writes one."""
    load_step: int = -1
    """Step of the checkpoint to resume from. -1: the latest, if there is one. 0: none."""


@dataclass(frozen=True)
class Metrics:
    log_freq: int = 1
    """Steps between reports."""
    jsonl_file: str = ""
    """File in `job.dump_folder` with one JSON object per report. "": none."""


@dataclass(frozen=True)
class Compile:
    enable: bool = False
    """Compile each layer with `torch.compile(fullgraph=True)`."""
    backend: str = "inductor"
    """"inductor", which needs a C++ compiler on CPUs, or "aot_eager", which captures and runs uncompiled."""


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    packing: Packing = field(default_factory=Packing)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    compile: Compile = field(default_factory=Compile)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Loads a file (None: the defaults) and applies the overrides, as in `["--training.seq_len", "512"]`."""
    from_file: dict[str, Any] = {}
    if path is not None:
        try:
            from_file = _flat(tomllib.loads(Path(path).read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"expected a TOML file at {str(path)!r}: {error}") from error
    values = {key: _of_toml(key, value) for key, value in from_file.items()}
    values |= _overrides(overrides)
    return _config_of(values)


def _config_of(values: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    config = Config()
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)


def _types() -> dict[str, type]:
    """Every valid key, `section.field`, and its type."""
    return {
        f"{section}.{name}": kind
        for section, cls in get_type_hints(Config).items()
        for name, kind in get_type_hints(cls).items()
    }


def _type_of(key: str) -> type:
    types = _types()
    if key not in types:
        closest = difflib.get_close_matches(key, types, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown key {key!r}; the closest valid key is {closest!r}")
    return types[key]


def _flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns `{"training": {"seq_len": 512}}` into `{"training.seq_len": 512}`."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _of_toml(key: str, value: Any) -> Any:
    kind = _type_of(key)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{key}: expected {kind.__name__}, got {value!r}")
    return value


def _overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses `--section.field value` and `--section.field=value`; `--section.flag` alone means true."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"expected --section.field value, got {option!r}")
        key = option[2:]
        kind = _type_of(key)
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--")
            if not has_value and kind is not bool:
                raise ConfigError(f"{key}: expected a value of type {kind.__name__} behind it, got none")
            text = rest.pop(0) if has_value else "true"
        values[key] = _of_text(key, kind, text)
    return values


def _of_text(key: str, kind: type, text: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{key}: expected {kind.__name__}, got {text!r}") from None
