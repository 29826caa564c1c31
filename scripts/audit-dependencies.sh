#!/usr/bin/env bash
# Looks up known vulnerabilities of what the images install. Asks pypi.org's advisory database, and fails where it finds
# one. A mirror that serves packages alone has no such database; then each package is reported as skipped, which fails too.
# Usage: scripts/audit-dependencies.sh [FOLDER WITH THE ENVIRONMENT'S COMMANDS]
set -euo pipefail
cd "$(dirname "$0")/.."
"${1:-.venv/bin}/pip-audit" --strict --no-deps --disable-pip --requirement deploy/docker/constraints.txt
