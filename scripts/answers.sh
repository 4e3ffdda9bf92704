#!/usr/bin/env bash
# All of docs/answers.md: makes conversations, trains in three stages, asks, exports, and takes a picture of the report
# if Chromium is there. A quarter of an hour on two cores.
#   scripts/answers.sh [FOLDER [--section.key=value ...]]   FOLDER: outputs, or where all is written instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
folder="${1:-outputs}"
mkdir -p "$folder"
"$PYTHON" scripts/make_conversations.py "$folder/questions"
sed -E "s#(\./)?outputs/#$folder/#" docs/examples/answers.toml > "$folder/answers.toml"
CONFIG_FILE="$folder/answers.toml" ./run_train.sh "${@:2}"
question='Which kind of object does `ResourceContainer` name?'
"$PYTHON" -m torchtitan.tools.generate --chat --checkpoint "$folder/answers" --prompt "$question"
"$PYTHON" -m torchtitan.tools.evaluate "$folder/answers" --tasks "$folder/questions/kind.jsonl" "$folder/questions/parameters.jsonl"
"$PYTHON" -m torchtitan.tools.convert to-hf "$folder/answers" "$folder/answers_hf" --dtype float32
if browser="$(command -v chromium || command -v chromium-browser || command -v google-chrome)"; then
    "$browser" --headless --no-sandbox --hide-scrollbars --window-size=1280,860 --virtual-time-budget=5000 \
        --screenshot="$folder/answers.png" "file://$(realpath "$folder/answers/report.html")"
fi
