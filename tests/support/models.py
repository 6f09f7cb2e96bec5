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

VOCABULARY, LENGTH, ROWS = 53, 64, 2
WIDE_WINDOW = 40
"""Longer than a rank's tokens, shorter than the sequence: transformers sees no window in a shard."""
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "attention_dropout": 0.0, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "n_kv_heads": 2,
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
    "index_n_heads": 16, "index_head_dim": 8, "index_topk": 12,
}  # fmt: skip
"""Sizes of models of any family, by the names of attributes of their configurations."""
_OTHERWISE: tuple[dict[str, Any], ...] = (
    {}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": 4, "is_decoder": None, "head_dim": None, "sliding_window": None},
)  # fmt: skip
"""Sizes that are tried instead of some of these, one set after another; None leaves the default."""

_WINDOW_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_DELTA_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_FOUR_KV_HEADS = {"num_key_value_heads": 4}
_MLA = {**_FOUR_KV_HEADS, "head_dim": None}
_LLAMA_4 = {"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {"use_sliding_window": False}),
    "Mistral": ("MistralForCausalLM", {}),
    "Phi-3": ("Phi3ForCausalLM", {}),
    "Gemma 2": ("Gemma2ForCausalLM", _WINDOW_AND_FULL),
    "Gemma 3": ("Gemma3ForCausalLM", _WINDOW_AND_FULL),
    "gpt-oss": ("GptOssForCausalLM", _WINDOW_AND_FULL),
    "Llama 4": ("Llama4ForCausalLM", {**_LLAMA_4, "no_rope_layers": [1, 1]}),
    "Llama 4, no RoPE": ("Llama4ForCausalLM", {**_LLAMA_4, "no_rope_layers": [1, 0], "floor_scale": 8}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {**_FOUR_KV_HEADS, "head_dim": None}),
    "Qwen2 with a window": ("Qwen2ForCausalLM", {**_WINDOW_AND_FULL, "max_window_layers": 1}),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        {**_WINDOW_AND_FULL, "local_attention": 2 * WIDE_WINDOW, "cls_token_id": 1, "sep_token_id": 2,
         "reference_compile": False},
    ),
    "BERT": ("BertForMaskedLM", {"is_decoder": False}),
    "BERT, cross-attention": ("BertLMHeadModel", {"add_cross_attention": True}),
    "T5": ("T5ForConditionalGeneration", {"is_decoder": False}),
    "BART": ("BartForConditionalGeneration", {"is_decoder": False}),
    "OPT": ("OPTForCausalLM", {}),
    "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Qwen3-Next": ("Qwen3NextForCausalLM", _DELTA_AND_FULL),
    "Mamba-2": ("Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 16}),
    "Bamba": ("BambaForCausalLM", {"attn_layer_indices": [1]}),
    "Nemotron-H": ("NemotronHForCausalLM", {"layers_block_type": ["mamba", "attention"]}),
    "Kimi Linear": ("KimiLinearForCausalLM", {**_DELTA_AND_FULL, **_FOUR_KV_HEADS}),
    "Mamba": ("MambaForCausalLM", {}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", {"use_sliding_window": False}),  # a window of 0, and no layer with a window
    "Zamba2": (
        "Zamba2ForCausalLM",
        {**_FOUR_KV_HEADS, "layers_block_type": ["mamba", "hybrid"], "mamba_ngroups": 1, "n_mamba_heads": 4,
         "mamba_headdim": 16, "num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 4},
    ),
    "Ling 3 (Bailing)": (
        "BailingHybridForCausalLM",
        {**_DELTA_AND_FULL, **_FOUR_KV_HEADS, "mlp_layer_types": ["dense", "dense"], "num_mtp_layers": 0},
    ),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", _MLA),
    "AX-K2": ("AXK2ForCausalLM", _MLA),
    "GLM-5": ("GlmMoeDsaForCausalLM", {**_MLA, "indexer_types": ["full", "shared"]}),
    "Hunyuan V4": ("HYV4ForCausalLM", {**_MLA, "indexer_types": ["full", "shared"]}),
    "dots.note": (
        "Dots3NoteForCausalLM",
        {**_MLA, "head_dim": 12, "layer_types": ["indexed_attention", "sliding_attention"],
         "shared_experts_intermediate_size": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
         "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8,
         "swa_v_head_dim": 8},
    ),
    "Mistral Large 4": (
        "MistralLarge4ForConditionalGeneration",
        {"text_config": {
            **SMALL, **_FOUR_KV_HEADS, "num_hidden_layers": 3, "no_rope_layers": [1, 1, 0],
            "kv_source_layers": [0, 0, 2], "indexer_types": ["full", "shared", "full"]},
         "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28}},
    ),
    "MiniMax M3": (
        "MiniMaxM3VLForCausalLM",
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_block_size": 8,
         "index_topk_blocks": 3, "mlp_layer_types": ["dense", "sparse"], "dense_intermediate_size": 48,
         "shared_intermediate_size": 16},
    ),
    "GLM-5 Next": (
        "Glm5NextForConditionalGeneration",
        {"text_config": {
            **SMALL, **_DELTA_AND_FULL, **_FOUR_KV_HEADS, "qk_rope_head_dim": 0,
            "indexer_types": ["full", "full"], "mlp_layer_types": ["dense", "sparse"], "index_kpool": 4, "hc_mult": 2},
         "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
            "projection_intermediate_size": 16}},
    ),
    "Qwen4": (
        "Qwen4ExpForCausalLM",
        {**_DELTA_AND_FULL, "hc_count": 2, "hc_lowrank": 8,
         "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
         "indexer_compress_ratio": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    ),
    "DeepSeek-V4": (
        "DeepseekV4ForCausalLM",
        {"head_dim": 16, "qk_rope_head_dim": None, "sliding_window": 5, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2,
         "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "index_topk": 3,
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
         "mlp_layer_types": ["moe", "moe"], "num_key_value_heads": 1},
    ),
}  # fmt: skip
"""Model class, and changes of `SMALL`; None leaves the default."""


def is_in_this_version(family: str) -> bool:
    """Return whether this version of transformers has the model class of a family."""
    import transformers

    from support.multimodal import MULTIMODAL

    return hasattr(transformers, {**FAMILIES, **MULTIMODAL}[family][0])


def _sizes_of(config_class: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Sizes that a configuration has, without dropout."""
    default = config_class().to_dict()
    named = {*default, *getattr(config_class, "attribute_map", {}), *signature(config_class.__init__).parameters}
    sizes = {name: value for name, value in {**SMALL, **others}.items() if name in named and value is not None}
    return {**sizes, **{name: 0.0 for name, value in default.items() if isinstance(value, float) and "drop" in name}}


def _changes_for(kind: str) -> Iterator[dict[str, Any]]:
    """Configurations of a small model of any class, the most likely one first."""
    import transformers

    try:
        yield from [_sizes_of(getattr(transformers, kind).config_class, others) for others in _OTHERWISE]
    except Exception as error:
        raise ValueError(f"no small {kind}: {type(error).__name__} in its configuration") from error


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

    kind, changes = FAMILIES.get(family, (family, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        config_class = getattr(transformers, kind).config_class
        sizes = _sizes_of(config_class, {}) if family in FAMILIES else _changes_of_runnable(family)
        config = config_class(**{name: size for name, size in {**sizes, **changes}.items() if size is not None})
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # the other ones take no float64
        model: nn.Module = getattr(transformers, kind)(config)
    return with_random_weights(model)


def with_random_weights(model: nn.Module) -> nn.Module:
    """Return a model with equal weights in every process, in float64."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * drawn if "norm" in name.lower() and name.endswith("weight") else 0.2 * drawn)
    return model.double().train()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of all parameters; zeros where there is none."""
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


def assert_gradients_sum_to(model: nn.Module, expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    """Compares the sum of all ranks' gradients with others."""
    for (name, _), found, wanted in zip(model.named_parameters(), gradients(model), expected, strict=True):
        summed = found.clone()
        dist.all_reduce(summed)
        torch.testing.assert_close(
            summed, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
