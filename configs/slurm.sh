#!/bin/bash
# sbatch configs/slurm.sh CONFIG... [--set KEY=VALUE...] runs a config in as many jobs as it takes, one after another.
#
# Each job ends itself a little before its limit: the run then ends with exit code 4 and a complete submission, and this script
# submits itself again, to go on with the rows that are left. Any other exit code ends the chain. Change the options below
# instead of naming them on the command line: only these reach the next job.
#SBATCH --job-name=ensemble
#SBATCH --time=04:00:00
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --requeue

margin_seconds=120 # from the end of the run to the end of the job
max_jobs=50        # a chain that makes no progress ends here

# Slurm older than 22.05 does not set the first.
end=${SLURM_JOB_END_TIME:-$(date -d "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)" +%s)}
seconds=$((end - $(date +%s) - margin_seconds))
if [ "$seconds" -le 0 ]; then
  echo "the job's limit leaves no time beside the $margin_seconds seconds at its end; raise --time" >&2
  exit 2
fi

"${PYTHON:-python}" -m ensemble run "$@" --set "time_limit=${seconds}s"
code=$?
job=${ENSEMBLE_JOB:-1}
if [ "$code" -eq 4 ] && [ "$job" -lt "$max_jobs" ]; then
  sbatch --export="ALL,ENSEMBLE_JOB=$((job + 1))" "$0" "$@" && exit 0
fi
exit "$code"
