"""Provider for transformers: its attention function, batches as buffers of a context, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cp_dtensor import Documents
from cp_dtensor.api.extension import (
    Mesh,
    attention_of_shards,
    hooks_held,
    innermost,
    is_handle,
    sequence_ranks,
    value_of,
)
from cp_dtensor.integrations.transformers.chosen import shards_are_seen, with_selected_keys
from cp_dtensor.integrations.transformers.layers import refuse_arguments, whole_length
from cp_dtensor.integrations.transformers.multimodal import SHARD_IMAGES
from cp_dtensor.integrations.transformers.private import PROVIDER, table_of


def register() -> str:
    """Make `attn_implementation="cp_dtensor"` available in transformers, for the rest of the process.

    With it, models attend to the whole sequence inside of `context_parallel` and in modules with `ContextParallel`, in
    any layout, with gradient checkpointing and under `torch.compile`. Outside of both they attend as with "sdpa". Masks
    are those of the model; sinks (`s_aux`), `softcap` and grouped heads are supported. Other arguments of attention
    that are not None are refused by name.

    Returns:
        "cp_dtensor", for `from_pretrained(attn_implementation=register())` or `set_attn_implementation(register())`.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if PROVIDER not in table_of(AttentionInterface):
        hooks_held()  # for good
        AttentionInterface.register(PROVIDER, with_selected_keys(_attention, s_aux="sinks"))
        # The function for "sdpa" is that of the hook now.
        AttentionMaskInterface.register(PROVIDER, table_of(AttentionMaskInterface)["sdpa"])
    return PROVIDER


# Attention


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None, cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention as a function of transformers: (B, H, S, D) in, (B, S, H, Dv) out."""
    refuse_arguments(f'attn_implementation="{PROVIDER}"', kwargs)
    if attention_mask is None and kwargs.get("sliding_window") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} got sliding_window={kwargs['sliding_window']} and no mask: this model does not "
            "make its masks by transformers.masking_utils"
        )
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    documents = None
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError("got cu_seq_lens_k without cu_seq_lens_q, expected both or neither")
    if cu_seq_lens_q is not None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "cu_seq_lens_q is not supported in compiled code: pass position_ids that begin with 0 in each document"
            )
        if query.size(0) != 1:
            raise NotImplementedError(f"cu_seq_lens_q needs a batch of one row, got {query.size(0)}")
        documents = Documents(cu_seq_lens_q, cu_seq_lens_k)
    bias, keys = position_bias, key.size(2)
    is_zeros = getattr(module, "has_relative_attention_bias", True) is False  # or the bias of an earlier layer
    if is_zeros and bias is not None and bias.size(-1) == keys and shards_are_seen() and keys != whole_length(keys):
        bias = None  # zeros of attention without positions, such as T5's to its encoder, have this rank's keys
    out = attention_of_shards(
        query, key, value, attn_mask=attention_mask, is_causal=causal, mask=documents, dropout_p=dropout, scale=scaling,
        sinks=s_aux, bias=bias, softcap=softcap or 0.0,
    )  # fmt: skip
    if out is None:
        refused = {"softcap": softcap, "s_aux": s_aux, "cu_seq_lens_q": cu_seq_lens_q}
        if names := [name for name, argument in refused.items() if argument is not None]:
            raise NotImplementedError(
                f'outside of context_parallel, attn_implementation="{PROVIDER}" is "sdpa", which does not support '
                f"{', '.join(names)}: set another attn_implementation there"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask = _mask_alone(attention_mask) if is_handle(attention_mask) else attention_mask
        alone: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias,
        )  # fmt: skip
        return alone
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.disable
def _mask_alone(name: torch.Tensor) -> Any:
    return value_of(name).alone()


# Batches and loss


@dataclass(eq=False)
class ModelBatch:
    """A batch of a causal language model as buffers of a context: position ids added, labels shifted.

    Args:
        input_ids: (B, S) int64, whole and equal on every rank. None if `inputs_embeds` is given.
        inputs_embeds: (B, S, D), instead of `input_ids`; no gradients.
        labels: (B, S) int64, not shifted, as transformers' models take them; None if there is no loss.
        attention_mask: (B, S), 0 for padding. None, or all 1: no padding, so that documents may be packed.
        position_ids: (B, S) or (1, S) int64; documents that are packed begin again with 0, and the model is called
            with `use_cache=False`: with a cache, documents attend to each other. None: 0 to S - 1.
        ignore_index: label that does not count.
        others: more (B, S, ...) tensors that the model takes, by name, such as token_type_ids.

    `inputs` are the arguments of the model, `shift_labels` (B, S) the label of the next token of each token, and
    `buffers` the arguments `buffers` and `buffer_seq_dims` of `context_parallel`.

    Raises:
        ValueError: tensors that do not fit.

    >>> batch = ModelBatch(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]]))
    >>> batch.inputs["position_ids"].tolist(), batch.shift_labels.tolist()
    ([[0, 1, 2]], [[6, 7, -100]])
    """

    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    ignore_index: int = -100
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, Any] = field(init=False)
    shift_labels: torch.Tensor | None = field(init=False)
    is_whole: bool = field(init=False, default=False)  # the model takes whole inputs, which are no buffers

    def __post_init__(self) -> None:
        given = {"input_ids": self.input_ids, "inputs_embeds": self.inputs_embeds}
        self.inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        if len(self.inputs) != 1:
            raise ValueError("ModelBatch expects either input_ids or inputs_embeds")
        (tokens,) = self.inputs.values()
        rows, length = tokens.shape[:2]
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, -1)
        # Tensors of their own: a context shards tensor objects, and an expanded one has no memory for its rows.
        self.inputs |= {"position_ids": positions.expand(rows, -1).clone(), **self.others}
        if self.attention_mask is not None and not bool(self.attention_mask.all()):
            self.inputs["attention_mask"] = self.attention_mask
        self.shift_labels = None
        if self.labels is not None:
            self.shift_labels = F.pad(self.labels[:, 1:], (0, 1), value=self.ignore_index).contiguous()
        for each, tensor in {**self.inputs, "labels": self.labels}.items():
            if tensor is not None and tuple(tensor.shape[:2]) != (rows, length):
                raise ValueError(
                    f"ModelBatch expects {each} of shape ({rows}, {length}, ...), got {tuple(tensor.shape)}"
                )

    @classmethod
    def from_processor(
        cls, inputs: Mapping[str, Any], *, shard_images: bool = False, ignore_index: int = -100
    ) -> ModelBatch:
        """Return a batch of a model that takes images, video or sound, from what its processor returns.

        The model makes embeddings, positions and masks of the whole inputs by its own code, and its language model gets
        this rank's shards of them. So logits are those of this rank's tokens, and gradients reach the towers.

        Args:
            inputs: arguments of the model by name, whole and equal on every rank: `input_ids` (B, S), `labels` (B, S),
                not shifted, `pixel_values` and others. Packed documents need the model's own position ids.
            shard_images: True divides images, frames and sounds over the ranks by their patches, and gathers the
                embeddings; False: every rank computes all.
            ignore_index: label that does not count.

        Raises:
            ValueError: no `input_ids`, or tensors that do not fit.

        >>> ids, image = torch.tensor([[5, 9, 9, 7]]), torch.zeros(1, 3, 8, 8)
        >>> batch = ModelBatch.from_processor({"input_ids": ids, "labels": ids, "pixel_values": image})
        >>> [*batch.inputs], batch.shift_labels.tolist(), batch.buffers["seq_len"]
        (['input_ids', 'pixel_values'], [[9, 9, 7, -100]], 4)
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        batch = cls(given.get("input_ids"), labels=given.pop("labels", None), ignore_index=ignore_index)
        batch.inputs = {**given, **({SHARD_IMAGES: True} if shard_images else {})}
        batch.is_whole = True
        return batch

    @property
    def buffers(self) -> dict[str, Any]:
        """`buffers` and others of the arguments of `context_parallel`."""
        tensors = [] if self.is_whole else [*self.inputs.values()]
        tensors += [] if self.shift_labels is None else [self.shift_labels]
        lengths = {"seq_len": self.inputs["input_ids"].size(1)} if self.is_whole else {}
        return {"buffers": tensors, "buffer_seq_dims": [1] * len(tensors), **lengths}


def causal_lm_loss(
    logits: torch.Tensor, shift_labels: torch.Tensor, *, mesh: Mesh | None = None, ignore_index: int = -100,
    num_items_in_batch: int | torch.Tensor | None = None, gradients: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Return the cross entropy, a mean over the labels of all ranks, as one process computes it of the whole sequence.

    Args:
        logits: (B, S, V), of this rank's tokens; computed in float32 (float64 stays).
        shift_labels: (B, S) int64, this rank's, shifted before they were sharded (`ModelBatch`).
        mesh: the ranks that share the sequence; None for those of the open context.
        ignore_index: label that does not count.
        num_items_in_batch: number to divide by, of all batches of a step, as transformers' Trainer passes it. None:
            the number of labels of all ranks that count.
        gradients: "mean" if gradients are averaged over the ranks of `mesh` afterwards, as DistributedDataParallel and
            FSDP2 do; "sum" if they are added.

    Returns:
        () loss, equal on every rank. If no label counts, 0 (one process has NaN there).

    Raises:
        ValueError: no mesh outside of contexts, or another name for `gradients`.

    Each rank computes the share of its own tokens; `gradients` decides how it is scaled. Two small collectives.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f'expected gradients to be "mean" or "sum", got {gradients!r}')
    context = innermost() if mesh is None else None
    if mesh is None and context is None:
        raise ValueError("causal_lm_loss needs mesh= outside of context_parallel")
    ranks = sequence_ranks(mesh) if context is None else context.call.ranks
    wide = logits if logits.dtype == torch.float64 else logits.float()
    own = F.cross_entropy(wide.flatten(0, -2), shift_labels.flatten(), ignore_index=ignore_index, reduction="sum")
    count = (shift_labels != ignore_index).sum()
    with torch.no_grad():
        totals = ranks.gather(torch.stack([own.detach().double(), count.double()])).sum(0)
    divisor = totals[1].clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    divisor = divisor.to(own)
    share = own / divisor
    share = share * ranks.size if gradients == "mean" else share
    return share + (totals[0].to(own) / divisor - share).detach()
