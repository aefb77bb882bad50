#!/usr/bin/env bash
# A job on SLURM: sbatch examples/slurm.sh train.py. One task a node starts torchrun, which starts a rank for each GPU.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
set -euo pipefail
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)"
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" "$@"
