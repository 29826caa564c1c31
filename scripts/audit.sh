#!/usr/bin/env bash
# Secrets in the tree, the Dockerfile's mistakes, and a bill of materials (sbom.json, CycloneDX) of the environment.
# Known vulnerabilities are another step, scripts/audit-dependencies.sh: it needs a service on the network.
# Usage: scripts/audit.sh [FOLDER WITH THE ENVIRONMENT'S COMMANDS]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}

# Without the detectors of mere names and of hexadecimal digits, which take digests of results for secrets. What is left
# looks for private keys, for tokens by their form and for random base64; test_receipt.py holds published test vectors.
git ls-files -z -- . ':!tests/gateway/test_receipt.py' |
    xargs -0 "$bin/detect-secrets-hook" --disable-plugin HexHighEntropyString --disable-plugin KeywordDetector \
        --exclude-lines 'me:pw@'
echo "no secrets in $(git ls-files | wc -l) files"

"$bin/hadolint" Dockerfile
echo "the Dockerfile is in order"

"$bin/cyclonedx-py" environment "$bin/python" --pyproject pyproject.toml --output-reproducible --output-file sbom.json
echo "sbom.json: $("$bin/python" -c 'import json; print(len(json.load(open("sbom.json"))["components"]))') components"
