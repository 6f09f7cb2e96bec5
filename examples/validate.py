"""Validation of a configuration for a number of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from config import Config, ConfigError

CHOICES = {
    "model.name": ("llama3", "hybrid", "sparse"),
    "optimizer.name": ("AdamW",),
    "lr_scheduler.decay_type": ("cosine", "linear"),
    "training.dataset": ("stdlib",),
    "training.mixed_precision_param": ("float32", "bfloat16", "float64"),
    "parallelism.context_parallel_rotate_method": ("auto", "symm_mem", "allgather", "alltoall"),
    "parallelism.context_parallel_load_balancer": ("headtail", "none", "balanced", "per_document"),
    "packing.documents": ("none", "files", "lognormal"),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "compile.backend": ("inductor", "aot_eager"),
}
POSITIVE = (
    "model.attention_every",
    "model.index_topk",
    "model.latent_dim",
    "model.dim",
    "model.n_layers",
    "model.n_heads",
    "model.n_kv_heads",
    "model.hidden_dim",
    "training.seq_len",
    "training.local_batch_size",
    "training.steps",
    "packing.median_length",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "checkpoint.interval",
    "metrics.log_freq",
)


def resolved(config: Config, world_size: int) -> Config:
    """`config` with every -1 replaced by its number on `world_size` ranks.

    Raises:
        ConfigError: the configuration cannot run on these ranks.
    """
    _check_values(config)
    config = _with_parallelism(config, world_size)
    _check_model(config)
    _check_packing(config)
    _check_layers(config)
    return _with_global_batch(config)


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _check_values(config: Config) -> None:
    for key, choices in CHOICES.items():
        if _value(config, key) not in choices:
            expected = " or ".join(f'"{choice}"' for choice in choices)
            raise ConfigError(f'{key}: expected {expected}, got "{_value(config, key)}"')
    for key in POSITIVE:
        if _value(config, key) < 1:
            raise ConfigError(f"{key}: expected at least 1, got {_value(config, key)}")
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas != 1:
        raise ConfigError(
            "parallelism.data_parallel_replicate_degree: expected 1 (use data_parallel_shard_degree for data "
            f"parallelism), got {replicas}"
        )
    every = config.activation_checkpoint.selective_ac_option
    if not every.isdecimal() or int(every) < 1:
        raise ConfigError(
            'activation_checkpoint.selective_ac_option: expected a positive integer in quotes, n for "every n-th '
            f'layer", got "{every}"'
        )


def _with_parallelism(config: Config, world_size: int) -> Config:
    degrees = config.parallelism
    others = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    shards = degrees.data_parallel_shard_degree
    if shards == -1:
        shards = max(world_size // others, 1)
    if shards * others != world_size:
        raise ConfigError(
            f"parallelism: expected degrees whose product is the number of ranks, {world_size}, got "
            f"data_parallel_shard_degree {shards} x context_parallel_degree {degrees.context_parallel_degree} x "
            f"tensor_parallel_degree {degrees.tensor_parallel_degree} = {shards * others}: "
            f"start with torchrun --nproc-per-node {shards * others}, or set other degrees"
        )
    return dataclasses.replace(config, parallelism=dataclasses.replace(degrees, data_parallel_shard_degree=shards))


def _check_model(config: Config) -> None:
    model, degrees = config.model, config.parallelism
    tp = degrees.tensor_parallel_degree
    for name, size, divisor, of in (
        ("model.dim", model.dim, 2 * model.n_heads, "2 x model.n_heads (RoPE turns pairs)"),
        ("model.n_heads", model.n_heads, model.n_kv_heads, "model.n_kv_heads"),
        ("model.n_kv_heads", model.n_kv_heads, tp, "parallelism.tensor_parallel_degree"),
        ("model.hidden_dim", model.hidden_dim, tp, "parallelism.tensor_parallel_degree"),
    ):
        if size % divisor:
            raise ConfigError(f"{name}: expected a multiple of {of} = {divisor}, got {size}")
    if tp > 1 and config.compile.enable:
        raise ConfigError(
            "compile.enable: expected false with tensor parallelism, got true: torch 2.13 computes wrong gradients of "
            "compiled layers there, with or without context parallelism"
        )
    # Between the matrices, tensor parallelism shards the local sequence in equal parts.
    parts = 2 * degrees.context_parallel_degree * tp
    if tp > 1 and config.training.seq_len % parts:
        raise ConfigError(
            "training.seq_len: expected a multiple of 2 x context_parallel_degree x tensor_parallel_degree = "
            f"{parts} with tensor parallelism, got {config.training.seq_len}"
        )


def _check_packing(config: Config) -> None:
    sigma, layout = config.packing.sigma, config.parallelism.context_parallel_load_balancer
    if not 0 <= sigma < math.inf:
        raise ConfigError(f"packing.sigma: expected a number >= 0, got {sigma}")
    if layout == "per_document" and (config.packing.documents == "none" or config.training.local_batch_size > 1):
        raise ConfigError(
            'parallelism.context_parallel_load_balancer: "per_document" divides the documents of one packed sample, '
            f"got training.local_batch_size {config.training.local_batch_size} and packing.documents "
            f'"{config.packing.documents}"; "balanced" divides any samples'
        )


def _check_layers(config: Config) -> None:
    name = config.model.name
    if name == "llama3":
        return
    expected: dict[str, Any] = {"parallelism.tensor_parallel_degree": 1}
    if config.packing.documents != "none":
        expected["compile.enable"] = False
        if name == "hybrid":  # states end where documents do, the same in all rows of a batch
            expected["training.local_batch_size"] = 1
    for key, value in expected.items():
        if _value(config, key) != value:
            packed = f' and packing.documents "{config.packing.documents}"' if len(expected) > 1 else ""
            raise ConfigError(f'{key}: expected {value} with model.name "{name}"{packed}, got {_value(config, key)}')


def _with_global_batch(config: Config) -> Config:
    training = config.training
    one_pass = training.local_batch_size * config.parallelism.data_parallel_shard_degree
    size = one_pass if training.global_batch_size == -1 else training.global_batch_size
    if size < 1 or size % one_pass:
        raise ConfigError(
            "training.global_batch_size: expected -1 or a multiple of local_batch_size x data_parallel_shard_degree "
            f"= {one_pass}, got {size}"
        )
    return dataclasses.replace(config, training=dataclasses.replace(training, global_batch_size=size))
