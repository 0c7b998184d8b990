#!/usr/bin/env bash
# The whole test suite from a clean clone: environment, ruff, mypy, import contracts, pytest. Arguments go to pytest:
#   bash tests/run.sh -k mdlm
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launchers/environment.sh"
cd "$REPOSITORY"

# Tests start up to eight processes of their own: one thread each, or they fight for the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
started=$SECONDS

step() {
    echo "== $1"
    shift
    "$@" || { local code=$?; echo "FAILED: $*" >&2; exit "$code"; }
}

# A real Slurm for the long tests (-m long), where this is root on Debian or Ubuntu. The others use commands that stand in for Slurm's.
if [[ "$*" == *long* && $EUID -eq 0 ]] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v munged; } >/dev/null; then
    echo "== a Slurm for the tests (slurmctld, slurmd, slurm-client, munge)"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurmctld slurmd slurm-client munge; } \
        >/dev/null 2>&1 || echo "not to be had here; the tests do without"
fi

step ruff "$PYTHON" -m ruff check pretrain finetune data_prep launchers tests
step mypy "$PYTHON" -m mypy
step "import contracts" "$VENV/bin/lint-imports" --no-cache
# Two workers, a file of tests to each at a time: much of the suite is processes that wait for each other.
step pytest "$PYTHON" -m pytest -n 2 --dist loadfile "$@"
echo "== all checks passed in $((SECONDS - started)) s"
