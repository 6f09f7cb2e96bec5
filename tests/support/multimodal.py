"""Tiny models of transformers with a vision or audio tower, with random weights, and what a processor returns."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from support.models import VOCABULARY, with_random_weights

ROWS, LENGTH, PLACEHOLDER, VIDEO = 2, 64, 50, 51
_PATCH, _MERGED = 4, 2
"""Pixels along the side of a patch, and patches along the side of a token."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_WINDOW = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": _PATCH,
}  # fmt: skip
_QWEN = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": _PATCH,
    "spatial_merge_size": _MERGED, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_AUDIO = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 32,
}  # fmt: skip
_OTHERS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "vision_start_token_id": 52,
           "vision_end_token_id": 52}  # fmt: skip
_IDEFICS: dict[str, Any] = {
    "text_config": {"model_type": "llama", **_TEXT}, "image_token_id": PLACEHOLDER, "scale_factor": 2,
    "vision_config": _SIGLIP,
}  # fmt: skip
_GEMMA_4_VISION = {
    **_SIGLIP, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8, "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}  # fmt: skip
MULTIMODAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration", "grid",
        {"text_config": {**_TEXT, **_MROPE}, **_OTHERS,
         "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}},
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration", "grid",
        {"text_config": {**_TEXT, **_MROPE}, **_OTHERS,
         "vision_config": {**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}},
    ),
    "Qwen3.5": (
        "Qwen3_5ForConditionalGeneration", "grid",
        {"text_config": {
            **_TEXT, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0, "mrope_interleaved": True}},
         **_OTHERS, "vision_config": {**_QWEN, "num_position_embeddings": 64}},
    ),
    "GLM-4V": (
        "Glm4vForConditionalGeneration", "grid",
        {"text_config": {**_TEXT, "rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
         "image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "image_start_token_id": 52, "image_end_token_id": 52,
         "video_start_token_id": 52, "video_end_token_id": 52,
         "vision_config": {**_QWEN, "image_size": 32, "intermediate_size": 48}},
    ),
    "Gemma 3 VLM": (
        "Gemma3ForConditionalGeneration", "fixed",
        {"text_config": {**_TEXT, **_WINDOW}, "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
         "image_token_index": PLACEHOLDER},
    ),
    "Gemma 4 VLM": (
        "Gemma4ForConditionalGeneration", "positions",
        {"text_config": {
            **_TEXT, **_WINDOW, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8},
         "vision_config": _GEMMA_4_VISION, "audio_config": None, "image_token_id": PLACEHOLDER, "video_token_id": VIDEO,
         "audio_token_id": 52, "boi_token_id": 52, "eoi_token_id": 52, "boa_token_id": 52, "eoa_token_index": 52},
    ),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration", "fixed",
        {"text_config": {"model_type": "gemma", **_TEXT}, "image_token_index": PLACEHOLDER, "projection_dim": 32,
         "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP, "image_size": 8, "projection_dim": 32}},
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration", "fixed",
        {"text_config": {"model_type": "llama", **_TEXT}, "image_token_id": PLACEHOLDER,
         "vision_config": {"model_type": "clip_vision_model", **_SIGLIP, "image_size": 8}},
    ),
    "InternVL": (
        "InternVLForConditionalGeneration", "fixed",
        {"text_config": {"model_type": "qwen2", **_TEXT}, "image_token_id": PLACEHOLDER, "image_seq_length": 4,
         "vision_config": {**_SIGLIP, "image_size": [16, 16], "patch_size": [_PATCH, _PATCH]}},
    ),
    "Idefics3": ("Idefics3ForConditionalGeneration", "by row", _IDEFICS),
    "SmolVLM": ("SmolVLMForConditionalGeneration", "by row", _IDEFICS),
    "Mistral 3": (
        "Mistral3ForConditionalGeneration", "sizes",
        {"text_config": {"model_type": "mistral", **_TEXT}, "image_token_index": PLACEHOLDER,
         "spatial_merge_size": _MERGED,
         "vision_config": {"model_type": "pixtral", **_SIGLIP, "head_dim": 8, "rope_parameters":
                           {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "LFM2-VL": (
        "Lfm2VlForConditionalGeneration", "shapes",
        {"text_config": {"model_type": "lfm2", **_TEXT, "layer_types": ["conv", "full_attention"],
                         "block_multiple_of": 8}, "image_token_id": PLACEHOLDER, "downsample_factor": _MERGED,
         "projector_hidden_size": 32,
         "vision_config": {"model_type": "siglip2_vision_model", **_SIGLIP, "num_patches": 16}},
    ),
    "Qwen2-Audio": (
        "Qwen2AudioForConditionalGeneration", "sound",
        {"text_config": {"model_type": "qwen2", **_TEXT}, "audio_config": _AUDIO, "audio_token_index": PLACEHOLDER},
    ),
    "Qwen2.5-Omni": (
        "Qwen2_5OmniThinkerForConditionalGeneration", "sound",
        {"text_config": {**_TEXT, **_MROPE}, "image_token_index": 52, "video_token_index": VIDEO,
         "audio_token_index": PLACEHOLDER, "audio_start_token_id": 48, "audio_end_token_id": 48,
         "vision_start_token_id": 49, "vision_end_token_id": 49,
         "audio_config": {**_AUDIO, "n_window": 8, "output_dim": 32},
         "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}},
    ),
    "MiniMax M3 VL": (
        "MiniMaxM3SparseForConditionalGeneration", "grid",
        {"text_config": {
            **_TEXT, "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "dense"],
            "dense_intermediate_size": 48, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 8,
            "index_topk_blocks": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
         "image_token_index": PLACEHOLDER, "video_token_index": VIDEO, "projector_hidden_size": 32,
         "vision_config": {**_SIGLIP, "spatial_merge_size": _MERGED}},
    ),
    "Idefics": (
        "IdeficsForVisionText2Text", "",
        {**_TEXT, "vision_config": {**_SIGLIP, "embed_dim": 32}, "use_resampler": False, "cross_layer_interval": 1,
         "additional_vocab_size": 0},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration", "",
        {**_AUDIO, "vocab_size": VOCABULARY, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
         "max_target_positions": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
    ),
}  # fmt: skip
"""By name: class, what its processor returns, and configuration."""
FROM_PROCESSORS = [name for name, (_, form, _) in MULTIMODAL.items() if form]
"""Models that take what their processor returns."""
KINDS = ("text", "image", "images", "video", "packed", "padded")


def tiny_multimodal(name: str, attention: str) -> Any:
    """A model with equal weights in every call, in float64."""
    import transformers

    kind, _, changes = MULTIMODAL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(**changes))
    model.set_attn_implementation(attention)
    return with_random_weights(model)


def processed(name: str, kind: str, device: str = "cpu") -> dict[str, torch.Tensor] | None:
    """What the processor of a model returns for a batch of one of `KINDS`, and labels; None: it has no video.

    "image" is one image in the first row, "images" are three of different sizes, two of them in the first row.
    """
    random = torch.Generator().manual_seed(1)
    form = MULTIMODAL[name][1]
    if kind == "video" and form != "grid":
        return None
    ids = torch.randint(3, 45, (ROWS, LENGTH), generator=random)
    given: dict[str, torch.Tensor] = {"input_ids": ids}
    has_one_kind = kind == "video" and name == "GLM-4V"  # whose placeholders of frames are those of images
    count = 0 if has_one_kind else {"text": 0, "image": 1}.get(kind, 3)
    # In patches; the first is on both ranks, in `HeadTail()` of 2 ranks and in `Contiguous()`.
    sizes, places = [(4, 4), (2, 4), (4, 2)][:count], [(0, 14), (0, 31), (1, 14)][:count]
    if count:
        tokens, more = _of_images(name, form, sizes, random)
        given |= more
        for (row, start), length in zip(places, tokens, strict=True):
            ids[row, start : start + length] = PLACEHOLDER
    if kind == "video":  # of three frames, in the second row
        given["pixel_values_videos"] = torch.randn(3 * 8, 6 * _PATCH**2, generator=random, dtype=torch.float64)
        given["video_grid_thw"] = torch.tensor([[3, 2, 4]])
        for start in (30, 32, 34) if name == "Qwen2.5-VL" else (30, 35, 40):  # text between frames tells their times
            ids[1, start : start + 2] = VIDEO
    types = (ids == PLACEHOLDER).long() + 2 * (ids == VIDEO).long()
    if has_one_kind:
        ids[ids == VIDEO] = PLACEHOLDER
    if form in ("grid", "positions") and name != "MiniMax M3 VL":
        given["mm_token_type_ids"] = types
    if name in ("Gemma 3 VLM", "PaliGemma"):
        given["token_type_ids"] = types
    labels = ids.masked_fill(types > 0, -100)
    labels[0, 5:9] = -100  # other numbers of labels on the ranks
    if kind == "packed":
        documents = [torch.cat([torch.arange(n) for n in each]) for each in ([30, 34], [9, 30, 25])]
        given["position_ids"] = torch.stack(documents)
        if "mrope_section" in str(MULTIMODAL[name][2]["text_config"]):  # text, and time, height and width
            given["position_ids"] = torch.stack([given["position_ids"] + step for step in (0, 0, 1, 2)])
            given["position_ids"][3, types > 0] += 3
    if kind == "padded":
        padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        padding[0, -11:] = 0
        padding[1, :7] = 0
        given["attention_mask"] = padding
        labels = labels.masked_fill(padding == 0, -100)
        labels[1, 7] = -100  # padding predicts nothing
    if name == "Qwen2.5-Omni" and "attention_mask" not in given and kind != "packed":
        given["attention_mask"] = torch.ones_like(ids)  # without it, the model has no positions of sound
    return {key: each.to(device) for key, each in {**given, "labels": labels}.items()}


def _of_images(
    name: str, form: str, sizes: list[tuple[int, int]], random: torch.Generator
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Numbers of tokens, and tensors, of images of (height, width) patches, or of as many sounds."""
    count, most = len(sizes), 16
    tokens = [height * width // _MERGED**2 for height, width in sizes]

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    if name == "Whisper":
        return [0] * count, {"input_features": of(ROWS, 16, 64)}
    if name == "Idefics":
        mask = torch.ones(ROWS, LENGTH // 2, 1)  # of a rank's tokens
        return [4] * count, {"pixel_values": of(ROWS, 1, 3, 16, 16), "image_attention_mask": mask}
    if form == "fixed":
        side = 8 if name in ("LLaVA", "PaliGemma") else 16
        return [4] * count, {"pixel_values": of(count, 3, side, side)}
    if form == "grid":
        patches = sum(height * width for height, width in sizes)
        grid = torch.tensor([[1, height, width] for height, width in sizes])
        return tokens, {"pixel_values": of(patches, 6 * _PATCH**2), "image_grid_thw": grid}
    pixels = torch.tensor(sizes) * _PATCH
    if form == "sizes":
        return tokens, {"pixel_values": of(count, 3, 16, 16), "image_sizes": pixels}
    if form == "by row":
        values, mask = torch.zeros(ROWS, 2, 3, 16, 16, dtype=torch.float64), torch.zeros(ROWS, 2, 16, 16).long()
        for index, (row, place) in enumerate([(0, 0), (0, 1), (1, 0)][:count]):
            height, width = pixels[index].tolist()
            values[row, place, :, :height, :width] = of(3, height, width)
            mask[row, place, :height, :width] = 1
        return [4] * count, {"pixel_values": values, "pixel_attention_mask": mask}
    if form in ("shapes", "positions"):
        values = torch.zeros(count, most, 3 * _PATCH**2, dtype=torch.float64)
        mask, places = torch.zeros(count, most).long(), torch.full((count, most, 2), -1)
        for index, (height, width) in enumerate(sizes):
            values[index, : height * width] = of(height * width, 3 * _PATCH**2).sigmoid()
            mask[index, : height * width] = 1
            places[index, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        if form == "positions":
            return tokens, {"pixel_values": values, "image_position_ids": places}
        shapes = torch.tensor(sizes)
        return tokens, {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    assert form == "sound"
    lengths, mask = [64, 40, 24][:count], torch.zeros(count, 64).long()
    for index, length in enumerate(lengths):
        mask[index, :length] = 1
    tokens = [(length // 2 - 2) // 2 + 1 for length in lengths]  # a convolution and a mean, each of two steps
    return tokens, {"input_features": of(count, 16, 64), "feature_attention_mask": mask}
