"""Run a module of another program after `redirect_imports()`.

    torchrun --nproc-per-node 8 -m cp_dtensor.integrations.torch_experimental torchtitan.train ...

The first rank prints what was replaced.
"""

from __future__ import annotations

import os
import runpy
import sys

from cp_dtensor.integrations.torch_experimental import redirect_imports


def main() -> None:
    """Run the module that the first argument names, with the other arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m cp_dtensor.integrations.torch_experimental MODULE [ARGUMENTS]")
    redirected = redirect_imports()
    if os.environ.get("RANK", "0") == "0":
        print(redirected, flush=True)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
