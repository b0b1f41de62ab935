#!/usr/bin/env bash
# Checks and measurements that need a GPU, in six stages of at most ten minutes, the most telling first:
#
#   1 check    sft doctor, the smoke test (float64 exactness and memory of four networks in five modes), tests marked gpu,
#              rates of the GPU and its host                                                                                 3 minutes
#   2 steps    training steps against eager PyTorch in bfloat16, PyTorch's operators, with traces and memory histories       8 minutes
#   3 test     every Triton kernel in the cases that `make test` interprets, compiled                                         4 minutes
#   4 kernels  every kernel against float64, then its time next to cuDNN's and the roofline                                   8 minutes
#   5 tune     the table that backend="auto" selects by (python -m sft tune)                                                  9 minutes
#   6 rest     steps with backend="auto" and "triton", then the kernels under compute-sanitizer (memcheck, racecheck)        10 minutes
#
#   benchmarks/gpu.sh --stage 1                  one stage (a number or a name; several are allowed), or `all` for all of them
#   benchmarks/gpu.sh --stage 2 --minutes 5      at most five minutes for each stage
#   benchmarks/gpu.sh --stage 1 --out results    folder of the results (default: $OUT, then $RESULTS, then benchmarks/results)
#   benchmarks/gpu.sh all --dry-run              every command on the CPU, at small sizes, to try the script
#
# All results are packed into one archive, <date>-gpu-<stage>.tar.gz (<date>-gpu.tar.gz for several stages), after each command, and also
# when the script is stopped by a signal or a stage has no time left. A later stage uses the table of stage 5, if it has the same --out. Kernels that benchmarks/kernels/kernel_precompile.py
# compiled on a machine without a GPU, into build/triton-cache, are used if they are for this Triton.
#
# A word in front of options runs one command with these options, without a time limit: kernels, steps, tune, test, sanitize
# (`gpu.sh kernels --help`; sanitize takes the options of kernels). Without any argument: kernels.
#
# Nothing is downloaded. Needs a Python (PYTHON names it) with torch 2.11 or newer for CUDA, its triton, and numpy, sympy, networkx and
# rich; for tests pytest and hypothesis, and pytest-xdist to run eight at a time. compute-sanitizer comes with the CUDA toolkit
# (COMPUTE_SANITIZER names it). An assembler for Hopper from CUDA 13.3 on, named by TRITON_PTXAS_PATH, lets kernels fuse what older ones
# get wrong (kernels/README.md); a table is for one assembler.
# Ends with 0 if all was well, with 1 if something was wrong, did not run or had no time, with 2 if nothing can run here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
unset TRITON_INTERPRET
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
results=${OUT:-${RESULTS:-$root/benchmarks/results}}
stages=(check steps test kernels tune rest)
dry_run=

say() { echo "benchmarks/gpu.sh: $*" >&2; }

# Missing packages by name; none of ours is imported before.
require() {
    local missing
    missing=$("$python" -P -c 'import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@") || { say "$python does not run"; exit 2; }
    [ -z "$missing" ] || { say "$python has no $missing; install what is missing, or name another Python by PYTHON"; exit 2; }
}

require_gpu() {
    "$python" -P -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { say "no CUDA device here, and nothing else can be measured; run it on a machine with a GPU"; exit 2; }
}

has() { "$python" -P -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

find_sanitizer() {
    local each
    for each in "${COMPUTE_SANITIZER:-compute-sanitizer}" /usr/local/cuda/bin/compute-sanitizer /opt/cuda/bin/compute-sanitizer; do
        if command -v "$each" >/dev/null 2>&1; then
            echo "$each"
            return
        fi
    done
}

# -- stages ---------------------------------------------------------------------------------------------------------------------------

children=()
background_logs=()
stage=
stage_end=0
failed=0
work=
archive=

minutes_of() {
    case $1 in
    check) echo 3 ;;
    test) echo 4 ;;
    steps | kernels) echo 8 ;;
    tune) echo 9 ;;
    rest) echo 10 ;;
    esac
}

# Seconds that the stage has left.
seconds_left() { echo $((stage_end - $(date +%s))); }

# The same in minutes, less half a minute to write results, for the --minutes of a script.
minutes_left() {
    local seconds=$(($(seconds_left) - 30))
    if [ "$seconds" -lt 6 ]; then seconds=6; fi
    printf '%d.%02d\n' $((seconds / 60)) $((seconds % 60 * 100 / 60))
}

# Start a command with the time that the stage has left, in the background: a shell handles no signal while it waits for a command in the
# foreground. Fails if no time is left.
start() {
    local seconds limit=()
    seconds=$(seconds_left)
    echo "== $stage: $*, $(date +%H:%M:%S), $seconds s left"
    if [ "$seconds" -le 0 ]; then
        say "no time left for it"
        failed=1
        return 1
    fi
    if command -v timeout >/dev/null 2>&1; then limit=(timeout -k 10 "$seconds"); fi
    ${limit[@]+"${limit[@]}"} "$@" &
    children+=("$!")
}

# Wait for a command that was started: its process and its words.
finish() {
    local pid=$1 code=0
    shift
    wait "$pid" || code=$?
    if [ "$code" != 0 ]; then
        failed=1
        if [ "$code" = 124 ] || [ "$code" = 137 ]; then say "out of time: $*"; else say "ended with $code: $*"; fi
    fi
}

# Run a command. Its output goes to the terminal and to the log.
attempt() {
    if ! start "$@"; then return; fi
    finish "${children[-1]}" "$@"
    unset 'children[-1]'
    pack
}

# Run a command in the background. Its output follows when `join` is called.
in_background() {
    local log
    log=$(mktemp)
    exec 5>&1
    if start "$@" >"$log" 2>&1; then background_logs+=("$log"); fi
    head -n 1 "$log" >&5
    exec 5>&-
}

# Wait for the commands in the background.
join() {
    local number
    for number in "${!background_logs[@]}"; do
        finish "${children[$number]}" "the command of the following lines"
        cat "${background_logs[$number]}"
        rm -f "${background_logs[$number]}"
    done
    children=()
    background_logs=()
    pack
}

# Pack the results so far into the archive.
pack() {
    local each folders=()
    for each in "${wanted[@]}"; do
        if [ -d "$results/gpu-$each" ]; then folders+=("gpu-$each"); fi
    done
    tar -czf "$archive.part" -C "$results" "${folders[@]}" && mv "$archive.part" "$archive"
}

# Pack and leave; commands that run are stopped first.
stop() {
    local each
    trap - TERM INT HUP
    for each in ${children[@]+"${children[@]}"}; do
        kill -TERM "$each" 2>/dev/null || true
        wait "$each" 2>/dev/null || true
    done
    join
    say "stopped in stage $stage"
    pack
    exit 1
}

# Tests, eight at a time if pytest-xdist is there. Names of files have no blanks.
gpu_tests() {
    local each files=() options=(-p no:cacheprovider -p no:benchmark -q --continue-on-collection-errors)
    if has xdist; then options+=(-n "${TEST_PROCESSES:-8}"); fi
    if [ -n "$dry_run" ]; then options=(-p no:cacheprovider -p no:benchmark -q --collect-only); fi
    if [ "$1" = kernels ]; then
        shift
        SFT_KERNELS_ON_GPU=1 run_tests "${options[@]}" -k interpreted "$root/tests/kernels${dry_run:+/rows}" "$@"
        return
    fi
    shift
    while IFS= read -r each; do files+=("$each"); done < <(cd "$root" && grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
    if [ -n "$dry_run" ]; then files=("${files[0]}"); fi
    run_tests "${options[@]}" -m gpu --rootdir "$root" "${files[@]/#/$root/}" "$@"
}

run_tests() { $runner env PYTHONDONTWRITEBYTECODE=1 "$python" -P -m pytest -c "$root/pyproject.toml" "$@"; }

runner=

stage_check() {
    attempt "$python" -P -m sft doctor
    if [ -n "$dry_run" ]; then
        attempt "$python" "$root/benchmarks/gpu_smoke.py" --device cpu --only u-net --modes strips --size 48 40 --out "$work"
    else
        in_background "$python" "$root/benchmarks/gpu_smoke.py" --processes 4 --minutes "$(minutes_left)" --out "$work"
    fi
    gpu_tests marked
    join
    if [ -n "$dry_run" ]; then
        attempt "$python" "$root/benchmarks/gpu_rates.py" --device cpu --minutes 0.05 --out "$work"
    else
        attempt "$python" "$root/benchmarks/gpu_rates.py" --minutes "$(minutes_left)" --out "$work"
    fi
}

# Steps with one backend.
steps_of() {
    local backend=$1 options=(--dry-run --only "vgg block 1")
    shift
    if [ -z "$dry_run" ]; then options=(--minutes "$(minutes_left)" --together); fi
    attempt "$python" "$root/benchmarks/kernels/kernel_steps.py" "${options[@]}" --dtypes bf16 --backends "$backend" \
        --name "gpu-steps-$backend" --out "$work" "$@"
}

stage_steps() { steps_of aten --trace; }

stage_test() { gpu_tests kernels; }

stage_kernels() {
    if [ -n "$dry_run" ]; then
        attempt env TRITON_INTERPRET=1 "$python" "$root/benchmarks/kernels/kernel_bench.py" --dry-run --only rows --out "$work"
    else
        attempt "$python" "$root/benchmarks/kernels/kernel_bench.py" --minutes "$(minutes_left)" --out "$work"
    fi
}

stage_tune() {
    if [ -n "$dry_run" ]; then
        attempt "$python" -P -m sft tune --dry-run sft.cli.tune:_UNet --input 1x3x256x256 --dtype bfloat16 --budget 1GiB
    else
        attempt "$python" -P -m sft tune --minutes "$(minutes_left)" --dtype bfloat16
    fi
    mkdir -p "$work/table"
    find "$SFT_CACHE_DIR" -path '*/kernels/*.json' -exec cp {} "$work/table" \;
    pack
}

stage_rest() {
    local tool sanitizer
    steps_of auto
    if [ -z "$dry_run" ]; then steps_of triton; fi
    sanitizer=$(find_sanitizer)
    if [ -n "$dry_run" ]; then
        attempt "$python" "$root/benchmarks/kernels/kernel_bench.py" --list --only rows
        return
    fi
    if [ -z "$sanitizer" ]; then
        say "no compute-sanitizer here; it comes with the CUDA toolkit, COMPUTE_SANITIZER names it"
        failed=1
        return
    fi
    for tool in memcheck racecheck; do
        attempt env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 1 \
            "$python" "$root/benchmarks/kernels/kernel_bench.py" --verify --minutes "$(minutes_left)" \
            --name "gpu-kernels-$tool" --out "$work"
    done
}

# A stage, by its name: its commands, its log and its archive.
run_stage() {
    local logger
    stage=$1
    stage_end=$(($(date +%s) + $(awk -v minutes="${minutes:-$(minutes_of "$stage")}" 'BEGIN { printf "%d", 60 * minutes + 0.999 }')))
    work=$results/gpu-$stage
    mkdir -p "$work"
    trap stop TERM INT HUP
    runner=attempt
    exec 3>&1 4>&2 > >(tee -a "$work/log.txt") 2>&1
    logger=$!
    failed=0
    "stage_$stage"
    echo "== $stage: done, $(date +%H:%M:%S), $([ "$failed" = 0 ] && echo 'all well' || echo 'something was wrong, see above')"
    exec 1>&3 2>&4 3>&- 4>&-
    wait "$logger" || true
    runner=
    pack
    trap - TERM INT HUP
    return "$failed"
}

# The name of a stage, given its number or its name.
stage_name() {
    local number each
    for number in "${!stages[@]}"; do
        each=${stages[$number]}
        if [ "$1" = "$each" ] || [ "$1" = $((number + 1)) ]; then
            echo "$each"
            return
        fi
    done
    say "no stage $1; there are 1 to 6: ${stages[*]}"
    return 2
}

run_stages() {
    local wanted=() minutes='' each status=0 name
    while [ $# -gt 0 ]; do
        case $1 in
        all) wanted=("${stages[@]}") ;;
        --dry-run) dry_run=1 ;;
        --stage | --minutes | --out)
            [ $# -gt 1 ] || { say "$1 needs a value"; exit 2; }
            case $1 in
            --stage)
                each=$(stage_name "$2") || exit 2
                wanted+=("$each")
                ;;
            --minutes)
                [[ $2 =~ ^[0-9]+([.][0-9]+)?$ && $2 =~ [1-9] ]] || { say "--minutes $2: give a positive number"; exit 2; }
                minutes=$2
                ;;
            --out) results=$2 ;;
            esac
            shift
            ;;
        *) say "unknown argument $1; the first lines of $0 describe the arguments"; exit 2 ;;
        esac
        shift
    done
    [ ${#wanted[@]} -gt 0 ] || wanted=("${stages[@]}")
    require torch numpy sympy networkx rich triton
    case " ${wanted[*]} " in *" check "* | *" test "*) require pytest hypothesis ;; esac
    if [ -n "$dry_run" ]; then export CUDA_VISIBLE_DEVICES=; else require_gpu; fi
    mkdir -p "$results"
    results=$(cd "$results" && pwd)
    name=gpu
    if [ ${#wanted[@]} = 1 ]; then name=gpu-${wanted[0]}; fi
    archive=$results/$(date +%Y-%m-%d)-$name.tar.gz
    export SFT_CACHE_DIR="${SFT_CACHE_DIR:-$results/cache}"
    mkdir -p "$SFT_CACHE_DIR"
    if [ -z "${TRITON_CACHE_DIR:-}" ] && [ -d "$root/build/triton-cache" ]; then export TRITON_CACHE_DIR="$root/build/triton-cache"; fi
    for each in "${wanted[@]}"; do run_stage "$each" || status=1; done
    exit $status
}

# -- one command ------------------------------------------------------------------------------------------------------------------------

case ${1:-} in
all | --stage | --dry-run | --minutes) run_stages "$@" ;;
esac
case "${1:-} $* " in "--out "*" --stage "* | "--out "*" --dry-run "* | "--out "*" --minutes "*) run_stages "$@" ;; esac
what=kernels
case ${1:-} in
test | sanitize | kernels | tune | steps)
    what=$1
    shift
    ;;
esac
require torch numpy sympy networkx rich
case $what in
test)
    require triton pytest hypothesis
    require_gpu
    status=0
    gpu_tests kernels "$@" || status=1
    gpu_tests marked "$@" || status=1
    exit $status
    ;;
sanitize)
    require triton
    require_gpu
    sanitizer=$(find_sanitizer)
    [ -n "$sanitizer" ] || { say "no compute-sanitizer here; it comes with the CUDA toolkit, COMPUTE_SANITIZER names it"; exit 2; }
    status=0
    for tool in memcheck racecheck; do
        # Without PyTorch's cache each tensor is an allocation of its own, so the tool knows its end.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 1 \
            "$python" "$root/benchmarks/kernels/kernel_bench.py" --verify --name "gpu-kernels-$tool" --out "$results" "$@" || status=1
    done
    exit $status
    ;;
kernels) exec "$python" "$root/benchmarks/kernels/kernel_bench.py" --out "$results" "$@" ;;
tune)
    case " $* " in *" --help "* | *" -h "* | *" --dry-run "*) exec "$python" -P -m sft tune "$@" ;; esac
    require_gpu
    status=0
    "$python" -P -m sft tune "$@" || status=$?
    # The table, next to the other results.
    "$python" -P -c 'import datetime, pathlib, shutil, sys
from sft.torch_runtime.profiling import table_folders
for table in (path for folder in table_folders() for path in sorted(folder.glob("*.json"))):
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(table, pathlib.Path(sys.argv[1], f"{datetime.date.today().isoformat()}-gpu-table-{table.name}"))' "$results"
    exit $status
    ;;
steps) exec "$python" "$root/benchmarks/kernels/kernel_steps.py" --out "$results" "$@" ;;
esac
