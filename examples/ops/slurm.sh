#!/usr/bin/env bash
# A job on SLURM that goes on after a failed rank, a lost node and its own time limit:
#     sbatch examples/ops/slurm.sh examples/ops/train.py --folder run --steps 1000
# One task a node starts a rank for each GPU. With IMAGE=... it runs in a container (Pyxis and Enroot).
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:USR1@300
set -uo pipefail
logs="logs/$SLURM_JOB_ID/start-${SLURM_RESTART_COUNT:-0}"
mkdir -p "$logs"
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE="$logs/nccl-"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds in which ranks save after SIGTERM

container=()
if [[ -n "${IMAGE:-}" ]]; then
  container=(--container-image="$IMAGE" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")
fi

ends=0
stop() { # the time limit is near: ranks save and leave, and the job waits for its next turn
  ends=1
  scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap stop USR1
srun --kill-on-bad-exit=1 ${container[@]+"${container[@]}"} autopar run --ranks "$SLURM_GPUS_ON_NODE" \
  --nodes "$SLURM_NNODES" --endpoint "$first:$port" --max-restarts 3 --log-dir "$logs" "$@" &
step=$!
wait "$step"
code=$?
if ((ends)); then # the signal ended the first wait
  wait "$step"
  code=$?
  ((code == 0)) || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
