#!/usr/bin/env bash
# DAPO on Qwen2.5-7B with DAPO-Math-17k (configs/dapo_7b.yaml): 4 learners next to 4 engines, on one host with 8 accelerators.
# Model and data come from the Hugging Face hub on first use. docs/benchmarks.md says which runs have been made.
# Usage: scripts/dapo_7b.sh [KEY=VALUE ...]      e.g. run_dir=runs/dapo (the same command then continues after a stop)
set -euo pipefail
cd "$(dirname "$0")/.."
die() { printf 'dapo_7b: %s\n' "$*" >&2; exit 2; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
backend=$("$python" -c 'from weight_sync.device import get_backend; print(get_backend("auto").name)') ||
  die "Tandem does not import in $python; install it first, e.g. pip install -c constraints/cuda.txt -e \".[cuda]\", or set PYTHON"
if [ "$backend" = cpu ] && [[ ! " $* " =~ " "(--dry-run|--cfg|--help)[\ =] ]]; then # these show something and need none
  die "found no accelerator; --dry-run --device-memory-gib 80 plans for some, and scripts/quickstart.sh runs on this machine"
fi
printf '\033[1m==> %s\033[0m\n' "python -m trainer --config-name dapo_7b $*"
exec "$python" -m trainer --config-name dapo_7b "$@"
