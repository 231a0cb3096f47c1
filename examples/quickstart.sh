#!/usr/bin/env bash
# Show on a real run what the library promises, and check each word of it.
#
#     bash examples/quickstart.sh
#
# A small GPT is trained on 4 ranks. One of them is killed in the middle of a step;
# the job starts again, and ends with the same bits as if nothing had happened. Then
# it goes on on 6 ranks, and one flipped bit is found before it can do harm.
#
# The package and an MPI are installed into .venv of this clone; the checkpoints go to
# runs/quickstart, which is emptied first. Exit status 0: all came out as said.
set -euo pipefail

run=runs/quickstart/broken
logs=runs/quickstart/logs

main() {
    trap '[[ $? -eq 0 ]] || echo "quickstart: FAILED (logs: $logs)" >&2' EXIT
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    rm -rf runs/quickstart
    mkdir -p "$logs"

    install
    SECONDS=0
    train_without_a_break
    lose_a_rank
    start_again
    go_on_on_six_ranks
    look_at_the_run
    flip_one_bit
    say "All came out as said, in $SECONDS s after the install."
}

install() {
    say "Install the package with its MPI extra into .venv"
    export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
    # Four ranks on two cores: one that waits should let another one run.
    export MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            fail "Python 3.11 or later is needed: apt-get install python3 python3-venv"
        python3 -c 'import ensurepip, venv' 2>/dev/null ||
            fail "Python cannot make a venv: apt-get install python3-venv"
        python3 -m venv .venv
    fi
    show .venv/bin/python -m pip install --quiet -e '.[mpich]'
}

train_without_a_break() {
    say "1. Train to step 40 without a break"
    train unbroken 4 --run runs/quickstart/unbroken --steps 40
    claim "the final state has a digest" grep -q '^digest ' "$logs/unbroken"
}

lose_a_rank() {
    say "2. Train again, and lose rank 2 in the middle of step 27"
    local status=0
    # --wait: else the checkpoint of step 20 might still be on its way at step 27.
    train killed 4 --run $run --steps 40 --wait --kill-rank 2 --kill-step 27 ||
        status=$?
    claim "the job died (exit status $status)" test $status -ne 0
    claim "the newest checkpoint is of step 20" newest_step_is 20
}

start_again() {
    say "3. Start again"
    train resumed 4 --run $run --steps 40
    claim "resumed from step 20" grep -q '^resumed from step 20 ' "$logs/resumed"
    claim "identical: the digest is that of the run without a break" \
        test "$(value_of digest resumed)" = "$(value_of digest unbroken)"
}

go_on_on_six_ranks() {
    say "4. Go on from step 40 on 6 ranks: refused, unless it is asked for"
    local status=0
    train refused 6 --run $run --steps 50 || status=$?
    claim "refused (exit status $status)" test $status -ne 0
    claim "and why: WorldSizeMismatchError" \
        grep -q '^WorldSizeMismatchError: ' "$logs/refused"

    train resharded 6 --run $run --steps 50 --reshard
    claim "resumed from step 40" grep -q '^resumed from step 40 ' "$logs/resharded"
    claim "6 ranks hold the arrays that 4 ranks saved, bit for bit" \
        test "$(value_of 'loaded arrays' resharded)" = "$(value_of arrays resumed)"
    claim "the newest checkpoint is of step 50" newest_step_is 50
}

look_at_the_run() {
    say "5. Look at the run from outside, without MPI"
    show mpickpt ls $run
    show mpickpt show "$(mpickpt latest $run)"
    claim "all checkpoints are whole" show mpickpt verify $run
}

flip_one_bit() {
    say "6. Flip one bit in the shard of rank 3"
    local checkpoint shard status=0
    checkpoint=$(mpickpt latest $run)
    shard=$(basename "$checkpoint"/rank00003-*.h5)
    flip_bit_in_the_middle "$checkpoint/$shard"

    show mpickpt verify "$checkpoint" >"$logs/verify" 2>&1 || status=$?
    cat "$logs/verify"
    claim "verify finds it (exit status $status)" test $status -eq 3
    claim "and names $shard" grep -qF "$shard" "$logs/verify"

    status=0
    train damaged 6 --run $run --steps 60 --restore 50 || status=$?
    claim "load finds it (exit status $status)" test $status -ne 0
    claim "and names $shard" grep -q "^CorruptShardError: .*$shard" "$logs/damaged"

    train passed-over 6 --run $run --steps 50 --reshard
    claim "a plain start passes it over" grep -q '^resumed from step 40 ' "$logs/passed-over"
    claim "and ends with the same arrays" \
        test "$(value_of arrays passed-over)" = "$(value_of arrays resharded)"
    show mpickpt ls $run
}

flip_bit_in_the_middle() {
    python - "$1" <<'END'
import sys

with open(sys.argv[1], "r+b") as shard:
    middle = shard.seek(0, 2) // 2
    shard.seek(middle)
    byte = shard.read(1)[0]
    shard.seek(middle)
    shard.write(bytes([byte ^ 1]))
print(f"{shard.name}: byte {middle} was {byte:#04x}, is {byte ^ 1:#04x}")
END
}

# train LOG RANKS [OPTION...]: run the example; to hang is to fail.
train() {
    local log=$logs/$1 ranks=$2 status=0
    shift 2
    show timeout 300 mpiexec -n "$ranks" python -m mpi4py examples/train_gpt.py "$@" |
        tee "$log" || status=$?
    [[ $status -ne 124 ]] || fail "the ranks hang"
    return $status
}

# show COMMAND...: print it as it could be typed, and run it.
show() {
    echo "\$ $*"
    # An MPI launcher that reads the terminal from the background is stopped by it.
    "$@" </dev/null 2>&1
}

# claim TEXT COMMAND...: the command must succeed for the text to be true.
claim() {
    local text=$1
    shift
    "$@" || fail "not so: $text"
    echo "ok: $text"
}

newest_step_is() {
    local newest
    newest=$(mpickpt latest $run)
    [[ $newest == *-$(printf %010d "$1") ]]
}

value_of() {
    sed -n "s/^$1 //p" "$logs/$2" | grep . || echo "no $1 in $2"
}

say() {
    printf '\n%s\n' "$*"
}

fail() {
    echo "quickstart: $*" >&2
    exit 1
}

main "$@"
