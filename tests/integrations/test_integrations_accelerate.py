"""`integrations.accelerate`: steps of transformers models on thread ranks, refusals, and the switch."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.model_cells import recurrences_in_float64
from support.models import tiny_model
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

accelerate = pytest.importorskip("accelerate", reason="needs the extra [integrations]")
transformers = pytest.importorskip("transformers", reason="needs the extra [integrations]")

from cp_dtensor import Contiguous, Documents, SlidingWindow, Striped, context_parallel  # noqa: E402
from cp_dtensor.integrations import accelerate as cp_accelerate  # noqa: E402
from cp_dtensor.integrations.transformers import register  # noqa: E402

Accelerator = accelerate.Accelerator
Trainer: Any = transformers.Trainer
RANKS, LENGTH, BATCH = 2, 21, 2
SIZES = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(kind: str = "Llama", **config: Any) -> Any:
    """A model with random weights."""
    made = getattr(transformers, f"{kind}Config")(**SIZES, **config)
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(23, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH).repeat(BATCH, 1)}


def packed() -> dict[str, torch.Tensor]:
    """Other documents in each row."""
    positions = [[*range(9), *range(LENGTH - 9)], [*range(4), *range(10), *range(LENGTH - 14)]]
    return {**batch(), "position_ids": torch.tensor(positions)}


def padded() -> dict[str, torch.Tensor]:
    """Padding to the left in one row, to the right in the other."""
    made = batch()
    seen = torch.ones(BATCH, LENGTH, dtype=torch.long)
    seen[0, :5] = seen[1, -6:] = 0
    return {**made, "attention_mask": seen, "labels": made["labels"].masked_fill(seen.roll(1) * seen == 0, -100)}


def prepared(rank: int, model: nn.Module) -> Any:
    """An accelerator with context parallelism, as far as steps are concerned, that has prepared a model."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    config = accelerate.ParallelismConfig(cp_size=RANKS)
    accelerator = SimpleNamespace(parallelism_config=config, torch_device_mesh={"cp": mesh})
    Accelerator._prepare_cp(accelerator, model)
    return accelerator


def one_process(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**inputs).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def in_steps(rank: int, model: Any, inputs: dict[str, torch.Tensor], names: list[str], options: dict[str, Any]) -> Any:
    """Loss and gradients of this rank in a step, divided by the labels of all ranks; only `names` are passed."""
    accelerator = prepared(rank, model)
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    given["shift_labels"] = nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    count = (given["shift_labels"] != -100).sum()
    buffers = list(given.values())
    with Accelerator.maybe_context_parallel(
        accelerator, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=buffers, **options
    ):
        loss = model(**{name: given[name] for name in names}, num_items_in_batch=count).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
    assert given["input_ids"].size(1) < LENGTH
    return loss.detach(), list(grads)


def compare(results: list[Any], whole: tuple[torch.Tensor, Any]) -> None:
    """Compares the sums over the ranks of losses and gradients with those of one process."""
    torch.testing.assert_close(sum(loss for loss, _ in results).double(), whole[0].double(), rtol=1e-5, atol=1e-5)
    for *grads, expected in zip(*(grads for _, grads in results), whole[1], strict=True):
        assert all(grad is None for grad in grads) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(sum(grads), expected, rtol=1e-5, atol=1e-5)


class Adapter(nn.Module):
    """A model inside of another, whose arguments have no position ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


ALL = ["input_ids", "labels", "shift_labels"]
WITHOUT_POSITIONS = {name: tensor for name, tensor in batch().items() if name != "position_ids"}
ALL_SEEN = {**batch(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


@pytest.mark.filterwarnings("ignore:position_ids are those of packed documents, and the model has a cache")
@pytest.mark.parametrize(
    ("inputs", "use_cache", "layout"),
    [
        *[(batch(), True, layout) for layout in (None, Contiguous(), Striped(1))],
        *[(WITHOUT_POSITIONS, True, layout) for layout in (None, Contiguous(), Striped(1))],
        *[(each, use_cache, None) for each in (packed(), padded(), ALL_SEEN) for use_cache in (True, False)],
    ],
)
def test_loss_and_gradients_are_those_of_one_process(inputs: Any, use_cache: bool, layout: Any) -> None:
    model = llama()
    model.config.use_cache = use_cache  # with a cache, transformers does not tell packed documents apart
    names = [*ALL, *({"position_ids", "attention_mask"} & inputs.keys())]
    with cp_accelerate.enable():
        steps = run_ranks(RANKS, lambda rank: in_steps(rank, deepcopy(model), inputs, names, {"layout": layout}))
        adapted = run_ranks(RANKS, lambda rank: in_steps(rank, Adapter(deepcopy(model)), inputs, names, {}))
    compare(steps, one_process(model, inputs))
    compare(adapted, one_process(model, inputs))


def test_positions_that_a_model_makes_from_tokens_are_not_those_of_a_step() -> None:
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**{**SIZES, "num_key_value_heads": 4}))

    def body(rank: int) -> None:
        refused = partial(pytest.raises, ValueError, match="RobertaEmbeddings makes position ids from tokens")
        with refused():
            in_steps(rank, model, WITHOUT_POSITIONS, ["input_ids"], {})
        with refused():
            Trainer._prepare_context_parallel_inputs(trainer_of(rank, model), model, dict(WITHOUT_POSITIONS))

    with cp_accelerate.enable():
        run_ranks(RANKS, body)


def test_missing_positions_are_added_to_models_that_an_accelerator_has_prepared() -> None:
    """In a plain context, too; other models are refused, and outside of contexts a model counts positions itself."""
    model, inputs = llama(), batch()
    whole = model(input_ids=inputs["input_ids"]).logits

    def body(rank: int) -> None:
        own, tokens = deepcopy(model), inputs["input_ids"].clone()
        mesh = prepared(rank, own).torch_device_mesh["cp"]
        assert torch.equal(own(input_ids=tokens).logits, whole)
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1], layout=Contiguous()):
            found = own(input_ids=tokens).logits
            with pytest.raises(ValueError, match="got no position_ids inside of context_parallel"):
                deepcopy(model)(input_ids=tokens)
        torch.testing.assert_close(found, whole.tensor_split([11], 1)[rank])

    with cp_accelerate.enable():
        run_ranks(RANKS, body)


def test_options_of_the_switch_and_of_a_step_reach_the_context() -> None:
    """A window of the switch, combined with sinks of a step."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, generator=generator)
    options: Any = {"mask": SlidingWindow(3, 0), "layout": Contiguous(), "method": "ring"}

    def attend(rank: int) -> None:
        accelerator, outs = prepared(rank, nn.Identity()), []
        mesh = accelerator.torch_device_mesh["cp"]
        steps = partial(Accelerator.maybe_context_parallel, accelerator, sinks=sinks)
        for opened in (steps, partial(context_parallel, mesh, sinks=sinks, **options), partial(context_parallel, mesh)):
            buffers = [tensor.clone() for tensor in (q, k, v)]
            with opened(buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                outs.append(nn.functional.scaled_dot_product_attention(*buffers, is_causal=True))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])

    with cp_accelerate.enable(**options):
        run_ranks(RANKS, attend)


def test_the_switch_is_reversible_nested_and_safe() -> None:
    def hooks() -> tuple[Any, Any]:
        return Accelerator._prepare_cp, Accelerator.maybe_context_parallel

    def mask_of_steps() -> Any:
        masks: list[Any] = []
        run_ranks(RANKS, lambda rank: masks.append(prepared(rank, nn.Identity())._cp_context.options["mask"]))
        assert masks == masks[:1] * RANKS
        return masks[0]

    before = hooks()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'buffers'"):
        cp_accelerate.enable(buffers=[])
    assert hooks() == before
    first = cp_accelerate.enable()
    second = cp_accelerate.enable(mask=Documents([0, 4]))
    inside = hooks()
    assert inside[0] is not before[0]
    assert inside[1] is not before[1]
    with suppress(KeyError), cp_accelerate.enable(mask=Documents([0, 5])):
        assert mask_of_steps() == Documents([0, 5])
        raise KeyError
    assert hooks() == inside
    first.disable()  # not the latest
    assert mask_of_steps() == Documents([0, 4])
    second.disable()
    second.disable()
    assert hooks() == before
    kept = SimpleNamespace(_cp_context=None, parallelism_config=None)
    with suppress(AttributeError):  # accelerate's own function, through a reference that other code has kept
        inside[0](kept, nn.Identity())
    assert type(kept._cp_context).__name__ != "_Steps"


def test_options_for_an_accelerator_that_was_prepared_before() -> None:
    pc = accelerate.ParallelismConfig(cp_size=RANKS)
    with cp_accelerate.enable(), pytest.raises(TypeError, match="prepared before enable"):
        Accelerator.maybe_context_parallel(SimpleNamespace(parallelism_config=pc), [], [], mask=Documents([0, 4]))


class Streamed(torch.utils.data.IterableDataset[int]):
    """Rows without a length."""

    def __iter__(self) -> Any:
        yield from range(3)


@pytest.mark.parametrize(
    ("data", "dispatched", "is_refused"),
    [(Streamed(), None, True), (Streamed(), False, False), ([1], None, False), ([1], True, True)],
)
def test_batches_that_are_dispatched_are_refused(data: Any, dispatched: bool | None, is_refused: bool) -> None:
    """Each rank of a sequence would get other rows, which contexts compare in their first call only."""
    config = SimpleNamespace(cp_handler=None)
    accelerator = SimpleNamespace(
        parallelism_config=config, torch_device_mesh={"cp": None}, dispatch_batches=dispatched
    )
    refused = (
        pytest.raises(NotImplementedError, match="different rows: set it to False") if is_refused else nullcontext()
    )
    with cp_accelerate.enable(), refused:
        Accelerator._prepare_cp(accelerator, torch.utils.data.DataLoader(data))
    assert hasattr(accelerator, "_cp_context") is not is_refused


def flattened(*left_out: str) -> dict[str, Any]:
    """A batch of TRL's padding-free collator: three documents in one row."""
    sizes = [9, 4, 8]
    cu_seqlens = torch.tensor([0, 9, 13, LENGTH], dtype=torch.int32)
    tokens = batch()["input_ids"][:1]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    made = {
        "input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions,
        "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 9, "max_length_k": 9,
        "seq_idx": torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(sizes))[None],
    }  # fmt: skip
    return {name: value for name, value in made.items() if name not in left_out}


def trainer_of(rank: int, model: nn.Module, **attributes: Any) -> Any:
    """A Trainer, as far as the inputs of a step are concerned, that has prepared a model."""
    accelerator = prepared(rank, model)
    accelerator.maybe_context_parallel = partial(Accelerator.maybe_context_parallel, accelerator)
    nothing = {"label_smoother": None, "compute_loss_func": None}
    return SimpleNamespace(accelerator=accelerator, _prepare_input=lambda each: each, **{**nothing, **attributes})


def document_by_document(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of `flattened` and its gradients in one process, where no document sees another."""
    tokens, labels = (flattened()[name][0].split([9, 4, 8]) for name in ("input_ids", "labels"))
    with recurrences_in_float64(model):
        logits = torch.cat([model(each[None], use_cache=False).logits[0, :-1] for each in tokens])
    loss = nn.functional.cross_entropy(logits, torch.cat([each[1:] for each in labels]))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def check_steps_of_a_trainer(model: Any, inputs: dict[str, Any], use_cache: bool = False) -> None:
    """Compares the loss and the gradients of a step of Trainer with those of single documents."""

    def body(rank: int) -> Any:
        own, given = deepcopy(model), {name: each.clone() for name, each in inputs.items() if torch.is_tensor(each)}
        numbers = {name: each for name, each in inputs.items() if name not in given}
        opened, ready = Trainer._prepare_context_parallel_inputs(trainer_of(rank, own), own, {**given, **numbers})
        count = (ready["shift_labels"] != -100).sum()
        with opened():
            loss = own(**ready, use_cache=use_cache, num_items_in_batch=count).loss
            return loss.detach(), torch.autograd.grad(loss, list(own.parameters()), allow_unused=True)

    with cp_accelerate.enable():
        compare(run_ranks(RANKS, body), document_by_document(model))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "cp_dtensor"])
@pytest.mark.parametrize(
    "left_out",
    [(), ("position_ids",), ("seq_idx",), ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")],
    ids=str,
)
def test_documents_of_padding_free_collators(left_out: tuple[str, ...], implementation: str, use_cache: bool) -> None:
    """Those of TRL and of transformers, which leave out some arguments; a cache hides documents from position ids."""
    register()
    model = llama()
    model.set_attn_implementation(implementation)
    check_steps_of_a_trainer(model, flattened(*left_out), use_cache)


@pytest.mark.parametrize("family", ["Qwen3-Next", "LFM2", "Nemotron-H"])
def test_recurrent_layers_have_the_documents_of_padding_free_collators(family: str) -> None:
    check_steps_of_a_trainer(tiny_model(family, "sdpa"), flattened())


DIFFER = "begin packed documents at different"
DROPPED = "takes documents from seq_lengths with padding_free=True only"


def collated(columns: list[str], padding_free: bool) -> dict[str, Any]:
    """A trainer's data set and collator: SFTTrainer removes position_ids, and may not read seq_lengths."""
    return {
        "train_dataset": SimpleNamespace(column_names=columns),
        "data_collator": SimpleNamespace(padding_free=padding_free),
    }


OWN_LOSS = "got compute_loss_func, which would compute a loss within this rank's shard"


@pytest.mark.parametrize(
    ("trainer", "changes", "message"),
    [
        ({}, {"position_ids": torch.arange(LENGTH)[None]}, "seq_idx, position_ids begin .* first of which is token 9"),
        ({}, {"cu_seq_lens_k": torch.tensor([0, 9, 12, LENGTH])}, f"{DIFFER} .* token 12"),
        ({}, {"input_ids": batch()["input_ids"]}, "seq_idx need a batch of one row, got 2 rows"),
        (collated(["input_ids", "position_ids"], False), {}, DROPPED),
        (collated(["input_ids", "position_ids"], True), {}, DROPPED),
        (collated(["input_ids", "seq_lengths"], False), {}, DROPPED),
        (collated(["input_ids", "seq_lengths"], True), {}, None),
        (collated(["input_ids", "labels"], False), {}, None),
        (
            {"label_smoother": len},
            {},
            "got label_smoothing_factor, which would compute a loss within this rank's shard",
        ),
        ({}, [{"prompt": "text"}], "got a list, as trainers have that generate"),
        ({"args": SimpleNamespace(neftune_noise_alpha=5.0)}, {}, "got neftune_noise_alpha, whose noise"),
        ({"compute_loss_func": len}, {}, OWN_LOSS),
        ({"compute_loss_func": len}, {"labels": None, "shift_labels": torch.ones(1, LENGTH).long()}, OWN_LOSS),
        ({"compute_loss_func": len}, {"labels": None}, None),
    ],
)
def test_steps_of_a_trainer_that_would_be_wrong_are_refused(trainer: Any, changes: Any, message: str | None) -> None:
    def body(rank: int) -> None:
        model = llama()
        inputs = changes
        if isinstance(changes, dict):
            inputs = {name: each for name, each in {**flattened(), **changes}.items() if each is not None}
        refused = pytest.raises((ValueError, NotImplementedError), match=message) if message else nullcontext()
        with refused:
            Trainer._prepare_context_parallel_inputs(trainer_of(rank, model, **trainer), model, inputs)

    with cp_accelerate.enable():
        run_ranks(RANKS, body)


def test_every_rank_evaluates_the_mean_of_the_losses_and_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return inputs["loss"], None, None

    monkeypatch.setattr(Trainer, "prediction_step", of_rank)

    def body(rank: int) -> None:
        trainer = SimpleNamespace(accelerator=prepared(rank, nn.Identity()))
        trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=rank == 0, remainder=-1)
        inputs = {"loss": torch.tensor([3.0, 8.0][rank])}
        assert Trainer.prediction_step(trainer, None, inputs, True)[0] == 5.5
        with pytest.raises(NotImplementedError, match="only the loss is evaluated"):
            Trainer.prediction_step(trainer, None, inputs, False)

    def smaller_batch(rank: int) -> None:
        """Of three rows: accelerate takes so many values of those that it gathers, where both ranks give three."""
        trainer = SimpleNamespace(accelerator=prepared(rank, nn.Identity()))
        loader = SimpleNamespace(remainder=3)
        trainer.accelerator.gradient_state = SimpleNamespace(
            end_of_dataloader=True, remainder=loader.remainder, active_dataloader=loader
        )
        Trainer.prediction_step(trainer, None, {"loss": torch.zeros(())}, True)
        assert loader.remainder == 3 * RANKS

    with cp_accelerate.enable():
        run_ranks(RANKS, body)
        run_ranks(RANKS, smaller_batch)
    assert Trainer.prediction_step is of_rank


def test_sft_trainer_evaluates_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SFTTrainer.prediction_step` of TRL opens no context: a stand-in for its class, which must not be reached."""

    class SFTTrainer(SimpleNamespace):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)

        def prediction_step(self, *_: Any) -> Any:
            raise AssertionError

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
            assert inputs["input_ids"].size(1) < LENGTH
            assert num_items_in_batch == 3 * 6  # the labels of all documents
            return model(**inputs, num_items_in_batch=num_items_in_batch).loss * RANKS

    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", SimpleNamespace(SFTTrainer=SFTTrainer))
    model = llama().eval()
    whole_loss, _ = document_by_document(model)

    def body(rank: int) -> None:
        own = deepcopy(model)
        trainer = SFTTrainer(**vars(trainer_of(rank, own)), _prepare_inputs=lambda each: each)
        trainer._prepare_context_parallel_inputs = partial(Trainer._prepare_context_parallel_inputs, trainer)
        trainer._get_num_items_in_batch = lambda batches, device: (batches[0]["labels"][:, 1:] != -100).sum()
        trainer.args, trainer.compute_loss_context_manager = SimpleNamespace(device="cpu"), nullcontext
        trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=False, remainder=-1)
        loss, *others = trainer.prediction_step(own, flattened(), True)
        torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-5)
        assert others == [None, None]

    before = SFTTrainer.prediction_step
    with cp_accelerate.enable():
        run_ranks(RANKS, body)
    assert SFTTrainer.prediction_step is before


def test_packing_of_sft_trainer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTTrainer refuses it after `Trainer.__init__`: a stand-in, which finds its arguments as they were afterwards."""

    def of_trainer(self: Any, args: Any, accelerator: Any) -> None:
        self.args, self.accelerator = args, accelerator

    class SFTTrainer(Trainer):  # type: ignore[misc]
        prediction_step = Trainer.prediction_step

        def __init__(self, args: Any, accelerator: Any) -> None:
            super().__init__(args, accelerator)
            if self.accelerator.parallelism_config.cp_enabled and (args.packing or args.eval_packing or args.fails):
                raise ValueError("refused by TRL")

    monkeypatch.setattr(Trainer, "__init__", of_trainer)
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_trainer", SimpleNamespace(SFTTrainer=SFTTrainer))
    accelerator = SimpleNamespace(parallelism_config=accelerate.ParallelismConfig(cp_size=RANKS), _cp_context=None)
    packing: Any = {"packing": True, "eval_packing": None, "fails": False}
    args, failing = SimpleNamespace(**packing), SimpleNamespace(**{**packing, "fails": True})
    with cp_accelerate.enable():
        trainer = SFTTrainer(args, accelerator)
        with pytest.raises(ValueError, match="refused by TRL"):
            SFTTrainer(failing, accelerator)
    assert vars(args) == packing
    assert failing.packing
    with pytest.raises(ValueError, match=r"SFTTrainer with packing=True was made while .* enabled: train while it is"):
        trainer._prepare_context_parallel_inputs(nn.Identity(), {})
    with pytest.raises(ValueError, match="refused by TRL"):
        SFTTrainer(args, accelerator)
