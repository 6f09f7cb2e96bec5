"""Tiny models of transformers' families, with random weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, LENGTH, WINDOW, ROWS = 53, 64, 24, 2
"""The window is between a rank's 32 tokens of 2 ranks and fewer: less than S / 2, so each rank's own keys exceed it."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_TWO_LAYERS = ["sliding_attention", "full_attention"]
WIDE_WINDOW = 40
"""Longer than a rank's tokens, shorter than the sequence: transformers sees no window in a shard."""


def _family(name: str) -> tuple[str, dict[str, Any]]:
    """Model class and configuration."""
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "Llama": ("LlamaForCausalLM", {}),
        "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
        "Mistral": ("MistralForCausalLM", {"sliding_window": WIDE_WINDOW}),
        "Phi-3": ("Phi3ForCausalLM", {"sliding_window": WIDE_WINDOW}),
        "Gemma 2": ("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": WIDE_WINDOW, "layer_types": _TWO_LAYERS}),
        "Gemma 3": ("Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": WIDE_WINDOW, "layer_types": _TWO_LAYERS}),
        "gpt-oss": (
            "GptOssForCausalLM",
            {"head_dim": 8, "sliding_window": WIDE_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
             "layer_types": _TWO_LAYERS},
        ),
        "Llama 4": (
            "Llama4ForCausalLM",
            {"head_dim": 8, "attention_chunk_size": WIDE_WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
             "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 1]},
        ),
        "Llama 4, no RoPE": (
            "Llama4ForCausalLM",
            {"head_dim": 8, "attention_chunk_size": WIDE_WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
             "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "floor_scale": 8},
        ),
        "DeepSeek-V3": (
            "DeepseekV3ForCausalLM",
            {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
             "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
             "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        ),
        "Qwen2 with a window": (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": WIDE_WINDOW, "max_window_layers": 1,
             "layer_types": _TWO_LAYERS},
        ),
        "ModernBERT": (
            "ModernBertForMaskedLM",
            {"local_attention": 2 * WIDE_WINDOW, "layer_types": _TWO_LAYERS, "cls_token_id": 1, "sep_token_id": 2,
             "embedding_dropout": 0.0, "mlp_dropout": 0.0, "reference_compile": False},
        ),
        "BERT": ("BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
        "BERT, cross-attention": (
            "BertLMHeadModel",
            {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True,
             "add_cross_attention": True},
        ),
        "T5": (
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
             "decoder_start_token_id": 0},
        ),
        "BART": (
            "BartForConditionalGeneration",
            {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0},
        ),
        "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
        "Qwen3-Next": (
            "Qwen3NextForCausalLM",
            {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
             "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
             "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        ),
        "Mamba-2": (
            "Mamba2ForCausalLM",
            {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
        ),
        "Bamba": (
            "BambaForCausalLM",
            {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
             "mamba_chunk_size": 16},
        ),
        "Nemotron-H": (
            "NemotronHForCausalLM",
            {"layers_block_type": ["mamba", "attention"], "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
             "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16},
        ),
        "Kimi Linear": (
            "KimiLinearForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "kv_lora_rank": 16,
             "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_experts_per_tok": 2,
             "num_local_experts": 4, "moe_intermediate_size": 16, "linear_head_dim": 8, "linear_num_heads": 2},
        ),
        "Mamba": ("MambaForCausalLM", {"state_size": 8}),
        # Its configuration has a window of 0, and no layer with a window.
        "Qwen2-MoE": (
            "Qwen2MoeForCausalLM",
            {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
             "shared_expert_intermediate_size": 16},
        ),
        "Zamba2": (
            "Zamba2ForCausalLM",
            {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_ngroups": 1,
             "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1, "use_mem_rope": True,
             "adapter_rank": 4},
        ),
        "Ling 3 (Bailing)": (
            "BailingHybridForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
             "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8,
             "qk_nope_head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4, "n_group": 2, "topk_group": 1,
             "moe_intermediate_size": 16, "head_dim": 8, "num_mtp_layers": 0},
        ),
    }  # fmt: skip
    return families[name]


def is_in_this_version(family: str) -> bool:
    """Return whether this version of transformers has the model class of a family."""
    import transformers

    return hasattr(transformers, _family(family)[0])


FAMILIES = (
    "Llama", "Qwen3", "Mistral", "Phi-3", "Gemma 2", "Gemma 3", "gpt-oss", "Llama 4", "Llama 4, no RoPE", "DeepSeek-V3",
    "Qwen2 with a window", "ModernBERT", "BERT", "BERT, cross-attention", "T5", "BART", "LFM2", "Qwen3-Next",
    "Mamba-2", "Bamba", "Nemotron-H", "Kimi Linear", "Mamba", "Qwen2-MoE", "Zamba2", "Ling 3 (Bailing)",
)  # fmt: skip


SMALL: dict[str, Any] = {
    **_SIZES, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "n_kv_heads": 2,
    "num_kv_heads": 2, "n_embd": 32, "d_model": 32, "dim": 32, "emb_dim": 32, "embedding_size": 32, "lru_width": 32,
    "word_embed_proj_dim": 32, "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48, "hidden_dim": 48, "d_kv": 8, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8, "attention_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "rotary_dim": 4, "window_size": WIDE_WINDOW, "sliding_window": WIDE_WINDOW, "attention_window_size": WIDE_WINDOW,
    "local_attention": WIDE_WINDOW, "attention_chunk_size": WIDE_WINDOW, "use_sliding_window": True,
    "attention_types": [[["global", "local"], 1]], "state_size": 8, "expand": 2, "chunk_size": 16, "block_size": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8,
    "linear_num_heads": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 53, "laurel_rank": 8,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "is_decoder": True, "intra_bottleneck_size": 32,
}  # fmt: skip
"""Sizes of models of any family, by the names of attributes of their configurations."""
_OTHERWISE: tuple[dict[str, Any], ...] = (
    {}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": 4, "is_decoder": None, "head_dim": None, "sliding_window": None},
)  # fmt: skip
"""Sizes that are tried instead of some of these, one set after another; None leaves the default."""


def _changes_for(kind: str) -> Iterator[dict[str, Any]]:
    """Configurations of a small model of any class, the most likely one first."""
    import transformers

    config_class = getattr(transformers, kind).config_class
    try:
        default = config_class().to_dict()
    except Exception as error:
        raise ValueError(f"no small {kind}: {type(error).__name__} in its configuration") from error
    named = {*default, *getattr(config_class, "attribute_map", {}), *signature(config_class.__init__).parameters}
    for others in _OTHERWISE:
        sizes = {name: value for name, value in {**SMALL, **others}.items() if name in named and value is not None}
        yield {
            **sizes, **{name: 0.0 for name, value in default.items() if isinstance(value, float) and "drop" in name}
        }  # fmt: skip


@functools.cache
def _changes_of_runnable(kind: str) -> dict[str, Any]:
    """The configuration of a small model of any class that runs.

    Raises:
        ValueError: none does.
    """
    import transformers

    reasons = []
    for changes in _changes_for(kind):
        model_class = getattr(transformers, kind)
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                parameters = sum(each.numel() for each in model_class(model_class.config_class(**changes)).parameters())
            if parameters > 3_000_000:
                reasons.append(f"{parameters} parameters")
                continue
            model_class(model_class.config_class(**changes))(torch.randint(3, VOCABULARY, (ROWS, LENGTH)))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return changes
    raise ValueError(f"no small {kind}: {reasons[0]}")


def tiny_model(family: str, attention: str) -> nn.Module:
    """A model with equal weights in every call, in float64; of a family, or of a class of transformers."""
    import transformers

    kind, changes = _family(family) if family in FAMILIES else (family, _changes_of_runnable(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, kind)
        config = model_class.config_class(**({**_SIZES, **changes} if family in FAMILIES else changes))
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # the other ones take no float64
        random = torch.Generator().manual_seed(0)
        model: nn.Module = model_class(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * drawn if "norm" in name.lower() and name.endswith("weight") else 0.2 * drawn)
    return model.double().train()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of all parameters; zeros where there is none."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


def assert_gradients_sum_to(model: nn.Module, expected: list[torch.Tensor]) -> None:
    """Compares the sum of all ranks' gradients with others."""
    for found, wanted in zip(gradients(model), expected, strict=True):
        summed = found.clone()
        dist.all_reduce(summed)
        torch.testing.assert_close(summed, wanted, rtol=1e-6, atol=1e-6)
