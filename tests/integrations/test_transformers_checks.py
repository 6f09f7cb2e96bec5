"""What `check_model` says of models, layers that the provider does not see, and versions of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import tiny_model
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import context_parallel

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")

from cp_dtensor.integrations.transformers import check_model, register
from cp_dtensor.integrations.transformers.private import TESTED, table_of, warn_of_version

ROOT = Path(__file__).resolve().parents[2]


def test_check_model_names_layers() -> None:
    assert check_model(tiny_model("Llama", "sdpa")) == []
    (eager,) = check_model(tiny_model("Llama", "eager"))
    assert eager.startswith('LlamaForCausalLM, model: attn_implementation="eager" computes attention as matrix')
    assert check_model(tiny_model("LFM2", "sdpa")) == check_model(tiny_model("Qwen3-Next", "sdpa")) == []
    assert any("mixer" in line for line in check_model(tiny_model("Mamba", "eager")))
    assert check_model(tiny_model("BART", "sdpa")) == check_model(tiny_model("T5", register())) == []
    assert any(
        "T5Attention joins its position bias and a mask of" in line for line in check_model(tiny_model("T5", "sdpa"))
    )
    model: Any = tiny_model("Llama", "sdpa")
    model.add_module("pool", type("LaterCompressor", (nn.Identity,), {})())
    assert check_model(model) == ["pool: LaterCompressor compresses keys of this rank's shard only"]
    model.config.layer_types = ["full_attention", "attention_of_a_later_version"]
    assert any("layer_types has 'attention_of_a_later_version', layers that" in line for line in check_model(model))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("BertForPreTraining", {}, "takes the result of a whole row from the tokens of this rank's shard"),
        ("AlbertForPreTraining", {}, "takes the result of a whole row from the tokens of this rank's shard"),
        ("BloomForCausalLM", {"n_layer": 1}, "BloomAttention computes attention by operations that a context does not"),
        ("EsmForMaskedLM", {"token_dropout": True, "pad_token_id": 1, "mask_token_id": 32}, "the share of mask tokens"),
        ("FNetForMaskedLM", {}, "none of its layers calls attention that a context sees"),
        ("M2M100ForConditionalGeneration", {"d_model": 32}, "M2M100SinusoidalPositionalEmbedding counts positions"),
        ("MobileBertForMaskedLM", {"embedding_size": 16, "intra_bottleneck_size": 32}, "trigram_input"),
    ],
)  # fmt: skip
def test_attention_that_the_provider_does_not_see_is_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    """transformers takes any attention function for any model, also for models that do not call it."""
    import transformers

    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**sizes, num_attention_heads=4, **changes)
    config._attn_implementation = register()
    assert any(reason in line for line in check_model(model_class(config)))


def test_a_position_bias_of_the_shard_is_refused() -> None:
    """Of a model that says nothing of it. T5's attention without positions gives zeros, which are left out."""
    import transformers

    function = table_of(transformers.AttentionInterface)[register()]

    def body(_: int) -> None:
        x, module = torch.ones(1, 2, 16, 8), nn.Module()
        with context_parallel(dist.group.WORLD, buffers=[x], buffer_seq_dims=[2]):  # type: ignore[arg-type]
            bias = torch.zeros(1, 2, 8, 8)
            with pytest.raises(ValueError, match=r"16 keys of the whole sequence.* got \(1, 2, 8, 8\)"):
                function(module, x, x, x, None, position_bias=bias, is_causal=False)
            module.has_relative_attention_bias = False  # type: ignore[assignment]
            assert function(module, x, x, x, None, position_bias=bias, is_causal=False)[0].shape == (1, 8, 2, 8)

    run_ranks(2, body)


@pytest.mark.parametrize(("version", "warns"), [("5.9.1", 1), ("5.10.4", 0), ("5.24.2", 0), ("5.25.0.dev0", 1)])
def test_versions_that_were_not_run_are_warned_of_once(
    version: str, warns: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    warn_of_version.cache_clear()
    for _ in range(2):
        warn_of_version()
    assert [f"this is {version}" in str(each.message) for each in recwarn] == [True] * warns


def test_the_extra_ends_where_the_tested_versions_end() -> None:
    """The page has a row for the oldest and the newest of them."""
    oldest, newest = (tuple(map(int, each.split("."))) for each in TESTED)
    extra = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("transformers =")
    )
    assert f"transformers>={TESTED[0]},<{newest[0]}.{newest[1] + 1}" in extra
    rows = re.findall(r"^\| (\d+)\.(\d+)\.\d+ \| \d+ \|", (ROOT / "docs" / "models.md").read_text(), re.M)
    assert {oldest, newest} <= {(int(major), int(minor)) for major, minor in rows}
