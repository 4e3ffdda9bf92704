#!/usr/bin/env bash
# Trains and tests with other versions of Python and torch, and prints a table: scripts/check_versions.sh [PYTHON:TORCH ...]
#   PYTHON:TORCH  such as 3.12:2.11 (its newest patch); by default every Python found with every torch below. As TORCH
#                 "newest" is what pip picks unasked, and "lowest" holds every package at pyproject.toml's lower bound.
#   ENVIRONMENTS  folder to keep the environments in (about 7 GB each with torch for GPUs); else each is removed after use
# An environment is made with venv and pip, or with uv where it is on PATH. Exit status 1 where anything failed.

set -u
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHONS="3.10 3.11 3.12 3.13"
TORCHES="2.11 2.12 2.13 2.14 newest"
PATIENCE=600  # seconds for a run or for the unit tests
UNITS="activation_checkpoint attention config_manager conversion_report converter_filter cpu_gemm
data_loader data_sources float8 int8 kernel_substitutes llama loss low_bit_adamw norm optimizer pipeline qwen3 tokenizer transpose_pass"

# Six steps of the debug model: the table shows the last loss. Name, processes, flags.
RUNS=(
    "bf16|1|"
    "float8 tensorwise|1|--model.converters=float8"
    "float8 rowwise|1|--model.converters=float8 --float8.recipe_name=rowwise"
    "int8|1|--model.converters=int8"
    "mx|1|--model.converters=mx --mx.emulate"
    "FSDP 2, float8 gather|2|--model.converters=float8 --float8.enable_fsdp_float8_all_gather"
    "FSDP 2, int8 gather|2|--model.converters=int8 --int8.enable_fsdp_int8_all_gather"
    "TP 2, int8|2|--model.converters=int8 --parallelism.tensor_parallel_degree=2 --training.local_batch_size=4"
    "PP 2|2|--parallelism.pipeline_parallel_degree=2 --training.local_batch_size=4"
    "FSDP 2, resumed|2|--checkpoint.enable_checkpoint --checkpoint.interval=3 --checkpoint.async_mode=async"
)

# Prints an interpreter of version $1.
find_python() {
    local candidate
    for candidate in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python "$(uv python find "$1" 2>/dev/null)"; do
        if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Makes the environment $3 with Python $1 and torch $2.
install() {
    local python constraints="$3/constraints.txt" requirements="$3/requirements.txt"
    python="$(find_python "$1")" || { echo "Python $1 not found" >&2; return 1; }
    mkdir -p "$3"
    # What the project needs, without the project: installing it would write beside its sources.
    sed -n '/^\(dependencies\|report\|dev\) = \[/,/^\]/p' "$ROOT/pyproject.toml" |
        grep -o '"[^"]*"' | tr -d '"' | grep -v '^torchtitan\[' > "$requirements"
    case "$2" in
        newest) : > "$constraints" ;;
        lowest) sed 's/>=\([0-9.]*\)/==\1.*/' "$requirements" > "$constraints" ;;
        *) echo "torch==$2.*" > "$constraints" ;;
    esac
    if command -v uv > /dev/null; then
        uv venv --quiet --allow-existing --python "$python" "$3" &&
            uv pip install --quiet --python "$3/bin/python" -r "$requirements" -c "$constraints"
    else
        "$python" -m venv "$3" &&
            "$3/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" -c "$constraints"
    fi
}

# Trains with Python $1, in so many processes $2, in folder $3, with flags $4...; prints the loss of step 6.
train() {
    local python="$1" processes="$2" folder="$3"
    shift 3
    (cd "$folder" && NGPU="$processes" timeout "$PATIENCE" "$python" -m torchtitan.launch "$ROOT/train.py" \
        --job.config_file="$ROOT/train_configs/debug_model.toml" --job.dump_folder="$folder" --training.steps=6 \
        --training.local_batch_size=$((4 / processes)) --training.global_batch_size=4 --lr_scheduler.decay_ratio=0 \
        --metrics.log_freq=1 "$@") > "$folder/log" 2>&1 &&
        "$python" -c 'import json, sys
losses = {line["step"]: line["loss"] for line in map(json.loads, open(sys.argv[1])) if "loss" in line}
assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1], losses
print("%.3f" % losses[6])' "$folder/metrics.jsonl" 2>> "$folder/log"
}

# Fills CELLS with what came of each check in environment $1.
check() {
    local python="$1/bin/python" logs="$1/logs" run name processes flags folder
    rm -rf "$logs" && mkdir -p "$logs/units"
    CELLS=()
    (cd "$ROOT" && timeout "$PATIENCE" "$python" -m pytest -p no:cacheprovider $(printf 'tests/unit/test_%s.py ' $UNITS)) \
        > "$logs/units/log" 2>&1
    cell $? "$logs/units" "$(grep -oE '[0-9]+ passed' "$logs/units/log")"
    for run in "${RUNS[@]}"; do
        IFS='|' read -r name processes flags <<< "$run"
        folder="$logs/${name//[ ,]/_}"
        mkdir "$folder"
        result="$(train "$python" "$processes" "$folder" $flags)"
        status=$?
        if [[ "$name" == *resumed ]] && [ $status = 0 ]; then  # from step 3 on
            rm -r "$folder/checkpoint/step-6"
            result="$(train "$python" "$processes" "$folder" $flags)" && grep -q "loaded .*step-3" "$folder/log"
            status=$?
        fi
        cell $status "$folder" "$result"
    done
}

# A cell of the table: $3, or, where the status $1 is not 0, that it failed, and the end of the log in folder $2.
cell() {
    if [ "$1" = 0 ]; then
        CELLS+=("$3")
    else
        CELLS+=("FAILED")
        FAILED=1
        echo "FAILED: $2/log" >&2
        tail -n 25 "$2/log" >&2
    fi
}

export PYTHONPATH="$ROOT"
[ "${1:-}" = --help ] && { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0; }
PAIRS="$*"
if [ -z "$PAIRS" ]; then
    for python in $PYTHONS; do
        find_python "$python" > /dev/null || { echo "Python $python not found; skipping it" >&2; continue; }
        for torch in $TORCHES; do PAIRS+=" $python:$torch"; done
    done
fi
for pair in $PAIRS; do
    [[ "$pair" =~ ^3\.[0-9]+:([0-9.]+|newest|lowest)$ ]] || {
        echo "Error: $pair is not PYTHON:TORCH, such as 3.12:2.11, 3.12:newest or 3.12:lowest." >&2
        exit 2
    }
done
FOLDER="${ENVIRONMENTS:-$(mktemp -d)}"
FAILED=0
TABLE="| Python | torch | torchao | units |"
RULE="|---|---|---|---:|"
for run in "${RUNS[@]}"; do TABLE+=" ${run%%|*} |"; RULE+="---:|"; done
TABLE+=$'\n'"$RULE"
DONE=" "
for pair in $PAIRS; do
    environment="$FOLDER/${pair/:/-}"
    echo "$pair ..." >&2
    if ! install "${pair%%:*}" "${pair#*:}" "$environment"; then
        TABLE+=$'\n'"| ${pair%%:*} | ${pair#*:} | not installed |"
        FAILED=1
        continue
    fi
    versions="$("$environment/bin/python" -c 'import platform
from importlib.metadata import version
print(platform.python_version(), "|", version("torch"), "|", version("torchao"))')"
    if [[ "$DONE" != *" $versions "* ]]; then  # "newest" may be one of the others
        check "$environment"
        TABLE+=$'\n'"| $versions |$(printf ' %s |' "${CELLS[@]}")"
        DONE+="$versions "
    fi
    [ -n "${ENVIRONMENTS:-}" ] || rm -rf "$environment"
done
echo "$TABLE"
exit $FAILED
