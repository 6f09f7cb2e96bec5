#!/usr/bin/env bash
# Starts the ranks of one node. On every node: NODES=2 NODE_RANK=0 HEAD=node0 GPUS=8 bash torchrun.sh [program arguments]
# HEAD: name or address of the node with NODE_RANK 0. If hosts have several networks, set NCCL_SOCKET_IFNAME and
# GLOO_SOCKET_IFNAME to the interface between nodes; NCCL_DEBUG=INFO tells which network NCCL takes.
set -euo pipefail
[ $# -gt 0 ] || set -- "$(dirname "$0")/train_step.py"
exec python -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" "$@"
