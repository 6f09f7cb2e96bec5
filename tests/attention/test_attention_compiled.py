"""The attention kernels compiled for a Hopper GPU on machines without one: they fit shared memory and registers.

Run as a script, this file compiles them and prints their resources: Triton's interpreter, in which other tests run
kernels, cannot compile in the same process.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from support.compiled_subprocess import run_uninterpreted

SHARED_BYTES = 227 * 1024
STACK_BYTES = 128
"""Of spilled registers; the loops of dK and dV hold almost 255, and compilers differ."""

VARIANTS = [(1, "none"), (1, "of single elements"), (2, "in runs"), (2, "none", 50.0)]
"""Kinds of masks and of dropout, and softcap: those that need most registers, each compiled in about two seconds."""


def compiled(name: str, mask: int, dropout: str, softcap: float = 0.0, head_dim: int = 128) -> dict[str, object]:
    """Shared memory and stack, in bytes, of a kernel with its default config for bfloat16 and descriptors."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cp_dtensor.attention.triton import backward as attention_backward
    from cp_dtensor.attention.triton import configs as attention_configs
    from cp_dtensor.attention.triton import forward as attention_forward

    x = torch.zeros(1, 1, 16, head_dim, dtype=torch.bfloat16)
    draws_each = dropout == "of single elements"
    backward = attention_configs.default_backward_config(x, x, x, x, takes_registers=draws_each or softcap > 0)
    kernel, config, blocks = {
        "forward": (
            attention_forward.attention_forward_kernel,
            attention_configs.default_config(x, x, draws_each=draws_each),
            ("k", "v"),
        ),
        "dq": (attention_backward.attention_dq_kernel, backward.dq, ("k", "v")),
        "dkv": (attention_backward.attention_dkv_kernel, backward.dkv, ("q", "grad")),
    }[name]
    constants = {"HEAD_DIM": head_dim, "V_DIM": head_dim, "BLOCK_DIM": head_dim, "BLOCK_V": head_dim}
    constants |= {"BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns}
    constants |= {
        "PRECISION": config.precision,
        "MASK": mask,
        "BIAS": 0,
        "DROPOUT": dropout != "none",
        "IN_RUNS": dropout == "in runs",
        "SOFTCAP": softcap,
        "TMA": True,
        "SPLIT_LSE": False,
    }
    read = config.block_rows if name == "dkv" else config.block_columns
    line = f"tensordesc<{{}}[1,{config.block_rows}]>"
    types = {
        "lo_ptr": "*i32",
        "hi_ptr": "*i32",
        "ranges_ptr": "*i32",
        "low": "*fp32",
        "scale": "fp32",
        "scale_log2": "fp32",
    }
    types |= {"seed_ptr": "*i64", "q_position_ptr": "*i32", "kv_position_ptr": "*i32", "dropout_scale": "fp32"}
    types |= {"shift": line.format("fp32"), "delta": line.format("fp32")}
    types |= {x: line.format("i32") if mask == 2 else "*fp32" for x in ("lo", "hi")}
    types |= {f"{x}_ptr": "*bf16" for x in ("out", "q", "k", "v", "dq", "dk", "dv", "grad")}
    types |= dict.fromkeys(blocks, f"tensordesc<bf16[1,1,{read},{head_dim}]>")
    signature, hints = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        default = "*fp32" if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else types.get(argument, default)
        whole_blocks = "stride" in argument and not argument.startswith(("intervals", "ranges", "q_pos", "kv_pos"))
        if whole_blocks or signature[argument] == "*bf16":
            hints[(index,)] = [["tt.divisibility", 16]]
    known = {(kernel.arg_names.index(x),): value for x, value in constants.items() if x in kernel.arg_names}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    source = ASTSource(kernel, signature, known, hints)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [str(disassembler()), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack, usage
    return {
        "kernel": name,
        "mask": mask,
        "dropout": dropout,
        "softcap": softcap,
        "shared": result.metadata.shared,
        "stack": int(stack.group(1)),
    }


def disassembler() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.slow
def test_kernels_fit_a_hopper_gpu() -> None:
    pytest.importorskip("triton")
    if not disassembler().exists():
        pytest.skip("this Triton has no disassembler")
    results = json.loads(run_uninterpreted(__file__))
    assert len(results) == len(VARIANTS) * 3
    for result in results:
        assert result["shared"] <= SHARED_BYTES, result
        assert result["stack"] <= STACK_BYTES, result


if __name__ == "__main__":
    print(json.dumps([compiled(name, *variant) for name in ("forward", "dq", "dkv") for variant in VARIANTS]))
