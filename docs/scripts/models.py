"""Writes docs/models.md: runs every cell of the support matrix on two processes of this machine.

pip install -c constraints.txt -e '.[test,transformers]' && python docs/scripts/models.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
INTRODUCTION = """# Models of transformers

The [README](../README.md#in-your-training) has the recipe, and
[an example](../examples/integrations/transformers_two_ranks.py) a whole program.

Each cell was run: a model of the family with two layers and random weights (float64, {length} tokens, windows and
chunks of {window}) made one training step on {ranks} ranks in `HeadTail()`. "right": its loss and every gradient equal
those of one process to 1e-5. "refused": an error names the reason on every rank. No cell may be wrong.

- plain context: `with context_parallel(...)` around a model with "sdpa", or as it comes if it has no "sdpa"
- provider, and the columns after it: `attn_implementation=cp_dtensor.integrations.transformers.register()`
- compiled: `torch.compile(model)`; checkpointed: gradient checkpointing, not reentrant
- packed: position ids that begin again (encoders do not read documents from them)
- padded: an `attention_mask` with zeros at the right in one batch row and at the left in another

`check_model(model)` lists the reasons for a model at hand. Versions: {versions}.

"""

IMAGES = """
## Images and sound

A model with a vision or audio tower is right with text alone. The call of a tower inside of a context is refused by
name: attention would take its tokens for shards of the sequence. Call the tower before the context, and shard the
embeddings:

```python
images = model.get_image_features(pixel_values, **others)  # what the tower takes, such as image_grid_thw
is_image = input_ids == model.config.image_token_id
embeddings = model.get_input_embeddings()(input_ids)
embeddings = embeddings.masked_scatter(is_image[..., None], torch.cat([*images.pooler_output]))
position_ids = torch.arange(input_ids.size(1)).expand(len(input_ids), -1).clone()
# Qwen-VL: position_ids, _ = model.model.get_rope_index(input_ids, mm_token_type_ids, image_grid_thw=image_grid_thw)
[embeddings] = context_parallel_shard(mesh, [embeddings], [1])
with context_parallel(mesh, buffers=[position_ids, shift_labels], buffer_seq_dims=[-1, 1]):
    logits = model(inputs_embeds=embeddings, position_ids=position_ids, use_cache=False).logits
    loss = causal_lm_loss(logits, shift_labels)
loss.backward()
```

Every rank calls the tower with all images, and the mean of the ranks' gradients is the gradient of one process, also
for the tower. Where layers of the language model add more features of images (`deepstack_visual_embeds` of Qwen3-VL),
call the language model and shard these features too. [Tests](../tests/processes/test_transformers_towers.py) do both,
with LLaVA, Qwen2.5-VL and Qwen3-VL. An encoder of sound (Whisper) is called before the context in the same way, and its
results are sharded: `encoder_outputs=(context_parallel_shard(mesh, [states], [1])[0],)`.
"""


def main() -> None:
    """Runs all cells and writes the page."""
    import torch
    import transformers
    from support.model_cells import COLUMNS, run_cell, table
    from support.models import FAMILIES, LENGTH, WIDE_WINDOW
    from support.processes import Processes

    processes, cells = Processes(2, timeout=200), {}
    for family in FAMILIES:
        for column in COLUMNS:
            (cell,) = {*processes.run(run_cell, family, column)}
            cells[family, column] = cell
            print(f"{family}, {column}: {cell}", flush=True)
    processes.stop()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    text = INTRODUCTION.format(length=LENGTH, window=WIDE_WINDOW, ranks=2, versions=versions) + table(cells) + IMAGES
    (ROOT / "docs" / "models.md").write_text(text + "\nWritten by `python docs/scripts/models.py`.\n")


if __name__ == "__main__":
    main()
