#!/usr/bin/env bash
# Time from a clone to a first result: clone, install, demo, then a score and a plan of one's own.
#
#     benchmarks/first_result.sh [REPOSITORY] [OUT.md] [NOTE]
#
# KEEP=DIR keeps the folder that the demo leaves. Every stage says its wall clock and the processor seconds of its own, which other work on the machine does not change much.
set -euo pipefail
repository=$(realpath "${1:-.}") out=$(realpath -m "${2:-benchmarks/results/first_result.md}") note=${3:-}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} TIMEFORMAT='%R %U %S'
rows=() wall=0 own=0

stage() { # NAME COMMAND...
    local name=$1 took
    shift
    took=$({ time "$@" >"$place/log" 2>&1 || { tail -20 "$place/log" >&2; exit 1; }; } 2>&1)
    read -r real user system <<<"$(tail -1 <<<"$took")"
    wall=$(echo "$wall + $real" | bc) own=$(echo "$own + $user + $system" | bc)
    rows+=("| $name | $(printf %.0f "$real") | $(printf %.0f "$(echo "$user + $system" | bc)") |")
    echo "$name: $real s"
}

stage "\`git clone\`" git clone -q "$repository" "$place/clone"
cd "$place/clone"
stage "\`make install\`" make install
stage "\`make demo\`: the main job, a plan, a pruned model, a verdict" make demo
stage "\`layerbudget score demo\`" .venv/bin/layerbudget score demo -o scores.json
stage "\`layerbudget plan sparsity scores.json --sparsity 0.5\`" .venv/bin/layerbudget plan sparsity scores.json --sparsity 0.5 -o plan.json
test -s plan.json
[ -z "${KEEP:-}" ] || cp -r layerbudget-demo "$KEEP"

{
    echo "# From a clone to a first result"
    echo
    echo "Made by \`benchmarks/first_result.sh\` on $(date -u +%F): $(getconf _NPROCESSORS_ONLN) processors, threads: $OMP_NUM_THREADS, packages from a local index${note:+; $note}."
    echo
    echo "| stage | seconds | processor seconds |"
    echo "|---|---:|---:|"
    printf '%s\n' "${rows[@]}"
    echo "| together | $(printf %.0f "$wall") | $(printf %.0f "$own") |"
} >"$out"
cat "$out"
