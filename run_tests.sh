#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest's arguments], as -n 0 for one at a time
export EXTRA=dev
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
unset PYTHONDONTWRITEBYTECODE  # images set it; hundreds of processes would each compile this project, and all tests
export PYTEST_XDIST_AUTO_NUM_WORKERS="${PYTEST_XDIST_AUTO_NUM_WORKERS:-$(($(getconf _NPROCESSORS_ONLN) * 3 / 2))}"  # many tests wait
cd "$ROOT" && exec "$PYTHON" -m pytest -n auto --dist worksteal "$@"
