"""Rooms of the package, their floors and allowed imports, which `test_house` checks."""

# Room -> floor. Imports stay in their room or point to a lower floor. `attention` and `comm` never import each other.
FLOORS = {
    "_torch": 0,
    "spec": 0,
    "plan": 1,
    "attention": 2,
    "comm": 2,
    "engine": 3,
    "api": 4,
    "integrations": 5,
    "tools": 5,
}

WITHOUT_TORCH = ("spec", "plan")

# Room -> the dotted prefixes of torch that it may not import.
FORBIDDEN_TORCH = {
    "attention": ("torch.distributed",),
    "comm": ("torch.distributed.tensor",),
    "engine": ("torch.distributed.tensor",),
}

# Modules (prefixes) that tools may import besides themselves and the public names of the package: plans and masks as
# data, the cost model, the choice of kernels, and for benchmarks of internals the kernels of one device and the size of
# symmetric memory.
TOOLS_IMPORT = (
    "plan", "spec", "engine.cost_model", "attention.backends", "attention.masked", "comm.symm_mem_workspace",
)  # fmt: skip

# The one tool that may touch torch's private names: torch's own context parallel can only be measured through them.

# Modules (prefixes) that may import triton.
TRITON = ("_torch", "attention.triton", "comm.triton_kernels")
