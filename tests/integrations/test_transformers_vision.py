"""Models of transformers that take images, video or sound, with whole inputs of their processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.model_cells import Alone, kinds_of, multimodal_alone, run_multimodal_cell
from support.models import is_in_this_version
from support.multimodal import FROM_PROCESSORS, PLACEHOLDER, processed, tiny_multimodal
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import ContextParallel, Contiguous, Layout, MirroredBatch, Striped, context_parallel
from cp_dtensor.api.extension import sequence_ranks
from cp_dtensor.integrations.transformers import ModelBatch, multimodal, register

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")

CASES: list[tuple[str, str, Layout | None]] = [
    *[(name, "shard_images", None) for name in FROM_PROCESSORS if name != "Qwen2-Audio"],
    ("Qwen2-Audio", "images", None),
    *[(name, "packed", None) for name in ("Qwen3-VL", "Qwen3.5", "Gemma 3 VLM", "LLaVA")],
    *[(name, "padded", None) for name in ("Qwen2.5-VL", "Qwen3.5", "Gemma 4 VLM", "PaliGemma", "Qwen2.5-Omni")],
    *[(name, "plain images", None) for name in ("Qwen3-VL", "Gemma 4 VLM", "LFM2-VL")],
    *[(name, column, None) for name in ("Qwen2.5-VL", "Gemma 3 VLM") for column in ("text", "checkpointed images")],
    *[("Qwen3-VL", "shard_images", layout) for layout in (Contiguous(), Striped(3), MirroredBatch())],
]


def whole_world() -> Any:
    return dist.group.WORLD


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Alone]:
    """Loss and gradients of one process, by family and kind of batch."""
    return {}


@pytest.mark.parametrize(("name", "column", "layout"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    alone: dict[tuple[str, str], Alone], name: str, column: str, layout: Layout | None
) -> None:
    if not is_in_this_version(name):
        pytest.skip(f"this version of transformers has no {name}")
    kinds = kinds_of(name, column)
    for kind in kinds:
        if (name, kind) not in alone:
            alone[name, kind] = multimodal_alone(name, kind)
    expected = {kind: alone[name, kind] for kind in kinds}
    (found,) = {*run_ranks(2, run_multimodal_cell, name, column, layout, "cpu", expected)}
    if name == "MiniMax M3 VL" and not multimodal._images_are_apart(tiny_multimodal(name, "sdpa")):
        assert "images of one call attend to each other" in found  # transformers 5.20
    else:
        assert found == "right"


def test_three_ranks_of_which_some_have_no_image() -> None:
    expected = {kind: multimodal_alone("Qwen3-VL", kind) for kind in kinds_of("Qwen3-VL", "shard_images")}
    assert {*run_ranks(3, run_multimodal_cell, "Qwen3-VL", "shard_images", None, "cpu", expected)} == {"right"}


def test_one_rank_whose_tower_has_a_head_of_multihead_attention() -> None:
    """It reads its mask, and asks for weights."""
    expected = {kind: multimodal_alone("LFM2-VL", kind) for kind in kinds_of("LFM2-VL", "images")}
    assert run_ranks(1, run_multimodal_cell, "LFM2-VL", "images", MirroredBatch(), "cpu", expected) == ["right"]


# What the towers compute


def patches_of_ranks(rank: int, name: str, kind: str, shard_images: bool) -> int:
    """Rows that the tower of this rank gets."""
    model, given, seen = tiny_multimodal(name, "sdpa"), processed(name, kind), list[int]()
    assert given is not None
    tower = model.model.visual
    tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    batch = ModelBatch.from_processor(given, shard_images=shard_images)
    with context_parallel(whole_world(), **batch.buffers):
        model(**batch.inputs, use_cache=False)
    return sum(seen)


@pytest.mark.parametrize(
    ("kind", "expected"), [("images", [16, 16]), ("video", [16 + 8, 16 + 16]), ("image", [16, 16])]
)
def test_images_and_frames_are_divided_by_patches(kind: str, expected: list[int]) -> None:
    """Images of 16, 8 and 8 patches, and 3 frames of 8; of one image, the other rank computes it for nothing."""
    assert run_ranks(2, patches_of_ranks, "Qwen3-VL", kind, True) == expected


def test_every_rank_computes_all_images_by_default() -> None:
    assert run_ranks(2, patches_of_ranks, "Qwen3-VL", "images", False) == [32, 32]


# Refusals


def call(rank: int, name: str, case: str) -> None:
    register()
    model, given = tiny_multimodal(name, "cp_dtensor"), processed(name, "images")
    assert given is not None
    labels, more = given["labels"], dict[str, Any]()
    batch = ModelBatch.from_processor(given, shard_images=True)
    buffers = batch.buffers
    if case == "labels":
        more["labels"] = labels
    if case == "a shard beside":
        padding = torch.ones_like(labels)
        more["attention_mask"] = padding
        buffers["buffers"].append(padding)
        buffers["buffer_seq_dims"].append(1)
    if case == "other tokens":
        batch.inputs["input_ids"] = batch.inputs["input_ids"] + rank * (batch.inputs["input_ids"] == 7)
    if case == "an unknown argument":
        more["per_token"] = torch.zeros(5, 5)
    if case == "tokens are a buffer":
        buffers["buffers"].append(batch.inputs["input_ids"])
        buffers["buffer_seq_dims"].append(1)
    if case == "no language model":
        model.model.language_model.config = model.config.vision_config
    if case == "mixes images":
        model.model.multi_modal_projector.add_module("norm", nn.BatchNorm1d(4))
    with context_parallel(whole_world(), **buffers):
        model(**batch.inputs, **more, use_cache=False)


@pytest.mark.parametrize(
    ("name", "case", "error", "message"),
    [
        ("LLaVA", "labels", ValueError, "got labels of the whole sequence .* batch.shift_labels"),
        ("LLaVA", "a shard beside", ValueError, "a shard of attention_mask.*the whole of all inputs"),
        (
            "Qwen3-VL",
            "other tokens",
            ValueError,
            r"other tokens on each rank .*\[\(2, 64\), \(2, 64\)",
        ),
        ("LLaVA", "an unknown argument", NotImplementedError, r"got per_token of shape \(5, 5\)"),
        ("LLaVA", "tokens are a buffer", NotImplementedError, "makes tokens .*ModelBatch.from_processor"),
        ("LLaVA", "no language model", NotImplementedError, "did not call a language model of LlamaConfig"),
        ("Qwen2-Audio", "no methods", NotImplementedError, "by none of get_image_features.* pass shard_images=False"),
        ("LLaVA", "mixes images", NotImplementedError, "BatchNorm1d mixes images"),
    ],
)
def test_refusals(name: str, case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, call, name, case)


def test_towers_in_which_images_attend_to_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MiniMax M3's of transformers 5.20, which takes no `cu_seqlens`."""
    assert multimodal._images_are_apart(tiny_multimodal("Qwen3-VL", "sdpa"))
    assert not multimodal._images_are_apart(tiny_multimodal("LLaVA", "sdpa"))
    monkeypatch.setattr(multimodal, "_images_are_apart", lambda _model: False)
    with pytest.raises(NotImplementedError, match="images of one call attend to each other"):
        run_ranks(2, call, "Qwen3-VL", "plain")


def joined_features(rank: int) -> None:
    """Two images of the first rank in one row, as a model gives them, and one of the other."""
    features = torch.zeros(1, 8 - 4 * rank, 4)
    multimodal._of_all_ranks(sequence_ranks(whole_world()), 2 - rank, "get_image_features", features)


def test_features_of_several_images_in_one_row_are_refused_on_every_rank() -> None:
    def body(rank: int) -> str:
        with pytest.raises(NotImplementedError) as error:
            joined_features(rank)
        return str(error.value)

    assert {*run_ranks(2, body)} == {
        "get_image_features returns features of several images as one row: pass shard_images=False"
    }


def one_image_of_one_token(rank: int) -> None:
    """The first rank gets an image whose features Mistral 3 returns without their dim of tokens, and fails."""
    given = processed("Mistral 3", "images")
    assert given is not None
    given["image_sizes"] = torch.tensor([[8, 8], [16, 16], [16, 16]])
    given["input_ids"][given["input_ids"] == PLACEHOLDER] = 3
    given["input_ids"][:, 14:18] = given["input_ids"][0, 20] = PLACEHOLDER
    batch = ModelBatch.from_processor(given, shard_images=True)
    model = tiny_multimodal("Mistral 3", "sdpa")
    with context_parallel(whole_world(), **batch.buffers):
        model(**batch.inputs, use_cache=False)


def test_towers_that_fail_on_one_rank_fail_on_every_rank() -> None:
    def body(rank: int) -> str:
        with pytest.raises(RuntimeError) as error:
            one_image_of_one_token(rank)
        return str(error.value)

    (message,) = {*run_ranks(3, body)}
    assert message.startswith("get_image_features with shard_images=True failed for the images of some ranks, {0: ")
    assert message.endswith("pass shard_images=False")


def after_an_error(rank: int) -> None:
    given = processed("LLaVA", "images")
    assert given is not None
    model = tiny_multimodal("LLaVA", "sdpa")
    batch = ModelBatch.from_processor(given, shard_images=True)
    with pytest.raises(NotImplementedError), context_parallel(whole_world(), **batch.buffers):
        model(**batch.inputs, per_token=torch.zeros(5, 5), use_cache=False)
    assert "get_image_features" not in vars(model.model)
    with context_parallel(whole_world(), **batch.buffers):
        assert multimodal.whole_call() is None
        assert model(**batch.inputs, use_cache=False).logits.size(1) == 32


def test_a_failed_call_leaves_nothing() -> None:
    run_ranks(2, after_an_error)


def test_one_process_takes_the_same_batch() -> None:
    register()
    given = processed("LLaVA", "images")
    assert given is not None
    batch = ModelBatch.from_processor(given, shard_images=True)
    del given["labels"]
    found = tiny_multimodal("LLaVA", "cp_dtensor")(**batch.inputs, use_cache=False).logits
    torch.testing.assert_close(found, tiny_multimodal("LLaVA", "sdpa")(**given, use_cache=False).logits)


def test_whole_inputs_of_a_model_with_the_style_are_refused() -> None:
    """Its forward opens the context, so its call has no place for the towers before it."""
    register()

    def body(rank: int) -> None:
        model, given = tiny_multimodal("Qwen2.5-VL", "cp_dtensor"), processed("Qwen2.5-VL", "image")
        assert given is not None
        style = ContextParallel(seq_len=given["input_ids"].size(1))
        parallelize_module(model, init_device_mesh("cpu", (2,)), style)
        with pytest.raises(NotImplementedError, match="with ContextParallel got whole inputs with images"):
            model(**ModelBatch.from_processor(given).inputs, use_cache=False)

    run_ranks(2, body)
