"""Cells of the support matrix: one training step of a model family on ranks that share the sequence."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from cp_dtensor import Layout, context_parallel
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, register
from support.models import FAMILIES, LENGTH, ROWS, VOCABULARY, assert_gradients_sum_to, gradients, tiny_model

COLUMNS = {
    "plain": "plain context",
    "plain packed": "plain, packed",
    "plain padded": "plain, padded",
    "provider": "provider",
    "compiled": "compiled",
    "checkpointed": "checkpointed",
    "packed": "packed",
    "padded": "padded",
}
"""Names of the columns, and their titles: the last five are with the provider."""
_TOLERANCE = 1e-5
_NAMED = (NotImplementedError, ValueError)
"""Errors that are refusals: their messages name a reason."""


def batch_of(family: str, kind: str, device: str) -> tuple[ModelBatch, dict[str, torch.Tensor]]:
    """A batch, equal in every call, and what an encoder-decoder takes besides."""
    random = torch.Generator().manual_seed(3)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (ROWS, length), generator=random)

    ids, positions, padding = tokens(LENGTH), None, None
    labels = ids.clone()
    labels[0, 5:9] = -100  # other numbers of labels on the ranks
    if kind == "packed":
        positions = torch.stack(
            [torch.cat([torch.arange(length) for length in each]) for each in ([21, 43], [9, 30, 25])]
        )
    if kind == "padded":
        padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        padding[0, -11:] = 0
        padding[1, :7] = 0
        labels = labels.masked_fill(padding == 0, -100)
        labels[1, 7] = -100  # padding predicts nothing: where a query sees no key, "eager" differs from "sdpa"
    whole = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": padding}
    batch = ModelBatch(**{name: each if each is None else each.to(device) for name, each in whole.items()})
    more = {}
    if "cross" in family:
        more = {"encoder_hidden_states": torch.randn(ROWS, 50, 32, generator=random, dtype=torch.float64)}
    if FAMILIES.get(family, (family,))[0].endswith("ForConditionalGeneration"):
        more = {"decoder_input_ids": tokens(LENGTH)}
    return batch, {name: each.to(device) for name, each in more.items()}


def run_cell(rank: int, family: str, column: str, layout: Layout | None = None, device: str = "cpu") -> str:
    """ "right", or the reason of a refusal; raises AssertionError for wrong results. On every rank of the world."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        return _run_cell(family, column, layout, device)


def _run_cell(family: str, column: str, layout: Layout | None, device: str) -> str:
    kind = next((each for each in ("packed", "padded") if each in column), "")
    batch, more = batch_of(family, kind, device)
    if "position_ids" not in inspect.signature(tiny_model(family, "eager").forward).parameters:
        batch.inputs.pop("position_ids", None)
    loss, grads = _alone(family, batch, more, device, column.startswith("plain"))
    model = _model_of(family, "sdpa" if column.startswith("plain") else register()).to(device)
    if column == "checkpointed":
        if not model.supports_gradient_checkpointing:
            return "transformers has no gradient checkpointing for it"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.compiler.reset()
    called = torch.compile(model, backend="aot_eager", dynamic=False) if column == "compiled" else model
    world: Any = dist.group.WORLD
    assert batch.shift_labels is not None
    buffers = [*batch.buffers["buffers"], *more.values()]
    try:
        with context_parallel(world, buffers=buffers, buffer_seq_dims=[1] * len(buffers), layout=layout):
            logits = called(**batch.inputs, **more, use_cache=False).logits
            found = causal_lm_loss(logits, batch.shift_labels, gradients="sum")
            found.backward()
    except Exception as error:  # a refusal names a reason; errors of Dynamo have it in their message
        if not isinstance(error, _NAMED) and (column != "compiled" or "NotImplementedError" not in repr(error)):
            raise
        return _reason(str(error))
    assert_gradients_sum_to(model, grads, _TOLERANCE)
    torch.testing.assert_close(found.detach(), loss, rtol=_TOLERANCE, atol=_TOLERANCE, check_dtype=False)
    return "right"


def _model_of(family: str, attention: str) -> Any:
    try:
        return tiny_model(family, attention)
    except (ValueError, KeyError):  # models without SDPA are used as they come
        return tiny_model(family, "eager")


class _SoftmaxInFloat64(TorchFunctionMode):
    """Keeps the softmax of "eager" in float64: in float32 its mask, the least float64, is -inf, and padding is NaN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


def _alone(
    family: str, batch: ModelBatch, more: dict[str, torch.Tensor], device: str, is_plain: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one process."""
    model = _model_of(family, "sdpa")
    # Versions before 5.21 let "sdpa" leave out the softcap, which the provider has.
    if not is_plain and getattr(model.config, "attn_logit_softcapping", None):
        model = tiny_model(family, "eager")
    model.to(device)
    assert batch.shift_labels is not None
    with _SoftmaxInFloat64(), recurrences_in_float64(model):
        logits = model(**batch.inputs, **more, use_cache=False).logits
    loss = F.cross_entropy(logits.double().flatten(0, 1), batch.shift_labels.flatten())
    loss.backward()
    return loss.detach(), gradients(model)


@contextmanager
def recurrences_in_float64(model: nn.Module) -> Iterator[None]:
    """While open, torch functions of a model's recurrent layers, which compute in float32, compute in float64."""
    modeling = sys.modules[type(model).__module__]
    with ExitStack() as stack:
        for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"):
            function = getattr(modeling, name, None)
            if function is None:
                continue
            text = inspect.getsource(inspect.unwrap(function)).replace("torch.float32", "torch.float64")
            wide: dict[str, Any] = dict(vars(modeling))
            exec(text[text.index("def ") :].replace(".float()", ".double()"), wide)
            stack.enter_context(mock.patch.object(modeling, name, wide[name]))
        yield


def _reason(message: str) -> str:
    """The reason in a message, without names of layers and the way out."""
    text = re.split(
        r"\n|: use |: pass |; |\. ", message.strip().partition("inside of context_parallel: ")[2] or message
    )[0]
    return re.sub(r"^[\w., ]+: (?=\w)", "", text)


# docs/models.md

Cells = dict[tuple[str, str], str]
"""By family and column: "right", or the reason of a refusal."""


def table(cells: Cells) -> str:
    """The matrix as Markdown: cells, and the reasons that they refer to by number."""
    families, columns = dict.fromkeys(family for family, _ in cells), dict.fromkeys(column for _, column in cells)
    reasons = list(dict.fromkeys(cell for cell in cells.values() if cell != "right"))
    lines = [f"| family | {' | '.join(COLUMNS[column] for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family in families:
        shown = (cells[family, column] for column in columns)
        row = ("right" if cell == "right" else f"refused [{reasons.index(cell) + 1}]" for cell in shown)
        lines.append(f"| {family} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]) + "\n"


def cells_of(text: str) -> Cells:
    """The inverse of `table`, for a text that contains it."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.M))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    titles = {title: column for column, title in COLUMNS.items()}
    head, *body = [row for row in rows if len(row) == len(COLUMNS) + 1]
    cells = {}
    for family, *row in body:
        for title, cell in zip(head[1:], row, strict=True):
            number = re.fullmatch(r"refused \[(\d+)\]", cell)
            cells[family, titles[title]] = reasons[number[1]] if number else cell
    return cells
