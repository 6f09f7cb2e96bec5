"""Writes the tables of docs/scaling.md: predictions of the cost model for clusters that are not there.

python docs/scripts/scaling.py              all tables, minutes
python docs/scripts/scaling.py --only 0     the first table, seconds
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from cp_dtensor import Cluster
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.plan.cost import ring_work, seconds
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.plan import Planned, chosen, spec_of, ways

PAGE = Path(__file__).resolve().parents[1] / "scaling.md"
HEADS = Heads(64, 8)
DOCUMENTS = "documents 4096"
METHODS = ("nested ring", "hybrid", "ring", "ulysses")
Row = list[str]


def predicted(cluster: Cluster, mask: str, tokens: int) -> tuple[dict[str, Planned], Planned, float]:
    """Return the ways by method, the one that "auto" takes, and the FLOPs of forward on one GPU."""
    case = Case(tokens, HEADS, mask)
    found = ways(cluster, case, ["HeadTail" if mask == "causal" else "Balanced"])
    return {each.method: each for each in found}, chosen(found, cluster), case.flops("fwd") / cluster.ranks


def small() -> Iterator[Row]:
    """16 to 64 GPUs: useful TFLOP/s of a GPU, forward / backward."""
    yield ["GPUs", "tokens a GPU", "mask", *METHODS, '`"auto"` takes']
    for gpu, per_gpu in (("H100", 8192), ("B200", 16384)):
        for mask in ("causal", DOCUMENTS):
            for nodes in (2, 4, 8):
                cluster = Cluster(gpu, nodes=nodes, internode="NDR400", packages=True)
                found, best, flops = predicted(cluster, mask, per_gpu * cluster.ranks)
                speeds = [
                    f"{flops / each.estimate.forward / 1e12:.0f} / {2.5 * flops / each.estimate.backward / 1e12:.0f}"
                    for each in (found[method] for method in METHODS)
                ]
                yield [f"{cluster.ranks} {gpu}", f"{per_gpu:,}", mask, *speeds, best.method]


def large() -> Iterator[Row]:
    """1,024 and 4,096 GPUs: forward and backward, and what limits them."""
    limits = ["computation", "NVLink", "network", "exposed"]
    yield ["GPUs", "tokens", "takes", "ms", *limits, "TFLOP/s a GPU", *(f"{method}, times" for method in METHODS[1:])]
    for nodes in (128, 512):
        cluster = Cluster("H100", nodes=nodes, internode="NDR400", packages=True)
        for tokens in (1 << 20, 1 << 23, 1 << 25, 1 << 27):
            found, best, flops = predicted(cluster, "causal", tokens)
            whole = best.estimate.seconds
            parts = [best.computing, best.transferring(0), best.transferring(1), best.exposed]
            yield [
                f"{cluster.ranks:,}", f"{tokens >> 20}M", best.method, f"{1e3 * whole:,.0f}",
                *(f"{1e3 * part:,.0f}" for part in parts), f"{3.5 * flops / whole / 1e12:.0f}",
                *(f"{found[method].estimate.seconds / whole:.2f}" for method in METHODS[1:]),
            ]  # fmt: skip


def planning() -> Iterator[Row]:
    """Seconds on one core, and the memory of the process so far."""
    yield [
        "ranks",
        "tokens",
        "documents",
        "mask and layout, s",
        "tables, s",
        "plan of one rank, s",
        "its estimate, s",
        "GB",
    ]
    for ranks in (8, 64, 512, 4096):
        tokens = ranks << 15
        times = [time.process_time()]
        case = Case(tokens, HEADS, "documents 812")
        documents: Any = case.mask_value
        spec = spec_of(case, case.layout("Balanced"), ranks)
        spec.partition.groups()
        times.append(time.process_time())
        assert spec.tiling.reading
        times.append(time.process_time())
        plan = AllGather().plan(spec, ranks // 2)
        assert plan.routes
        times.append(time.process_time())
        cluster = Cluster("H100", nodes=max(ranks // 8, 1))
        assert sum(seconds(work, cluster.flat) for work in ring_work(plan, spec, cluster.hosts, 1))
        times.append(time.process_time())
        spent = [f"{stop - start:.2g}" for start, stop in pairwise(times)]
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        yield [f"{ranks:,}", f"{tokens >> 10:,}k", f"{len(documents.lengths):,}", *spent, f"{gigabytes:.1f}"]


TABLES = (small, large, planning)


def markdown(rows: Iterator[Row]) -> str:
    head, *lines = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, choices=range(len(TABLES)))
    only = parser.parse_args().only
    parts = PAGE.read_text().split("<!-- table -->\n")
    for place, rows in enumerate(TABLES):
        if only in (None, place):
            _, end, rest = parts[place + 1].partition("\n\n")
            parts[place + 1] = markdown(rows()) + end + rest
    PAGE.write_text("<!-- table -->\n".join(parts))


if __name__ == "__main__":
    main()
