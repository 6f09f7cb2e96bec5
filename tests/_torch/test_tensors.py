"""Memory order of tensors."""

from __future__ import annotations

import pytest
import torch

from cp_dtensor._torch.tensors import laid_out_after

B, H, S, D = 2, 4, 6, 8
QUERIES = {
    "heads first": torch.randn(B, H, S, D),
    "rows first": torch.randn(B, S, H, D).transpose(1, 2),
    "of a fused projection": torch.randn(B, S, 3 * H, D).transpose(1, 2)[:, :H],
    "some heads": torch.randn(B, S, H, D).transpose(1, 2)[:, 1:3],
    "some rows": torch.randn(B, H, S, D)[:, :, :4],
    "expanded": torch.randn(1, H, S, D).expand(B, H, S, D),
    "one batch row": torch.randn(1, S, H, D).transpose(1, 2),
    "one head": torch.randn(B, 1, S, D),
    "overlapping": torch.randn(B * H * S * D).as_strided((B, H, S, D), (D, 4, 2, 1)),
}


@pytest.mark.parametrize("v_dim", [D, 5])
@pytest.mark.parametrize("q", QUERIES.values(), ids=QUERIES)
def test_strides_of_outputs_follow_from_those_of_queries(q: torch.Tensor, v_dim: int) -> None:
    """torch's cuDNN attention looks up its plans by the strides of q, k and v alone."""
    batch, heads, rows, _ = q.shape
    outs = [
        torch.randn(batch, heads, rows, v_dim),
        torch.randn(batch, rows, heads, v_dim).transpose(1, 2),
        torch.randn(heads, batch, v_dim, rows).permute(1, 0, 3, 2),
        torch.randn(batch, heads, rows + 3, v_dim)[:, :, 1:-2],
    ]
    found = [laid_out_after(q, out) for out in outs]
    for out, result in zip(outs, found, strict=True):
        assert torch.equal(out, result)
    several = [dim for dim in range(4) if q.size(dim) > 1]
    assert len({tuple(result.stride(dim) for dim in several) for result in found}) == 1


@pytest.mark.parametrize("name", ["heads first", "rows first", "some heads", "some rows", "one batch row"])
def test_outputs_with_the_strides_of_queries_are_not_copied(name: str) -> None:
    q = QUERIES[name]
    out = torch.empty_strided(q.shape, q.stride())
    assert laid_out_after(q, out) is out
