#!/usr/bin/env bash
# Fills carried/ with the packages that ./run_tests.sh -m gpu and python -m benchmarks gpu need besides torch and NumPy,
# and with the CPU's losses that the tests compare with, for a machine with a GPU but no network, in some minutes:
# scripts/carry_for_gpu.sh [PYTHON [ARCHITECTURE]]
#   PYTHON        version of Python on that machine, x86-64 Linux; by default 3.12
#   ARCHITECTURE  of its GPU: 90 for H100 and H200, the default; 100 for B200
# Copy the checkout there together with carried/; scripts/carried.py then finds the packages. carried/*/peer has the
# trainer that benchmarks/gpu.py compares with; carried/nccl lets several ranks share the GPU in tests, which alone need it.
if [[ ! "${1:-3.12}" =~ ^3\.1[0-3]$ || ! "${2:-90}" =~ ^[0-9]+$ ]]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [ "$1" = --help ] && exit 0 || exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
WANTED="${1:-3.12}"
FOLDER="$ROOT/carried/$WANTED"
LIMIT=60  # MiB

download() {  # into folder $1, the packages $2...
    local folder="$1" platforms=() tag
    shift
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux1; do
        platforms+=(--platform "${tag}_x86_64")
    done
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version "$WANTED" \
        --implementation cp "${platforms[@]}" --dest "$folder" "$@" || exit 1
}

rm -rf "$FOLDER"
download "$FOLDER" -c "$ROOT/constraints.txt" torchao pydantic tomli_w sentencepiece safetensors tqdm fsspec \
    universal_pathlib pytest pytest-timeout pytest-xdist
download "$FOLDER/peer" --no-deps torchtitan==0.1.0  # benchmarks/gpu_peer.py does without what it imports
"$PYTHON" "$ROOT/scripts/small_nccl.py" "$ROOT/carried/nccl" "${2:-90}" || exit 1
PYTHONPATH="$ROOT:$ROOT/tests/helpers" "$PYTHON" "$ROOT/tests/gpu/place.py" || exit 1
size="$(du -scm "$FOLDER" "$ROOT/carried/nccl" "$ROOT/carried/references" | tail -1 | cut -f1)"
echo "carried/: $(find "$FOLDER" -name '*.whl' | wc -l) packages for Python $WANTED, $size MiB with NCCL and references"
if [ "$size" -ge "$LIMIT" ]; then
    echo "Error: all must be smaller than $LIMIT MiB." >&2
    exit 1
fi
