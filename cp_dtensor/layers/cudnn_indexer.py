"""The lightning indexer by kernels of nvidia-cudnn-frontend, for Hopper and datacenter Blackwell GPUs.

Scores are computed in blocks of queries, in float32, each in the same order of additions wherever its query and its key
are; the first use compares that. The package's top-k takes the first of equal scores and returns them in order. It
knows how many keys each query has, and not which are hidden among them: those queries are selected by torch operations.

Source: github.com/NVIDIA/cudnn-frontend, `deepseek_sparse_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from cp_dtensor.api.extension import quiet, wrong_result
from cp_dtensor.layers.masked import in_intervals, largest_seen
from cp_dtensor.layers.package_kernels import TOP_K, PackageKernels, hopper_or_blackwell

_BYTES, _FEWEST_QUERIES = 256 << 20, 512
"""Limit for the scores of a block of queries, and fewest queries of one, which fill a GPU of 132 multiprocessors. The
package's top-k takes twice as many bytes."""
_DIM, _HEADS, _MOST_KEYS = 128, (16, 32, 64), 2048
"""What the kernels take: values of a key, heads, and keys of a query."""
_FEWEST_COLUMNS = 8192
"""Of a block's scores where the sequence has as many keys. The package's top-k is compiled for powers of 2; that for
4,096 columns selected wrong keys, so shorter sequences are left to torch operations."""
_FEW = 148
"""Up to so many queries, the package's top-k is another kernel."""
_SCORES, _TOP_K = (
    PackageKernels("nvidia-cudnn-frontend", "cudnn.deepseek_sparse_attention", f"{part} of select_keys")
    for part in ("scores", "best keys")
)


def select_by_kernel(out: Tensor, q: Tensor, k: Tensor, weights: Tensor, seen: Tensor, on_device: Tensor) -> bool:
    """Compute `select_reference` of the scores of keys; return False, with nothing done, if kernels do not serve.

    Args:
        on_device: `seen` on the device of q.
    """
    if not _serves(q, weights):
        return False
    topk = out.size(1)
    numbers = torch.arange(max(q.size(0), k.size(0), topk), dtype=torch.int32, device=q.device)
    for start, stop, is_scored in _blocks(seen, topk, k.size(0)):
        at = slice(start, stop)
        if not is_scored:
            lo, hi = on_device[0, :, at].int().unsqueeze(2)
            every = lo + numbers[:topk]
            out[at] = every.masked_fill_(every >= hi, -1)
            continue
        lo, hi = seen[:, :, at].unbind(1)
        first, last = int(torch.where(lo < hi, lo, k.size(0)).min()), int(hi.max())
        if first >= last:
            out[at] = -1
            continue
        columns = min(k.size(0) - first, max(_FEWEST_COLUMNS, 1 << (last - first - 1).bit_length()))
        ends = on_device[:, 1, at].amax(0).int() - first
        # Query i gets scores of the keys up to `offset` + i.
        offset = (ends - numbers[: stop - start]).amax().view(1) - 1
        scores = _scores(q[at], k[first : first + columns], weights[at], offset)
        if seen.size(0) == 1 and bool((lo == first).all()) and _top_k_serves(scores, topk):
            index = _top_k(scores, ends, topk)
            out[at] = index if first == 0 else torch.where(index < 0, index, index + first)
        else:
            of_block, few = numbers[first : first + columns], -(-(stop - start) // 8)  # for less memory
            pairs = zip(scores.split(few), on_device[:, :, at].split(few, 2), strict=True)
            out[at] = torch.cat([largest_seen(x, in_intervals(y, of_block), of_block, topk) for x, y in pairs])
    return True


def _blocks(seen: Tensor, topk: int, keys: int) -> Iterator[tuple[int, int, bool]]:
    """Yield blocks of queries (start, stop), and whether they are scored: others take all of their keys, topk at most.

    A block is within a run of queries that see keys from one position on, if such runs are few.

    >>> seen = torch.tensor([[[0, 0, 0, 0, 4, 4, 4], [1, 2, 3, 4, 5, 6, 7]]])
    >>> list(_blocks(seen, topk=2, keys=7))
    [(0, 2, False), (2, 4, True), (4, 6, False), (6, 7, True)]
    """
    lo, hi = seen.unbind(1)
    total, step = lo.size(1), max(_FEWEST_QUERIES, _BYTES // (4 * max(keys, 1)))
    runs = [(True, total)]
    if seen.size(0) == 1:
        begins, counts = torch.where(hi[0] - lo[0] > topk, lo[0], -1).unique_consecutive(return_counts=True)
        if len(counts) <= 16 + total // 256:
            runs = [*zip((begins >= 0).tolist(), counts.tolist(), strict=True)]
    start = 0
    for is_scored, count in runs:
        for each in range(start, start + count, step):
            yield each, min(each + step, start + count), is_scored
        start += count


def _scores(q: Tensor, k: Tensor, weights: Tensor, offset: Tensor) -> Tensor:
    """Return the scores (T, S) of queries (T, H, D), weights (T, H) and keys (S, D), -inf behind key `offset` + t."""
    given = q.unsqueeze(0), k.unsqueeze(0).unsqueeze(2), weights.float().unsqueeze(0)
    compute = _SCORES.load().indexer_forward_wrapper
    found: Tensor = compute(*given, ratio=1, sm_scale=1.0, q_causal_offsets=offset)["scores"]
    return found[0]


def _top_k(scores: Tensor, ends: Tensor, topk: int) -> Tensor:
    """Return `largest_seen` of the first `ends` (T,) columns."""
    lengths = ends.clamp(min=0)
    found: Tensor = _TOP_K.load().indexer_top_k_wrapper(scores, lengths, topk, **TOP_K)["indices"]
    return found


def _serves(q: Tensor, weights: Tensor) -> bool:
    """Return whether kernels compute scores; at first use a small problem is compared."""
    refusal = hopper_or_blackwell(q)
    if q.dtype != torch.bfloat16 or q.size(1) not in _HEADS or q.size(2) != _DIM or weights.dtype == torch.float64:
        refusal = f"they need bfloat16, {_DIM} values of a key and {_HEADS} heads"
    return _SCORES.serve(q, refusal, (q.size(1),), partial(_scores_error, q))


def _top_k_serves(scores: Tensor, topk: int) -> bool:
    """Return whether the package's top-k serves; at first use a small problem is compared."""
    (queries, columns), fewest = scores.shape, _FEWEST_COLUMNS // 2 + 1
    is_served = topk <= _MOST_KEYS and columns >= fewest
    refusal = None if is_served else f"they select {_MOST_KEYS} keys at most, of {fewest} or more"
    # The package compiles for powers of two, and apart for few queries.
    kernel = topk, (columns - 1).bit_length(), queries > _FEW
    check = partial(_top_k_error, min(queries, _FEW + 1), columns, topk, scores.device)
    return _TOP_K.serve(scores, refusal, kernel, check)


@quiet()  # the package is imported and compiles
def _scores_error(q: Tensor) -> str:
    """Compare scores of a small problem with float64, and their bits with those in other places; "" if all is right."""
    generator = torch.Generator(q.device).manual_seed(0)
    queries, keys, begin = 40, 700, 600

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=q.device).to(q.dtype)

    q, k, weights = normal(queries, *q.shape[1:]), normal(keys, _DIM), normal(queries, q.size(1))
    offset = torch.tensor([begin], dtype=torch.int32, device=q.device)
    scores = _scores(q, k, weights, offset)
    wide = (torch.einsum("thd,sd->ths", q.double(), k.double()).relu_() * weights.double().unsqueeze(2)).sum(1)
    places, rows = (torch.arange(count, device=q.device) for count in (keys, queries))
    wide.masked_fill_(places > (rows + begin).unsqueeze(1), float("-inf"))
    wrong = wrong_result(("scores",), (scores,), (wide,), 1e-4)
    moved = _scores(q[3:], k[5:], weights[3:], offset - 2)
    is_moved = not wrong and not torch.equal(moved, scores[3:, 5:])
    return "a score depends on the place of its query and key" if is_moved else wrong


@quiet()
def _top_k_error(queries: int, columns: int, topk: int, device: torch.device) -> str:
    """Compare selected keys, with many equal scores, some queries of few keys and one of none; "" if all are right."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.randn(queries, columns, generator=generator, device=device).mul_(100).round_()
    scores += 0.0  # no -0.0: scores are sums that begin with 0.0, and the package sorts -0.0 behind it
    numbers = torch.arange(columns, dtype=torch.int32, device=device)
    ends = torch.randint(topk, columns + 1, (queries,), generator=generator, device=device).int()
    ends[queries // 2 :: 9] = 0
    ends[queries // 3 :: 9] = 5
    wanted = largest_seen(scores, numbers < ends.unsqueeze(1), numbers, topk)
    return "" if torch.equal(_top_k(scores, ends, topk), wanted) else "wrong keys of a small problem"
