#!/usr/bin/env bash
# Secrets in the tree, the Dockerfile's mistakes, and a bill of materials (sbom.json, CycloneDX) of the environment.
# Known vulnerabilities are another step, scripts/audit-dependencies.sh: it needs a service on the network.
# Usage: scripts/audit.sh [FOLDER WITH THE ENVIRONMENT'S COMMANDS]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}

# Without the detectors of mere names and of hexadecimal digits, which take digests of results for secrets. Tests make up
# credentials and hold published test vectors; there only what has the form of a real key or token counts.
secrets() {
    xargs -0 "$bin/detect-secrets-hook" --disable-plugin HexHighEntropyString --disable-plugin KeywordDetector "$@"
}
git ls-files -z -- . ':!tests' | secrets
git ls-files -z -- tests | secrets --disable-plugin Base64HighEntropyString --disable-plugin BasicAuthDetector
echo "no secrets in $(git ls-files | wc -l) files"

"$bin/hadolint" Dockerfile
echo "the Dockerfile is in order"

"$bin/cyclonedx-py" environment "$bin/python" --pyproject pyproject.toml --output-reproducible --output-file sbom.json
echo "sbom.json: $("$bin/python" -c 'import json; print(len(json.load(open("sbom.json"))["components"]))') components"
