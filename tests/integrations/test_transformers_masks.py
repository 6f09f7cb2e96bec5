"""Mask functions of transformers as mask values: equal to transformers' own masks, evaluated pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, Documents, Full, HeadTail, Mask, SlidingWindow, context_parallel
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.contexts import innermost
from cp_dtensor.integrations.transformers import masks
from cp_dtensor.integrations.transformers.masks import ModelMask
from cp_dtensor.spec.masks import interval_sets_of
from cp_dtensor.spec.model_masks import Bands, Chunks, Keys

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")
utils: Any = pytest.importorskip("transformers.masking_utils", reason="needs the extra [transformers]")


def dense(mask: Mask, length: int) -> torch.Tensor:
    """(S, S) number of times that a mask has each pair."""
    pairs = torch.zeros(length, length, dtype=torch.int64)
    for band in chain(*interval_sets_of(mask, length, length, 1)[0]):
        for query in range(band.first, band.last):
            pairs[query, slice(*band.keys(query))] += 1
    return pairs


Case = tuple[Callable[..., Any], Mask | None]


def functions(left_padding: torch.Tensor | None = None) -> dict[str, Case]:
    """Mask functions and the values that they are known as; None: evaluated."""
    left_padding = torch.zeros(2, dtype=torch.int64) if left_padding is None else left_padding
    window = utils.sliding_window_overlay(3)
    image = utils.or_masks(utils.causal_mask_function, lambda b, h, q, kv: (q < 6) & (kv < 9))
    window_or_full = utils.or_masks(utils.sliding_window_causal_mask_function(3), utils.bidirectional_mask_function)
    return {
        "causal": (utils.causal_mask_function, Causal()),
        "full": (utils.bidirectional_mask_function, Full()),
        "window": (utils.sliding_window_causal_mask_function(7), SlidingWindow(6, 0)),
        "window of nothing": (utils.sliding_window_causal_mask_function(0), Keys(())),
        "both sides": (utils.sliding_window_bidirectional_mask_function(4), SlidingWindow(4, 4)),
        "chunks": (utils.chunked_causal_mask_function(5, left_padding), Chunks(5) & Causal()),
        "causal first": (utils.and_masks(utils.causal_mask_function, window), SlidingWindow(2, 0)),
        "a window alone": (window, None),
        "window or full": (window_or_full, None),
        "image tokens": (image, None),
        "every third": (lambda b, h, q, kv: (q - kv) % 3 == 0, None),
        "nothing": (lambda b, h, q, kv: q < 0 * kv, None),
    }


def value_of(case: Case, length: int, call: Call, rows: int = 2, **known: Any) -> Mask:
    """The value of a mask of `length` tokens of this rank."""
    return ModelMask(**known, function=case[0], batch_size=rows, local=(length, length)).found(call)[0]


def call_of_two_ranks() -> Call:
    return Call.of(init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("padded", [False, True])
def test_values_have_the_pairs_of_the_function(name: str, padded: bool) -> None:
    known = functions()[name][1]
    length, rows = 23, 2
    padding = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        padding[0, 19:] = padding[1, :4] = padding[1, 8:10] = False
    # Chunks are counted from the first token that is no padding; a shard does not know where that is.
    wanted_of = functions((padding.cumsum(1) == 0).sum(1))[name][0]
    wanted = utils.sdpa_mask(
        rows, length, length, mask_function=wanted_of, attention_mask=padding, allow_is_causal_skip=False
    )

    def body(rank: int) -> None:
        local = HeadTail().local_length(length, rank, 2)
        places = positions_of(HeadTail().segments(length, rank, 2, 0), padding.device)
        of_shard = padding[:, places]
        case = functions((of_shard.cumsum(1) == 0).sum(1))[name]
        value = value_of(case, local, call_of_two_ranks(), padding=of_shard)
        for row in range(rows):
            assert torch.equal(dense(value.of_batch_row(row), length), wanted[row, 0].long())
        if known is not None and not padded:
            assert value == known
        if known is None and not padded and name != "window or full":
            assert isinstance(value, Bands)

    run_ranks(2, body)


@pytest.mark.parametrize("sliding", ["no", "around", "before"])
@pytest.mark.parametrize("size", [1, 4, 40])
def test_blocks_of_tokens_are_evaluated_at_the_ends_of_ranges(sliding: str, size: int) -> None:
    """In time that is linear in the tokens, to the value that all pairs give."""
    if not hasattr(utils, "blockwise_overlay"):
        pytest.skip("this transformers has no blocks")
    length = 23
    ids = torch.tensor([[-1, 0, 0, 0, 1, 1, -1, -1, *[2] * 9, -1, 3, 3, -1, 4, 4], [-1] * 12 + [5] * 11])
    window, blocks = utils.sliding_window_overlay(size), utils.blockwise_overlay(ids)
    causal, overlay = utils.causal_mask_function, utils.or_masks
    function = {
        "no": overlay(causal, blocks),
        "around": utils.and_masks(overlay(causal, blocks), window),
        "before": overlay(utils.and_masks(causal, window), blocks),
    }[sliding]

    def body(_rank: int) -> tuple[Mask, Mask]:
        call = Call.of(init_device_mesh("cpu", (1,)))
        with mock.patch.object(masks, "_values", side_effect=AssertionError("all pairs")):
            found = value_of((function, None), length, call, use_vmap=True)
        with mock.patch.object(masks, "_of_blocks", return_value=None):
            return found, value_of((function, None), length, call, use_vmap=True)

    found, expected = run_ranks(1, body)[0]
    assert found == expected


def test_other_functions_of_blocks_are_evaluated_at_all_pairs() -> None:
    """Blocks of equal ids that are apart, and tokens that see what comes after them."""
    if not hasattr(utils, "blockwise_overlay"):
        pytest.skip("this transformers has no blocks")
    apart, ids = torch.tensor([[0, 0, -1, 0, -1]]), torch.tensor([[-1, 0, 0, -1, -1]])
    bidirectional = utils.sliding_window_bidirectional_mask_function(2)
    functions = (
        utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(apart)),
        utils.or_masks(bidirectional, utils.blockwise_overlay(ids)),
        utils.and_masks(utils.causal_mask_function, utils.blockwise_overlay(ids)),
    )

    def body(_rank: int) -> list[Mask]:
        call = Call.of(init_device_mesh("cpu", (1,)))
        return [value_of((function, None), 5, call, rows=1) for function in functions]

    for function, value in zip(functions, run_ranks(1, body)[0], strict=True):
        wanted = utils.sdpa_mask(1, 5, 5, mask_function=function, attention_mask=None, allow_is_causal_skip=False)
        assert torch.equal(dense(value, 5), wanted[0, 0].long())


@pytest.mark.parametrize("padded", [False, True])
def test_functions_that_read_tensors_of_the_shard_are_refused(padded: bool) -> None:
    """Also those of one number a row, such as left padding, if there is padding."""
    of_shard = torch.zeros(1) if padded else torch.arange(8)

    def body(rank: int) -> None:
        function = utils.and_masks(utils.causal_mask_function, lambda b, h, q, kv: of_shard[kv] >= 0)
        padding = torch.arange(8)[None] > 2 if padded else None
        value_of((function, None), 8, call_of_two_ranks(), rows=1, padding=padding)

    with pytest.raises(NotImplementedError, match="reads of_shard, a tensor of this rank's tokens"):
        run_ranks(2, body)


def test_a_mask_that_no_known_function_asked_for_is_refused_in_contexts() -> None:
    """A later version of transformers may make masks in another way, in which documents would be lost."""
    config = transformers.LlamaConfig(attn_implementation="sdpa")
    given = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": utils.causal_mask_function}

    def body(rank: int) -> None:
        with context_parallel(init_device_mesh("cpu", (2,)), seq_len=8):
            make = utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
            make(**given, attention_mask=None, config=config)

    with pytest.raises(NotImplementedError, match=f"not known here .transformers {transformers.__version__}"):
        run_ranks(2, body)


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


def test_position_ids_travel_again_once_those_of_any_rank_are_others() -> None:
    """A mask is that of the present position ids; ranks gather them alike, also if only one of them has others."""
    one, two, three = [*range(8)], [*range(3), *range(5)], [*range(5), *range(3)]
    case = functions()["causal"]

    def body(rank: int) -> tuple[list[Mask], list[bool]]:
        call = replace(call_of_two_ranks(), layout=Contiguous())
        values, travelled, local = [], [], torch.zeros(1, 4, dtype=torch.int64)
        with context_parallel(init_device_mesh("cpu", (2,)), layout=Contiguous(), seq_len=8):
            context = innermost()
            assert context is not None
            for ids in (one, one, three, three, two, one):  # from one to three only rank 1 has others
                local.copy_(torch.tensor([ids[4 * rank : 4 * rank + 4]]))  # in place, as a collective would
                before = masks._latest.get(context)
                values.append(value_of(case, 4, call, rows=1, positions=local, context=context))
                travelled.append(masks._latest[context] is not before)
        return values, travelled

    documents = [Documents.from_lengths(lengths, within=Causal()) for lengths in ((5, 3), (3, 5))]
    for values, travelled in run_ranks(2, body):
        assert values == [Causal(), Causal(), documents[0], documents[0], documents[1], Causal()]
        assert travelled == [True, False, True, False, True, True]
