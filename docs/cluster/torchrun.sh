#!/bin/bash
# HOST=node0 docs/cluster/torchrun.sh
# On each of one to four nodes: trains on those that are there, and goes on from the last checkpoint on those that are
# left. Set pipelines.train.batch.global, so that a step has as many samples on any number of nodes.
exec torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 \
    --rdzv-backend c10d --rdzv-endpoint "$HOST:29500" --rdzv-id gpuflow \
    -m gpuflow train configs/photos.yaml --resume auto
