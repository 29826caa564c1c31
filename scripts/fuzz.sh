#!/usr/bin/env bash
# Requests made up by Schemathesis from the gateway's own OpenAPI document, against `verbatim up` with its engine:
#   scripts/fuzz.sh ENVIRONMENT SECONDS [options of `st run`]
# ENVIRONMENT is a virtual environment with schemathesis. Ends with 1 where an answer is a 5xx, is not what the document
# says, or does not come.
set -euo pipefail
cd "$(dirname "$0")/.."
fuzzer=$1 seconds=$2
shift 2
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# Without a bound a made-up request may ask for as many tokens as the context holds.
cat > "$folder/policy.yaml" <<'POLICY'
version: 1
anonymous: everybody
tenants:
  everybody:
    limits: {max_tokens: 8}
POLICY

"$python" -m gateway.cli up --port "$port" --policy "$folder/policy.yaml" > "$folder/log" 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true; rm -rf "$folder"' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/healthz"; do
    kill -0 "$server" || { cat "$folder/log"; exit 1; }
    sleep 1
done

# The document leaves bounds and null out (gateway/openai_api/openapi.py), so which requests fit it decides nothing.
unfit=positive_data_acceptance,negative_data_rejection,unsupported_method
status=0
"$fuzzer/bin/st" run "http://127.0.0.1:$port/openapi.json" --max-time "$seconds" --continue-on-failure \
    --request-timeout 60 --exclude-checks "$unfit" "$@" || status=$?
# Whatever was sent, it still answers.
curl --silent --show-error --fail "http://127.0.0.1:$port/healthz"
echo
cat "$folder/log"
exit "$status"
