"""`explain`: a table of the cost model's predictions for one attention call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor import _torch
from cp_dtensor.comm.groups import Mesh, SequenceRanks, axis_names, sequence_ranks
from cp_dtensor.comm.links import cluster_of
from cp_dtensor.engine.arguments import expect
from cp_dtensor.engine.call import Call, checked_mask
from cp_dtensor.engine.choose import SPLIT, Estimate, counted, estimates, fastest
from cp_dtensor.engine.contexts import inherited
from cp_dtensor.engine.planner import call_spec
from cp_dtensor.plan.cluster import GPUS, NETWORK, TOLERANCE, Cluster, Hardware, Tier, named
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Causal, Full, Mask, interval_sets_of, is_integer

_SENT = f"K/V by: symm_mem if ranks share memory, else the first of allgather and alltoall within {TOLERANCE - 1:.0%}"
_SPLIT = 'split: over two axes, hosts and the ranks of a host, into which only "auto" splits the one of the mesh'
Assumed = Hardware | str


@dataclass(frozen=True)
class Step:
    """Memory and time of a training step on the rank that needs most. `str()` is two lines of a table."""

    memory: dict[str, float]
    """Bytes by part."""
    peak: float
    """Bytes of the parts that exist together."""
    times: dict[str, float]
    """Seconds by part."""

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.times.values())

    def __str__(self) -> str:
        memory = ", ".join(f"{name} {count / 2**30:.1f}" for name, count in self.memory.items())
        times = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.times.items())
        return (
            f"a training step of the model, GiB: {memory}; at the peak {self.peak / 2**30:.1f}\n"
            f"a training step of the model, s: {times}; together {self.seconds:.2f}"
        )


@dataclass(frozen=True)
class Explanation:
    """Predictions for one attention call. `str()` is a table."""

    call: str
    assumption: str
    """GPU and link of each axis, and the source of their speeds."""
    axes: tuple[str, ...]
    """Names of the axes, the outer one first."""
    methods: dict[str, Estimate]
    """Predictions by the value of `method=`. Only "auto" takes others: with latents "expanded ring" and so on, where
    each rank expands its own latents, and K/V are sent; for an axis over several hosts "split ring" and "split hybrid",
    the methods of a mesh of two axes, hosts and the ranks of a host."""
    chosen: str
    """The method that `method="auto"` takes on such hardware; "" for functions that have none."""
    tolerance: float = TOLERANCE
    """The ratio within which it takes the first."""
    step: Step | None = None
    """A training step of the model, whose attention this is, with the chosen method."""

    def __str__(self) -> str:
        over_axes = [f"over {name}" for name in self.axes]
        rows = [("method", "K/V by", "forward", "with backward", *over_axes, "memory")]
        for name, each in self.methods.items():
            times = f"{1e3 * each.forward:.3g} ms", f"{1e3 * each.seconds:.3g} ms"
            memory = [f"{count / 2**20:.0f} MiB" for count in (*each.axis_bytes, each.memory)]
            rows.append((name + " *" * (name == self.chosen), each.transport, *times, *memory))
        within = f"within {self.tolerance - 1:.0%} of the fastest"
        chosen = f'* chosen by method="auto": the first row {within}, with backward'
        rules = [chosen, _SENT] + [_SPLIT] * any(name.startswith(SPLIT) for name in self.methods)
        if all(each.transport == "-" for each in self.methods.values()):  # no rings
            rows, rules = [(row[0], *row[2:]) for row in rows], [chosen] * bool(self.chosen)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join((self.call, self.assumption, *lines, *rules, *([] if self.step is None else [str(self.step)])))


def explain(
    mesh: Mesh, *, seq_len: int | tuple[int, int], q_heads: int | None = None, kv_heads: int | None = None,
    head_dim: int = 128, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16, is_causal: bool | None = None,
    mask: Mask | None = None, layout: Layout | None = None, rotate_method: str | None = None,
    hardware: Assumed | Mapping[str, Assumed] | None = None, v_head_dim: int | None = None,
    latent_dims: tuple[int, int] | None = None, quiet: bool = False, model: Any = None, tile: int | None = None,
    offload: bool = False, keep_attention: bool = False, optimizer_bytes: float = 4,
) -> Explanation:  # fmt: skip
    """Predict time, bytes on each axis and memory of every method, and print the table on rank 0 of the mesh.

    Args:
        mesh, rotate_method: as for `context_parallel_attention`.
        seq_len: the global number of tokens, or a pair of those of queries and keys.
        q_heads, kv_heads: query heads, and key/value heads (None: as many).
        head_dim, batch_size, dtype: of queries, keys and values.
        is_causal: True: query i sees keys j <= i only. None is True without a mask, False with one.
        mask, layout: as for `context_parallel_attention`; None takes that of the context around the call.
        v_head_dim: of values; None is `head_dim`.
        latent_dims: R and Dr of `context_parallel_mla`; `head_dim` is Dn + Dr then, and `kv_heads` None.
        hardware: the GPUs and links to assume: a `Hardware`, or the name of a GPU in `GPUS` ("H100"), with one of
            `LINKS` if wanted ("H100, InfiniBand NDR"); or a mapping from the name of each mesh axis to one of these.
            Where no link is named, nodes have 8 GPUs with NVLink (72 of GB200 and GB300), and InfiniBand NDR is between
            nodes. None takes the mesh's GPUs, whose links are measured once (a collective); on CPUs it is "H200".
        quiet: True prints nothing.
        model: a configuration of transformers, or a mapping of its names to numbers, of a model with this attention in
            every layer and dense MLPs; adds a training step of it. Its heads are used, and `q_heads`, `kv_heads` and
            `head_dim` are not given. Its layers are checkpointed, its parameters sharded over the ranks (FSDP2).
        tile: tokens that MLPs compute at a time; the loss has a chunk of the logits at a time then, as Liger's. None is
            all.
        offload: True if the inputs of layers are in the host's memory until backward.
        keep_attention: True if checkpoints keep the results of attention (`ATTENTION_OPS`).
        optimizer_bytes: of the optimizer's state for a parameter; 4 are those of AdamW in bfloat16.

    Returns:
        the predictions; `str()` is the table. Over an axis: bytes that the busiest rank receives, forward and backward
        together, by the plans of all ranks. Memory: bytes of buffers at the peak of backward, without inputs, results
        and workspaces of kernels.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    The memory of a training step, with T tokens of a rank, n ranks, e bytes an element, D hidden and F intermediate
    size, A and K the numbers of a token's query and kv heads, V words, N parameters, M of them in a layer:

        parameters    e (N/n + 3 M + embeddings and head): this layer and the next two are gathered, the rest always
        gradients     e (layers/n + 2 M + V D), the first when backward ends
        optimizer     optimizer_bytes N/n
        saved inputs  e T D for each layer, or for two if they are offloaded; e T A + 4 T q_heads more for each layer if
                      attention is kept; when backward begins
        attention     e T (3 D + 4 A + 5 K), A more unless it is kept, and the buffers of its method, for the layer that
                      is in backward
        MLP           e tile (6 F + 2 D)
        logits        e T D + 4 V D + e rows V, when backward begins; T rows, or T D / V of a chunk

    These are for norms, rotary positions and SwiGLU that save their inputs only, as Liger's do. Its time is that of
    attention and of the matrix products, at the speed of attention; the rest is memory traffic, and copies to the host.

    A ring over two nodes of H100s, planned in one process on a laptop, and its fastest method:

        torch.distributed.init_process_group("fake", rank=0, world_size=16)
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("ring", "ulysses"))
        explain(mesh, seq_len=131072, q_heads=32, hardware={"ring": "H100, Ethernet 400G", "ulysses": "H100"}).chosen
    """
    how = Training(tile, offload, keep_attention, optimizer_bytes)
    sizes = None if model is None else Model.of(model)
    if sizes is not None:
        of_call = {"q_heads": q_heads, "kv_heads": kv_heads, "v_head_dim": v_head_dim, "latent_dims": latent_dims}
        extra = [name for name, value in of_call.items() if value is not None] + ["head_dim"] * (head_dim != 128)
        expect(not extra, "the heads of model=, and none given", f"got {', '.join(extra)} too")
        expect(optimizer_bytes >= 0, "optimizer_bytes of at least 0", f"got {optimizer_bytes}")
        q_heads, kv_heads, head_dim = sizes.q_heads, sizes.kv_heads, sizes.head_dim
        check_numbers(dtype, **({} if tile is None else {"tile": tile}))
    else:
        expect(how == Training(), "tile, offload, keep_attention and optimizer_bytes with model= only", f"got {how}")
    if q_heads is None:
        raise TypeError("explain expects q_heads= or model=, got neither")
    kv_heads = q_heads if kv_heads is None else kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    if latent_dims is not None:
        _check_latents(latent_dims, q_heads, kv_heads, head_dim)
    check_numbers(
        dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, batch_size=batch_size, v_head_dim=v_head_dim
    )
    if q_heads % kv_heads:
        raise ValueError(f"expected q_heads to be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    call = Call.of(mesh, layout=layout, rotate_method=rotate_method, seq_len=seq_len)
    call = inherited("explain", call, layout=layout is None, mask=mask is None)
    mask = call.mask if mask is None else mask
    ranks, lengths = call.ranks, call.pair
    assert lengths is not None
    partition = call.partition(lengths, batch_size)
    shown = checked_mask(mask, mask is None if is_causal is None else is_causal) or Full()
    k_dim, v_dim = latent_dims or (head_dim, v_head_dim)
    of_keys = kv_heads if latent_dims is None else 1
    q_shape, k_shape, v_shape = (
        torch.Size((batch_size, heads, 0, dim))
        for heads, dim in ((q_heads, head_dim), (of_keys, k_dim), (of_keys, v_dim))
    )
    spec = call_spec(
        partition, shown, q_shape, k_shape, v_shape, dtype, torch.device("cpu"),
        value_dim=None if latent_dims is None else v_head_dim,
    )  # fmt: skip
    interval_sets_of(shown, *lengths, batch_size)  # refuses masks that are not of these lengths or this batch
    cluster, names, assumption = cluster_of_mesh(mesh, ranks, hardware, dtype.itemsize)
    is_split = ranks.inner is None and len(cluster.tiers) > 1
    found = estimates(spec, cluster, call.transport, one_axis=is_split)
    if is_split:
        found = {
            name: replace(each, axis_bytes=(int(each.bytes_over(1)), int(each.bytes_over(0))))
            for name, each in found.items()
        }
        names = f"{names[0]}, between hosts", "within"
    else:
        found = counted(found, spec, ranks.sizes)
    latents = "" if latent_dims is None else f", latents of {latent_dims[0]} + {latent_dims[1]}"
    by_axis = " x ".join(str(tier.ranks) for tier in reversed(cluster.tiers))
    step, chosen = None, fastest(found, cluster.tolerance)
    if sizes is not None:
        tokens = batch_size * -(-lengths[0] // ranks.size)
        step = step_of(sizes, how, tokens, ranks.size, dtype.itemsize, found[chosen], cluster.gpu)
    explanation = Explanation(
        f"{lengths[0]:,} tokens on {counted_ranks(by_axis)}, {q_heads}:{kv_heads} heads of {spec.dims}{latents}, batch "
        f"{batch_size}, {_described(shown, *lengths)}, {dtype}, {shortened(call.layout)}",
        assumption, names, found, chosen, cluster.tolerance, step,
    )  # fmt: skip
    if ranks.rank == 0 and not quiet:
        print(explanation, flush=True)
    return explanation


def check_numbers(dtype: torch.dtype, **numbers: int) -> None:
    """Refuse numbers below 1, and dtypes that are not floating."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} to be an integer >= 1, got {value!r}")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected dtype to be a floating torch.dtype, got {dtype!r}")


def cluster_of_mesh(
    mesh: Mesh, ranks: SequenceRanks, hardware: Assumed | Mapping[str, Assumed] | None, itemsize: int
) -> tuple[Cluster, tuple[str, ...], str]:
    """Return the ranks' GPUs and links, the names of their axes, and a line about them.

    They are measured on GPUs if none are assumed.

    Raises:
        TypeError, ValueError: hardware that is none, of an unknown name, or not of each axis.
    """
    # Axes of one rank are left out.
    names = tuple(
        name for name, group in zip(axis_names(mesh), sequence_ranks(mesh).axes, strict=True) if group in ranks.axes
    )
    if isinstance(mesh, dist.ProcessGroup):
        on_gpus = _torch.uses_nccl(mesh, torch.device("cuda"))
    else:
        on_gpus = mesh.device_type == "cuda"
    if hardware is None and on_gpus:
        device = torch.device("cuda", torch.cuda.current_device())
        cluster = cluster_of(ranks, device, itemsize)
        of_tiers = names if len(names) == len(cluster.tiers) else (f"{names[0]}, between hosts", "within")
        assumption = f"measured: {torch.cuda.get_device_name(device)}; " + "; ".join(
            f"{name}: {tier.speed / 1e9:.3g} GB/s, {'' if tier.shares_memory else 'no '}shared memory"
            for name, tier in zip(of_tiers, reversed(cluster.tiers), strict=True)
        )
        return cluster, names, assumption
    if isinstance(hardware, Mapping) and not {*names} <= {*hardware} <= {*axis_names(mesh)}:
        expected, received = ", ".join(axis_names(mesh)), ", ".join(map(str, hardware)) or "none"
        raise ValueError(f"expected hardware of each mesh axis, {expected}; got that of {received}")
    by_axis = hardware if isinstance(hardware, Mapping) else dict.fromkeys(names, hardware or "H200")
    if len(names) == 1 and isinstance(gpu := by_axis[names[0]], str) and named(gpu)[1] is None:
        node = GPUS[named(gpu)[0]].node
        if ranks.size > node and ranks.size % node == 0:
            cluster = Cluster(gpu, nodes=ranks.size // node)
            links = f"{GPUS[named(gpu)[0]].link}, and {NETWORK}, {cluster.tiers[1].speed / 1e9:.3g} GB/s, between them"
            hosts = f"hosts of {node} {named(gpu)[0]}, {links}"
            return replace(cluster, gpu=cluster.gpu.of_itemsize(itemsize)), names, f"assumed: {names[0]}: {hosts}"
    tiers, lines, across = [], [], 1
    for name, group in zip(reversed(names), ranks.groups, strict=True):
        across *= group.size()
        found, text = _assumed(by_axis[name], across)
        gpu = found.of_itemsize(itemsize) if isinstance(by_axis[name], str) else found
        tiers.append((gpu, Tier.of(found, group.size())))
        lines.append(f"{name}: {text}, {found.link_speed / 1e9:.3g} GB/s")
    cluster = Cluster(tiers[0][0], tuple(tier for _, tier in tiers))
    return cluster, names, "assumed: " + "; ".join(reversed(lines))


def _assumed(hardware: Assumed, across: int) -> tuple[Hardware, str]:
    """Return assumed hardware of an axis and its name; `across` is the number of ranks of it and of the inner axes."""
    if isinstance(hardware, Hardware):
        return hardware, f"the Hardware that was passed, {'' if hardware.shares_memory else 'no '}shared memory"
    if not isinstance(hardware, str):
        raise TypeError(f"expected hardware to be a Hardware, the name of one, or a mapping to these, got {hardware!r}")
    gpu, link = named(hardware)
    text = f"{gpu}, {link or (GPUS[gpu].link if across <= GPUS[gpu].node else NETWORK)}"
    return Hardware.of(text), text


def _check_latents(latent_dims: tuple[int, int], q_heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse dims that no call of `context_parallel_mla` has."""
    is_pair = isinstance(latent_dims, tuple) and len(latent_dims) == 2 and all(map(is_integer, latent_dims))
    fits = is_pair and latent_dims[0] >= 1 and 0 < latent_dims[1] < head_dim
    expect(fits, f"latent_dims to be (R, Dr), R >= 1 and 0 < Dr < head_dim, {head_dim}", f"got {latent_dims!r}")
    expect(kv_heads == q_heads, "kv_heads to be None for latents", f"got {kv_heads} with {q_heads} query heads")


def _described(mask: Mask, q_len: int, kv_len: int) -> str:
    if mask in (Full(), Causal()):
        return "full" if mask == Full() else "causal"
    return f"{shortened(mask)} ({mask.pairs(q_len, kv_len) / max(q_len * kv_len, 1):.1%} of all pairs)"


def counted_ranks(sizes: str) -> str:
    """Return the numbers of ranks as words of a sentence."""
    return f"{sizes} rank{'s' * (sizes != '1')}"


def shortened(value: object) -> str:
    """Return a value as text, or the name of its class if that is long."""
    text = str(value)
    return text if len(text) <= 80 else f"{type(value).__name__}(...)"


# A training step of a whole model

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HOST_SPEED = 50e9
"""Bytes a second between a GPU and the host's memory (PCIe 5)."""
_MOVED = 40
"""Numbers of a hidden row, and of a row of query heads, that a layer reads and writes beside its products."""


@dataclass(frozen=True)
class Model:
    """Sizes of a causal language model of dense layers: attention, and an MLP of three matrices."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    q_heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool

    @classmethod
    def of(cls, source: Any) -> Model:
        """Read a configuration of transformers, or a mapping of the names of its attributes to numbers.

        Raises:
            TypeError, NotImplementedError: an attribute that is missing; a mixture of experts.
        """
        found = SimpleNamespace(**source) if isinstance(source, Mapping) else source
        found = found.get_text_config() if hasattr(found, "get_text_config") else found
        missing = [name for name in _SIZES if not isinstance(getattr(found, name, None), int)]
        if missing:
            raise TypeError(f"expected model to have the integers {', '.join(_SIZES)}; got none for {missing[0]}")
        if experts := [name for name in _EXPERTS if (getattr(found, name, None) or 1) > 1]:
            raise NotImplementedError(f"expected model to be dense, got {experts[0]}={getattr(found, experts[0])}")
        heads = found.num_attention_heads
        return cls(
            found.hidden_size, found.intermediate_size, found.num_hidden_layers, found.vocab_size, heads,
            getattr(found, "num_key_value_heads", None) or heads,
            getattr(found, "head_dim", None) or found.hidden_size // heads,
            bool(getattr(found, "tie_word_embeddings", False)),
        )  # fmt: skip

    @property
    def layer(self) -> int:
        """Parameters of the matrices of a layer."""
        of_heads = (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (of_heads + 3 * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.hidden * self.vocabulary


class Training(NamedTuple):
    """How a model is trained: arguments of `explain`."""

    tile: int | None = None
    offload: bool = False
    keep_attention: bool = False
    optimizer_bytes: float = 4


def step_of(
    model: Model, how: Training, tokens: int, ranks: int, itemsize: int, attention: Estimate, gpu: Hardware
) -> Step:
    """Return the memory and time of a step of a rank with `tokens` tokens, by the formulas of `explain`."""
    hidden, of_q, of_kv = model.hidden, model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    roots, layers = model.head * (1 if model.is_tied else 2), model.layers * model.layer
    shard, gathered = (layers + roots) / ranks, 3 * model.layer + roots
    rows = tokens if how.tile is None else tokens * hidden / model.vocabulary
    kept = model.layers * tokens * (itemsize * of_q + 4 * model.q_heads) if how.keep_attention else 0
    inputs, tile = itemsize * tokens * hidden, min(how.tile or tokens, tokens)
    memory = {
        "parameters": itemsize * (shard + gathered),
        "gradients": itemsize * (layers / ranks + 2 * model.layer + model.head),
        "optimizer": how.optimizer_bytes * shard,
        "saved inputs": inputs * (2 if how.offload else model.layers) + kept,
        "attention": itemsize * tokens * (3 * hidden + (5 - how.keep_attention) * of_q + 5 * of_kv) + attention.memory,
        "MLP": itemsize * tile * (6 * model.intermediate + 2 * hidden),
        "logits": inputs + 4 * model.head + itemsize * rows * model.vocabulary,
    }
    # Gradients of layers come while what layers have saved goes: most is there when backward begins, or when it ends.
    in_layer = memory["attention"] + memory["MLP"]
    begin = (
        memory["saved inputs"] + itemsize * model.head + max(in_layer + itemsize * 2 * model.layer, memory["logits"])
    )
    peak = memory["parameters"] + memory["optimizer"] + max(begin, memory["gradients"] + in_layer)
    passes = layers * 4 + (0 if how.tile is None else 3 * hidden * model.intermediate * model.layers) + 3 * model.head
    moved = itemsize * tokens * model.layers * _MOVED * (hidden + of_q)
    times = {
        "attention": model.layers * (attention.seconds + (0 if how.keep_attention else attention.forward)),
        "products": 2 * tokens * passes / gpu.flops,
        "rest": moved / gpu.memory_speed + (2 * inputs * model.layers / _HOST_SPEED if how.offload else 0),
    }
    return Step(memory, peak, times)
