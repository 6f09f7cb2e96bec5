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
from support.multimodal import processed, tiny_multimodal

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
    name, config = FAMILIES.get(family, (family, {}))
    if name.endswith("ForConditionalGeneration") and "text_config" not in config:  # an encoder and a decoder
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


MULTIMODAL_COLUMNS = {
    "plain images": "plain context, images",
    "text": "text alone",
    "image": "one image",
    "images": "images of several sizes, video",
    "shard_images": "`shard_images=True`",
    "checkpointed images": "checkpointed",
    "packed": "packed",
    "padded": "padded",
}
"""Names of the columns of models with towers, and their titles: all but the first are with the provider."""
_KINDS = {"images": ("images", "video"), "shard_images": ("image", "images", "video")}


Alone = tuple[torch.Tensor, list[torch.Tensor]]
"""Loss and gradients of one process."""


def run_multimodal_cell(
    rank: int, name: str, column: str, layout: Layout | None = None, device: str = "cpu",
    alone: dict[str, Alone] | None = None,
) -> str:  # fmt: skip
    """As `run_cell`, for a model that gets what its processor returns; `alone`: of one process, by kind of batch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        words = column.split()
        for kind in kinds_of(name, column):
            expected = multimodal_alone(name, kind, device) if alone is None else alone[kind]
            reason = _run_multimodal(name, kind, words[0], expected, layout, device)
            if reason != "right":
                return reason
    return "right"


def kinds_of(name: str, column: str) -> list[str]:
    """Kinds of batches of which a cell consists."""
    word = column.split()[-1]
    return [kind for kind in _KINDS.get(word, (word,)) if processed(name, kind) is not None]


def multimodal_alone(name: str, kind: str, device: str = "cpu") -> Alone:
    """Loss and gradients of one process."""
    model, given = tiny_multimodal(name, "sdpa").to(device), processed(name, kind, device)
    assert given is not None
    labels = F.pad(given.pop("labels")[:, 1:], (0, 1), value=-100)
    with recurrences_in_float64(model):
        logits = model(**given, use_cache=False).logits
    loss = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach(), gradients(model)


def _run_multimodal(name: str, kind: str, column: str, expected: Alone, layout: Layout | None, device: str) -> str:
    model = tiny_multimodal(name, "sdpa" if column == "plain" else register()).to(device)
    given = processed(name, kind, device)
    assert given is not None
    batch = ModelBatch.from_processor(given, shard_images=column == "shard_images")
    assert batch.shift_labels is not None
    if column == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    world: Any = dist.group.WORLD
    try:
        with context_parallel(world, **batch.buffers, layout=layout):
            found = causal_lm_loss(model(**batch.inputs, use_cache=False).logits, batch.shift_labels, gradients="sum")
            found.backward()
    except _NAMED as error:
        return _reason(str(error))
    loss, grads = expected
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


def table(cells: Cells, titles: dict[str, str]) -> str:
    """The matrix as Markdown: cells, and the reasons that they refer to by number; `titles` of columns, by name."""
    families, columns = dict.fromkeys(family for family, _ in cells), dict.fromkeys(column for _, column in cells)
    reasons = list(dict.fromkeys(cell for cell in cells.values() if cell != "right"))
    lines = [f"| family | {' | '.join(titles[column] for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for family in families:
        shown = (cells[family, column] for column in columns)
        row = ("right" if cell == "right" else f"refused [{reasons.index(cell) + 1}]" for cell in shown)
        lines.append(f"| {family} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]).strip() + "\n"


def cells_of(text: str, titles: dict[str, str]) -> Cells:
    """The inverse of `table`, for a text that contains it."""
    begin = text.index(f"| family | {' | '.join(titles.values())} |")
    head, _, *body = re.match(r"(\|.*\n)+", text[begin:])[0].splitlines()  # type: ignore[index]
    after = re.match(r"\n*((?:\d+\. .*\n)*)", text[begin + len("\n".join([head, _, *body])) + 1 :])
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", after[1] if after else "", re.M))
    cells = {}
    for line in body:
        family, *row = [cell.strip() for cell in line.strip("|").split("|")]
        for column, cell in zip(titles, row, strict=True):
            number = re.fullmatch(r"refused \[(\d+)\]", cell)
            cells[family, column] = reasons[number[1]] if number else cell
    return cells
