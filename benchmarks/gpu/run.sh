#!/bin/sh
# sh benchmarks/gpu/run.sh timing|quality|tests OUT [SHAPE]
set -eu
cd "$(dirname "$0")/../.."
what=$1 out=$2 shape=${3:-mistral-7b}
: "${PYTHON:=python3}" "${DEVICE:=cuda}" "${SAMPLES:=128}" "${LENGTH:=2048}" "${BATCH:=8}" "${STEPS:=1500}" "${WIDTH:=768}" "${DEPTH:=12}" "${ROWS:=64}"
: "${SPARSITIES:=0.5 0.6 0.7}" "${WINDOWS:=96}"
mkdir -p "$out"
case $what in
timing)
    [ -f "$out/$shape/config.json" ] || $PYTHON -m benchmarks.size random_models "$shape" "$out/$shape"
    $PYTHON -m benchmarks.size tasks "$out/$shape" --device "$DEVICE" --samples "$SAMPLES" --length "$LENGTH" --batch-size "$BATCH" \
        --name "$shape-$DEVICE" --scratch "$out" --out "$out" --tasks walk perplexity wanda sparsegpt fisher-trace measure rank-gain
    ;;
quality)
    [ -f "$out/model/config.json" ] || $PYTHON -m benchmarks.gpu.train "$out/model" --device "$DEVICE" --steps "$STEPS" --width "$WIDTH" --depth "$DEPTH" --batch "$ROWS"
    for sparsity in $SPARSITIES; do
        $PYTHON -m layerbudget compare "$out/model" --scores fisher-gram --rules mdl,owl,alphapruning --sparsity "$sparsity" \
            --samples 16 --length 128 --windows "$WINDOWS" --device "$DEVICE" -o "$out/compare-$sparsity"
    done
    ;;
tests)
    $PYTHON -m pytest -q tests/execution/test_cuda.py
    ;;
*)
    echo "what to do: timing, quality or tests" >&2
    exit 2
    ;;
esac
