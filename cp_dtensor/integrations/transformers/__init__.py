"""Provider for transformers: `attn_implementation="cp_dtensor"`, buffers of a batch, and the loss of all ranks' tokens.

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cp_dtensor")
    batch = ModelBatch(input_ids=input_ids, labels=labels)
    with context_parallel(mesh, **batch.buffers):
        loss = causal_lm_loss(model(**batch.inputs, use_cache=False).logits, batch.shift_labels)
        loss.backward()  # of gradients that are averaged over ranks afterwards

Masks (windows, chunks, packed documents, padding) and the sink of each head are those of the model; its own mask
functions find the masks. Source: transformers' AttentionInterface and AttentionMaskInterface.
"""

from cp_dtensor.integrations.transformers.checks import check_model
from cp_dtensor.integrations.transformers.provider import ModelBatch, causal_lm_loss, register

__all__ = ["ModelBatch", "causal_lm_loss", "check_model", "register"]
