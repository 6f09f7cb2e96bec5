"""`integrations.torchtitan` on thread ranks, in stand-ins for the modules of TorchTitan that it plugs into."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.masked_problems import shown
from support.packed_documents import PackedProblem
from support.problems import dense
from support.ranks import run_ranks
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_dtensor import Causal, Contiguous
from cp_dtensor.integrations import torchtitan
from cp_dtensor.integrations.torch_experimental import redirect_imports

RANKS, TOKENS = 2, 32
PROBLEM = PackedProblem((0, TOKENS), q_heads=4, kv_heads=2, head_dim=8)
HEAD_TAIL = [*range(8), *range(24, 32), *range(8, 24)]
OTHER = [*range(4, 12), *range(20, 28), *range(4), *range(12, 20), *range(28, 32)]


class VarlenMetadata(NamedTuple):
    """As TorchTitan's."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int


def documents_of(*edges: int) -> VarlenMetadata:
    cu_seq = torch.tensor(edges, dtype=torch.int32)
    return VarlenMetadata(cu_seq, cu_seq, TOKENS, TOKENS)


def titan_modules(base_name: str, axes: str) -> dict[str, ModuleType]:
    """Stand-ins with the names and signatures of main in November 2026; `base_name` and `axes` of earlier ones vary."""

    class InnerAttention(nn.Module):
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

        def __init__(self) -> None:
            super().__init__()
            self.attention_metadata_key = type(self)

    class VarlenInnerAttention(InnerAttention):
        @dataclass(kw_only=True, slots=True)
        class Config(InnerAttention.Config):
            window_size: tuple[int, int] = (-1, 0)

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.window_size = config.window_size

    class FlexInnerAttention(InnerAttention):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.kernel_options: dict[str, Any] = {}

    class MLAVarlenInnerAttention(VarlenInnerAttention):  # earlier
        pass

    class MLAAttention(InnerAttention):
        """It projects (T, latents), here by nothing, for an inner attention."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.inner_attention = VarlenInnerAttention(VarlenInnerAttention.Config())
            self.attention_metadata_key = self.inner_attention.attention_metadata_key

        def project_mla_kv(self, latents: torch.Tensor) -> torch.Tensor:
            return latents.unflatten(1, (4, -1))

    class InnerGDN(InnerAttention):
        pass

    class Base:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    class ContextParallelInnerGDN(Base, InnerGDN):
        class Config(Base.Config, InnerGDN.Config):
            pass

    kinds = {each.__name__: each for each in (InnerAttention, VarlenInnerAttention, FlexInnerAttention)}
    packages = ("torchtitan", "torchtitan.models", "torchtitan.models.common", "torchtitan.distributed")
    attention = "torchtitan.models.common.attention"
    others: dict[str, dict[str, Any]] = {
        f"{attention}.mla": {"MLAAttention": MLAAttention}, f"{attention}.gdn": {"InnerGDN": InnerGDN},
        f"{attention}.cp_gdn": {"ContextParallelInnerGDN": ContextParallelInnerGDN},
    }  # fmt: skip
    if base_name != "CPAttention":
        others = {"torchtitan.models.kimi_k3.attention": {"MLAVarlenInnerAttention": MLAVarlenInnerAttention}}
    groups = {"spmd_mesh_group": lambda axis: dist.group.WORLD if axis == "cp" else None}
    contents: dict[str, dict[str, Any]] = {
        **{name: {} for name in packages},
        attention: kinds,
        **others,
        f"{attention}.cp_attention": {base_name: Base},
        f"torchtitan.distributed.{axes}": {"MeshAxisName": SimpleNamespace(CP="cp")},
        "torchtitan.distributed.spmd_types": groups,
        "spmd_types": {"no_typecheck": nullcontext, "is_type_checking": lambda: False},
    }
    made = {}
    for name, names in contents.items():
        made[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(names)
    return made


@pytest.fixture(params=[("CPAttention", "parallelism_context"), ("CPInnerAttention", "parallel_dims")])
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    modules = titan_modules(*request.param)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def local(tensor: torch.Tensor, rank: int, order: list[int] | None) -> torch.Tensor:
    positions = torch.tensor(range(TOKENS) if order is None else order)
    return tensor[positions.chunk(RANKS)[rank]]


def with_sinks(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The `out_transform` of models with sinks."""
    return out * torch.sigmoid(lse - torch.linspace(-1, 1, out.size(1), dtype=lse.dtype)).unsqueeze(-1)


@pytest.mark.parametrize(
    ("order", "edges", "window"),
    [
        (None, (0, TOKENS), (-1, 0)), (HEAD_TAIL, (0, TOKENS), (-1, 0)), (OTHER, (0, 5, 19, TOKENS), (4, 0)),
        (HEAD_TAIL, (0, 9, TOKENS, TOKENS, TOKENS), (-1, -1)),
    ],
    ids=str,
)  # fmt: skip
def test_varlen(titan: dict[str, ModuleType], order: Any, edges: tuple[int, ...], window: tuple[int, int]) -> None:
    inner = titan["torchtitan.models.common.attention"].VarlenInnerAttention
    left, right = (None if end == -1 else end for end in window)
    problem = replace(PROBLEM, cu_seqlens=edges, window=(left, right))
    tensors = problem.draw(0)
    *expected, _ = problem.reference(*tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    heads_first = (leaf.transpose(0, 1)[None] for leaf in leaves)
    out, lse = dense(*heads_first, shown(problem.mask, TOKENS, TOKENS, 1))
    out = with_sinks(out[0].transpose(0, 1), lse[0].t())
    transformed = out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    def body(rank: int) -> None:
        ours = torchtitan.inner_attention_map()[inner]
        module = ours(ours.Config(window_size=window))
        permutation = None if order is None else torch.tensor([order])
        metadata = ours.prepare_cp_metadata(documents_of(*edges), permutation=permutation)
        q, k, v, grad_out = (local(tensor, rank, order).clone() for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = module(q, k, v, attention_metadata=metadata, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip((out, *grads), expected, strict=True):
            torch.testing.assert_close(got, local(wanted, rank, order), rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="got 4 query and 2 kv heads, expected equally many without enable_gqa"):
            module(q, k, v, attention_metadata=metadata)
        out = module(q, k, v, attention_metadata=metadata, enable_gqa=True, out_transform=with_sinks)
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip((out, *grads), transformed, strict=True):
            torch.testing.assert_close(got, local(wanted, rank, order), rtol=1e-10, atol=1e-10)

    run_ranks(RANKS, body)


def test_latents(titan: dict[str, ModuleType]) -> None:
    """Keys without positions and values are packed; the key with positions is one for all heads."""
    q, k, v, grad_out = replace(PROBLEM, kv_heads=4).draw(0)
    leaves = [q, torch.cat((k[..., :5], v), dim=2), k[:, 0, 5:]]
    whole = [each.clone().requires_grad_() for each in leaves]
    keys = torch.cat((whole[1][..., :5], whole[2].unsqueeze(1).expand(-1, 4, -1)), dim=2)
    heads_first = (each.transpose(0, 1)[None] for each in (whole[0], keys, whole[1][..., 5:]))
    out = dense(*heads_first, shown(Causal(), TOKENS, TOKENS, 1))[0][0].transpose(0, 1)
    expected = out.detach(), *torch.autograd.grad(out, whole, grad_out)

    def body(rank: int) -> None:
        (ours,) = [each for each in torchtitan.inner_attention_map().values() if "MLA" in each.__name__]
        module = ours(ours.Config())
        assert module.attention_metadata_key is ours
        metadata = ours.prepare_cp_metadata(documents_of(0, TOKENS), permutation=torch.tensor([HEAD_TAIL]))
        own = [local(each, rank, HEAD_TAIL).clone().requires_grad_() for each in leaves]
        projected = [own[0], own[1].flatten(1) if hasattr(ours, "project_mla_kv") else own[1], own[2]]
        out = module(*projected, attention_metadata=metadata)
        grads = torch.autograd.grad(out, own, local(grad_out, rank, HEAD_TAIL))
        for got, wanted in zip((out, *grads), expected, strict=True):
            torch.testing.assert_close(got, local(wanted, rank, HEAD_TAIL), rtol=1e-10, atol=1e-10)

    run_ranks(RANKS, body)


def test_unknown_classes_are_named(titan: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtitan.models.common.attention.mla", "torchtitan.models.kimi_k3.attention"):
        monkeypatch.setitem(sys.modules, name, None)
    kinds = vars(titan["torchtitan.models.common.attention"])
    for name in ("VarlenInnerAttention", "FlexInnerAttention"):
        monkeypatch.delitem(kinds, name)
    with pytest.raises(ImportError, match=r"expected a TorchTitan with one of VarlenInner.*; got InnerAttention$"):
        torchtitan.inner_attention_map()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex(titan: dict[str, ModuleType]) -> None:
    inner = titan["torchtitan.models.common.attention"].FlexInnerAttention
    q, k, v, _ = (tensor.float() for tensor in PROBLEM.draw(0))
    block_mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 9), None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=8
    )
    first = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    expected = flex_attention(*first, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)

    def body(rank: int) -> None:
        ours = torchtitan.inner_attention_map()[inner]
        metadata = ours.prepare_cp_metadata(block_mask, permutation=torch.tensor([HEAD_TAIL]))
        own = [local(tensor, rank, HEAD_TAIL) for tensor in (q, k, v)]
        out = ours(ours.Config())(*own, attention_metadata=metadata, enable_gqa=True)
        torch.testing.assert_close(out, local(expected, rank, HEAD_TAIL), rtol=1e-5, atol=1e-5)

    run_ranks(RANKS, body)


def test_classes_fit_the_transform(titan: dict[str, ModuleType]) -> None:
    """`ContextParallelTransform` asks for subclasses of both, and copies configurations by their fields."""
    attentions = vars(titan["torchtitan.models.common.attention"])
    bases = vars(titan["torchtitan.models.common.attention.cp_attention"])
    base = bases.get("CPAttention") or bases["CPInnerAttention"]
    made = torchtitan.inner_attention_map()
    names = ["VarlenInnerAttention", "FlexInnerAttention"]
    assert [*made][:2] == [attentions[name] for name in names]
    of_latents = ["MLAAttention", "InnerGDN"] if "CPAttention" in bases else ["MLAVarlenInnerAttention"]
    assert [each.__name__ for each in made] == names + of_latents
    for inner, ours in made.items():
        assert issubclass(ours, inner)
        assert issubclass(ours, base)
        assert issubclass(ours.Config, inner.Config)
        assert ours.__name__ == f"ContextParallel{inner.__name__}"


def test_layouts_of_permutations() -> None:
    def layout(permutation: torch.Tensor | None) -> Any:
        metadata = torchtitan.prepare_metadata(documents_of(0, TOKENS), permutation=permutation, world_size=RANKS)
        return metadata.layout

    assert layout(None) == Contiguous()
    for order in (HEAD_TAIL, OTHER):
        assert layout(torch.tensor([order])).only_length == TOKENS
    for wrong in (torch.tensor(HEAD_TAIL), torch.tensor([HEAD_TAIL] * 2), torch.tensor([[1, 0, 2]])):
        with pytest.raises(ValueError, match=r"expected permutation of shape \(1, tokens\)"):
            layout(wrong)
    with pytest.raises(ValueError, match="in which the positions of each rank's tokens ascend"):
        layout(torch.tensor([[*reversed(range(TOKENS))]]))


def test_metadata_that_does_not_fit_is_refused(titan: dict[str, ModuleType]) -> None:
    with pytest.raises(TypeError, match="to be a BlockMask or to have cu_seq_q, got dict"):
        torchtitan.prepare_metadata({}, permutation=None, world_size=RANKS)
    other = documents_of(0, 4, TOKENS)._replace(cu_seq_k=torch.tensor([0, 5, TOKENS]))
    with pytest.raises(ValueError, match="expected self-attention"):
        torchtitan.prepare_metadata(other, permutation=None, world_size=RANKS)

    def body(rank: int) -> None:
        ours = next(iter(torchtitan.inner_attention_map().values()))
        metadata = ours.prepare_cp_metadata(documents_of(0, TOKENS), permutation=None)
        q, k, v, _ = (local(tensor, rank, None) for tensor in PROBLEM.draw(0))
        ours(ours.Config())(q, k, v, attention_metadata=metadata, sinks=torch.zeros(4))

    with pytest.raises(NotImplementedError, match="inner attention has no sinks"):
        run_ranks(RANKS, body)


API = "distributed/context_parallel/api.py"
SOURCES = {
    "not attention: use cp_dtensor.integrations.torchtitan": {
        "models/common/attention/cp_attention.py": "class CPAttention", API: "",
    },
    "the SDPA of DTensors from torch": {API: "def apply_cp_to_forward("},
    "has no place for another inner one": {API: "def cp_shard("},
    "the load balancers and SDPA from torch": {"distributed/context_parallel.py": "plan = _ContextParallel("},
    "takes the context manager": {},
    "": None,
}  # fmt: skip
"""By what is said of an installed version: its files; None if there is none."""


@pytest.mark.parametrize("said", SOURCES)
def test_redirected_imports_name_what_an_installed_version_takes(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ({"__init__.py": "raise AssertionError('imported')"} | (SOURCES[said] or {})).items():
        path = tmp_path / "torchtitan" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchtitan", raising=False)
    if SOURCES[said] is None:
        monkeypatch.setattr("cp_dtensor.integrations.torchtitan.find_spec", lambda name: None)
    with redirect_imports() as redirected:
        assert said in redirected.torchtitan
        assert bool(said) == bool(redirected.torchtitan)
        assert str(redirected).endswith(redirected.torchtitan)
        experimental = "torch.distributed.tensor.experimental"
        assert redirected.replaced[experimental] == ("context_parallel",)
        assert "_context_parallel_shard" in redirected.replaced[f"{experimental}._attention"]
        assert f"{experimental}: context_parallel\n" in str(redirected)


def test_a_program_started_with_redirected_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys\nfrom torch.distributed.tensor.experimental import context_parallel as c\nprint(sys.argv[1:], c)"
    )
    (tmp_path / "a_program.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-m", "a_program", "--degree", "8"])
    with redirect_imports() as held:
        started = import_module("cp_dtensor.integrations.torch_experimental.__main__")
        monkeypatch.setattr(started, "redirect_imports", lambda: held)
        started.main()
        printed = capsys.readouterr().out
    assert printed.startswith("names of cp_dtensor now in\n")
    assert "['--degree', '8'] <function context_parallel" in printed
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit, match="usage"):
        started.main()
