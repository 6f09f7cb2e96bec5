"""Context parallelism of accelerate, `transformers.Trainer` and TRL by this library.

    from cp_dtensor.integrations import accelerate as cp_accelerate

    cp_accelerate.enable()  # before Accelerator.prepare, or before Trainer.train
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=8), ...)

Everything else stays as accelerate documents it. An accelerator that is prepared while this is enabled opens
`cp_dtensor.context_parallel` in `maybe_context_parallel`, which also takes the options of that context then:

    with accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=..., mask=Documents(cu_seqlens)):

Models of transformers with `attn_implementation="sdpa"` compute plain causal attention under the mask of the context.
Those with other masks of their own (windows, chunks, sinks) need the attention implementation "cp_dtensor", which
builds masks of the whole sequence; under "sdpa" they are refused when they are prepared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from cp_dtensor import Batched, Documents, HeadTail, Layout, Mask, context_parallel, local_positions
from cp_dtensor.api.extension import PROVIDER, Mesh, models_with_positions, sequence_ranks

__all__ = ["Enabled", "enable", "padded_and_packed_mask"]

_SEQUENCE_INPUTS = (
    "input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask", "token_type_ids",
)  # fmt: skip
"""Inputs of transformers models whose dim 1 is the sequence."""


class Enabled:
    """The switch that `enable` returns: in force until `disable` or the end of a `with` block.

    Switches nest: accelerators that are prepared take the options of the latest one that is in force.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from accelerate import Accelerator

        self._undo: list[tuple[type, str, Any]] = []
        self._settings = settings
        try:
            self._replace(Accelerator, "_prepare_cp", self._prepared_by)
            self._replace(Accelerator, "maybe_context_parallel", _with_options)
        except BaseException:
            self.disable()
            raise

    def disable(self) -> None:
        """Gives accelerate its own functions back; further calls do nothing.

        Accelerators that were prepared before keep this library.
        """
        while self._undo:
            owner, name, replacement = self._undo.pop()
            replacement.is_disabled = True  # for a later switch, or other code, that calls it
            while getattr(owner.__dict__[name], "is_disabled", False):
                setattr(owner, name, owner.__dict__[name].original)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _replace(self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = owner.__dict__[name]
        made = make(original)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (original if vars(replacement)["is_disabled"] else made)(*args, **kwargs)

        vars(replacement).update(is_disabled=False, original=original)
        setattr(owner, name, replacement)
        self._undo.append((owner, name, replacement))

    def _prepared_by(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Accelerator._prepare_cp` of this library."""

        def prepare(accelerator: Any, *args: Any) -> tuple[Any, ...]:
            settings = dict(self._settings)
            handler = accelerator.parallelism_config.cp_handler
            if settings["rotate_method"] is None and getattr(handler, "cp_comm_strategy", None) == "alltoall":
                settings["rotate_method"] = "alltoall"  # "allgather" is accelerate's default, so it is no choice
            steps = _Steps(accelerator.torch_device_mesh["cp"], settings)
            for arg in args:
                if isinstance(arg, nn.Module):
                    steps.attach(arg)
            accelerator._cp_context = steps
            trainer = sys.modules.get("transformers.trainer")  # imported by now if it trains
            if trainer is not None and all(owner is not trainer.Trainer for owner, *_ in self._undo):
                self._replace(trainer.Trainer, "_prepare_context_parallel_inputs", _trainer_inputs)
                self._replace(trainer.Trainer, "prediction_step", _trainer_prediction)
            return args

        return prepare


def enable(
    *,
    mask: Mask | None = None,
    method: str = "auto",
    layout: Layout | None = None,
    rotate_method: str | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    debug: bool = False,
) -> Enabled:
    """Switches `ParallelismConfig(cp_size=n)` to this library, in `Accelerator.prepare` from now on.

    Args:
        mask, method, layout, sinks, deterministic, debug: of the contexts that `maybe_context_parallel` and `Trainer`
            open, as for `cp_dtensor.context_parallel`; `maybe_context_parallel` takes them too, for one step.
        rotate_method: as there. None: "alltoall" if the handler of the `ParallelismConfig` says so, otherwise "auto".

    Returns:
        the switch, in force already: `disable()` ends it, and so does leaving `with enable():`.

    Raises:
        ImportError: accelerate is not installed.

    `Accelerator.prepare` and the steps then raise
        NotImplementedError, ValueError: for transformers models whose result would not be that of one process; the
            message names the reason and the way out. Padding and packed documents become masks in `Trainer`; in steps
            of your own pass `mask=`, for which there is `padded_and_packed_mask`.
    """
    return Enabled(
        {
            "mask": mask, "method": method, "layout": layout, "rotate_method": rotate_method, "sinks": sinks,
            "deterministic": deterministic, "debug": debug,
        }
    )  # fmt: skip


def padded_and_packed_mask(
    position_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
) -> Mask | None:
    """The mask of packed documents and of padding, without causality; None if there is neither.

    Args:
        position_ids: (B, S) integers of the whole sequence. A document begins wherever a position is not the one before
            plus 1, as in transformers.
        attention_mask: (B, S), of the whole sequence, nonzero for tokens and 0 for padding at either end of a row.

    Raises:
        ValueError: other shapes; padding between tokens.

    Padding sees nothing here, where a model may give it some output: outputs at padding differ, those of tokens do not.

    >>> padded_and_packed_mask(torch.tensor([[0, 1, 2, 0, 1]])).cu_seqlens
    (0, 3, 5)
    >>> padded_and_packed_mask(attention_mask=torch.tensor([[0, 1, 1]])).cu_seqlens
    (1, 3)
    """
    given = [tensor for tensor in (position_ids, attention_mask) if tensor is not None]
    if any(tensor.dim() != 2 or tensor.shape != given[0].shape for tensor in given):
        raise ValueError(
            f"expected position_ids and attention_mask of one shape (batch, sequence), got {[*map(_shape, given)]}"
        )
    if not given:
        return None
    batch, length = given[0].shape
    rows: list[list[Mask]] = [[] for _ in range(batch)]
    if position_ids is not None and not _ascends(position_ids):
        begins = position_ids[:, 1:] - position_ids[:, :-1] != 1
        for row, starts in zip(rows, begins.tolist(), strict=True):
            row.append(Documents([0, *(index + 1 for index, start in enumerate(starts) if start), length]))
    if attention_mask is not None and not bool(attention_mask.all()):
        for row, seen in zip(rows, (attention_mask != 0).tolist(), strict=True):
            tokens = [index for index, is_token in enumerate(seen) if is_token] or [0]
            first, last = tokens[0], tokens[-1] + 1 if any(seen) else 0
            if last - first != sum(seen):
                raise ValueError("expected padding at the ends of each row of attention_mask, got zeros between tokens")
            row.append(Documents.for_length([first, last], length))
    if not rows or not rows[0]:
        return None
    masks = [row[0] if len(row) == 1 else row[0] & row[1] for row in rows]
    return masks[0] if batch == 1 else Batched(masks)


class _Steps:
    """`_cp_context` of an accelerator: opens a context for each step, and checks what its models are called with.

    Args:
        mesh: the context-parallel axis.
        settings: options of the contexts.
    """

    def __init__(self, mesh: Mesh, settings: dict[str, Any]) -> None:
        self.mesh = mesh
        self.settings = settings
        self._step: _Step | None = None
        self._models = WeakSet[nn.Module]()

    @contextmanager
    def __call__(
        self,
        *,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
        **options: Any,
    ) -> Iterator[None]:
        settings = {**self.settings, **{name: value for name, value in options.items() if value is not None}}
        tensors, dims = list(buffers or ()), list(buffer_seq_dims or ())
        step = _Step(tensors, dims, settings["mask"] is not None, settings["layout"] or HeadTail())
        context = context_parallel(
            self.mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=no_restore_buffers, **settings
        )
        before, self._step = self._step, step
        models_with_positions.update(self._models)
        try:
            with context:
                yield
        finally:
            self._step = before
            if before is None:
                models_with_positions.difference_update(self._models)

    def attach(self, model: nn.Module) -> None:
        """Registers the checks of a model of transformers; other models run as they are."""
        config = getattr(model, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if config is None or implementation is None:
            return
        _refuse_other_masks(model, config, implementation)
        model.register_forward_pre_hook(self._check_call, with_kwargs=True, prepend=True)
        self._models.add(model)
        if implementation == "sdpa":
            for layer in _attention_layers(model):
                layer.register_forward_pre_hook(self._causal, with_kwargs=True, prepend=True)

    def _check_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Checks a model's inputs in a step, before any collective, and adds positions if they are missing."""
        step = self._step
        if step is None:
            return None
        parameters = signature(model.forward).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if given.get("labels") is not None and given.get("shift_labels") is None and "CausalLM" in type(model).__name__:
            raise ValueError(
                f"{type(model).__name__} got labels without shift_labels, and would shift this rank's part of them: "
                "pass shift_labels too, labels shifted by one before they are sharded, among the buffers"
            )
        if getattr(model.config, "_attn_implementation", None) != PROVIDER:
            step.refuse_unmasked(given)
        if "position_ids" in parameters and given.get("position_ids") is None:
            positions = local_positions(self.mesh, step.length(), step.layout, device=step.device)
            return args, {**kwargs, "position_ids": positions[None]}
        return None

    def _causal(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Lets the context mask an attention layer: the model makes its own masks from this rank's tokens only."""
        if self._step is None or "attention_mask" not in kwargs:
            return None
        return args, {**kwargs, "attention_mask": None, "is_causal": True}


class _Step:
    """The buffers of one step, and the facts that only whole ones show."""

    def __init__(self, buffers: list[torch.Tensor], dims: list[int], is_masked: bool, layout: Layout) -> None:
        self.layout = layout
        self.device = buffers[0].device if buffers else torch.device("cpu")
        self._lengths = {tensor.size(dim) for tensor, dim in zip(buffers, dims, strict=False)}
        self._is_masked = is_masked
        self._ascends: dict[int, bool] = {}
        self._is_true: dict[int, bool] = {}
        if not is_masked:
            for tensor in buffers:
                if tensor.dim() == 2 and not tensor.is_floating_point():
                    self._ascends[id(tensor)] = _ascends(tensor)
                    self._is_true[id(tensor)] = bool(tensor.all())

    def length(self) -> int:
        """The number of tokens of the whole sequence; refuses buffers of several lengths."""
        if len(self._lengths) != 1:
            raise ValueError(
                f"position_ids are missing, and the buffers of this step have the lengths {sorted(self._lengths)}: "
                "pass position_ids, as one of the buffers"
            )
        return next(iter(self._lengths))

    def refuse_unmasked(self, given: dict[str, Any]) -> None:
        """Refuses packed documents and padding that no mask of the context tells apart."""
        if self._is_masked:
            return
        positions, padding = given.get("position_ids"), given.get("attention_mask")
        way_out = (
            "pass mask=padded_and_packed_mask(position_ids, attention_mask), made of the whole tensors, to "
            f'maybe_context_parallel (Trainer does), or load the model with attn_implementation="{PROVIDER}"'
        )
        if positions is not None and not self._ascends.get(id(positions), True):
            raise ValueError(f"position_ids restart in a step without a mask, as in packed documents: {way_out}")
        if padding is not None and not self._is_true.get(id(padding), False):
            raise ValueError(
                "expected attention_mask to be None, or a buffer of the step without zeros; got "
                f"{'zeros' if id(padding) in self._is_true else 'a tensor that is no buffer (batch, sequence)'}: "
                f"{way_out}"
            )


def _ascends(tensor: torch.Tensor) -> bool:
    """True if each number of each row is the one before plus 1."""
    return bool((tensor[:, 1:].long() - tensor[:, :-1].long() == 1).all())


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _refuse_other_masks(model: nn.Module, config: Any, implementation: str) -> None:
    """Refuses a transformers model whose layers are not plain causal attention, unless its provider masks them."""
    name = type(model).__name__
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    others = sorted({*types} - {"full_attention", "sliding_attention", "chunked_attention"})
    if others:
        raise NotImplementedError(
            f"{name} has layers of {others}, which mix tokens by other means than attention: context parallelism does "
            "not see them"
        )
    if implementation == PROVIDER:
        return
    way_out = f'call cp_dtensor.integrations.transformers.register() and load it with attn_implementation="{PROVIDER}"'
    if implementation != "sdpa":
        raise NotImplementedError(
            f"{name} has attn_implementation={implementation!r}, which context parallelism does not see: {way_out}, or "
            'with "sdpa"'
        )
    windows = sorted({*types} - {"full_attention"})
    if windows:
        raise NotImplementedError(f"{name} has layers of {windows}, whose masks are lost under sdpa: {way_out}")
    layers = _attention_layers(model)
    if getattr(config, "is_encoder_decoder", False) or not layers or not all(each.is_causal for each in layers):
        raise NotImplementedError(
            f"{name} is not a decoder whose attention layers are called self_attn and causal, the only kind that runs "
            f"under sdpa: {way_out}"
        )


def _attention_layers(model: nn.Module) -> list[Any]:
    """The attention layers of a decoder of transformers."""
    return [
        module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] == "self_attn" and hasattr(module, "is_causal")
    ]


def _with_options(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.maybe_context_parallel` that takes the options of a context too."""

    def maybe_context_parallel(
        self: Any, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None, **options: Any
    ) -> AbstractContextManager[None]:
        steps = getattr(self, "_cp_context", None)
        given = {"buffers": buffers, "buffer_seq_dims": buffer_seq_dims, "no_restore_buffers": no_restore_buffers}
        if isinstance(steps, _Steps):
            return steps(**given, **options)
        if self.parallelism_config and self.parallelism_config.cp_enabled and options:
            raise TypeError(
                f"this accelerator was prepared before enable(), so it takes no {', '.join(options)}: call enable() "
                "before Accelerator.prepare"
            )
        result: AbstractContextManager[None] = original(self, **given)
        return result

    return maybe_context_parallel


def _trainer_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer._prepare_context_parallel_inputs` that turns packing and padding into the mask of the step."""

    def prepare(self: Any, model: nn.Module, inputs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        steps = getattr(self.accelerator, "_cp_context", None)
        if not isinstance(steps, _Steps):
            result: tuple[Callable[..., Any], dict[str, Any]] = original(self, model, inputs)
            return result
        _refuse_losses_of_labels(self, inputs)
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        batch, length = tokens.shape[:2]
        if "labels" in inputs and "shift_labels" not in inputs:
            inputs["shift_labels"] = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(length, device=tokens.device).repeat(batch, 1)
        options = {}
        config = self.accelerator.unwrap_model(model).config
        if getattr(config, "_attn_implementation", None) != PROVIDER:
            mask = padded_and_packed_mask(inputs["position_ids"], inputs.pop("attention_mask", None))
            if mask is not None:
                own = steps.settings["mask"]
                options["mask"] = mask if own is None else own & mask
        sharded = [name for name in _SEQUENCE_INPUTS if isinstance(inputs.get(name), torch.Tensor)]
        others = [
            name
            for name, value in inputs.items()
            if name not in sharded and isinstance(value, torch.Tensor) and value.shape[:2] == (batch, length)
        ]
        if others:
            raise NotImplementedError(
                f"expected the inputs {', '.join(_SEQUENCE_INPUTS)} only, since others may have to be sharded; got "
                f"{', '.join(others)} of shape (batch, sequence): open accelerator.maybe_context_parallel in a "
                "training_step of your own"
            )
        for name in sharded:
            # Views, such as expanded position ids, cannot be sharded in place.
            inputs[name] = self._prepare_input(inputs[name]).contiguous()
        buffers = [inputs[name] for name in sharded]
        opened = partial(
            self.accelerator.maybe_context_parallel, buffers=buffers, buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=buffers, **options,
        )  # fmt: skip
        return opened, inputs

    return prepare


def _refuse_losses_of_labels(trainer: Any, inputs: dict[str, Any]) -> None:
    """Refuses losses that Trainer computes of the labels themselves, which they shift inside of this rank's shard."""
    for name, argument in (("label_smoother", "label_smoothing_factor"), ("compute_loss_func", "compute_loss_func")):
        if "labels" in inputs and getattr(trainer, name, None) is not None:
            raise NotImplementedError(
                f"Trainer got {argument}, which would shift labels within this rank's shard: override "
                "Trainer.compute_loss instead, where inputs have shift_labels, shifted before they are sharded"
            )


def _trainer_prediction(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.prediction_step` whose loss is the mean over the ranks of a sequence.

    Trainer takes the ranks' losses for those of other rows, and drops some of them in the last batch.
    """

    def prediction_step(
        self: Any, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        steps = getattr(self.accelerator, "_cp_context", None)
        if not isinstance(steps, _Steps):
            result: tuple[Any, Any, Any] = original(self, model, inputs, prediction_loss_only, *args, **kwargs)
            return result
        if not prediction_loss_only:
            raise NotImplementedError(
                "Trainer.predict, and evaluate with compute_metrics, would take the logits of each rank's shard for "
                "those of other rows: under context parallelism only the loss is evaluated (prediction_loss_only=True)"
            )
        ends = self.accelerator.gradient_state
        if ends.end_of_dataloader and ends.remainder > 0:
            warnings.warn(
                f"the last batch of this evaluation has {ends.remainder} rows, fewer than the others: accelerate "
                "counts them once, and each row of other batches once for every rank of a sequence, so that eval_loss, "
                "if there are others, is no mean over rows: make the data set a multiple of the evaluation batch",
                stacklevel=2,
            )
        loss, logits, labels = original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        if loss is not None:
            loss = sequence_ranks(steps.mesh).gather(loss.reshape(1).double()).mean().to(loss)
        return loss, logits, labels

    return prediction_step
