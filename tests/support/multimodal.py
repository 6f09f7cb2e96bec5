"""Tiny models of transformers with a vision or audio tower, with random weights, and a batch for each."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from support.models import VOCABULARY, with_random_weights

ROWS, LENGTH, PLACEHOLDER = 2, 64, 50
FIRST = 22
"""The first token of the image or the sound: it is on both ranks, in `HeadTail()` of 2 ranks and in `Contiguous()`."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_AUDIO = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 32,
}  # fmt: skip
_OTHERS = {"video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 52}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaVA": (
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **_TEXT}, "image_token_id": PLACEHOLDER,
         "vision_config": {"model_type": "clip_vision_model", **_SIGLIP}},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**_TEXT, **_MROPE}, "image_token_id": PLACEHOLDER, **_OTHERS,
         "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}},
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": {**_TEXT, **_MROPE}, "image_token_id": PLACEHOLDER, **_OTHERS,
         "vision_config": {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}},
    ),
    "Gemma 3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": {**_TEXT, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
         "vision_config": _SIGLIP, "mm_tokens_per_image": 16, "image_token_index": PLACEHOLDER},
    ),
    "Idefics": (
        "IdeficsForVisionText2Text",
        {**_TEXT, "vision_config": {**_SIGLIP, "embed_dim": 32}, "use_resampler": False, "cross_layer_interval": 1,
         "additional_vocab_size": 0},
    ),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        {"text_config": {"model_type": "gemma", **_TEXT}, "image_token_index": PLACEHOLDER, "projection_dim": 32,
         "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP, "projection_dim": 32}},
    ),
    "Qwen2-Audio": (
        "Qwen2AudioForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **_TEXT}, "audio_config": _AUDIO, "audio_token_index": PLACEHOLDER},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**_AUDIO, "vocab_size": VOCABULARY, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
         "max_target_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
    ),
}  # fmt: skip


def tiny_multimodal(name: str, attention: str) -> Any:
    """A model with equal weights in every call, in float64."""
    import transformers

    kind, changes = _MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**changes))
    model.set_attn_implementation(attention)
    return with_random_weights(model)


def batch_of(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids with the placeholders of an image or a sound in each row, and what the tower takes."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (ROWS, LENGTH), generator=random)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    if name == "Whisper":
        return ids, {"input_features": of(ROWS, 16, 64)}
    ids[:, FIRST : FIRST + 16] = PLACEHOLDER
    if name == "Qwen2-Audio":
        lengths = torch.ones(ROWS, 64, dtype=torch.int64)
        return ids, {"input_features": of(ROWS, 16, 64), "feature_attention_mask": lengths}
    if "Qwen" in name:
        grid = torch.tensor([[1, 8, 8]]).expand(ROWS, -1)
        return ids, {"pixel_values": of(ROWS * 64, 96), "image_grid_thw": grid}
    if name == "Idefics":
        return ids, {"pixel_values": of(ROWS, 1, 3, 16, 16), "image_attention_mask": torch.ones(ROWS, LENGTH // 2, 1)}
    return ids, {"pixel_values": of(ROWS, 3, 16, 16)}
