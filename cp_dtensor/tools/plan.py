"""Attention on a cluster that is described, not there: `python -m cp_dtensor plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_dtensor import GPUS, LINKS, Cluster, Hardware, Layout, imbalance
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine.choose import SPLIT, Estimate, estimates, fastest
from cp_dtensor.plan.cluster import NETWORK, Kernels, Tier
from cp_dtensor.plan.cost import Drawn, Work, seconds
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, masking_of
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    argument,
    command_parser,
    layout_by_name,
    mask_argument,
    positive,
    positive_number,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DESCRIPTION = """\
Predicts one attention call, forward and backward, on a cluster that need not be there: no process group, no GPU.

    python -m cp_dtensor plan --gpu H100 --nodes 16 --seq-len 1M --heads 64:8
    python -m cp_dtensor plan --gpu GB200 --nodes 4 --internode XDR800 --seq-len 4M --mask 'documents 8192'

Prints the best way for each number of ranks that share the sequence, all ways for the most of them, what is chosen and
why, what is busy when on the slowest rank, and what to paste. Bytes are those of the slowest rank, received or sent.
"""
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_GPU = "H100"
_WIDTH = 96
"""Characters of a line of the timeline, each a part of the time."""
_SHADES = " ░▒▓█"


@argument
def tokens_argument(text: str) -> int:
    """Read a number of tokens, such as 8192, 128k or 1M (k and M, in either case, are 1,024 and 1,048,576).

    >>> tokens_argument("1M"), tokens_argument("8192"), tokens_argument("2K")
    (1048576, 8192, 2048)
    """
    unit = _UNITS.get(text[-1:].lower())
    digits, unit = (text, 1) if unit is None else (text[:-1], unit)
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"expected a number of tokens, such as 8192, 128k or 1M, got {text!r}")
    return int(digits) * unit


# Clusters in files


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster to a file, for `load_cluster`."""
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def load_cluster(path: Path) -> Cluster:
    """Return the cluster of a file that `save_cluster` has written.

    Raises:
        ValueError: the file is another one.
    """
    try:
        values = json.loads(path.read_text())
        gpu = Hardware(**{**values["gpu"], "kernels": Kernels(**values["gpu"]["kernels"])})
        return Cluster(gpu, tuple(Tier(**tier) for tier in values["tiers"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of `doctor --save`: {error!r}") from None


# Predictions


@dataclass(frozen=True)
class Planned:
    """One way to compute a call, and its prediction."""

    degree: int
    """Ranks that share the sequence."""
    layout: str
    method: str
    """The value of `method=`, after "nested " if it is a ring over several axes."""
    estimate: Estimate
    cluster: Cluster
    """The links that the method uses."""
    imbalance: float

    @property
    def transport(self) -> str:
        """The value of `rotate_method=`, "-" where no K/V travel."""
        return self.estimate.transport if self.degree > 1 else "-"

    @property
    def computing(self) -> float:
        """Seconds of both passes if transfers took no time."""
        return sum(seconds(_alone(work), self.cluster) for work in self.estimate.work)

    @property
    def exposed(self) -> float:
        """Seconds of transfers that computation does not hide."""
        return max(self.estimate.seconds - self.computing, 0.0)

    def transferring(self, tier: int) -> float:
        """Return the seconds in which a tier would transfer its bytes without a pause."""
        return self.estimate.bytes_over(tier) / self.cluster.tiers[tier].speed


def _alone(work: Work) -> Work:
    return tuple(replace(step, received=(), sent=()) for step in work)


def spec_of(case: Case, layout: Layout, ranks: int) -> CallSpec:
    """Return the call of all ranks."""
    partition = LayoutPartition(layout, case.seq_len, case.seq_len, case.batch, ranks)
    masking = masking_of(partition, case.mask_value)
    return CallSpec(
        partition, case.mask_value, case.batch, case.heads.q, case.heads.kv, *case.heads.dims, case.dtype, masking
    )


def ways(cluster: Cluster, case: Case, layouts: Sequence[str]) -> list[Planned]:
    """Return every way to compute a call on all ranks of a cluster; in each layout those that "auto" prefers first."""
    found = list[Planned]()
    for name in layouts:
        layout = layout_by_name(name, case.mask_value, case.seq_len)
        spec = spec_of(case, layout, cluster.ranks)
        of_layout = imbalance(layout, case.mask_value, case.seq_len, cluster.ranks)
        for method, each in estimates(spec, cluster, ROTATE_METHODS["auto"], one_axis=True).items():
            label = method.replace(SPLIT + "ring", "nested ring").replace(SPLIT, "")
            links = cluster if method.startswith(SPLIT) else cluster.flat
            found.append(Planned(cluster.ranks, name, label, each, links, of_layout))
    return found


def chosen(found: Sequence[Planned], cluster: Cluster) -> Planned:
    """Return the way that "auto" takes, of several layouts the fastest."""
    taken = []
    for layout in dict.fromkeys(each.layout for each in found):
        of_layout = {f"{place}": each for place, each in enumerate(found) if each.layout == layout}
        by_place = {place: each.estimate for place, each in of_layout.items()}
        taken.append(of_layout[fastest(by_place, cluster.tolerance)])
    return min(taken, key=lambda each: each.estimate.seconds)


# Text


def _time(value: float) -> str:
    return f"{value:,.1f} s" if value >= 9.995 else f"{1e3 * value:.4g} ms"


def tier_names(cluster: Cluster) -> tuple[str, ...]:
    """Return the places of the links of a cluster; nodes of one GPU have no links inside."""
    has_inner = len(cluster.tiers) > 1 or cluster.tiers[0].shares_memory
    return ("in a node", "between nodes", "between pods")[not has_inner :][: len(cluster.tiers)]


def table(found: Sequence[Planned], flops: float) -> str:
    """Return the table of some ways; `flops` are those of both passes that count, of all ranks."""
    head = ["ranks", "layout", "method", "K/V by", "forward", "both", "exposed", "TFLOP/s a GPU"]
    tiers = max((tier_names(each.cluster) for each in found), key=len)
    head += [*tiers, "memory", "imbalance"]
    rows = [head]
    for each in found:
        estimate = each.estimate
        moved = [f"{estimate.bytes_over(tier) / 2**20:,.0f} MiB" for tier in range(len(tiers))]
        times = list(map(_time, (estimate.forward, estimate.seconds, each.exposed)))
        speed = f"{flops / each.degree / estimate.seconds / 1e12:.0f}"
        names = [f"{each.degree:,}", each.layout, each.method, each.transport]
        rows.append([*names, *times, speed, *moved, f"{estimate.memory / 2**30:.2f} GiB", f"{each.imbalance:.1%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def reasons(best: Planned, found: Sequence[Planned], cluster: Cluster) -> Iterator[str]:
    """Yield lines that say what is chosen, what limits it, and what the others would take."""
    within = f"the first within {cluster.tolerance - 1:.0%} of the fastest"
    yield f"chosen: {_named(best)}, {best.layout}: {within}"
    links = [f"links {name} {_time(best.transferring(tier))}" for tier, name in enumerate(tier_names(best.cluster))]
    yield f"limits: computation {_time(best.computing)}, {', '.join(links)}; {_time(best.exposed)} exposed"
    for each in found:
        if each.layout == best.layout and each is not best:
            ratio = each.estimate.seconds / best.estimate.seconds
            yield f"  {_named(each)}: {ratio:.2f} times as long, {_time(each.exposed)} exposed"


def _named(planned: Planned) -> str:
    return planned.method + (f", K/V by {planned.transport}" if planned.transport != "-" else "")


def drawn(planned: Planned) -> tuple[Drawn, float]:
    """Return what is busy when in forward and backward, and the time of both."""
    spans: Drawn = []
    begins = 0.0
    for work in planned.estimate.work:
        of_pass: Drawn = []
        lasts = seconds(work, planned.cluster, of_pass)
        spans += [(tier, begins + start, begins + stop) for tier, start, stop in of_pass]
        begins += lasts
    return spans, begins


def _lanes(planned: Planned) -> dict[int | None, str]:
    return {None: "GPU", **dict(enumerate(tier_names(planned.cluster)))}


def timeline(planned: Planned) -> str:
    """Return lines of characters, each a part of the time: the darker, the longer something is busy."""
    spans, whole = drawn(planned)
    lines = []
    for tier, name in _lanes(planned).items():
        busy = [0.0] * _WIDTH
        for _, start, stop in (span for span in spans if span[0] == tier):
            first, last = start / whole * _WIDTH, stop / whole * _WIDTH
            for cell in range(int(first), min(int(last) + 1, _WIDTH)):
                busy[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
        darkest = len(_SHADES) - 1
        cells = "".join(_SHADES[min(ceil(part * darkest - 1e-3), darkest)] for part in busy)
        lines.append(f"{name:<14}{cells}")
    split = int(planned.estimate.forward / whole * _WIDTH)
    marks = "forward".ljust(split)[:split] + "|backward"
    return "\n".join([" " * 14 + marks, *lines])


def picture(planned: Planned, title: str) -> Figure:
    """Draw the timeline."""
    from matplotlib.figure import Figure

    spans, _ = drawn(planned)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axis: Any = figure.subplots()
    lanes = _lanes(planned)
    for height, (tier, colour) in enumerate(zip(lanes, ("#a5d593", "#4f8fcd", "#ffdf9a", "#e06666"), strict=False)):
        bars = [(1e3 * start, 1e3 * (stop - start)) for each, start, stop in spans if each == tier]
        axis.broken_barh(bars, (-height - 0.4, 0.8), facecolors=colour, edgecolors="black", linewidth=0.4)
    axis.axvline(1e3 * planned.estimate.forward, color="black", linewidth=0.8)
    axis.set(yticks=[-height for height in range(len(lanes))], yticklabels=lanes.values(), xlabel="ms", title=title)
    return figure


def snippet(planned: Planned, total: int) -> str:
    """Return Python and TorchTitan's TOML for a way, beside data parallelism over the other GPUs."""
    sizes, names, over = [planned.degree], ["cp"], '"cp"'
    if planned.method in ("nested ring", "hybrid"):
        sizes = [tier.ranks for tier in reversed(planned.cluster.tiers)]
        names = ["ring_pods", "ring", "ulysses"][-len(sizes) :]
        over = ", ".join(f'"{name}"' for name in names)
    if total > planned.degree:
        sizes, names = [total // planned.degree, *sizes], ["dp", *names]
    method = planned.method.removeprefix("nested ")
    layout = planned.layout + {"HeadTail": "()", "Contiguous": "()", "Balanced": "(mask, seq_len)"}.get(
        planned.layout, ""
    )
    rotate = f', rotate_method="{planned.transport}"' if planned.transport != "-" else ""
    quoted = ", ".join(f'"{name}"' for name in names) + "," * (len(names) == 1)
    shape = ", ".join(map(str, sizes)) + "," * (len(sizes) == 1)
    return (
        f'mesh = init_device_mesh("cuda", ({shape}), mesh_dim_names=({quoted}))[{over}]\n'
        f'with context_parallel(mesh, method="{method}", layout={layout}{rotate}, ...):\n\n'
        f"[parallelism]  # TorchTitan\ncontext_parallel_degree = {planned.degree}"
    )


# Command


def main(arguments: Sequence[str]) -> None:
    """Print the plan of the command line."""
    parser = command_parser("plan", _DESCRIPTION)
    add = parser.add_argument
    add("--gpu", default=_GPU, help=f"one of {', '.join(GPUS)}; default: {_GPU}")
    add("--nodes", type=positive, default=1, help="default: 1")
    add("--pods", type=positive, default=1, help="of so many nodes each; default: 1")
    add("--gpus-per-node", type=positive, help="GPUs that NVLink connects; default: what is usual for the GPU")
    add("--internode", default=NETWORK, help=f"one of {', '.join(LINKS)}; a port a GPU; default: {NETWORK}")
    add("--oversubscription", type=positive_number, default=1.0, help="of the network, between pods if there are any")
    add("--packages", action="store_true", help="FlashAttention-4 and cuDNN are installed (the extra kernels)")
    add("--cluster", type=Path, metavar="FILE", help="a machine that doctor --save has measured; --nodes of it")
    add("--seq-len", type=tokens_argument, default=1 << 20, metavar="TOKENS", help="such as 128k or 1M; default: 1M")
    add("--batch", type=positive, default=1)
    add("--heads", type=argument(Heads.parse), default=Heads(32, 8), metavar="Q:KV[:DIM]", help="default: 32:8:128")
    add("--mask", type=mask_argument, default="causal", metavar="MASK", help=f"{MASK_HELP}; default: causal")
    add("--layouts", nargs="+", help=f"of {', '.join(LAYOUTS)}; default: HeadTail, and Balanced for other masks")
    add("--degrees", nargs="+", type=positive, help="ranks that share the sequence; default: all that a mesh can have")
    add("-o", "--output", type=Path, metavar="FILE", help="picture of the timeline, such as plan.png")
    options = parser.parse_args(arguments)
    try:
        cluster = _cluster(options)
        case = Case(options.seq_len, options.heads, options.mask, options.batch)
        flops = case.flops("fwdbwd")  # refuses masks that do not fit the length
        layouts = options.layouts or ["HeadTail"] + ["Balanced"] * (not case.is_plain)
        parts = {
            degree: part for degree in options.degrees or range(1, cluster.ranks + 1)
            if (part := cluster.part(degree)) is not None
        }  # fmt: skip
        if options.degrees and not {*options.degrees} <= {*parts}:
            sizes = " x ".join(str(tier.ranks) for tier in reversed(cluster.tiers))
            raise ValueError(
                f"expected --degrees that divide the GPUs, {sizes}, into neighbours; got {options.degrees}"
            )
        found = {degree: ways(part, case, layouts) for degree, part in parts.items()}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    best = {degree: chosen(each, parts[degree]) for degree, each in found.items()}
    most = max(found)
    links = "; ".join(f"{tier.ranks:,} at {tier.speed / 1e9:.3g} GB/s" for tier in cluster.tiers)
    print(f"{case.title}, on {cluster.ranks:,} GPUs ({options.cluster or options.gpu}): {links}\n")
    print(f"the best way for each number of ranks\n{table(list(best.values()), flops)}\n")
    print(f"{most:,} ranks\n{table(found[most], flops)}\n")
    print("\n".join(reasons(best[most], found[most], parts[most])), end="\n\n")
    print(f"{timeline(best[most])}\n\n{snippet(best[most], cluster.ranks)}")
    if options.output is not None:
        title = f"{best[most].method}, {most:,} ranks, {options.seq_len:,} tokens"
        save_picture(parser, options.output, lambda: picture(best[most], title))


def _cluster(options: Any) -> Cluster:
    network = {name: getattr(options, name) for name in ("nodes", "pods", "internode", "oversubscription")}
    if options.cluster is None:
        return Cluster(options.gpu, gpus_per_node=options.gpus_per_node, packages=options.packages, **network)
    measured = load_cluster(options.cluster)
    inner, *outer = measured.tiers
    usual: dict[str, object] = {"gpu": _GPU, "gpus_per_node": None, "packages": False}
    if outer:
        usual |= {"nodes": 1, "pods": 1, "internode": NETWORK, "oversubscription": 1.0}
    unread = [f"--{name.replace('_', '-')}" for name, value in usual.items() if getattr(options, name) != value]
    if unread:
        raise ValueError(
            f"--cluster {options.cluster} has measured what {', '.join(unread)} would assume: leave it out"
        )
    return measured if outer else Cluster(measured.gpu, (inner, *Cluster(_GPU, **network).tiers[1:]))
