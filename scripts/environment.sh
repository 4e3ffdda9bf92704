# Sourced by run_train.sh and run_tests.sh. Sets PYTHON to an interpreter that has what this project needs: the one in
# use if it has everything, else .venv's, which is made or brought up to date first.
#   EXTRA  of pyproject.toml's extras: report, the default; dev, which also has what the tests need; or empty

EXTRA="${EXTRA-report}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# glibc then asks for large pages: 5 to 9% of a step on a CPU.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
    if python_fits "$candidate"; then BASE="$candidate"; break; fi
done
if [ -z "${BASE:-}" ]; then
    echo "Error: no Python 3.10 to 3.13 found; install one, or set PYTHON=/path/to/python" >&2
    exit 2
fi

missing="$("$BASE" "$ROOT/scripts/missing.py" $EXTRA 2> /dev/null)" || missing="torch and all else"
has_torch() { ! grep -q '^torch\b' <<< "$missing"; }
if [ -z "$missing" ]; then
    PYTHON="$BASE"
elif [ ! -x "$ROOT/.venv/bin/python" ] && has_torch && CARRIED="$("$BASE" "$ROOT/scripts/carried.py")" \
    && [ -n "$CARRIED" ]; then  # packages that were brought along instead
    PYTHON="$BASE"
    export PYTHONPATH="$PYTHONPATH:$CARRIED"
else
    PYTHON="$ROOT/.venv/bin/python"
    stamp="$ROOT/.venv/.installed${EXTRA:+-$EXTRA}"
    wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Setting up .venv (once; takes a few minutes if packages must be downloaded) ..."
        constraints="$(mktemp)"
        log="$(mktemp)"
        site=""
        if has_torch; then  # use that torch, and hold pip to it
            site="--system-site-packages"
            grep -v -e '^torch==' -e '^triton==' "$ROOT/constraints.txt" > "$constraints"
            "$BASE" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> "$constraints"
        else
            cp "$ROOT/constraints.txt" "$constraints"
        fi
        made=""
        [ -x "$PYTHON" ] || made="yes"
        { [ -z "$made" ] || "$BASE" -m venv $site "$ROOT/.venv"; } > "$log" 2>&1 &&
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --retries 1 -c "$constraints" \
                -e "$ROOT${EXTRA:+[$EXTRA]}" >> "$log" 2>&1 || {
            echo "Error: could not install the packages into .venv (see $log). Without a network, use an environment" \
                "that has them, or bring carried/ along (scripts/carry_for_gpu.sh)." >&2
            [ -z "$made" ] || rm -rf "$ROOT/.venv"
            rm -f "$constraints"
            exit 1
        }
        rm -f "$constraints" "$log"
        echo "$wanted" > "$stamp"
    fi
fi
