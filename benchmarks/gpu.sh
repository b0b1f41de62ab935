#!/bin/sh
# Verify every kernel against float64 on this machine's GPU, then time it beside cuDNN and the roofline. Arguments go to
# benchmarks/kernels/kernel_bench.py (--help lists them); results go to benchmarks/results/. Needs a GPU, and a Python with torch,
# triton and what sft itself depends on: PYTHON names it.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
unset TRITON_INTERPRET
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/benchmarks/kernels/kernel_bench.py" "$@"
