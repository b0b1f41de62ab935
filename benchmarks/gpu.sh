#!/bin/sh
# What needs a GPU. `all` is one after the other, with their defaults, whatever goes wrong on the way; the others by their word in front of
# the options (without one: kernels), and --help lists the options of each:
#
#   test      every kernel in the cases that `make test` interprets (tiles, borders, ragged sizes, memory of NaN), compiled, on this GPU;
#             and all other tests that need one. Needs pytest and hypothesis, too
#   sanitize  the same launches at a small size under compute-sanitizer, which comes with the CUDA toolkit (COMPUTE_SANITIZER names it):
#             memory beyond a tensor, and races in shared memory
#   kernels   verify every kernel against float64, then time it beside cuDNN and the roofline
#   tune      make the table that backend="auto" chooses by (python -m sft tune)
#   steps     whole segments and whole training steps against eager PyTorch; by the table, where there is one
#
# Results go to benchmarks/results/ (RESULTS names another folder), with a copy of the table, which is in the folder of SFT_CACHE_DIR.
# Nothing is downloaded. Needs a Python (PYTHON names it) with torch 2.11 or newer for CUDA, its triton, and numpy, sympy, networkx and
# rich. An assembler for Hopper from CUDA 13.3 on, named by TRITON_PTXAS_PATH, lets kernels fuse what older ones get wrong
# (kernels/README.md); a table is for one assembler.
# Ends with 0 if all was well, with 1 if something was wrong or did not run, with 2 if nothing can run here.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
unset TRITON_INTERPRET
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
results=${RESULTS:-$root/benchmarks/results}
what=kernels
case ${1:-} in
all | test | sanitize | kernels | tune | steps)
    what=$1
    shift
    ;;
esac

say() { echo "benchmarks/gpu.sh: $*" >&2; }

# What is missing, by name: nothing of ours is imported before all of it is there.
require() {
    missing=$("$python" -P -c 'import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@") || { say "$python does not run"; exit 2; }
    [ -z "$missing" ] || { say "$python has no $missing; install what is missing, or name another Python by PYTHON"; exit 2; }
}

# Nor is anything begun on a machine without a GPU.
require_gpu() {
    "$python" -P -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { say "no CUDA device here, and nothing else can be measured; run it on a machine with a GPU"; exit 2; }
}

find_sanitizer() {
    for each in "${COMPUTE_SANITIZER:-compute-sanitizer}" /usr/local/cuda/bin/compute-sanitizer /opt/cuda/bin/compute-sanitizer; do
        if command -v "$each" >/dev/null 2>&1; then
            echo "$each"
            return
        fi
    done
}

require torch numpy sympy networkx rich
case $what in
test)
    require triton pytest hypothesis
    require_gpu
    cd "$root"
    status=0
    interpreted="tests/kernels"
    # Names of files have no blanks.
    SFT_KERNELS_ON_GPU=1 "$python" -P -m pytest -p no:cacheprovider -q -k interpreted --continue-on-collection-errors $interpreted "$@" || status=1
    "$python" -P -m pytest -p no:cacheprovider -q -m gpu --continue-on-collection-errors $(grep -rl 'mark\.gpu' tests --include='test_*.py') "$@" || status=1
    exit $status
    ;;
sanitize)
    require triton
    require_gpu
    sanitizer=$(find_sanitizer)
    [ -n "$sanitizer" ] || { say "no compute-sanitizer here; it comes with the CUDA toolkit, COMPUTE_SANITIZER names it"; exit 2; }
    status=0
    for tool in memcheck racecheck; do
        # Without PyTorch's cache each tensor is an allocation of its own, which the tool knows the end of.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 1 \
            "$python" "$root/benchmarks/kernels/kernel_bench.py" --verify --name "gpu-kernels-$tool" --out "$results" "$@" || status=1
    done
    exit $status
    ;;
kernels) exec "$python" "$root/benchmarks/kernels/kernel_bench.py" --out "$results" "$@" ;;
tune)
    case " $* " in *" --help "* | *" -h "*) exec "$python" -P -m sft tune --help ;; esac
    require_gpu
    status=0
    "$python" -P -m sft tune "$@" || status=$?
    # What was measured here, beside the other results.
    "$python" -P -c 'import datetime, pathlib, shutil, sys
from sft.torch_runtime.profiling import table_folders
for table in (path for folder in table_folders() for path in sorted(folder.glob("*.json"))):
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(table, pathlib.Path(sys.argv[1], f"{datetime.date.today().isoformat()}-gpu-table-{table.name}"))' "$results"
    exit $status
    ;;
steps) exec "$python" "$root/benchmarks/kernels/kernel_steps.py" --out "$results" "$@" ;;
all)
    require triton
    require_gpu
    mkdir -p "$results"
    log=$results/$(date +%Y-%m-%d)-gpu.log
    state=$(mktemp)
    trap 'rm -f "$state"' EXIT
    : >"$log"
    status=0
    for stage in test sanitize kernels tune steps; do
        echo "== $stage, $(date +%H:%M:%S)" | tee -a "$log"
        { "$0" "$stage" 2>&1 && echo 0 >"$state" || echo $? >"$state"; } | tee -a "$log"
        code=$(cat "$state")
        if [ "$code" != 0 ]; then
            status=1
            say "$stage ended with $code, see above; the rest goes on" 2>&1 | tee -a "$log"
        fi
    done
    echo "== done, $(date +%H:%M:%S): $log" | tee -a "$log"
    exit $status
    ;;
esac
