"""Models and Trainer of transformers outside of contexts, after `register()`."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import is_in_this_version
from support.models import tiny_model as family_model
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import ContextParallel, Contiguous
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.handles import value_of

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")

from transformers.models.bart import modeling_bart as bart  # noqa: E402
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as recurrent_gemma  # noqa: E402

from cp_dtensor.integrations.transformers import register  # noqa: E402
from cp_dtensor.integrations.transformers.checks import refuse_own_positions  # noqa: E402


def tiny_model(implementation: str, kind: str = "Llama") -> Any:
    register()
    torch.manual_seed(0)
    windows = {"sliding_window": 4} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attn_implementation=implementation, num_key_value_heads=2, **windows,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_trainer_divides_the_loss_by_the_labels_that_have_a_token_before_them(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra [integrations]")
    model, rows = tiny_model("sdpa"), torch.randint(32, (2, 8))
    expected = model(input_ids=rows, labels=rows).loss.item()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, per_device_train_batch_size=2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("positions", [[*range(9)], [*range(3, 12)], [*range(4), *range(5)]], ids=str)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_the_provider_attends_as_sdpa(kind: str, use_cache: bool, positions: list[int]) -> None:
    model, rows = tiny_model("cp_dtensor", kind), torch.randint(32, (2, 9))
    given = {"input_ids": rows, "position_ids": torch.tensor([positions]), "use_cache": use_cache}
    found = model(**given).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(**given).logits)


def test_the_provider_has_the_position_bias_of_t5() -> None:
    register()
    model, tokens = family_model("T5", "cp_dtensor"), torch.randint(3, 53, (2, 9))
    given = {"input_ids": tokens, "decoder_input_ids": tokens[:, :6], "use_cache": False}
    found = model(**given).logits
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    torch.testing.assert_close(found, model(**given).logits)
    for module in model.modules():
        if isinstance(getattr(module, "relative_attention_bias", None), torch.nn.Embedding):
            module.relative_attention_bias.weight.data.zero_()  # type: ignore[operator, union-attr]
    assert (model(**given).logits - found).abs().max() > 1e-3


def test_packed_documents_with_blocks_of_tokens_are_masked_as_by_sdpa() -> None:
    """Blocks see each other in both directions; the ranks of a context would have parts of them."""
    positions, blocks = torch.tensor([[*range(4), *range(5)]]), torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, -1]])
    given = {"inputs_embeds": torch.zeros(1, 9, 16), "attention_mask": None, "past_key_values": None}
    expected, found = (
        transformers.masking_utils.create_causal_mask(
            tiny_model(each).config, **given, position_ids=positions, block_sequence_ids=blocks
        )
        for each in ("sdpa", "cp_dtensor")
    )
    assert torch.equal(value_of(found).alone(), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_implementations_compile_to_one_graph(implementation: str) -> None:
    torch.compiler.reset()
    model, rows = tiny_model(implementation), torch.randint(32, (2, 9))
    given = {"input_ids": rows, "labels": rows, "use_cache": False}
    found = torch.compile(model, fullgraph=True, backend="eager")(**given)
    torch.testing.assert_close(found.loss, model(**given).loss)


def test_documents_of_keys_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="got cu_seq_lens_k without cu_seq_lens_q"):
        tiny_model("cp_dtensor")(torch.zeros(1, 4, dtype=torch.int64), cu_seq_lens_k=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_provider_generates_as_sdpa(cache: str) -> None:
    model, rows = tiny_model("cp_dtensor"), torch.randint(1, 32, (2, 9))
    seen = torch.ones_like(rows)
    seen[0, :4] = 0
    given = {"input_ids": rows, "attention_mask": seen, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found = model.generate(**given, cache_implementation=cache)
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model.generate(**given, cache_implementation=cache))


def test_a_mask_that_counts_cached_keys_is_for_one_process_only() -> None:
    """Modules with `ContextParallel` get masks that a model made outside of contexts."""
    model, rows = tiny_model("cp_dtensor"), torch.randint(1, 32, (1, 6))
    cache = model(input_ids=rows[:, :4]).past_key_values
    given = {"inputs_embeds": torch.zeros(1, 2, 16), "attention_mask": None, "past_key_values": cache}
    name = transformers.masking_utils.create_causal_mask(model.config, **given)

    def body(rank: int) -> None:
        call = Call.of(init_device_mesh("cpu", (2,)))
        with pytest.raises(NotImplementedError, match="takes no cache of keys that has tokens"):
            value_of(name).of_call(call)

    run_ranks(2, body)


@pytest.mark.skipif(not is_in_this_version("DeepSeek-V4"), reason="needs a newer transformers")
def test_what_the_provider_does_not_support_alone_is_refused_by_name() -> None:
    model = family_model("DeepSeek-V4", "cp_dtensor")
    with pytest.raises(NotImplementedError, match=r"outside of context_parallel, .* does not support s_aux"):
        model(input_ids=torch.randint(1, 32, (1, 24)), use_cache=False)


def _part(kind: str) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
    if kind == "recurrence":
        config = transformers.RecurrentGemmaConfig(lru_width=16, **sizes)
        return recurrent_gemma.RecurrentGemmaRecurrentBlock(config, 0)
    if kind == "model":
        return recurrent_gemma.RecurrentGemmaModel(transformers.RecurrentGemmaConfig(num_hidden_layers=3, **sizes))
    if kind == "eager":
        eager: torch.nn.Module = tiny_model("eager").model.layers[0].self_attn
        return eager
    return bart.BartLearnedPositionalEmbedding(16, 8)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("recurrence", "RecurrentBlock would be wrong with ContextParallel: .* mixes tokens of this rank's shard"),
        ("positions", "PositionalEmbedding would be wrong with ContextParallel: .* counts positions within this rank"),
        (
            "model",
            r"RecurrentGemmaModel would be wrong with ContextParallel: .*layers\.0, .* mixes tokens of this",
        ),
        ("eager", 'LlamaAttention would be wrong with ContextParallel: attn_implementation="eager"'),
    ],
)
def test_parts_that_see_their_shard_only_are_refused_when_they_are_parallelized(kind: str, message: str) -> None:
    """No call of a model would check them."""
    part = _part(kind)

    def body(rank: int) -> None:
        mesh, attention = init_device_mesh("cpu", (2,)), tiny_model("cp_dtensor").model.layers[0].self_attn
        with pytest.raises(NotImplementedError, match=message):
            parallelize_module(part, mesh, ContextParallel())
        assert "forward" not in vars(part)
        parallelize_module(attention, mesh, ContextParallel())

    run_ranks(2, body)


def test_a_call_of_a_model_with_the_style_is_checked() -> None:
    """The model's own call is outside of the context that its forward opens."""

    def body(rank: int) -> None:
        model, ids = tiny_model("sdpa"), torch.zeros(1, 4, dtype=torch.int64)
        signature = inspect.signature(model.forward)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel(layout=Contiguous()))
        assert inspect.signature(model.forward) == signature
        for each in (model, copy.deepcopy(model)):
            with pytest.raises(ValueError, match="position_ids"):
                each(input_ids=ids, use_cache=False)
            positions = torch.arange(4 * rank, 4 * rank + 4)[None]
            assert each(input_ids=ids, position_ids=positions, use_cache=False).logits.shape == (1, 4, 32)

    run_ranks(2, body)


@pytest.mark.parametrize(("left", "is_refused"), [(1, True), (0, False)])
def test_positions_by_padding_are_not_replaced_by_others(left: int, is_refused: bool) -> None:
    """OPT counts tokens that are no padding, so padding before tokens gives them other positions."""
    padding = torch.ones(2, 6, dtype=torch.int64)
    padding[0, :left] = 0
    padding[1, 4:] = 0
    refused = pytest.raises(ValueError, match="OPTDecoder makes position ids from padding, and got none")
    with refused if is_refused else nullcontext():
        refuse_own_positions(family_model("OPT", "sdpa"), {"attention_mask": padding})
    refuse_own_positions(tiny_model("sdpa"), {"attention_mask": padding})


def test_a_model_with_the_style_on_one_rank_is_the_model() -> None:
    def body(rank: int) -> None:
        model, ids = tiny_model("sdpa"), torch.arange(4)[None]
        whole = model(input_ids=ids, use_cache=False).logits
        parallelize_module(model, init_device_mesh("cpu", (1,)), ContextParallel())
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)

    run_ranks(1, body)
