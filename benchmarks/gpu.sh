#!/bin/sh
# What needs a GPU. With no word in front of the options (or `kernels`): verify every kernel against float64 on this machine's GPU, then
# time it beside cuDNN and the roofline. `tune`: make the table that backend="auto" chooses by (python -m sft tune). `steps`: whole segments
# and whole training steps against eager PyTorch. `all`: one after the other, with their defaults. --help lists the options of each. Results
# go to benchmarks/results/, the table to the folder of SFT_CACHE_DIR, which `steps` reads it from, too. Needs a Python with torch, triton and
# what sft itself depends on: PYTHON names it.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
unset TRITON_INTERPRET
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
what=kernels
case ${1:-} in
kernels | tune | steps | all)
    what=$1
    shift
    ;;
esac
case $what in
kernels) exec "$python" "$root/benchmarks/kernels/kernel_bench.py" "$@" ;;
tune) exec "$python" -P -m sft tune "$@" ;;
steps) exec "$python" "$root/benchmarks/kernels/kernel_steps.py" "$@" ;;
all)
    "$0" kernels || echo "some kernels are wrong or do not run: see above" >&2
    "$0" tune || echo "some kernels were refused: see above" >&2
    exec "$0" steps
    ;;
esac
