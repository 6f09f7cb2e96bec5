"""Models of transformers on 2 ranks: ways of training, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import LENGTH, ROWS, assert_gradients_sum_to, gradients, tiny_model
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
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


def batch(**changes: Any) -> ModelBatch:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 53, (ROWS, LENGTH), generator=random)
    labels = ids.clone()
    labels[1, :13] = -100
    return ModelBatch(**{"input_ids": ids, "labels": labels, **changes})


def alone(family: str, step: Callable[[nn.Module], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one process."""
    model = tiny_model(family, "eager" if family == "gpt-oss" else "sdpa")
    loss = step(model)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal(
    model: nn.Module, loss: torch.Tensor, expected: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:  # fmt: skip
    """Compares the loss and the sum of all ranks' gradients with those of one process."""
    torch.testing.assert_close(loss.detach().double(), expected[0].double(), rtol=1e-6, atol=1e-6)
    assert_gradients_sum_to(model, expected[1])


def train(
    family: str, attention: str, layout: Layout | None, *, model: Any = None, use_cache: bool = False,
    changes: dict[str, Any] | None = None, forward: Any = None,
) -> None:  # fmt: skip
    """One step on the ranks of the world equals transformers' own loss in one process."""
    labels = batch(**(changes or {})).labels
    positions = batch(**(changes or {})).inputs

    def whole(one: nn.Module) -> torch.Tensor:
        return one(**positions, labels=labels, use_cache=False).loss

    expected = alone(family, whole)
    model = tiny_model(family, attention) if model is None else model
    mine, world = batch(**(changes or {})), dist.group.WORLD
    assert mine.shift_labels is not None
    with context_parallel(world, **mine.buffers, layout=layout):
        logits = (forward or model)(**mine.inputs, use_cache=use_cache).logits
        loss = causal_lm_loss(logits, mine.shift_labels, gradients="sum")
    loss.backward()
    assert_equal(model, loss, expected)


def layouts(rank: int, family: str, attention: str) -> None:
    register()
    for layout in (
        Contiguous(), HeadTail(), Striped(4), MirroredBatch(), Balanced(Causal(), LENGTH),
        PerDocument([0, 20, LENGTH]),
    ):  # fmt: skip
        train(family, attention, layout)
        documents = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
        train(family, attention, layout, changes={"position_ids": documents})


@pytest.mark.parametrize(("family", "attention"), [("Gemma 3", "sdpa"), ("gpt-oss", "cp_dtensor"), ("Llama", "sdpa")])
def test_any_layout_with_and_without_documents(two_processes: Processes, family: str, attention: str) -> None:
    two_processes.run(layouts, family, attention)


def ways_to_train(rank: int, family: str) -> None:
    register()
    for attention in ("cp_dtensor", "sdpa") if family != "gpt-oss" else ("cp_dtensor",):
        train(family, attention, None, use_cache=True)
        for reentrant in (True, False):
            model: Any = tiny_model(family, attention)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another name for it has come
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            train(family, attention, None, model=model)


@pytest.mark.parametrize("family", ["Gemma 3", "gpt-oss", "Mistral"])
def test_caches_and_gradient_checkpointing(two_processes: Processes, family: str) -> None:
    two_processes.run(ways_to_train, family)


def compiled_layers(rank: int, family: str) -> None:
    register()
    torch.compiler.reset()
    model: Any = tiny_model(family, "cp_dtensor")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
    for layer in model.model.layers:
        # Experts of gpt-oss depend on data, so only its attention is one graph.
        (layer.self_attn if family == "gpt-oss" else layer).compile(backend="aot_eager", fullgraph=True)
    train(family, "", None, model=model)
    model.zero_grad()
    documents = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]
    train(family, "", None, model=model, changes={"position_ids": documents})  # the same code
    whole = torch.compile(tiny_model(family, "cp_dtensor"), backend="aot_eager", fullgraph=True)
    one = batch()
    with (
        context_parallel(init_device_mesh("cpu", (2,)), **one.buffers),
        pytest.raises(Exception, match="compile its layers"),
    ):
        whole(**one.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "Gemma 3"])
def test_compiled_layers_without_graph_breaks(two_processes: Processes, family: str) -> None:
    two_processes.run(compiled_layers, family)


def modules(rank: int, family: str) -> None:
    """Attention modules with `ContextParallel` and no context: masks are made where no context is open."""
    register()
    mesh = init_device_mesh("cpu", (2,))
    for changes in ({}, {"position_ids": torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]}):
        whole = batch(**changes)
        labels, inputs = whole.labels, dict(whole.inputs)
        expected = alone(family, lambda one: one(**inputs, labels=labels, use_cache=False).loss)  # noqa: B023
        model: Any = tiny_model(family, "cp_dtensor")
        for layer in model.model.layers:
            parallelize_module(layer.self_attn, mesh, ContextParallel())
        names = [*inputs]
        *shards, shifted = context_parallel_shard(mesh, [*inputs.values(), whole.shift_labels], [1] * (len(names) + 1))
        logits = model(**dict(zip(names, shards, strict=True)), use_cache=False).logits
        loss = causal_lm_loss(logits, shifted, mesh=mesh, gradients="sum")
        loss.backward()
        assert_equal(model, loss, expected)


def modules_without_positions(rank: int) -> None:
    register()
    model: Any = tiny_model("Llama", "cp_dtensor")
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, init_device_mesh("cpu", (2,)), ContextParallel())
    with pytest.raises(ValueError, match="the model has counted them in its shard"):
        model(input_ids=torch.ones(ROWS, 8, dtype=torch.int64), use_cache=False)


def test_modules_refuse_positions_that_were_counted_in_shards(two_processes: Processes) -> None:
    two_processes.run(modules_without_positions)


@pytest.mark.parametrize("family", ["Gemma 3", "gpt-oss"])
def test_modules_with_context_parallel(two_processes: Processes, family: str) -> None:
    two_processes.run(modules, family)


def one_process(rank: int) -> None:
    """Outside of contexts the provider is "sdpa"."""
    register()
    for changes in ({}, {"attention_mask": torch.cat([torch.zeros(ROWS, 5), torch.ones(ROWS, LENGTH - 5)], 1).long()}):
        given = batch(**changes)
        for family in ("Gemma 3", "BERT"):
            with torch.no_grad():
                found = [tiny_model(family, each)(**given.inputs).logits for each in ("cp_dtensor", "sdpa")]
            torch.testing.assert_close(*found)
    with pytest.raises(NotImplementedError, match='is "sdpa", which does not support s_aux'):
        tiny_model("gpt-oss", "cp_dtensor")(**batch().inputs)


def test_outside_of_contexts(two_processes: Processes) -> None:
    two_processes.run(one_process)


def in_context(model: nn.Module, given: ModelBatch, *, more: Any = None, buffers: Any = None, **arguments: Any) -> Any:
    assert given.shift_labels is not None
    buffers = given.buffers if buffers is None else buffers
    with context_parallel(dist.group.WORLD, **buffers):
        return model(**{**given.inputs, **(more or {})}, **arguments)


def refusals(rank: int) -> None:
    import transformers

    register()
    world = dist.group.WORLD
    llama: Any = tiny_model("Llama", "sdpa")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.T5GemmaConfig(encoder={**sizes}, decoder={**sizes}, vocab_size=53)
    encoder_decoder = transformers.T5GemmaForConditionalGeneration(config)
    encoder_decoder.set_attn_implementation("cp_dtensor")
    for message, attempt in {
        "got no position_ids inside of context_parallel": lambda: in_context(
            llama, batch(), more={"position_ids": None}
        ),
        "the model has counted them in its shard": lambda: in_context(
            llama, batch(), more={"position_ids": torch.arange(LENGTH // 2)[None]}
        ),
        f"expected position_ids of this rank's {LENGTH // 2} tokens, got {LENGTH}": lambda: in_context(
            llama, batch(), more={"position_ids": torch.arange(LENGTH)[None]}
        ),
        "would shift them within this rank's shard": lambda: in_context(
            llama, batch(), more={"labels": torch.zeros(ROWS, LENGTH // 2, dtype=torch.int64)}
        ),
        "which have .* keys: make it one of the context's buffers": lambda: in_context(
            llama, batch(), more={"attention_mask": torch.zeros(ROWS, LENGTH - 3)}
        ),
        "computes attention as matrix products": lambda: in_context(tiny_model("Llama", "eager"), batch()),
        "LlamaForQuestionAnswering got start_positions": lambda: in_context(
            transformers.LlamaForQuestionAnswering(llama.config), batch(), more={"start_positions": torch.ones(ROWS)}
        ),
        "takes the result of a whole row from the tokens of this rank's shard": lambda: in_context(
            transformers.LlamaForSequenceClassification(llama.config), batch()
        ),
        "T5GemmaForConditionalGeneration got labels without decoder_input_ids": lambda: in_context(
            encoder_decoder, batch(), more={"labels": torch.zeros(ROWS, LENGTH // 2, dtype=torch.int64)}
        ),
        "does not support head_scales": lambda: in_context(
            tiny_model("Llama", "cp_dtensor"), batch(), more={"head_scales": torch.ones(2)}
        ),
        "ModernBertForMaskedLM got no position_ids|ModernBertModel got no position_ids": lambda: in_context(
            tiny_model("ModernBERT", "sdpa"), batch(), more={"position_ids": None}
        ),
    }.items():  # fmt: skip
        with pytest.raises((NotImplementedError, ValueError), match=message):
            attempt()
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=53)
    )
    with pytest.warns(UserWarning, match="the loss of its router .* from the tokens of this rank's shard"):
        in_context(experts, batch(), more={"output_router_logits": True})
    model: Any = tiny_model("Llama", "sdpa")
    cache = model(input_ids=torch.ones(ROWS, 4, dtype=torch.int64), use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="takes no cache of keys that has tokens"):
        in_context(model, batch(), past_key_values=cache)
    config = transformers.DeepseekV4Config(
        **sizes, vocab_size=53, layer_types=["sliding_attention"], mlp_layer_types=["moe"], head_dim=16, q_lora_rank=8,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, o_groups=2, o_lora_rank=8,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "cp_dtensor", "eager"
    with pytest.raises(ValueError, match=r"a model that pads or joins it \(DeepSeek-V4\) cannot be used"):
        in_context(transformers.DeepseekV4ForCausalLM(config), batch(), use_cache=False)
    dist.barrier(world)


def test_what_is_wrong_in_shards_is_refused_by_name(two_processes: Processes) -> None:
    two_processes.run(refusals)


def counted_for_scales(rank: int) -> None:
    """Positions of the whole sequence, which layers without RoPE count to scale queries."""
    register()
    for layout in (Contiguous(), Striped(4)):
        for attention, use_cache in (("sdpa", True), ("cp_dtensor", False)):
            train("Llama 4, no RoPE", attention, layout, use_cache=use_cache)
    with pytest.raises(NotImplementedError, match="positions that are the same in all batch rows, got MirroredBatch"):
        train("Llama 4, no RoPE", "sdpa", MirroredBatch())
    model: Any = tiny_model("Llama 4, no RoPE", "sdpa")
    inputs = batch().inputs
    whole = model(**inputs, use_cache=False).logits.detach()
    shards = dict(zip(inputs, context_parallel_shard(dist.group.WORLD, [*inputs.values()], [1, 1]), strict=True))
    with context_parallel(dist.group.WORLD):  # no length is declared
        logits = model(**shards, use_cache=False).logits.detach()
    torch.testing.assert_close(logits, context_parallel_shard(dist.group.WORLD, [whole], [1])[0], rtol=1e-6, atol=1e-6)
    for each in model.modules():
        each.forward = each.forward  # as accelerate does: it calls the forward that the class had then
    assert any("attn_temperature_tuning" in line for line in check_model(model))


def test_positions_that_llama_4_counts(two_processes: Processes) -> None:
    two_processes.run(counted_for_scales)


def whole_padding(rank: int, attention: str) -> None:
    """Padding that is not among the buffers is whole on every rank."""
    for width in (0, 9):
        padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        padding[0, LENGTH - width :] = 0
        given = batch()
        inputs = dict(given.inputs)
        expected = tiny_model("Mistral", "sdpa")(**inputs, attention_mask=padding).logits
        whole = expected.detach()
        logits = in_context(tiny_model("Mistral", attention), given, more={"attention_mask": padding})
        mine = context_parallel_shard(dist.group.WORLD, [whole], [1])[0]
        torch.testing.assert_close(logits.logits.detach(), mine, rtol=1e-6, atol=1e-6)


def test_padding_that_is_not_sharded(two_processes: Processes) -> None:
    two_processes.run(register_and, whole_padding, "sdpa")
    two_processes.run(register_and, whole_padding, "cp_dtensor")


def register_and(rank: int, body: Callable[..., None], *args: Any) -> None:
    register()
    body(rank, *args)


def documents_by_edges(rank: int) -> None:
    edges = torch.tensor([0, 17, 40, LENGTH], dtype=torch.int32)
    ids = batch().input_ids
    assert ids is not None
    positions = torch.cat([torch.arange(n) for n in (17, 23, 24)])[None]
    alone_inputs = {"input_ids": ids[:1], "position_ids": positions}
    whole = tiny_model("Mistral", "sdpa")(**alone_inputs, use_cache=False).logits.detach()
    given = ModelBatch(input_ids=ids[:1].clone(), labels=ids[:1], position_ids=positions)
    more = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 24, "max_length_k": 24}
    logits = in_context(tiny_model("Mistral", "cp_dtensor"), given, more=more, use_cache=True).logits
    torch.testing.assert_close(logits, context_parallel_shard(dist.group.WORLD, [whole], [1])[0], rtol=1e-6, atol=1e-6)


def test_documents_by_cu_seq_lens(two_processes: Processes) -> None:
    """With a cache, position ids do not say where documents begin: only cu_seq_lens do."""
    two_processes.run(register_and, documents_by_edges)


def dropout(rank: int, family: str) -> None:
    found = []
    for layout in (Contiguous(), HeadTail()):
        model = tiny_model(family, "cp_dtensor")
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        given = batch()
        torch.manual_seed(5)
        with context_parallel(dist.group.WORLD, **given.buffers, layout=layout):
            loss = causal_lm_loss(model(**given.inputs).logits, given.shift_labels)  # type: ignore[arg-type]
        found.append(loss.detach())
    without = causal_lm_loss(
        in_context(tiny_model(family, "cp_dtensor"), given := batch()).logits,
        context_parallel_shard(dist.group.WORLD, [given.shift_labels], [1])[0], mesh=dist.group.WORLD,  # type: ignore[list-item]
    ).detach()  # fmt: skip
    torch.testing.assert_close(*found)
    assert (found[0] - without).abs() > 1e-4


def test_dropout_does_not_depend_on_the_layout(two_processes: Processes) -> None:
    two_processes.run(register_and, dropout, "Gemma 3")


def flex(rank: int) -> None:
    """FlexAttention has no gradients on CPUs: forward only."""
    packed = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in ([20, 44], [64])])
    for family, attention in (("Gemma 3", "flex_attention"), ("Mistral", "flex_attention")):
        for changes in ({}, {"position_ids": packed}):
            given = batch(**changes)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = tiny_model(family, "sdpa")(**given.inputs, use_cache=False).logits.float()
                model = tiny_model(family, attention).float()
                logits = in_context(model, given, use_cache=False).logits
            mine = context_parallel_shard(dist.group.WORLD, [whole], [1])[0]
            torch.testing.assert_close(logits, mine, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_flex_attention(two_processes: Processes) -> None:
    two_processes.run(register_and, flex)


def unseen(rank: int) -> None:
    import transformers

    class Model(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        _supports_sdpa = True

        def __init__(self) -> None:
            super().__init__(transformers.LlamaConfig(num_hidden_layers=0, attn_implementation="sdpa"))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids @ input_ids.mT

    with pytest.warns(UserWarning, match="no attention call was seen there"):  # noqa: SIM117
        with context_parallel(dist.group.WORLD):
            Model()(torch.ones(1, 4, 4))


def test_a_model_without_attention_is_warned_of(two_processes: Processes) -> None:
    two_processes.run(unseen)


def mean_gradients(rank: int) -> None:
    """`gradients="mean"`: what DistributedDataParallel and FSDP2 average is the gradient of one process."""
    labels = batch().labels
    inputs = batch().inputs
    expected = alone("Llama", lambda one: one(**inputs, labels=labels, num_items_in_batch=77).loss)
    model: Any = tiny_model("Llama", "cp_dtensor")
    replicated = nn.parallel.DistributedDataParallel(model)
    given = batch()
    with context_parallel(dist.group.WORLD, **given.buffers):
        logits = replicated(**given.inputs).logits
        loss = causal_lm_loss(logits, given.shift_labels, num_items_in_batch=77)  # type: ignore[arg-type]
        loss.backward()
    torch.testing.assert_close(loss.detach().double(), expected[0].double(), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(gradients(model), expected[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_mean_gradients_by_ddp_and_given_numbers_of_items(two_processes: Processes) -> None:
    two_processes.run(register_and, mean_gradients)


def share_of_masks(rank: int, attention: str) -> None:
    """ESM scales its embeddings by the share of mask tokens, which differs between shards and between rows."""
    import transformers

    register()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 128}

    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.EsmConfig(
            vocab_size=53, mask_token_id=32, pad_token_id=1, token_dropout=True, **sizes, **options
        )
        one = transformers.EsmForMaskedLM(config).double()
        one.set_attn_implementation(attention)
        return one

    ids = torch.where(torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(7)) < 0.3, 32, 5)
    ids[:, : LENGTH // 4] = 32
    ids[0] = ids[0].roll(30)
    for positions in ("absolute", "rotary"):
        for width in (0, 9):
            padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
            padding[0, LENGTH - width :] = 0
            labels = torch.full((ROWS, LENGTH), 6).masked_fill(padding == 0, -100)
            given = ModelBatch(
                input_ids=ids.clone(), labels=labels, position_ids=torch.arange(2, LENGTH + 2)[None],
                others={} if not width else {"attention_mask": padding.clone()},
            )  # fmt: skip
            options["position_embedding_type"] = positions
            assert given.shift_labels is not None
            alone_model, mine = model(), model()
            logits = alone_model(**given.inputs).logits
            expected = F.cross_entropy(logits.flatten(0, 1), given.shift_labels.flatten())
            expected.backward()
            assert check_model(mine) == []
            with context_parallel(dist.group.WORLD, **given.buffers):
                loss = causal_lm_loss(mine(**given.inputs).logits, given.shift_labels, gradients="sum")
            loss.backward()
            assert_equal(mine, loss, (expected.detach(), gradients(alone_model)))


@pytest.mark.parametrize("attention", ["sdpa", "cp_dtensor"])
def test_the_share_of_mask_tokens_is_that_of_the_whole_sequence(two_processes: Processes, attention: str) -> None:
    two_processes.run(share_of_masks, attention)
