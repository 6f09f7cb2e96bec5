"""Mask functions of transformers as mask values: equal to transformers' own masks, evaluated pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, Full, HeadTail, Mask, SlidingWindow, context_parallel
from cp_dtensor.api.transformers_masks import ModelMask, recognised
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.spec.model_masks import Chunks, Keys

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")
utils: Any = pytest.importorskip("transformers.masking_utils", reason="needs the extra [transformers]")


def dense(mask: Mask, length: int) -> torch.Tensor:
    """(S, S) number of times that a mask has each pair."""
    pairs = torch.zeros(length, length, dtype=torch.int64)
    for bands in mask.interval_sets(length, length):
        for band in bands:
            for query in range(max(band.first, 0), min(band.last, length)):
                lo, hi = band.keys(query)
                pairs[query, max(lo, 0) : max(min(hi, length), 0)] += 1
    return pairs


def functions(left_padding: torch.Tensor | None = None) -> dict[str, tuple[Callable[..., Any], Mask | None]]:
    """Mask functions, and the values that they are recognised as; None: evaluated."""
    left_padding = torch.zeros(2, dtype=torch.int64) if left_padding is None else left_padding
    chunks = utils.chunked_causal_mask_function(5, left_padding)
    image = utils.or_masks(utils.causal_mask_function, lambda b, h, q, kv: (q < 6) & (kv < 9))
    return {
        "causal": (utils.causal_mask_function, Causal()),
        "full": (utils.bidirectional_mask_function, Full()),
        "window": (utils.sliding_window_causal_mask_function(7), SlidingWindow(6, 0)),
        "window of 0": (utils.sliding_window_causal_mask_function(0), Keys(())),
        "both sides": (utils.sliding_window_bidirectional_mask_function(4), SlidingWindow(4, 4)),
        "chunks": (chunks, Chunks(5) & Causal()),
        "window or chunks": (utils.or_masks(utils.sliding_window_causal_mask_function(3), chunks), None),
        "image tokens": (image, None),
        "every third": (lambda b, h, q, kv: (q - kv) % 3 == 0, None),
        "nothing": (lambda b, h, q, kv: q < 0 * kv, None),
    }


@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("padded", [False, True])
def test_values_have_the_pairs_of_the_function(name: str, padded: bool) -> None:
    function, known = functions()[name]
    length, rows = 23, 2
    padding = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        padding[0, 19:] = padding[1, :4] = padding[1, 8:10] = False
    if known is not None:
        assert recognised(function, 0) == known
    # Chunks are counted from the first token that is no padding; a shard does not know where that is.
    wanted_of = functions((padding.cumsum(1) == 0).sum(1))[name][0]
    wanted = utils.sdpa_mask(
        rows, length, length, mask_function=wanted_of, attention_mask=padding, allow_is_causal_skip=False
    )

    def body(rank: int) -> None:
        config = AttentionConfig.of(init_device_mesh("cpu", (2,)), "auto", HeadTail(), None, debug=False)
        local = HeadTail().local_length(length, rank, 2)
        model_mask = ModelMask(function, rows, (local, local), padding, False, lambda: None)
        value = model_mask.mask_for(config)
        for row in range(rows):
            assert torch.equal(dense(value.of_batch_row(row), length), wanted[row, 0].long())

    run_ranks(2, body)


def test_functions_that_read_tensors_of_the_shard_are_refused() -> None:
    of_shard = torch.arange(8)

    def body(rank: int) -> None:
        config = AttentionConfig.of(init_device_mesh("cpu", (2,)), "auto", HeadTail(), None, debug=False)
        function = utils.and_masks(utils.causal_mask_function, lambda b, h, q, kv: of_shard[kv] >= 0)
        ModelMask(function, 1, (8, 8), None, False, lambda: None).mask_for(config)

    with pytest.raises(NotImplementedError, match="reads of_shard, a tensor of this rank's tokens"):
        run_ranks(2, body)


def test_another_function_of_a_known_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal_mask_function(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < q

    causal_mask_function.__module__, causal_mask_function.__qualname__ = utils.__name__, "causal_mask_function"
    with pytest.raises(NotImplementedError, match="is not the mask that it was in other versions"):
        recognised(causal_mask_function, 0)


def test_counted_positions_are_refused_on_every_rank_though_a_buffer_has_those_of_the_first() -> None:
    given: dict[str, Any] = {
        "config": transformers.LlamaConfig(attn_implementation="sdpa"), "inputs_embeds": torch.zeros(1, 4, 8),
        "attention_mask": None, "past_key_values": None,
    }  # fmt: skip

    def body(rank: int) -> None:
        mesh, ids, packed = init_device_mesh("cpu", (2,)), torch.arange(8)[None], torch.arange(4).repeat(2)[None]
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], layout=Contiguous()):
            with pytest.raises(ValueError, match="counted them in its shard"):
                utils.create_causal_mask(position_ids=torch.arange(4)[None], **given)
            utils.create_causal_mask(position_ids=ids, **given)
        with context_parallel(mesh, buffers=[packed], buffer_seq_dims=[1], layout=Contiguous()):
            utils.create_causal_mask(position_ids=packed, **given)

    run_ranks(2, body)
