#!/bin/bash
# A run on 8 machines with 8 GPUs each, under Slurm; settings follow the config. From the repository's folder:
#   sbatch scripts/slurm.sh conf/pretrain/linformer_base.yaml
# On one machine:
#   sbatch --nodes 1 scripts/slurm.sh conf/pretrain/linformer_base.yaml --name one-machine
# Add your cluster's --partition, --account and --time; prepare long text beforehand, on a machine without GPUs (docs/data.md).

#SBATCH --job-name=lit-linformer
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.txt
# The log is continued when the job comes back.
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time is over: longer than a validation takes, since one that has begun is finished.
#SBATCH --signal=USR1@300

set -euo pipefail

config=$1
shift
# srun has not taken --cpus-per-task from the job since Slurm 22.05.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# A process that ends takes the others with it; --ckpt_path auto continues where the last start of this job stopped.
srun --kill-on-bad-exit=1 python run.py fit --config "$config" --config conf/trainer/slurm.yaml --ckpt_path auto \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" "$@"
