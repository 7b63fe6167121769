#!/usr/bin/env bash
# Every check and test that needs no accelerator. Makes .venv if needed. Safe to run again.
# Usage: scripts/test.sh [STAGE ...]      stages: lint types imports unit integration e2e; default all
set -uo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh cpu,test || exit 1
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
export RAY_worker_niceness=0 # else Ray's workers would come after everything here that computes

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint types imports unit integration e2e)
for name in "${stages[@]}"; do
  case $name in
    lint | types | imports | unit | integration | e2e) ;;
    *) echo "unknown stage $name; there are lint, types, imports, unit, integration and e2e" >&2; exit 2 ;;
  esac
done
failed=()
stage() {
  local name=$1 begin=$SECONDS; shift
  printf '\n\033[1m==> %s: %s\033[0m\n' "$name" "$*"
  if "$@"; then printf '%s passed in %s s\n' "$name" $((SECONDS - begin)); else failed+=("$name"); fi
}

# Much of the time is spent waiting. What computes, looks at no clock and needs no fixed port therefore runs in a second
# lane beside the rest, in order and at a lower priority. `end_second_lane` shows how it went.
logic=(tests/unit/trainer tests/unit/rollout tests/simulation tests/house)
computing=(tests/integration/test_{fallback_vllm,learner_compile,learner_moe,plain_loop,recorder_vllm}.py
  tests/integration/test_learner_ranks{,_critic,_divergence,_losses}.py)
whole_runs=(tests/e2e/test_{adapter_job,bad_input,bench}.py)
beside() {
  case $1 in
    types) exec pyright ;;
    unit) exec pytest -q -m "not gpu" "${logic[@]}" ;;
    integration) exec pytest -q -m "not gpu" "${computing[@]}" ;;
    e2e) exec pytest -q -m "not gpu" "${whole_runs[@]}" ;;
  esac
}
scratch=$(mktemp -d)
logs=$scratch/logs
export TANDEM_TEST_CACHE=$scratch/cache # the tiny model is made once for all
mkdir "$logs" "$TANDEM_TEST_CACHE"
second_lane() {
  local name begin
  trap 'kill $! 2>/dev/null; exit 1' TERM
  renice -n 10 "$BASHPID" >/dev/null
  for name in "${stages[@]}"; do
    begin=$SECONDS
    beside "$name" >"$logs/$name" 2>&1 &
    wait $! && echo $((SECONDS - begin)) >"$logs/$name.passed"
  done
}
end_second_lane() {
  local name
  wait "$lane"
  for name in "${stages[@]}"; do
    if [ ! -s "$logs/$name" ] && [ -f "$logs/$name.passed" ]; then continue; fi # has no part in this lane
    printf '\n\033[1m==> %s, beside the rest\033[0m\n' "$name"
    cat "$logs/$name"
    if [ -f "$logs/$name.passed" ]; then printf '%s passed in %s s\n' "$name" "$(<"$logs/$name.passed")"
    else failed+=("$name, beside the rest"); fi
  done
}

second_lane &
lane=$!
trap 'kill $lane 2>/dev/null; wait $lane; rm -rf "$scratch"' EXIT
for name in "${stages[@]}"; do
  case $name in
    lint) stage lint ruff check .; stage format ruff format --check . ;;
    imports) stage imports lint-imports ;;
    unit) stage unit pytest -q -m "not gpu" tests/unit/weight_sync tests/contract ;;
    integration) stage integration pytest -q -m "not gpu" tests/integration "${computing[@]/#/--ignore=}" ;;
    e2e) stage e2e pytest -q -m "not gpu" tests/e2e "${whole_runs[@]/#/--ignore=}" ;;
  esac
done
end_second_lane
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nFAILED:' >&2; printf ' %s;' "${failed[@]}" >&2; echo >&2
  exit 1
fi
printf '\nAll stages passed in %s s: %s\n' "$SECONDS" "${stages[*]}"
