"""Context parallelism of accelerate, `transformers.Trainer` and TRL by this library.

    from cp_dtensor.integrations import accelerate as cp_accelerate

    cp_accelerate.enable()  # before Accelerator.prepare, or before Trainer.train
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=8), ...)

Everything else stays as accelerate documents it. An accelerator that is prepared while this is enabled opens
`cp_dtensor.context_parallel` in `maybe_context_parallel`, which also takes the options of that context then:

    with accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=..., mask=Documents(cu_seqlens)):

Models of transformers make their masks (windows, chunks, packed documents, padding) of the whole sequence, as in any
context; a model with a sink of each head needs the attention implementation "cp_dtensor". Models that would be wrong
are refused when called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from cp_dtensor import Documents, Mask, context_parallel
from cp_dtensor.api.extension import (
    Mesh,
    SharedInstallation,
    attribute_replaced,
    sequence_ranks,
    takes_options,
    when_loaded,
    wrapped,
)
from cp_dtensor.integrations.transformers.checks import (
    arguments_of,
    is_model,
    lacks_positions,
    positions_are_added,
    refuse_own_positions,
)
from cp_dtensor.integrations.transformers.chosen import shards_are_seen
from cp_dtensor.integrations.transformers.layers import positions_here
from cp_dtensor.integrations.transformers.rows import whole_rows

__all__ = ["Enabled", "enable"]

_SEQUENCE_INPUTS = (
    "input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask", "token_type_ids",
)  # fmt: skip
"""Inputs of transformers models whose dim 1 is the sequence."""
_DOCUMENT_INPUTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Inputs by which padding-free collators tell kernels of packed documents where these begin."""


# The switch


class Enabled(ExitStack):
    """The switch that `enable` returns: in force until `disable` or the end of a `with` block.

    Switches nest: accelerators that are prepared take the options of the latest one that is in force.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.callback(_installation.held().close)
        _in_force.append(self)
        self.callback(_in_force.remove, self)

    disable = ExitStack.close
    """Gives accelerate its own functions back, if no other switch is in force; further calls do nothing.

    Accelerators that were prepared before keep this library.
    """


_in_force: list[Enabled] = []


def _patches() -> Iterator[AbstractContextManager[None]]:
    from accelerate import Accelerator

    yield wrapped(Accelerator, "_prepare_cp", _prepare_cp)
    yield wrapped(Accelerator, "maybe_context_parallel", _maybe_context_parallel)

    for module, owner, name, ours in (
        ("transformers.trainer", "Trainer", "_prepare_context_parallel_inputs", _trainer_inputs),
        ("transformers.trainer", "Trainer", "prediction_step", _trainer_prediction),
        ("trl.trainer.sft_trainer", "SFTTrainer", "prediction_step", _sft_prediction),
        ("trl.trainer.dpo_trainer", "DPOTrainer", "prediction_step", _rows_prediction),
        ("trl.trainer.kto_trainer", "KTOTrainer", "prediction_step", _rows_prediction),
    ):
        yield when_loaded(module, partial(_trainer_patched, owner, name, ours))
    yield when_loaded("transformers.trainer", lambda module: wrapped(module.Trainer, "__init__", _trainer_made))
    yield when_loaded("trl.trainer.sft_trainer", lambda module: wrapped(module.SFTTrainer, "__init__", _sft_made))


def _trainer_patched(owner: str, name: str, ours: Callable[..., Any], module: Any) -> AbstractContextManager[None]:
    """While open, a method of trainers whose accelerator this library has prepared is `ours(steps, original, ...)`."""

    def around(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = getattr(trainer.accelerator, "_cp_context", None)
        if isinstance(steps, _Steps):
            return ours(steps, original, trainer, *args, **kwargs)
        return original(trainer, *args, **kwargs)

    return wrapped(getattr(module, owner), name, around)


_installation = SharedInstallation(_patches)


@takes_options("mesh", "buffers", "buffer_seq_dims", "no_restore_buffers", "seq_len", of=context_parallel)
def enable(**options: Any) -> Enabled:
    """Switch `ParallelismConfig(cp_size=n)` to this library, in `Accelerator.prepare` from now on.

    Args:
        options: of the contexts that `maybe_context_parallel` and `Trainer` open, as for `cp_dtensor.context_parallel`;
            `maybe_context_parallel` takes them too, for one step.
        rotate_method: as there. None: "alltoall" if the handler of the `ParallelismConfig` says so, otherwise "auto".

    Returns:
        the switch, in force already: `disable()` ends it, and so does leaving `with enable():`.

    Raises:
        ImportError: accelerate is not installed.

    `Accelerator.prepare` and the steps then raise
        NotImplementedError, ValueError: for transformers models whose result would not be that of one process; the
            message names the reason and the way out.
    """
    inspect.signature(enable).bind(**options)  # refuses options of other names
    return Enabled(options)


# Accelerator


class _Steps:
    """`_cp_context` of an accelerator: opens a context for each step. Models in what it prepared get missing positions.

    `prepared` is what the accelerator prepares; models of transformers may be inside of others, such as adapters.
    """

    def __init__(self, mesh: Mesh, options: dict[str, Any], prepared: Sequence[Any]) -> None:
        self.mesh, self.options = mesh, options
        modules = (module for each in prepared if isinstance(each, nn.Module) for module in each.modules())
        for model in {*filter(is_model, modules)} - {*positions_are_added}:
            model.register_forward_pre_hook(_with_positions, with_kwargs=True, prepend=True)
            positions_are_added.add(model)

    def __call__(self, **options: Any) -> AbstractContextManager[None]:
        given = {name: value for name, value in options.items() if value is not None}
        return context_parallel(self.mesh, **{**self.options, **given})


def _with_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the position ids that a call in a context lacks."""
    given = arguments_of(model, args, kwargs)
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if not shards_are_seen() or tokens is None or not lacks_positions(model, given):
        return None
    refuse_own_positions(model, given)
    return args, {**kwargs, "position_ids": positions_here(tokens.size(1), tokens.device)[None]}


def _prepare_cp(original: Callable[..., Any], accelerator: Any, *args: Any) -> tuple[Any, ...]:
    """`Accelerator._prepare_cp` of this library."""
    if not _in_force:  # a reference that other code has kept
        return original(accelerator, *args)
    for loader in args:
        if isinstance(loader, DataLoader):
            dispatched = accelerator.dispatch_batches
            if dispatched or (dispatched is None and isinstance(loader.dataset, IterableDataset)):
                raise NotImplementedError(
                    "dispatch_batches, which accelerate sets for iterable data sets, gives the ranks of a sequence "
                    "different rows: set it to False, by DataLoaderConfiguration or by accelerator_config of Trainer"
                )
    options = dict(_in_force[-1].options)
    handler = accelerator.parallelism_config.cp_handler
    if options.get("rotate_method") is None and getattr(handler, "cp_comm_strategy", None) == "alltoall":
        options["rotate_method"] = "alltoall"  # "allgather" is accelerate's default, so it is no choice
    accelerator._cp_context = _Steps(accelerator.torch_device_mesh["cp"], options, args)
    return args


def _maybe_context_parallel(
    original: Callable[..., Any], self: Any, buffers: Any = None, buffer_seq_dims: Any = None,
    no_restore_buffers: Any = None, **options: Any,
) -> AbstractContextManager[None]:  # fmt: skip
    """`Accelerator.maybe_context_parallel` that takes the options of a context too."""
    steps = getattr(self, "_cp_context", None)
    given = {"buffers": buffers, "buffer_seq_dims": buffer_seq_dims, "no_restore_buffers": no_restore_buffers}
    if isinstance(steps, _Steps):
        return steps(**given, **options)
    if self.parallelism_config and self.parallelism_config.cp_enabled and options:
        raise TypeError(
            f"this accelerator was prepared before enable(), so it takes no {', '.join(options)}: call enable() "
            "before Accelerator.prepare"
        )
    return original(self, **given)


# Trainer


def _trainer_inputs(
    steps: _Steps, _: Callable[..., Any], trainer: Any, model: nn.Module, inputs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`Trainer._prepare_context_parallel_inputs` that shards all inputs, with labels shifted before."""
    if not isinstance(inputs, Mapping):
        raise NotImplementedError(
            "expected the inputs of a step to be tensors by name, which the ranks share; got a "
            f"{type(inputs).__name__}, as trainers have that generate (GRPO, RLOO)"
        )
    for name, argument, of_tokens in (
        ("label_smoother", "label_smoothing_factor", {"labels"}),
        ("compute_loss_func", "compute_loss_func", {"labels", "shift_labels"}),
    ):
        if getattr(trainer, name, None) is not None and not of_tokens.isdisjoint(inputs):
            raise NotImplementedError(
                f"Trainer got {argument}, which would compute a loss within this rank's shard: override "
                "Trainer.compute_loss instead, where inputs have shift_labels, shifted before they are sharded"
            )
    if getattr(getattr(trainer, "args", None), "neftune_noise_alpha", None) is not None and model.training:
        raise NotImplementedError("Trainer got neftune_noise_alpha, whose noise would be that of a row of shard length")
    _refuse_dropped_documents(trainer, model)
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None:
        raise NotImplementedError(
            f"expected the inputs of a step to have input_ids or inputs_embeds, which the ranks share; got {[*inputs]}"
        )
    batch, length = tokens.shape[:2]
    labels = inputs.get("labels")
    is_of_rows = labels is None or (labels.size(0) == batch and labels.shape[1:2] != (length,))
    is_of_rows = is_of_rows or _takes_means(model)
    if is_of_rows and "shift_labels" not in inputs:
        return partial(_of_rows, steps, trainer, model, "labels" in inputs), inputs
    documents, own = _documents_of(inputs, tokens), steps.options.get("mask")
    if "labels" in inputs and "shift_labels" not in inputs:
        inputs["shift_labels"] = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    if inputs.get("position_ids") is None:
        refuse_own_positions(model, inputs)
        inputs["position_ids"] = torch.arange(length, device=tokens.device).repeat(batch, 1)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    others = [name for name in tensors if name not in _SEQUENCE_INPUTS and tensors[name].shape[:2] == (batch, length)]
    if others:
        raise NotImplementedError(
            f"expected the inputs {', '.join(_SEQUENCE_INPUTS)} only, since others may have to be sharded; got "
            f"{', '.join(others)} of shape (batch, sequence): open accelerator.maybe_context_parallel in a "
            "training_step of your own"
        )
    # Views, such as expanded position ids, cannot be sharded in place.
    sharded = {name: trainer._prepare_input(tensors[name]).contiguous() for name in _SEQUENCE_INPUTS if name in tensors}
    inputs.update(sharded)
    buffers = [*sharded.values()]
    opened = partial(
        trainer.accelerator.maybe_context_parallel, buffers=buffers, buffer_seq_dims=[1] * len(buffers),
        no_restore_buffers=buffers, mask=documents if documents is None or own is None else own & documents,
    )  # fmt: skip
    return opened, inputs


def _takes_means(model: nn.Module) -> bool:
    """Return whether a model's loss is the mean over its labels, although Trainer passes the number of all labels.

    The mean over a shard is not that of the row where ranks have different numbers of labels.
    """
    whole: Any = next(filter(is_model, model.modules()), None)
    if whole is None:
        return False
    names = inspect.unwrap(type(whole).forward).__code__.co_names
    return "CrossEntropyLoss" in names or type(whole).__name__.endswith("ForTokenClassification")


def _documents_of(inputs: dict[str, Any], tokens: torch.Tensor) -> Mask | None:
    """Take the arguments of packed documents out of the inputs of a step; return their mask, None if there are none.

    They are of the whole sequence, so a model cannot use them in a shard. The mask, given to the context, is read by
    attention and by recurrent layers. Adds position ids that begin again in each document where there are none.

    Raises:
        NotImplementedError: several batch rows.
        ValueError: cu_seq_lens, seq_idx and position ids begin documents at different tokens.
    """
    given = {name: inputs.pop(name, None) for name in _DOCUMENT_INPUTS}
    begins = {name: {0, *given[name].tolist()} for name in _DOCUMENT_INPUTS[:2] if given[name] is not None}
    if given["seq_idx"] is not None:
        begins["seq_idx"] = _breaks(given["seq_idx"], 0)
    if not begins:
        return None
    batch, length = tokens.shape[:2]
    if batch != 1:
        raise NotImplementedError(f"{', '.join(begins)} need a batch of one row, got {batch} rows")
    positions = inputs.get("position_ids")
    if positions is not None:
        begins["position_ids"] = _breaks(positions, 1)
    edges, *others = ({*each, length} for each in begins.values())
    differing = set[int]().union(*(edges ^ other for other in others))
    if differing:
        raise ValueError(
            f"{', '.join(begins)} begin packed documents at different tokens, the first of which is token "
            f"{min(differing)}: expected position_ids that begin again where each document begins"
        )
    documents = Documents.for_length(sorted(edges), length)
    if positions is None:
        counted = [torch.arange(each, device=tokens.device) for each in documents.lengths]
        inputs["position_ids"] = torch.cat(counted)[None]
    return documents


def _breaks(row: torch.Tensor, step: int) -> set[int]:
    """Return the tokens of a row (1, S) whose value is not that of the token before plus `step`, with token 0."""
    return {0, *((row.diff(dim=-1) != step).nonzero()[:, -1] + 1).tolist()}


def _trainer_made(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`Trainer.__init__`, after which SFTTrainer would refuse packing: here packed documents are kept apart."""
    original(trainer, *args, **kwargs)
    config, given = trainer.accelerator.parallelism_config, trainer.args
    is_sft = any(kind.__name__ == "SFTTrainer" for kind in type(trainer).__mro__)  # its __init__ gives packing back
    is_packed = is_sft and (given.packing or given.eval_packing)
    if config is None or not config.cp_enabled or not is_packed:
        return
    trainer._cp_packing = given.packing, given.eval_packing
    given.packing = given.eval_packing = False  # what was given is packed already
    trainer._prepare_context_parallel_inputs = partial(_packed_inputs, trainer)


def _packed_inputs(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> Any:
    if not isinstance(trainer.accelerator._cp_context, _Steps):
        raise ValueError(
            "this SFTTrainer with packing=True was made while cp_dtensor.integrations.accelerate was enabled: train "
            "while it is enabled, too, since others would let packed documents attend to each other"
        )
    return type(trainer)._prepare_context_parallel_inputs(trainer, model, inputs)


def _sft_made(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`SFTTrainer.__init__`, which gives the arguments back as they were."""
    try:
        original(trainer, *args, **kwargs)
    finally:
        if "_cp_packing" in vars(trainer):
            trainer.args.packing, trainer.args.eval_packing = vars(trainer).pop("_cp_packing")


def _refuse_dropped_documents(trainer: Any, model: nn.Module) -> None:
    """Refuse packed training data whose documents TRL's collator leaves out, so that each row would be one document."""
    padding_free = getattr(getattr(trainer, "data_collator", None), "padding_free", None)
    columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ()
    if padding_free is None or not model.training:  # another collator, or other data
        return
    if "position_ids" in columns or ("seq_lengths" in columns and not padding_free):
        raise ValueError(
            f"the training data has the columns {', '.join(columns)}, and TRL's collator has padding_free="
            f"{padding_free}; it takes documents from seq_lengths with padding_free=True only: pack the data by "
            "trl.pack_dataset and set padding_free=True and max_length=None in SFTConfig"
        )


@contextmanager
def _of_rows(steps: _Steps, trainer: Any, model: nn.Module, has_labels: bool = False) -> Iterator[None]:
    """While open, a trainer without a label for each token computes its loss of whole rows.

    So do trainers of preferences (DPO, KTO), of rewards, and of classes.
    """
    if getattr(trainer, "precompute_ref_logps", False):
        raise NotImplementedError(
            "precompute_ref_log_probs=True gives each row the numbers of another one where ranks share a sequence: TRL "
            "takes the values of all ranks for those of other rows; set it to False"
        )
    if trainer.args.torch_compile:
        raise NotImplementedError("torch_compile=True is not supported with a loss of whole rows")
    counts = sys.modules["transformers.trainer"].Trainer.compute_loss.__code__.co_names
    if has_labels and "get_tp_size" not in counts:
        raise NotImplementedError(
            "a loss of labels of whole rows needs a newer transformers, such as 5.23, whose Trainer counts the ranks "
            "that have the same rows by get_tp_size()"
        )
    with ExitStack() as stack:
        for each in filter(None, (model, getattr(trainer, "ref_model", None))):
            stack.enter_context(whole_rows(each, steps.mesh, **steps.options))
        # As ranks of tensor parallelism, those of a sequence have the same rows, which Trainer and TRL count once.
        alike = trainer.get_tp_size() * sequence_ranks(steps.mesh).size
        for name, value in (("get_tp_size", lambda: alike), ("_tp_size", alike)):
            stack.enter_context(attribute_replaced(trainer, name, value))
        yield


def _trainer_prediction(
    steps: _Steps, original: Callable[..., Any], trainer: Any, model: nn.Module, inputs: dict[str, Any],
    prediction_loss_only: bool, *args: Any, **kwargs: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`Trainer.prediction_step` whose loss is the mean over the ranks of a sequence.

    Trainer takes the ranks' losses for those of other rows.
    """
    if not prediction_loss_only:
        raise NotImplementedError(
            "Trainer.predict, and evaluate with compute_metrics, would take the logits of each rank's shard for "
            "those of other rows: under context parallelism only the loss is evaluated (prediction_loss_only=True)"
        )
    ends, ranks = trainer.accelerator.gradient_state, sequence_ranks(steps.mesh)
    if ends.end_of_dataloader and ends.remainder > 0:
        # Of the last batch accelerate keeps one value a row. Every rank of a sequence gives one for each row.
        ends.active_dataloader.remainder *= ranks.size
    loss, logits, labels = original(trainer, model, inputs, prediction_loss_only, *args, **kwargs)
    if loss is not None:
        loss = ranks.gather(loss.reshape(1).double()).mean().to(loss)
    return loss, logits, labels


def _rows_prediction(steps: _Steps, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """`prediction_step` of a trainer whose loss is of whole rows."""

    def of_rows(trainer: Any, model: nn.Module, *others: Any, **options: Any) -> Any:
        with _of_rows(steps, trainer, model):
            return original(trainer, model, *others, **options)

    return _trainer_prediction(steps, of_rows, *args, **kwargs)


def _sft_prediction(steps: _Steps, _: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """`SFTTrainer.prediction_step` of shards, in which TRL's own would compute whole sequences."""
    return _trainer_prediction(steps, _loss_of_shards, *args, **kwargs)


def _loss_of_shards(self: Any, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
    """Run a prediction step of a trainer; its loss is this rank's share of the loss of the whole sequence."""
    inputs = self._prepare_inputs(inputs)
    count = self._get_num_items_in_batch([inputs], self.args.device)  # before labels are shards
    opened, inputs = self._prepare_context_parallel_inputs(model, inputs)
    with torch.no_grad(), self.compute_loss_context_manager(), opened():
        return self.compute_loss(model, inputs, num_items_in_batch=count).detach(), None, None
