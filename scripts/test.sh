#!/usr/bin/env bash
# Every check and test that needs no accelerator. Makes .venv if needed. Safe to run again.
# Usage: scripts/test.sh [STAGE ...]      stages: lint types imports unit integration e2e; default all
set -uo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh cpu,test || exit 1
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint types imports unit integration e2e)
failed=()
stage() {
  local name=$1 begin=$SECONDS; shift
  printf '\n\033[1m==> %s: %s\033[0m\n' "$name" "$*"
  if "$@"; then printf '%s passed in %s s\n' "$name" $((SECONDS - begin)); else failed+=("$name"); fi
}

# What hardly looks at a clock runs beside what comes next, on the second core. `await_quiet` shows how it went.
declare -A quiet=()
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT
begin_quiet() {
  local name=$1; shift
  "$@" >"$logs/$name" 2>&1 &
  quiet[$name]=$!
}
await_quiet() {
  local name
  for name in "${!quiet[@]}"; do
    printf '\n\033[1m==> %s, which ran beside\033[0m\n' "$name"
    if wait "${quiet[$name]}"; then printf '%s passed\n' "$name"; else failed+=("$name"); fi
    cat "$logs/$name"
  done
  quiet=()
}

for name in "${stages[@]}"; do
  case $name in
    lint) stage lint ruff check .; stage format ruff format --check . ;;
    types) begin_quiet types pyright ;;
    imports) stage imports lint-imports ;;
    unit)
      begin_quiet logic pytest -q -m "not gpu" tests/unit/trainer tests/unit/rollout tests/simulation tests/house
      stage unit pytest -q -m "not gpu" tests/unit/weight_sync tests/contract
      await_quiet
      ;;
    integration) await_quiet; stage integration pytest -q -m "not gpu" tests/integration ;;
    e2e) await_quiet; stage e2e pytest -q -m "not gpu" tests/e2e ;;
    *) echo "unknown stage $name" >&2; exit 2 ;;
  esac
done
await_quiet
if [ ${#failed[@]} -gt 0 ]; then printf '\nFAILED: %s\n' "${failed[*]}" >&2; exit 1; fi
printf '\nAll stages passed in %s s: %s\n' "$SECONDS" "${stages[*]}"
