"""Memory and time of a training step of a whole model, by part: `explain(..., model=)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from cp_dtensor.engine.choose import Estimate
from cp_dtensor.plan.cluster import Hardware

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HOST_SPEED = 50e9
"""Bytes a second between a GPU and the host's memory (PCIe 5)."""
_MOVED = 40
"""Numbers of a hidden row, and of a row of query heads, that a layer reads and writes beside its products."""


@dataclass(frozen=True)
class Model:
    """Sizes of a causal language model of dense layers: attention, and an MLP of three matrices."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    q_heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool

    @classmethod
    def of(cls, source: Any) -> Model:
        """Read a configuration of transformers, or a mapping of the names of its attributes to numbers.

        Raises:
            TypeError, NotImplementedError: an attribute that is missing; a mixture of experts.
        """
        found = SimpleNamespace(**source) if isinstance(source, Mapping) else source
        found = found.get_text_config() if hasattr(found, "get_text_config") else found
        missing = [name for name in _SIZES if not isinstance(getattr(found, name, None), int)]
        if missing:
            raise TypeError(f"expected model to have the integers {', '.join(_SIZES)}; got none for {missing[0]}")
        if experts := [name for name in _EXPERTS if (getattr(found, name, None) or 1) > 1]:
            raise NotImplementedError(f"expected model to be dense, got {experts[0]}={getattr(found, experts[0])}")
        heads = found.num_attention_heads
        return cls(
            found.hidden_size, found.intermediate_size, found.num_hidden_layers, found.vocab_size, heads,
            getattr(found, "num_key_value_heads", None) or heads,
            getattr(found, "head_dim", None) or found.hidden_size // heads,
            bool(getattr(found, "tie_word_embeddings", False)),
        )  # fmt: skip

    @property
    def layer(self) -> int:
        """Parameters of the matrices of a layer."""
        of_heads = (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (of_heads + 3 * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.hidden * self.vocabulary


class Training(NamedTuple):
    """How a model is trained: arguments of `explain`."""

    tile: int | None = None
    offload: bool = False
    keep_attention: bool = False
    optimizer_bytes: float = 4


@dataclass(frozen=True)
class Step:
    """Memory and time of a training step on the rank that needs most. `str()` is two lines of a table."""

    memory: dict[str, float]
    """Bytes by part."""
    peak: float
    """Bytes of the parts that exist together."""
    times: dict[str, float]
    """Seconds by part."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.times.values())

    def __str__(self) -> str:
        memory = ", ".join(f"{name} {count / 2**30:.1f}" for name, count in self.memory.items())
        times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.times.items())
        return (
            f"a training step of the model, GiB: {memory}; at the peak {self.peak / 2**30:.1f}\n"
            f"a training step of the model, s: {times}; together {self.seconds:.2f}"
        )


def step_of(
    model: Model, how: Training, tokens: int, ranks: int, itemsize: int, attention: Estimate, gpu: Hardware
) -> Step:
    """Return the memory and time of a step of a rank with `tokens` tokens, by the formulas of `explain`."""
    hidden, of_q, of_kv = model.hidden, model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    roots, layers = model.head * (1 if model.is_tied else 2), model.layers * model.layer
    shard, gathered = (layers + roots) / ranks, 3 * model.layer + roots
    rows = tokens if how.tile is None else tokens * hidden / model.vocabulary
    kept = model.layers * tokens * (itemsize * of_q + 4 * model.q_heads) if how.keep_attention else 0
    inputs, tile = itemsize * tokens * hidden, min(how.tile or tokens, tokens)
    memory = {
        "parameters": itemsize * (shard + gathered),
        "gradients": itemsize * (layers / ranks + 2 * model.layer + model.head),
        "optimizer": how.optimizer_bytes * shard,
        "saved inputs": inputs * (2 if how.offload else model.layers) + kept,
        "attention": itemsize * tokens * (3 * hidden + (5 - how.keep_attention) * of_q + 5 * of_kv) + attention.memory,
        "MLP": itemsize * tile * (6 * model.intermediate + 2 * hidden),
        "logits": inputs + 4 * model.head + itemsize * rows * model.vocabulary,
    }
    # Gradients of layers come while what layers have saved goes: most is there when backward begins, or when it ends.
    in_layer = memory["attention"] + memory["MLP"]
    begin = (
        memory["saved inputs"] + itemsize * model.head + max(in_layer + itemsize * 2 * model.layer, memory["logits"])
    )
    peak = memory["parameters"] + memory["optimizer"] + max(begin, memory["gradients"] + in_layer)
    passes = layers * 4 + (0 if how.tile is None else 3 * hidden * model.intermediate * model.layers) + 3 * model.head
    moved = itemsize * tokens * model.layers * _MOVED * (hidden + of_q)
    times = {
        "attention": model.layers * (attention.seconds + (0 if how.keep_attention else attention.forward)),
        "products": 2 * tokens * passes / gpu.flops,
        "rest": moved / gpu.memory_speed + (2 * inputs * model.layers / _HOST_SPEED if how.offload else 0),
    }
    return Step(memory, peak, times)
