"""What the tool `one_of_many` measures is what a rank among others computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from cp_dtensor.local_attention.math import MathAttention
from cp_dtensor.tools.one_of_many import METHODS, Problem, of_one_rank, report, whole_sequence

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_has_its_share_of_the_work(method: str, rank: int) -> None:
    """As many (query, key) pairs of all heads as every other rank, a few of them seen by nobody."""
    problem = Problem(64, 4, 8, 4, head_dim=16)
    pairs: dict[str, int] = {"forward": 0, "backward": 0}

    def counted(name: str, tile_q: int) -> Any:
        original = getattr(MathAttention, name)

        def run(self: Any, *args: Any) -> Any:
            q, k, mask = args[tile_q], args[tile_q + 1], args[-2]
            rows, columns = q.size(2), k.size(2)
            pairs[name] += q.size(1) * (rows * (rows + 1) // 2 if mask.is_causal else rows * columns)
            return original(self, *args)

        return mock.patch.object(MathAttention, name, run)

    with (
        mock.patch("cp_dtensor.splitting.choose_backend", return_value=MathAttention()),
        counted("forward", 0),
        counted("backward", 1),
    ):
        passes = of_one_rank(problem, method, rank, DEVICE, torch.float32)
        for name in pairs:
            pairs[name] = 0
        out, _, saved = passes.forward()
        grads = passes.backward()
    all_pairs = 8 * 64 * 65 // 2
    assert pairs == {"forward": all_pairs // 4, "backward": all_pairs // 4}
    assert out.shape == (1, 8, 16, 16)
    assert [tuple(grad.shape) for grad in grads] == [(1, 8, 16, 16), (1, 4, 16, 16), (1, 4, 16, 16)]
    assert saved


def test_passes_can_be_repeated() -> None:
    problem = Problem(48, 3, 6, 3, head_dim=8)
    for passes in (
        whole_sequence(problem, DEVICE, torch.float32),
        *(of_one_rank(problem, method, 1, DEVICE, torch.float32) for method in METHODS),
    ):
        first, again = passes.backward(), passes.backward()
        passes.forward()
        for a, b in zip(first, again, strict=True):
            assert a.shape == b.shape


def test_the_page_has_its_command() -> None:
    text = report("--ranks 8", 8, [("8,192", "ring", "0", "1", "2", "3", "4", "5%")])
    assert "`python -m cp_dtensor.tools.one_of_many --ranks 8`" in text
    assert "| 8,192 | ring | 0 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_it_needs_a_gpu() -> None:
    from cp_dtensor.tools import one_of_many

    with mock.patch("sys.argv", ["one_of_many"]), pytest.raises(SystemExit, match="measures a GPU"):
        one_of_many.main()
