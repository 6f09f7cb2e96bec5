"""What every benchmark report starts with, and Markdown tables."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch


def environment() -> str:
    """Hardware and versions, as Markdown."""
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}"]
    if torch.cuda.is_available():
        import triton

        version = torch.backends.cudnn.version()
        lines[0] += f", triton {triton.__version__}, CUDA {torch.version.cuda}, cuDNN {version}"
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            lines[0] += ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
        lines.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} visible")
    else:
        lines.append(f"CPU only ({platform.machine()})")
    return "  \n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers are formatted by the caller."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
