"""Models of transformers with learned sparse attention, in contexts and outside: docs/sparse.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import model_cells
from support.model_cells import COLUMNS, cells_of, run_cell
from support.models import FAMILIES, LENGTH, VOCABULARY, is_in_this_version, tiny_model
from support.problems import shard
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import (
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    SlidingWindow,
    Striped,
    context_parallel,
)
from cp_dtensor.spec.model_masks import Keys

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")

from cp_dtensor.integrations.transformers import ModelBatch, check_model, chosen, pooled, register, sparse  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BY_INDICES = ("DeepSeek-V3.2", "AX-K2", "GLM-5", "Hunyuan V4", "dots.note", "Mistral Large 4")
SPARSE = (*BY_INDICES, "MiniMax M3", "DeepSeek-V4")
NO_SDPA = {"Hunyuan V4", "DeepSeek-V4"}


def published(family: str, column: str) -> str:
    """A cell of docs/models.md; families that this version of transformers does not have are skipped."""
    if not hasattr(transformers, FAMILIES[family][0]):  # loads the module, too, which ranks as threads cannot
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    return cells_of(PAGE.read_text(), COLUMNS)[family, column]


def model_of(family: str, attention: str = "cp_dtensor") -> Any:
    published(family, "provider")
    register()
    return tiny_model(family, attention)


@pytest.mark.parametrize(("family", "column"), [
    *((family, column) for family in SPARSE for column in ("provider", "packed", "padded")),
    *((family, "plain") for family in ("GLM-5", "dots.note", "MiniMax M3")), ("Mistral Large 4", "checkpointed"),
])  # fmt: skip
def test_a_training_step_is_as_published(family: str, column: str) -> None:
    if not is_in_this_version(family):
        pytest.skip(f"this version of transformers does not have {family}")
    assert {*run_ranks(2, run_cell, family, column)} == {published(family, column)}


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(3)], ids=str)
@pytest.mark.parametrize("family", ["GLM-5", "MiniMax M3", "DeepSeek-V4"])
def test_layouts_of_three_ranks(family: str, layout: Layout) -> None:
    assert published(family, "provider") == "right"
    assert {*run_ranks(3, run_cell, family, "provider", layout)} == {"right"}


# Blocks that are pooled


def only_indexed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a family's models those of two indexed layers: docs/models.md has them with recurrent layers."""
    name, changes = FAMILIES[family]
    sizes = changes.get("text_config", changes)
    indexed = {**sizes, "layer_types": ["indexed_attention"] * 2, "indexer_types": ["full", "shared"]}
    both = {**changes, "text_config": indexed} if "text_config" in changes else indexed
    monkeypatch.setitem(FAMILIES, family, (name, both))


@pytest.mark.parametrize("kind", ["", "packed", "padded"])
@pytest.mark.parametrize("family", ["GLM-5 Next", "Qwen4"])
def test_pooled_index_keys(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_indexed(family, monkeypatch)
    monkeypatch.setattr(model_cells, "recurrences_in_float64", lambda _: nullcontext())
    published(family, "provider")
    assert {*run_ranks(3, run_cell, family, kind or "plain", Striped(5))} == {"right"}


def test_blocks_begin_with_documents_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    only_indexed("GLM-5 Next", monkeypatch)
    model, batch, tokens = model_of("GLM-5 Next"), batch_of(), batch_of().inputs["input_ids"]
    parts = [model(input_ids=part, use_cache=False).logits for part in tokens.split([21, LENGTH - 21], 1)]
    expected = torch.cat(parts, 1)
    found = in_context(model, batch, layout=Contiguous(), mask=Documents([0, 21, LENGTH]))
    torch.testing.assert_close(torch.cat(found, 1), expected)
    with pytest.raises(NotImplementedError, match="expects queries to see their documents up to themselves"):
        in_context(model, batch, mask=SlidingWindow(9, 0))


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()], ids=str)
@pytest.mark.parametrize(("family", "own"), [("DeepSeek-V4", "eager"), ("MiniMax M3", "sdpa")])
def test_documents_of_the_context_where_positions_are_places(family: str, own: str, layout: Layout) -> None:
    """Each as alone; in one process tokens see others, since the models compare position ids with places."""
    model, edges = model_of(family), [0, 24, 40, LENGTH]  # MiniMax M3 has blocks of 8, counted in the sequence
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges)]).expand(2, -1)
    packed, alone = batch_of(position_ids=positions), model_of(family, own)
    parts = [packed.inputs["input_ids"][:, start:stop] for start, stop in pairwise(edges)]
    expected = torch.cat([alone(input_ids=part, use_cache=False).logits for part in parts], 1)
    at = torch.cat([shard(torch.arange(LENGTH).view(1, 1, -1, 1), layout, rank, 2).flatten() for rank in range(2)])
    for batch in (packed, batch_of())[: 1 + (family == "MiniMax M3")]:
        found = torch.cat(in_context(model, batch, layout=layout, mask=Documents(edges)), 1)
        torch.testing.assert_close(found, expected[:, at], rtol=1e-5, atol=1e-5)  # parts of the models are float32
    message = "are others in packed documents: pass mask=Documents"
    with pytest.raises(NotImplementedError, match=message):
        in_context(model, packed, mask=Documents([0, 25, LENGTH]))
    if family == "DeepSeek-V4":
        with pytest.raises(NotImplementedError, match=message):
            in_context(model, batch_of(), mask=Documents(edges))
        with pytest.raises(NotImplementedError, match="expects queries to see their documents up to themselves"):
            in_context(model, batch_of(), mask=SlidingWindow(9, 0))


@pytest.mark.parametrize(("mask", "documents"), [
    (Causal(), [(0, 6)]),
    (Documents([0, 2, 6], within=Causal()), [(0, 2, 6)]),
    (Batched([Causal(), Causal() & Keys(((1, 4),))]), [(0, 6), (0, 1, 6)]),
    (Full(), [None]),
    (Causal() & SlidingWindow(2, 0), [None]),
    (Causal() & Keys(((0, 2), (3, 6))), [None]),
])  # fmt: skip
def test_documents_of_a_mask(mask: Mask, documents: list[Any]) -> None:
    assert pooled._documents(mask, 6, 2) == documents


# What travels


def in_context(model: Any, batch: ModelBatch, **options: Any) -> list[torch.Tensor]:
    """Logits of each rank."""

    def body(_: int) -> torch.Tensor:
        given = {name: tensor.clone() for name, tensor in batch.inputs.items()}
        buffers: Any = [*given.values()]
        with (
            warnings.catch_warnings(),
            context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[1] * len(buffers), **options),  # type: ignore[arg-type]
        ):
            warnings.simplefilter("ignore")
            logits: torch.Tensor = model(**given, use_cache=False).logits
        return logits

    return run_ranks(2, body)


def batch_of(**others: Any) -> ModelBatch:
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    return ModelBatch(input_ids=tokens, **others)


class OtherLinear(nn.Linear):
    """Stands for a projection whose weight is not all that it computes, such as one with an adapter."""


@pytest.mark.parametrize("family", BY_INDICES)
def test_latents_travel_where_a_layer_expands_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keys and values of all heads where the projection is not a plain one, with the same result."""
    model, calls = model_of(family), list[str]()
    for name in ("indexed_attention", "block_attention"):
        function = getattr(chosen, name)

        def counted(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(chosen, name, counted)
    found = in_context(model, batch_of())
    assert {*calls} == {"indexed_attention"}
    projections: list[Any] = [module.kv_b_proj for module in model.modules() if hasattr(module, "kv_b_proj")]
    hooks = [each.register_forward_pre_hook(lambda *_: calls.append("hook")) for each in projections]
    calls.clear()
    torch.testing.assert_close(in_context(model, batch_of()), found)
    assert {*calls} == {"block_attention", "hook"}
    for each, hook in zip(projections, hooks, strict=True):
        hook.remove()
        each.__class__ = OtherLinear
    calls.clear()
    torch.testing.assert_close(in_context(model, batch_of()), found)
    assert {*calls} == {"block_attention"}


# Refusals


def refused(model: Any, batch: ModelBatch, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        in_context(model, batch)


def test_blocks_with_padding_at_the_right_are_right() -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0, -11:] = 0
    model, batch = model_of("MiniMax M3"), batch_of(attention_mask=padding)
    expected = model(**batch.inputs, use_cache=False).logits
    for rank, found in enumerate(in_context(model, batch)):
        positions = torch.cat([torch.arange(16) + start for start in (16 * rank, 16 * (3 - rank))])
        is_kept = padding[:, positions].bool()
        torch.testing.assert_close(found[is_kept], expected[:, positions][is_kept])


def test_an_indexer_that_does_something_else_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("DeepSeek-V3.2")
    (kind,) = {type(each) for each in model.modules() if type(each).__name__.endswith("Indexer")}
    module = __import__(kind.__module__, fromlist=["F"])

    class Functions:
        """Stands for torch.nn.functional in the model's Python module."""

        relu = staticmethod(torch.sigmoid)

    monkeypatch.setattr(module, "F", Functions)
    refused(model, batch_of(), "DeepseekV32Indexer selects keys in a way that is not known .*made by sigmoid")


Q, K, W = torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 5, 1, 3)


def summed(scores: Any, weights: torch.Tensor = W) -> Any:
    return torch.matmul(weights, F.relu(scores)).squeeze(-2)


@pytest.mark.parametrize(("steps", "message"), [
    (lambda k: torch.matmul(Q.transpose(1, 2), k), r"queries of shape \(2, 3, 5, 4\), not \(2, 5, any, 4\)"),
    (lambda k: torch.matmul(k, Q), "queries of shape"),
    (lambda k: summed(torch.matmul(Q, k), W.squeeze(2)), r"weights of shape \(2, 5, 3\), not \(2, 5, 1, 3\)"),
    (lambda k: torch.matmul(Q, k) * -1.0, "a factor -1.0"),
    (lambda k: torch.matmul(Q, k) * torch.ones(3, 1), "a factor tensor"),
    (lambda k: torch.matmul(Q, k) + torch.zeros(1), "another addition, of Tensor"),
    (lambda k: summed(torch.matmul(Q, k)) + 1.0, "another addition, of float"),
    (lambda k: summed(torch.matmul(Q, k)).topk(2, dim=-1), "topk of dim -1 {}, without a mask"),
    (lambda k: (summed(torch.matmul(Q, k)) + torch.zeros(1)).topk(2, dim=1), "topk of dim 1"),
    (lambda k: (summed(torch.matmul(Q, k)) + torch.zeros(1)).topk(2, largest=False), "'largest': False"),
])  # fmt: skip
def test_what_an_indexer_computes_of_its_keys_is_checked(steps: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"An indexer selects keys in a way .*{message}"):
        steps(sparse._Cache("An indexer", None).update_indexer(K, 0))


def test_keys_of_other_dims_are_refused() -> None:
    cache = sparse._Cache("An indexer", None)
    with pytest.raises(NotImplementedError, match="keys of shape"):
        cache.update_indexer(K.unsqueeze(1), 0)


class Selector(nn.Module):
    """Selects places in the shard."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(*hidden_states.shape[:2], 1, dtype=torch.int32)


class OtherIndexer(Selector):
    pass


def test_indices_of_an_unknown_indexer_are_refused() -> None:
    model = model_of("DeepSeek-V3.2")
    model.config.layer_types = None
    layers = [each for each in model.modules() if hasattr(each, "indexer")]
    for layer in layers:
        layer.indexer = Selector()
    refused(model, batch_of(), "expects keys that were selected by an indexer that is known here")
    layers[0].indexer = OtherIndexer()
    assert check_model(model) == [
        "model.layers.0.self_attn.indexer: OtherIndexer selects keys of this rank's shard only"
    ]


@pytest.mark.parametrize(("family", "column", "reason"), [
    ("MiniMax M3", "packed", "position ids are taken for places of keys"),
    ("MiniMax M3", "padded", "no padding at the left"),
    ("DeepSeek-V4", "packed", "position ids are taken for places of keys"),
    ("DeepSeek-V4", "padded", "no padding at the left"),
])  # fmt: skip
def test_what_a_model_itself_computes_by_places_is_refused(family: str, column: str, reason: str) -> None:
    assert reason in published(family, column)


def test_positions_of_which_no_mask_was_made_are_refused() -> None:
    """Here the language model gets a mask of the caller."""
    own: Any = {"full_attention": None}

    def body(_: int) -> None:
        model, batch, world = model_of("MiniMax M3"), batch_of(), dist.group.WORLD
        with context_parallel(world, **batch.buffers):  # type: ignore[arg-type]
            model(**batch.inputs, attention_mask=own, use_cache=False)

    with pytest.raises(NotImplementedError, match="no mask was made of any"):
        run_ranks(2, body)


@pytest.mark.parametrize("family", ["DeepSeek-V3.2", "MiniMax M3", "DeepSeek-V4"])
def test_equal_bits_are_promised_by_torch_operations_alone(family: str) -> None:
    model, batch = model_of(family), batch_of()
    with pytest.raises(NotImplementedError, match="in a context with deterministic=True, expects"):
        in_context(model, batch, deterministic=True)
    expected = in_context(model, batch)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(in_context(model, batch, deterministic=True), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_masks_and_dropout() -> None:
    model = model_of("GLM-5")
    refused(
        model, batch_of(others={"attention_mask": torch.ones(2, LENGTH, 1, LENGTH)}), "expects a mask of transformers"
    )
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    refused(model, batch_of(), "with selected keys in context_parallel, does not take dropout")


# Outside of contexts


@pytest.mark.parametrize("family", [family for family in SPARSE if family not in NO_SDPA])
def test_outside_of_contexts_the_provider_attends_as_sdpa(family: str) -> None:
    model, batch = model_of(family).eval(), batch_of()
    padding = torch.ones(2, 20, dtype=torch.int64)
    padding[0, :4] = 0
    given = {"input_ids": batch.inputs["input_ids"][:, :20], "attention_mask": padding}
    found = model(**given, use_cache=False).logits
    generated = model.generate(**given, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(**given, use_cache=False).logits)
    assert torch.equal(generated, model.generate(**given, max_new_tokens=3, do_sample=False))
