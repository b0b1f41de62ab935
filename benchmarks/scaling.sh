#!/bin/sh
# Time one training step of one image on 1, 2, 4, ... devices of this machine, a band each: strong scaling. Arguments go to
# benchmarks/scaling.py (--help lists them). DEVICES is the largest number (all GPUs by default; without GPUs that of gloo processes).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
bin=${BIN:-$root/.venv/bin}
devices=${DEVICES:-$("$bin/python" -P -c 'import torch; print(max(1, torch.cuda.device_count()))')}
count=1
while [ "$count" -le "$devices" ]; do
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$bin/torchrun" --standalone --nproc-per-node "$count" \
        "$root/benchmarks/scaling.py" --measure --threads 1 "$@"
    count=$((count * 2))
done
