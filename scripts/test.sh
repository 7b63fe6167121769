#!/usr/bin/env bash
# Every check and test that needs no accelerator. Makes .venv if needed. Safe to run again.
# Usage: scripts/test.sh [STAGE ...]      stages: lint types imports unit integration e2e; default all
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bash scripts/install.sh cpu,test || exit 1
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
export RAY_worker_niceness=0 # else Ray's workers would come after everything here that computes

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint types imports unit integration e2e)
for stage in "${stages[@]}"; do
  case $stage in
    lint | types | imports | unit | integration | e2e) ;;
    *) echo "unknown stage $stage; there are lint, types, imports, unit, integration and e2e" >&2; exit 2 ;;
  esac
done

# Two lanes run side by side, each with its part of every stage in order. What computes and looks at no clock, or
# at minutes, is in `back`, at a lower priority. `front` is shown as it goes, `back` after it.
logic=(tests/unit/trainer tests/unit/rollout tests/simulation tests/golden tests/house)
computing=(tests/integration/test_{fallback_vllm,learner_compile,learner_moe,lora_vllm,plain_loop,recorder_vllm}.py
  tests/integration/test_{multinode_script,weight_sync_vllm}.py
  tests/integration/test_learner_ranks{,_critic,_divergence,_losses}.py)
whole_runs=(tests/e2e/test_{adapter_job,bad_input,bench,main_job}.py)
part() { # LANE STAGE: `command` is what the lane does for it, if anything
  local pytest=(pytest -q -m "not gpu")
  [ "$1" = front ] || pytest+=(--timeout 1200) # for tests without a limit of their own
  command=()
  case $1-$2 in
    front-lint) command=(bash -c "ruff check . && ruff format --check .") ;;
    front-imports) command=(lint-imports) ;;
    front-unit) command=("${pytest[@]}" tests/unit/weight_sync tests/contract) ;;
    front-integration) command=("${pytest[@]}" tests/integration "${computing[@]/#/--ignore=}") ;;
    front-e2e) command=("${pytest[@]}" tests/e2e "${whole_runs[@]/#/--ignore=}") ;;
    back-types) command=(pyright) ;;
    back-unit) command=("${pytest[@]}" "${logic[@]}") ;;
    back-integration) command=("${pytest[@]}" "${computing[@]}") ;;
    back-e2e) command=("${pytest[@]}" "${whole_runs[@]}") ;;
  esac
}

scratch=$(mktemp -d) || exit 1
export TANDEM_TEST_CACHE=$scratch/cache # the tiny model is made once for all
mkdir "$TANDEM_TEST_CACHE" || exit 1
child=
run_lane() { # LANE
  local stage begin failed=()
  for stage in "${stages[@]}"; do
    part "$1" "$stage"
    [ ${#command[@]} -gt 0 ] || continue
    begin=$SECONDS
    printf '\n\033[1m==> %s: %s\033[0m\n' "$stage" "${command[*]}"
    # In a session of its own, so that Ctrl-C reaches it once, from `stop`, and its tests can clean up. Where the kernel
    # shares the processor out by session, a priority counts inside one only; the session itself has another.
    setsid bash -c '[ "$0" != back ] || { echo 3 >/proc/self/autogroup; } 2>/dev/null; exec "$@"' \
      "$1" env --default-signal=INT "${command[@]}" &
    child=$!
    if wait $child; then printf '%s passed in %s s\n' "$stage" $((SECONDS - begin)); else failed+=("$stage"); fi
  done
  [ ${#failed[@]} = 0 ] || { printf '\nFAILED in lane %s: %s\n' "$1" "${failed[*]}"; return 1; }
}
stop() { # CODE
  [ -z "$child" ] || kill -INT "$child" 2>/dev/null
  wait
  exit "$1"
}
back_lane() {
  trap 'stop 143' TERM HUP
  renice -n 10 "$BASHPID" >/dev/null
  run_lane back
}

back_lane >"$scratch/back.log" 2>&1 &
back=$!
trap 'kill $back 2>/dev/null; stop 130' INT
trap 'kill $back 2>/dev/null; stop 143' TERM HUP
trap 'rm -rf "$scratch"' EXIT
run_lane front
front_code=$?
wait $back
back_code=$?
cat "$scratch/back.log"
if [ $front_code != 0 ] || [ $back_code != 0 ]; then
  printf '\nFAILED: exit codes of the lanes: front %s, back %s; each says above what failed\n' $front_code $back_code >&2
  exit 1
fi
printf '\nAll stages passed in %s s: %s\n' "$SECONDS" "${stages[*]}"
