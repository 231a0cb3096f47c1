#!/usr/bin/env bash
# The one test command: bash tests/run.sh [pytest arguments]
#
# Works on a bare Debian or Ubuntu machine with Python 3.11 or later. It makes .venv
# in this clone (MPICKPT_VENV or an active virtual environment win) and
# .venv-openmpi, then lints, then runs pytest, whose closing line is the last line of
# the output: with arguments in one session, else in two side by side.
# MPICKPT_TEST_OPENMPI=0 leaves Open MPI out, MPICKPT_TEST_FRAMEWORKS=0 PyTorch, JAX,
# DeepSpeed and Megatron.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,sm OMPI_MCA_pml=ob1
export OMPI_MCA_mpi_yield_when_idle=1

readonly SETUP_TIMEOUT_S=1200
# What starts many processes and waits for them.
readonly JOBS=(
    tests/crash tests/faults tests/slurm
    tests/test_bench.py tests/test_doctor.py tests/test_parallel_suite.py
)
readonly TORCH="torch==2.13.0+cpu"
readonly TORCH_INDEX=https://download.pytorch.org/whl/cpu
readonly TESTS_TIMEOUT_S=${MPICKPT_TEST_SESSION_TIMEOUT_S:-3600}

install_tools() {
    local missing=()
    command -v h5dump >/dev/null || missing+=(hdf5-tools)
    command -v strace >/dev/null || missing+=(strace)
    command -v munged >/dev/null || missing+=(munge)
    command -v slurmctld >/dev/null || missing+=(slurm-wlm)
    command -v shellcheck >/dev/null || missing+=(shellcheck)
    command -v mkfs.xfs >/dev/null || missing+=(xfsprogs)
    command -v mkfs.btrfs >/dev/null || missing+=(btrfs-progs)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v mkfs.ext4 >/dev/null || missing+=(e2fsprogs)
    command -v fusermount3 >/dev/null || missing+=(fuse3)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v glusterd >/dev/null || missing+=(glusterfs-server glusterfs-client)
    command -v mfsmaster >/dev/null || missing+=(moosefs-master)
    command -v mfschunkserver >/dev/null || missing+=(moosefs-chunkserver)
    command -v mfsmount >/dev/null || missing+=(moosefs-client moosefs-cli)
    python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "tests/run.sh: not root, so tests that need ${missing[*]} are skipped" >&2
        return
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

pip_install() {
    local directory=$1
    shift
    timeout "$SETUP_TIMEOUT_S" "$directory/bin/python" -m pip install \
        --quiet --disable-pip-version-check "$@"
}

# A stamp holds the digest of pyproject.toml, so that a second run installs nothing.
make_environment() {
    local directory=$1 extras=$2 stamp digest
    stamp="$directory/.mpickpt-stamp-$extras"
    [ -x "$directory/bin/python" ] || python3 -m venv "$directory"
    digest="$(sha256sum pyproject.toml | cut -d' ' -f1) $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ]; then
        pip_install "$directory" --editable ".[$extras]" || return
        echo "$digest" >"$stamp"
    fi
}

# The plain wheel on PyPI brings gigabytes of CUDA.
install_torch() {
    "$venv/bin/python" -c 'import torch' 2>/dev/null ||
        pip_install "$venv" "$TORCH" 2>/dev/null ||
        pip_install "$venv" --extra-index-url "$TORCH_INDEX" "$TORCH"
}

# Each status is kept by hand: `set -e` is off in a function called before `||`.
lint() {
    local status=0
    "$venv/bin/ruff" check --quiet . || status=1
    "$venv/bin/ruff" format --check --quiet . || status=1
    "$venv/bin/mypy" --no-error-summary || status=1
    if ! "$venv/bin/lint-imports" >"$venv/lint-imports.log"; then
        cat "$venv/lint-imports.log"
        status=1
    fi
    return "$status"
}

venv=${MPICKPT_VENV:-${VIRTUAL_ENV:-$PWD/.venv}}
install_tools
make_environment "$venv" mpich,test,servers
if [ "${MPICKPT_TEST_FRAMEWORKS:-1}" = 1 ]; then
    { install_torch && make_environment "$venv" frameworks; } ||
        echo "tests/run.sh: tests that need frameworks are skipped, see above" >&2
fi
if [ "${MPICKPT_TEST_OPENMPI:-1}" = 1 ]; then
    make_environment "$PWD/.venv-openmpi" openmpi,test
    export MPICKPT_TEST_OTHER_PYTHON="$PWD/.venv-openmpi/bin/python"
else
    export MPICKPT_TEST_OTHER_PYTHON=
fi
export PATH="$venv/bin:$PATH"

run_pytest() {
    timeout --kill-after=30 "$TESTS_TIMEOUT_S" "$venv/bin/python" -m pytest "$@"
}

# Half of the tests wait for jobs, servers and deadlines while the other half computes:
# two sessions side by side, of which the one that takes longer is printed last.
run_all() {
    local ignored=() log status=0 other_status=0
    for path in "${JOBS[@]}"; do ignored+=("--ignore=$path"); done
    log=$(mktemp)
    run_pytest "${JOBS[@]}" >"$log" 2>&1 &
    run_pytest "${ignored[@]}" || status=$?
    wait $! || other_status=$?
    cat "$log"
    rm -f "$log"
    [ "$status" -ne 0 ] && return "$status"
    return "$other_status"
}

# A lint failure does not hide what the tests say, nor do the tests hide it.
lint_status=0
lint || lint_status=$?
test_status=0
if [ $# -gt 0 ]; then
    run_pytest "$@" || test_status=$?
else
    run_all || test_status=$?
fi
[ "$test_status" -ne 0 ] && exit "$test_status"
exit "$lint_status"
