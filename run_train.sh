#!/usr/bin/env bash
# Trains: NGPU=2 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --section.key=value ...
#   NGPU         processes on this machine; by default one for each GPU, or one
#   CONFIG_FILE  TOML file; by default train_configs/debug_model.toml
#   PET_...      options of torchrun: PET_MAX_RESTARTS=3 starts all processes again after one has died; several machines
#                are in docs/multinode.md
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
# Avoids fragmentation of GPU memory.
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec "$PYTHON" -m torchtitan.launch "$ROOT/train.py" \
    --job.config_file="${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}" "$@"
