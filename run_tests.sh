#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest's arguments]
export EXTRA=dev
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
cd "$ROOT" && exec "$PYTHON" -m pytest "$@"
