#!/bin/bash
# Two nodes under SLURM: `sbatch slurm.sh example.py`. The program is that of using.md.
#SBATCH --job-name=minifsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00

# One task a node is right: it is torchrun, which starts a rank for each GPU of its node.
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node have different ones

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node=gpu \
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \
    "$@"
