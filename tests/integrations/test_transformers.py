"""Models of transformers on 2 ranks: ways of training, and what is refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.model_cells import recurrences_in_float64, run_cell
from support.models import LENGTH, ROWS, assert_gradients_sum_to, gradients, tiny_model
from support.processes import Processes, started
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    MirroredBatch,
    PerDocument,
    Striped,
    context_parallel,
    context_parallel_shard,
)
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, check_model, register

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")


def packed_at(*edges: int) -> torch.Tensor:
    """(1, LENGTH) position ids of documents that begin at some tokens."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise((0, *edges, LENGTH))])[None]


PACKED = {"position_ids": packed_at(20)}


def batch(**changes: Any) -> ModelBatch:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 53, (ROWS, LENGTH), generator=random)
    labels = ids.clone()
    labels[1, :13] = -100
    return ModelBatch(**{"input_ids": ids, "labels": labels, **changes})


def shard(whole: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
    """This rank's shard of the sequence, without gradients."""
    return context_parallel_shard(dist.group.WORLD, [whole.detach()], [1], layout)[0]  # type: ignore[arg-type]


def alone(family: str, step: Callable[[nn.Module], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one process."""
    model = tiny_model(family, "eager" if family == "gpt-oss" else "sdpa")
    with recurrences_in_float64(model):
        loss = step(model)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal(
    model: nn.Module, loss: torch.Tensor, expected: tuple[torch.Tensor, list[torch.Tensor]], tolerance: float = 1e-6
) -> None:
    """Compares the loss and the sum of all ranks' gradients with those of one process."""
    torch.testing.assert_close(loss.detach().double(), expected[0].double(), rtol=1e-6, atol=1e-6)
    assert_gradients_sum_to(model, expected[1], tolerance)


def train(
    family: str, attention: str, layout: Layout | None, *, model: Any = None, use_cache: bool = False,
    changes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """One step on the ranks of the world equals transformers' own loss in one process."""
    whole = batch(**(changes or {}))
    expected = alone(family, lambda one: one(**whole.inputs, labels=whole.labels, use_cache=False).loss)
    model = tiny_model(family, attention) if model is None else model
    mine = batch(**(changes or {}))
    assert mine.shift_labels is not None
    with context_parallel(dist.group.WORLD, **mine.buffers, layout=layout):  # type: ignore[arg-type]
        logits = model(**mine.inputs, use_cache=use_cache).logits
        loss = causal_lm_loss(logits, mine.shift_labels, gradients="sum")
    loss.backward()
    assert_equal(model, loss, expected)


def in_context(model: nn.Module, given: ModelBatch, *, more: Any = None, **arguments: Any) -> Any:
    with context_parallel(dist.group.WORLD, **given.buffers):  # type: ignore[arg-type]
        return model(**{**given.inputs, **(more or {})}, **arguments)


# Ways to train


def layouts(family: str, attention: str) -> None:
    for layout in (
        Contiguous(), HeadTail(), Striped(4), MirroredBatch(), Balanced(Causal(), LENGTH),
        PerDocument([0, 20, LENGTH]),
    ):  # fmt: skip
        train(family, attention, layout)
        train(family, attention, layout, changes=PACKED)


def caches_and_checkpoints(family: str) -> None:
    """Reentrant ones; others are in the support matrix."""
    for attention in ("cp_dtensor", "sdpa") if family != "gpt-oss" else ("cp_dtensor",):
        train(family, attention, None, use_cache=True)
        model: Any = tiny_model(family, attention)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another name for it has come
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        train(family, attention, None, model=model)


def compiled_layers(family: str) -> None:
    torch.compiler.reset()
    model: Any = tiny_model(family, "cp_dtensor")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
    for layer in model.model.layers:
        # Experts of gpt-oss depend on data, so only its attention is one graph.
        (layer.self_attn if family == "gpt-oss" else layer).compile(backend="aot_eager", fullgraph=True)
    train(family, "", None, model=model)
    model.zero_grad()
    train(family, "", None, model=model, changes=PACKED)  # the same code
    whole = torch.compile(tiny_model(family, "cp_dtensor"), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="compile its layers"):
        in_context(whole, batch())  # type: ignore[arg-type]


def modules(family: str) -> None:
    """Layers with `ContextParallel` and no context: masks are made where no context is open."""
    mesh = init_device_mesh("cpu", (2,))
    for changes in ({}, PACKED) if family != "Qwen3-Next" else ({},):
        whole = batch(**changes)
        inputs: dict[str, Any] = dict(whole.inputs)
        expected = alone(family, lambda one: one(**inputs, labels=whole.labels, use_cache=False).loss)  # noqa: B023
        model: Any = tiny_model(family, "cp_dtensor")
        for layer in model.model.layers:
            parallelize_module(
                layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn, mesh, ContextParallel()
            )
        *shards, shifted = (shard(each) for each in (*inputs.values(), whole.shift_labels))  # type: ignore[arg-type]
        logits = model(**dict(zip(inputs, shards, strict=True)), use_cache=False).logits
        loss = causal_lm_loss(logits, shifted, mesh=mesh, gradients="sum")
        loss.backward()
        assert_equal(model, loss, expected)
    if family == "Qwen3-Next":
        torch.compiler.reset()
        mixer = model.model.layers[0].linear_attn
        with pytest.raises(Exception, match="compile it inside of context_parallel"):
            torch.compile(mixer, backend="aot_eager", fullgraph=True)(torch.zeros(1, 4, 32).double())
    elif family != "gpt-oss":  # which makes its masks without position ids
        with pytest.raises(ValueError, match="the model has counted them in its shard"):
            model(input_ids=torch.ones(ROWS, 8, dtype=torch.int64), use_cache=False)


def mean_gradients() -> None:
    """`gradients="mean"`: what DistributedDataParallel and FSDP2 average is the gradient of one process."""
    whole = batch()
    expected = alone("Llama", lambda one: one(**whole.inputs, labels=whole.labels, num_items_in_batch=77).loss)
    model: Any = tiny_model("Llama", "cp_dtensor")
    replicated, given = nn.parallel.DistributedDataParallel(model), batch()
    with context_parallel(dist.group.WORLD, **given.buffers):  # type: ignore[arg-type]
        logits = replicated(**given.inputs).logits
        loss = causal_lm_loss(logits, given.shift_labels, num_items_in_batch=77)  # type: ignore[arg-type]
        loss.backward()
    torch.testing.assert_close(loss.detach().double(), expected[0].double(), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(gradients(model), expected[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# Masks


def outside_of_contexts() -> None:
    """There the provider is "sdpa"."""
    padding = torch.cat([torch.zeros(ROWS, 5), torch.ones(ROWS, LENGTH - 5)], 1).long()
    for given in (batch(), batch(attention_mask=padding)):
        for family in ("Gemma 3", "BERT"):
            with torch.no_grad():
                found = [tiny_model(family, each)(**given.inputs).logits for each in ("cp_dtensor", "sdpa")]
            torch.testing.assert_close(*found)
    with pytest.raises(NotImplementedError, match='is "sdpa", which does not support s_aux'):
        tiny_model("gpt-oss", "cp_dtensor")(**batch().inputs)


def whole_padding(attention: str) -> None:
    """Padding that is not among the buffers is whole on every rank."""
    for width in (0, 9):
        padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        padding[0, LENGTH - width :] = 0
        expected = tiny_model("Mistral", "sdpa")(**batch().inputs, attention_mask=padding).logits
        logits = in_context(tiny_model("Mistral", attention), batch(), more={"attention_mask": padding}).logits
        torch.testing.assert_close(logits.detach(), shard(expected), rtol=1e-6, atol=1e-6)


def documents_by_edges() -> None:
    """With a cache, position ids do not say where documents begin: only cu_seq_lens do."""
    edges, positions = torch.tensor([0, 17, 40, LENGTH], dtype=torch.int32), packed_at(17, 40)
    ids = batch().inputs["input_ids"][:1]
    whole = tiny_model("Mistral", "sdpa")(input_ids=ids, position_ids=positions, use_cache=False).logits
    given = ModelBatch(input_ids=ids.clone(), labels=ids, position_ids=positions)
    more = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 24, "max_length_k": 24}
    logits = in_context(tiny_model("Mistral", "cp_dtensor"), given, more=more, use_cache=True).logits
    torch.testing.assert_close(logits.detach(), shard(whole), rtol=1e-6, atol=1e-6)


def flex() -> None:
    """FlexAttention has no gradients on CPUs: forward only. Windows and full layers, documents in one row."""
    given = batch(position_ids=torch.cat([packed_at(20), packed_at()]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = tiny_model("Gemma 3", "sdpa")(**given.inputs, use_cache=False).logits.float()
        logits = in_context(tiny_model("Gemma 3", "flex_attention").float(), given, use_cache=False).logits
    torch.testing.assert_close(logits, shard(whole), rtol=1e-3, atol=1e-4)


# Layers that count


def counted_for_scales() -> None:
    """Positions of the whole sequence, which layers of Llama 4 without RoPE count to scale queries."""
    for layout in (Contiguous(), Striped(4)):
        for attention, use_cache in (("sdpa", True), ("cp_dtensor", False)):
            train("Llama 4, no RoPE", attention, layout, use_cache=use_cache)
    with pytest.raises(NotImplementedError, match="positions that are the same in all batch rows, got MirroredBatch"):
        train("Llama 4, no RoPE", "sdpa", MirroredBatch())
    model: Any = tiny_model("Llama 4, no RoPE", "sdpa")
    inputs = batch().inputs
    whole = model(**inputs, use_cache=False).logits
    shards = {name: shard(each) for name, each in inputs.items()}
    with context_parallel(dist.group.WORLD):  # type: ignore[arg-type]  # no length is declared
        logits = model(**shards, use_cache=False).logits
    torch.testing.assert_close(logits.detach(), shard(whole), rtol=1e-6, atol=1e-6)
    for each in model.modules():
        each.forward = each.forward  # as accelerate does: it calls the forward that the class had then
    assert any("attn_temperature_tuning" in line for line in check_model(model))


def counted_embeddings(family: str) -> None:
    """Positions that encoders and decoders count: learned ones, and those of T5's bias."""
    for layout in (Contiguous(), Striped(4)):
        assert run_cell(0, family, "padded", layout) == "right"
    assert "positions that are the same in all batch rows, got Mirrored" in run_cell(
        0, family, "padded", MirroredBatch()
    )


def dropout(family: str) -> None:
    """It does not depend on the layout."""
    found = []
    for probability, layout in ((0.3, Contiguous()), (0.3, HeadTail()), (0.0, None)):
        model, given = tiny_model(family, "cp_dtensor"), batch()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = probability
        torch.manual_seed(5)
        with context_parallel(dist.group.WORLD, **given.buffers, layout=layout):  # type: ignore[arg-type]
            loss = causal_lm_loss(model(**given.inputs).logits, given.shift_labels)  # type: ignore[arg-type]
        found.append(loss.detach())
    torch.testing.assert_close(*found[:2])
    assert (found[0] - found[2]).abs() > 1e-4


# What is refused


def refusals() -> None:
    import transformers

    llama: Any = tiny_model("Llama", "sdpa")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder_decoder = transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder={**sizes}, decoder={**sizes}, vocab_size=53)
    )
    encoder_decoder.set_attn_implementation("cp_dtensor")
    v4 = transformers.DeepseekV4Config(
        **sizes, vocab_size=53, layer_types=["sliding_attention"], mlp_layer_types=["moe"], head_dim=16, q_lora_rank=8,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, o_groups=2, o_lora_rank=8,
    )  # fmt: skip
    v4._attn_implementation, v4._experts_implementation = "cp_dtensor", "eager"
    cache = tiny_model("Llama", "sdpa")(input_ids=torch.ones(ROWS, 4, dtype=torch.int64), use_cache=True)
    labels, edges = torch.zeros(ROWS, LENGTH // 2, dtype=torch.int64), torch.tensor([0, LENGTH], dtype=torch.int32)
    delta = tiny_model("Qwen3-Next", "sdpa")
    of_heads = transformers.LlamaForQuestionAnswering, transformers.LlamaForSequenceClassification
    answers, classes = (kind(llama.config) for kind in of_heads)
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "got no position_ids inside of context_parallel": (llama, {"position_ids": None}),
        "the model has counted them in its shard": (llama, {"position_ids": torch.arange(LENGTH // 2)[None]}),
        f"expected position_ids of this rank's {LENGTH // 2} tokens, got {LENGTH}": (
            llama, {"position_ids": torch.arange(LENGTH)[None]},
        ),
        "would shift them within this rank's shard": (llama, {"labels": labels}),
        "which have .* keys: make it one of the context's": (llama, {"attention_mask": torch.zeros(ROWS, LENGTH - 3)}),
        "takes no cache of keys that has tokens": (llama, {"past_key_values": cache.past_key_values}),
        "computes attention as matrix products": (tiny_model("Llama", "eager"), {}),
        "LlamaForQuestionAnswering got start_positions": (answers, {"start_positions": torch.ones(ROWS)}),
        "takes the result of a whole row from the tokens of this rank's shard": (classes, {}),
        "T5GemmaForConditionalGeneration got labels without decoder_input_ids": (encoder_decoder, {"labels": labels}),
        "expects head_scales to be None": (tiny_model("Llama", "cp_dtensor"), {"head_scales": torch.ones(2)}),
        "ModernBert.* got no position_ids": (tiny_model("ModernBERT", "sdpa"), {"position_ids": None}),
        r"a model that pads or joins it \(DeepSeek-V4\) cannot be used": (
            transformers.DeepseekV4ForCausalLM(v4), {"use_cache": False},
        ),
        "pass use_cache=False": (delta, {"use_cache": True}),
        r"mask=Documents\(...\)": (delta, {"use_cache": False, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}),
    }  # fmt: skip
    for message, (model, more) in cases.items():
        with pytest.raises((NotImplementedError, ValueError), match=message):
            in_context(model, batch(), more=more)
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=53)
    )
    with pytest.warns(UserWarning, match="the loss of its router .* from the tokens of this rank's shard"):
        in_context(experts, batch(), more={"output_router_logits": True})
    dist.barrier()


def without_attention() -> None:
    import transformers

    class Model(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        _supports_sdpa = True

        def __init__(self) -> None:
            super().__init__(transformers.LlamaConfig(num_hidden_layers=0, attn_implementation="sdpa"))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids @ input_ids.mT

    warned = pytest.warns(UserWarning, match="no attention call was seen there")
    with warned, context_parallel(dist.group.WORLD):  # type: ignore[arg-type]
        Model()(torch.ones(1, 4, 4))


CASES: list[Any] = [
    *[(layouts, *each) for each in (("Gemma 3", "sdpa"), ("gpt-oss", "cp_dtensor"))],
    *[(caches_and_checkpoints, family) for family in ("Gemma 3", "gpt-oss", "Mistral")],
    *[pytest.param((compiled_layers, family), marks=pytest.mark.sweep) for family in ("gpt-oss", "Gemma 3")],
    *[(modules, family) for family in ("Gemma 3", "gpt-oss", "Qwen3-Next")],
    (mean_gradients,), (outside_of_contexts,), (whole_padding, "sdpa"), (whole_padding, "cp_dtensor"),
    (counted_embeddings, "BART"), (counted_embeddings, "T5"),
    (documents_by_edges,), pytest.param((flex,), marks=pytest.mark.sweep), (counted_for_scales,),
    (dropout, "Gemma 3"), (refusals,), (without_attention,),
]  # fmt: skip


def registered(_rank: int, body: Callable[..., None], *args: Any) -> None:
    register()
    body(*args)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0].__name__, *case[1:]]))
def test_models(two_processes: Processes, case: tuple[Any, ...]) -> None:
    two_processes.run(registered, *case)


# Hybrid models


@pytest.fixture(scope="module")
def without_provider() -> Iterator[Processes]:
    """Two processes in which `register()` is never called: it keeps the functions of models replaced."""
    yield from started(2, timeout=250)


def hybrid(rank: int, family: str) -> None:
    for edges in ((0, LENGTH), (0, 20, 21, LENGTH)):
        positions, ids = packed_at(*edges[1:-1]), batch().inputs["input_ids"]

        def one_by_one(one: nn.Module) -> torch.Tensor:
            parts = ids.split([stop - start for start, stop in pairwise(edges)], 1)  # noqa: B023
            given = [{"input_ids": part, "position_ids": torch.arange(part.size(1))[None]} for part in parts]
            return torch.cat([one(**each, use_cache=False).logits for each in given], 1).double().square().sum()

        expected = alone(family, one_by_one)
        mask = Documents(edges, within=Causal()) if len(edges) > 2 else None
        for layout in (Contiguous(), HeadTail(), Striped(4), MirroredBatch()):
            model, given = tiny_model(family, "sdpa"), batch(position_ids=positions, labels=None)
            assert check_model(model) == []
            modeling = vars(sys.modules[type(model).__module__])
            before = {name: value for name, value in modeling.items() if callable(value)}
            with context_parallel(dist.group.WORLD, **given.buffers, layout=layout, mask=mask):  # type: ignore[arg-type]
                loss = model(**given.inputs, use_cache=False).logits.double().square().sum()
                loss.backward()
            assert {name: value for name, value in modeling.items() if callable(value)} == before
            dist.all_reduce(total := loss.detach().clone())
            assert_equal(model, total, expected, 1e-5)


@pytest.mark.parametrize("family", ["Qwen3-Next", "Nemotron-H"])
def test_layouts_and_documents_of_the_context(without_provider: Processes, family: str) -> None:
    """Recurrent layers read the documents of the context, and all functions are restored after it."""
    without_provider.run(hybrid, family)
