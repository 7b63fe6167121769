#!/usr/bin/env bash
# From a fresh clone to a trained model: installs into .venv and runs the main job. Safe to run again.
# Usage: scripts/quickstart.sh [KEY=VALUE ...]      as for python -m trainer
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh cpu
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
printf '\033[1m==> %s\033[0m\n' "python -m trainer $*"
code=0
.venv/bin/python -m trainer "$@" || code=$?
shows= # an option that only prints something
for argument in "$@"; do
  case $argument in --help | -h | --version | --dry-run | --cfg* | -c) shows=1 ;; esac
done
if [ -n "$shows" ]; then exit "$code"; fi
case $code in
  0) printf '\n%s\n' "Done. Metrics: metrics.jsonl and tb/ in the run directory; timeline: trace.json at ui.perfetto.dev." \
       "Next: docs/quickstart.md, or .venv/bin/python -m trainer --help" ;;
  130) printf '\nInterrupted. The same command with run_dir=DIRECTORY resumes from the last checkpoint.\n' ;;
  2) printf '\nThe run cannot be made as configured; what to change is above.\n' >&2 ;;
  *) printf '\nThe run ended with exit code %s; the reason is above, and in log.txt of the run directory.\n' "$code" >&2 ;;
esac
exit "$code"
