#!/usr/bin/env bash
# A run of any length in jobs of 24 hours: ten minutes before the limit SLURM signals this script, the ranks save
# and leave with code 0, and the job is queued again; the next one goes on bit for bit.
#
#   sbatch --export=ALL,RUN_DIR=/shared/run,DATA=/shared/corpus,TOKENIZER=/shared/tokenizer.json examples/launch/slurm.sh
#
#SBATCH --job-name=megatron_cp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

is_out_of_time=no
# scancel signals every process of the job's steps; this script is not one of them.
leave() {
    is_out_of_time=yes
    scancel --signal=USR1 "$SLURM_JOB_ID"
}
trap leave USR1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NNODES=$SLURM_NNODES NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
export RDZV_ENDPOINT=$first:29500 RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

srun --kill-on-bad-exit=1 examples/launch/node.sh "$@" &
job=$!
wait "$job"
code=$?
while [ "$code" -eq $((128 + $(kill -l USR1))) ]; do # the trap ended the wait, the save goes on, or has just ended
    wait "$job"
    code=$?
done

if [ "$is_out_of_time" = yes ] && [ "$code" -eq 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
