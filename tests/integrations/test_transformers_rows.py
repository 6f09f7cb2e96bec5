"""Losses of whole rows: models whose backbone sees shards, alone and in steps of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import SMALL, with_random_weights
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("accelerate", reason="needs the extra [integrations]")
transformers = pytest.importorskip("transformers", reason="needs the extra [integrations]")

from transformers import Trainer  # noqa: E402

from cp_dtensor import Contiguous  # noqa: E402
from cp_dtensor.integrations import accelerate as cp_accelerate  # noqa: E402
from cp_dtensor.integrations.transformers.rows import whole_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")  # versions differ
RANKS, ROWS, LENGTH = 2, 3, 21


def classifier(kind: str = "Llama") -> Any:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: SMALL[name] for name in names}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_labels=3, pad_token_id=0)
    return with_random_weights(getattr(transformers, f"{kind}ForSequenceClassification")(config))


def rows(seed: int = 7) -> dict[str, torch.Tensor]:
    """Padded to the right and to the left, with a label for each row."""
    ids = torch.randint(3, SMALL["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    seen = torch.ones_like(ids)
    seen[0, -8:] = seen[1, :5] = 0
    return {"input_ids": ids * seen, "attention_mask": seen, "labels": torch.tensor([2, 0, 1])}


def assert_means_are_those_of_one_process(model: Any, inputs: Any, body: Callable[[int, Any], Any]) -> None:
    """Compares each rank's loss, and the mean of the ranks' gradients."""
    whole = deepcopy(model)
    loss = whole(**inputs).loss
    loss.backward()
    ranks = run_ranks(RANKS, lambda rank: body(rank, deepcopy(model)))
    for found, _ in ranks:
        torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-9)
    for *grads, expected in zip(
        *(grads for _, grads in ranks), [each.grad for each in whole.parameters()], strict=True
    ):
        torch.testing.assert_close(sum(grads) / RANKS, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layout", [None, Contiguous()])
def test_classes_of_rows(layout: Any) -> None:
    model, inputs, lengths = classifier(), rows(), set[int]()

    def body(rank: int, own: Any) -> Any:
        own.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.add(args[0].size(1)))
        with whole_rows(own, init_device_mesh("cpu", (RANKS,)), layout=layout):
            loss = own(**inputs).loss
        loss.backward()
        assert "forward" not in vars(own.model)
        return loss.detach(), [each.grad for each in own.parameters()]

    assert_means_are_those_of_one_process(model, inputs, body)
    assert lengths == {10, 11}


def step(rank: int, model: Any, inputs: dict[str, torch.Tensor], **attributes: Any) -> Any:
    """A step of a Trainer with checkpointed layers, as far as losses and gradients are concerned."""
    from accelerate import Accelerator, ParallelismConfig

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    config = ParallelismConfig(cp_size=RANKS)
    accelerator: Any = SimpleNamespace(parallelism_config=config, torch_device_mesh={"cp": mesh})
    Accelerator._prepare_cp(accelerator, model)
    trainer = SimpleNamespace(
        accelerator=accelerator, args=SimpleNamespace(torch_compile=False), get_tp_size=lambda: 1, label_smoother=None,
        compute_loss_func=None, **attributes,
    )  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    opened, given = Trainer._prepare_context_parallel_inputs(trainer, model, dict(inputs))
    with opened():
        assert trainer.get_tp_size() == trainer._tp_size == RANKS
        loss = model(**given).loss
        loss.backward()
    assert trainer.get_tp_size() == 1
    return loss.detach(), [each.grad for each in model.parameters()]


def test_steps_of_a_trainer() -> None:
    with cp_accelerate.enable():
        assert_means_are_those_of_one_process(classifier(), rows(), lambda rank, own: step(rank, own, rows()))


@pytest.mark.parametrize("kind", ["BertForTokenClassification", "LlamaForTokenClassification", "BertForMaskedLM"])
def test_labels_of_tokens_whose_loss_is_a_mean(kind: str) -> None:
    """These models ignore the number of all labels, and the ranks have different numbers of them."""
    config = classifier(kind.partition("For")[0]).config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.classifier_dropout = 0.0
    inputs, model = rows(), with_random_weights(getattr(transformers, kind)(config))
    inputs["labels"] = (inputs["input_ids"] % 3).masked_fill(torch.arange(LENGTH) < 9, -100)
    with cp_accelerate.enable():
        assert_means_are_those_of_one_process(model, inputs, lambda rank, own: step(rank, own, inputs))


def test_inputs_without_tokens_are_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(NotImplementedError, match=r"have input_ids or inputs_embeds.*got \['pixel_values'\]"):
            step(rank, classifier(), {"pixel_values": torch.zeros(1)})

    with cp_accelerate.enable():
        run_ranks(RANKS, body)


def test_what_is_refused() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def body(rank: int) -> None:
        mesh, bert, attends = init_device_mesh("cpu", (RANKS,)), classifier("Bert"), classifier()
        with pytest.raises(ValueError, match="RobertaEmbeddings makes position ids from tokens, and got none"):
            step(rank, classifier("Roberta"), rows())
        attends.add_module("more", Attends())
        refused = pytest.raises(NotImplementedError, match="BertModel gives pooler_output of this rank's tokens")
        with refused, whole_rows(bert, mesh):
            bert(**rows())
        with pytest.raises(NotImplementedError, match=r"has attention beside its backbone \(Attends\)"):
            whole_rows(attends, mesh).__enter__()
        with pytest.raises(NotImplementedError, match="needs a model of transformers, got Attends"):
            whole_rows(Attends(), mesh).__enter__()
        with pytest.raises(NotImplementedError, match="precompute_ref_log_probs=True gives each row the numbers"):
            step(rank, classifier(), rows(), precompute_ref_logps=True)

    with cp_accelerate.enable():
        run_ranks(RANKS, body)
