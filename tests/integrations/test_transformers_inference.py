"""Caches of transformers' models on 2 ranks: generation, prefill, packed documents, and the programs about them."""

from __future__ import annotations

import pickle
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_programs import launch
from support.models import LENGTH, ROWS, tiny_model
from support.pages import blocks
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import context_parallel, context_parallel_unshard
from cp_dtensor.integrations.transformers import ModelBatch, register

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")
ROOT = Path(__file__).resolve().parents[2]
EDGES = (0, 20, LENGTH)
REFUSED = "filled inside of context_parallel, where it has the keys of this rank's shard only"


def tokens() -> torch.Tensor:
    return torch.randint(3, 53, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def packed() -> torch.Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(EDGES)])[None]


def called_in_context(model: Any, batch: ModelBatch, **arguments: Any) -> Any:
    with context_parallel(dist.group.WORLD, **batch.buffers), torch.no_grad():  # type: ignore[arg-type]
        return model(**batch.inputs, **arguments)


def program(page: str, text: str) -> str:
    """The Python block of a page that has a text."""
    (found,) = (block for block in blocks(ROOT / page, "python") if text in block)
    return found


def generation(rank: int) -> None:
    for attention in ("sdpa", register()):
        model, given = tiny_model("Llama", attention).eval(), {"max_new_tokens": 2, "do_sample": False}
        expected = tiny_model("Llama", "sdpa").eval().generate(tokens(), **given)  # type: ignore[operator]
        for buffers in ([], [tokens()]):
            context = context_parallel(
                dist.group.WORLD, buffers=buffers, buffer_seq_dims=[1] * len(buffers)  # type: ignore[arg-type]
            )  # fmt: skip
            with context, pytest.raises(NotImplementedError, match="call it outside of the context, where each rank"):
                model.generate(*buffers or [tokens()], **given)  # type: ignore[operator]
        assert torch.equal(model.generate(tokens(), **given), expected)  # type: ignore[operator]


def caches(rank: int, with_provider: bool) -> None:
    """Before and after `register()`, which keeps the functions of models replaced."""
    model: Any = tiny_model("Llama", register() if with_provider else "sdpa").eval()
    last = tokens()[:, -1:]
    own = transformers.DynamicCache()
    called_in_context(model, ModelBatch(input_ids=tokens()), past_key_values=own)
    found = called_in_context(model, ModelBatch(input_ids=tokens())).past_key_values
    in_tuple = called_in_context(model, ModelBatch(input_ids=tokens()), return_dict=False)[1]
    for cache in (own, found, in_tuple, pickle.loads(pickle.dumps(found))):
        with pytest.raises(NotImplementedError, match=REFUSED):
            model(last, past_key_values=cache)
        with pytest.raises(NotImplementedError, match=REFUSED):
            model.generate(tokens(), past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == LENGTH // 2  # as it was
    with pytest.raises(NotImplementedError, match="decode outside of the context"):
        called_in_context(model, ModelBatch(input_ids=tokens()), past_key_values=found)
    with torch.no_grad():
        model(last, past_key_values=model(tokens()).past_key_values)  # one that no context has seen


def caches_with_windows(rank: int) -> None:
    """Gathered keys of a model's own cache are those of all tokens, also where a window is shorter than a shard."""
    model: Any = tiny_model("Mistral", "sdpa").eval()
    model.config.sliding_window = LENGTH // 4
    last, mesh = tokens()[:, :1], init_device_mesh("cpu", (2,))
    with torch.no_grad():
        expected = model(torch.cat([tokens(), last], 1)).logits[:, -1:]
    for own in (None, transformers.DynamicCache(config=model.config)):
        found = called_in_context(model, ModelBatch(input_ids=tokens()), past_key_values=own).past_key_values
        assert all(found.is_sliding)
        for whole in (transformers.DynamicCache(), transformers.DynamicCache(config=model.config)):
            for index, layer in enumerate(found.layers):
                whole.update(*context_parallel_unshard(mesh, [layer.keys, layer.values], [2, 2]), index)
            with torch.no_grad():
                torch.testing.assert_close(model(last, past_key_values=whole).logits, expected)
    assert model(tokens()).past_key_values.layers[0].keys.size(2) < LENGTH // 4  # outside of contexts


def caches_of_compiled_models(rank: int) -> None:
    torch.compiler.reset()
    model: Any = tiny_model("Llama", register()).eval()
    found = called_in_context(torch.compile(model, backend="eager"), ModelBatch(input_ids=tokens()))
    with pytest.raises(NotImplementedError, match=REFUSED):
        model(tokens()[:, -1:], past_key_values=found.past_key_values)


def caches_of_cross_attention(rank: int) -> None:
    model: Any = tiny_model("BERT, cross-attention", "sdpa").eval()
    encoded = torch.ones(ROWS, 10, 32, dtype=torch.float64)
    batch = ModelBatch(input_ids=tokens(), others={})
    with context_parallel(
        dist.group.WORLD, buffers=[*batch.buffers["buffers"], encoded], buffer_seq_dims=[1] * 3  # type: ignore[arg-type]
    ):  # fmt: skip
        found = model(**batch.inputs, encoder_hidden_states=encoded, use_cache=True).past_key_values
    assert isinstance(found, transformers.EncoderDecoderCache)
    with pytest.raises(NotImplementedError, match=REFUSED):
        model(tokens()[:, -1:], encoder_hidden_states=encoded, past_key_values=found)


def joined_documents(rank: int) -> None:
    model: Any = tiny_model("Llama", "sdpa").eval()
    for positions, expected in ((None, 0), (packed(), 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                called_in_context(model, ModelBatch(input_ids=tokens(), position_ids=positions))
        shown = [str(each.message) for each in caught]
        assert len(shown) == expected
        assert all("documents attend to each other" in each and "use_cache=False" in each for each in shown)


def readme(rank: int) -> None:
    """Its gradients, averaged over the ranks, are those of documents one by one."""
    alone: Any = tiny_model("Llama", "sdpa")
    parts = [tokens()[:, start:stop] for start, stop in pairwise(EDGES)]
    logits = torch.cat([alone(part, use_cache=False).logits for part in parts], 1)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    names = {
        "context_parallel": context_parallel, "model": tiny_model("Llama", "sdpa"), "tokens": tokens(),
        "positions": packed(), "mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")),
    }  # fmt: skip
    exec(program("README.md", "ModelBatch"), names)
    for parameter, expected in zip(names["model"].parameters(), alone.parameters(), strict=True):  # type: ignore[attr-defined]
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad / 2, expected.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "case",
    [
        (caches, False), (caches, True), (caches_with_windows,), (generation,), (caches_of_cross_attention,),
        (joined_documents,), (readme,),
        pytest.param((caches_of_compiled_models,), marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_caches(two_processes: Processes, case: tuple[Any, ...]) -> None:
    two_processes.run(*case)


@pytest.mark.slow
def test_the_program_about_prefill_and_generation(tmp_path: Path) -> None:
    """It compares with one process itself."""
    path = tmp_path / "program.py"
    path.write_text(program("docs/inference.md", "generate("))
    launch(2, path, folder=tmp_path, timeout=240)
