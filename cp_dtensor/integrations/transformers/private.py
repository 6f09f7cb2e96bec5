"""Names of transformers, private ones among them, that contexts and the provider depend on, in one place."""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache
from typing import Any

from torch import nn

MASKING_UTILS = "transformers.masking_utils"
MODELING_UTILS = "transformers.modeling_utils"
CACHE_UTILS = "transformers.cache_utils"
GENERATION_UTILS = "transformers.generation.utils"
LOSS_UTILS = "transformers.loss.loss_utils"
PREPROCESS = "_preprocess_mask_arguments"
"""The function of `MASKING_UTILS` that finds lengths and packed documents, before a mask function is called."""
REMAP = "remap_positions_for_packed_sequence"
"""The function of `MASKING_UTILS` that counts positions in each document, in versions that do so."""
PROVIDER = "cp_dtensor"
"""Name of the provider in transformers: `attn_implementation="cp_dtensor"`."""
INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"})
"""Types of layers whose indexer reads the mask; the last two are those of versions before 5.20."""
SEEN = ("sdpa", "flex_attention", PROVIDER)
"""Attention implementations of transformers that a context sees."""
TESTED = ("5.10", "5.24")
"""Oldest and newest minor version of which the support matrix was run (docs/models.md)."""
PASSED_ON = frozenset({
    "position_ids", "cache_position", "use_cache", "max_length_q", "max_length_k", "sliding_window", "is_causal",
    "shift_labels", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict",
    "deterministic", "layer_idx", "position_embeddings",
})  # fmt: skip
"""Keyword arguments that models pass on to layers, whose results do not depend on them: the mask has windows."""


def implementation_of(config: Any) -> str | None:
    """Return the `attn_implementation` of a model's configuration."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, by which transformers' tensor parallelism exchanges inputs and outputs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def table_of(interface: Any) -> dict[str, Any]:
    """Return the functions of an AttentionInterface or AttentionMaskInterface, by name; all models share them."""
    table: dict[str, Any] = interface._global_mapping
    return table


def kernel_name(function: Any) -> str | None:
    """Return the name of the kernel that stands behind a function of a model, None if there is none."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "func_name" in code.co_freevars:
            name: str = function.__closure__[code.co_freevars.index("func_name")].cell_contents
            return name
        function = getattr(function, "__wrapped__", None)
    return None


@lru_cache(maxsize=1)
def warn_of_version() -> None:
    """Warn once of a version of transformers of which no model was run."""
    version = str(sys.modules["transformers"].__version__)
    oldest, minor, newest = (tuple(map(int, each.split(".")[:2])) for each in (TESTED[0], version, TESTED[1]))
    if not oldest <= minor <= newest:
        warnings.warn(
            f"cp_dtensor was run with transformers {TESTED[0]} to {TESTED[1]}, this is {version}: what is not "
            "understood is refused, but compare a loss with one process first (docs/models.md)",
            stacklevel=2,
        )
