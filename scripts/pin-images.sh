#!/usr/bin/env bash
# Writes deploy/docker/constraints.txt: the newest versions that the images' packages may have, as installed today.
# Run it before a release, and the tests with what it wrote. Usage: scripts/pin-images.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${1:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet build '.[engine,otel]'
{
    echo "# Written by scripts/pin-images.sh. torch is pinned in pyproject.toml, and comes from an index of its own."
    "$work/venv/bin/pip" freeze --exclude verbatim --exclude torch
} >deploy/docker/constraints.txt
