#!/usr/bin/env bash
# Every check and test that needs no accelerator. Makes .venv if needed. Safe to run again.
# Usage: scripts/test.sh [STAGE ...]      stages: lint types imports unit integration e2e full; default all but full
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bash scripts/install.sh cpu,test || exit 1
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
export RAY_worker_niceness=0 # else Ray's workers would come after everything here that computes

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint types imports unit integration e2e)
for stage in "${stages[@]}"; do
  case $stage in
    lint | types | imports | unit | integration | e2e | full) ;;
    *) echo "unknown stage $stage; there are lint, types, imports, unit, integration, e2e and full" >&2; exit 2 ;;
  esac
done
is_chosen() { [[ " ${stages[*]} " == *" $1 "* ]]; }

# Two lanes run concurrently. `front` has the tests that look at a clock (the first three folders here, and the files marked
# `timing`) and as many others as make the lanes equally long. `back` has the rest, at a lower priority. `front` is shown
# live, `back` after it.
front_folders=(tests/unit/weight_sync tests/contract tests/simulation tests/golden)
back_folders=(tests/unit --ignore=tests/unit/weight_sync tests/house)
# One pytest for all that starts engines, clusters and whole runs. Runs come first: they inherit its environment, which
# an engine inside of the process changes.
process_folders=()
for stage in e2e integration; do if is_chosen $stage; then process_folders+=("tests/$stage"); fi; done

scratch=$(mktemp -d) || exit 1
export TANDEM_TEST_CACHE=$scratch/cache # the tiny model is made once for all
mkdir "$TANDEM_TEST_CACHE" || exit 1
child=
failed=()
run() { # LANE STAGES COMMAND ...
  local lane=$1 name=$2 begin=$SECONDS
  shift 2
  printf '\n\033[1m==> %s: %s\033[0m\n' "$name" "$*"
  # In a session of its own, so that Ctrl-C reaches it once, from `stop`, and its tests can clean up. Where the kernel
  # shares the processor out by session, a priority counts inside one only; the session itself has another.
  setsid bash -c '[ "$0" != back ] || { echo 3 >/proc/self/autogroup; } 2>/dev/null; exec "$@"' \
    "$lane" env --default-signal=INT "$@" &
  child=$!
  if wait $child; then printf '%s passed in %s s\n' "$name" $((SECONDS - begin)); else failed+=("$name"); fi
}
front_lane() {
  if is_chosen lint; then run front lint bash -c "ruff check . && ruff format --check ."; fi
  if is_chosen imports; then run front imports lint-imports; fi
  if is_chosen types; then run front types pyright; fi
  if is_chosen unit; then run front unit pytest -q -m "not gpu and not full" "${front_folders[@]}"; fi
  if [ ${#process_folders[@]} -gt 0 ]; then
    run front "${process_folders[*]}" pytest -q -m "timing and not gpu and not full" "${process_folders[@]}"
  fi
  if is_chosen full; then run front full pytest -q -m "full and timing and not gpu" tests; fi
  end_lane front
}
back_lane() {
  trap 'stop 143' TERM HUP
  renice -n 10 "$BASHPID" >/dev/null
  local pytest=(pytest -q --timeout 1200) # for tests without a limit of their own
  if is_chosen unit; then run back unit "${pytest[@]}" -m "not gpu and not full" "${back_folders[@]}"; fi
  if [ ${#process_folders[@]} -gt 0 ]; then
    run back "${process_folders[*]}" "${pytest[@]}" -m "not timing and not gpu and not full" "${process_folders[@]}"
  fi
  if is_chosen full; then run back full "${pytest[@]}" -m "full and not timing and not gpu" tests; fi
  end_lane back
}
end_lane() { # LANE
  [ ${#failed[@]} = 0 ] || { printf '\nFAILED in lane %s: %s\n' "$1" "${failed[*]}"; return 1; }
}
stop() { # CODE
  [ -z "$child" ] || kill -INT "$child" 2>/dev/null
  wait
  exit "$1"
}

back_lane >"$scratch/back.log" 2>&1 &
back=$!
trap 'kill $back 2>/dev/null; stop 130' INT
trap 'kill $back 2>/dev/null; stop 143' TERM HUP
trap 'rm -rf "$scratch"' EXIT
front_lane
front_code=$?
wait $back
back_code=$?
cat "$scratch/back.log"
if [ $front_code != 0 ] || [ $back_code != 0 ]; then
  printf '\nFAILED: exit codes of the lanes: front %s, back %s; see above for what failed\n' $front_code $back_code >&2
  exit 1
fi
printf '\nAll stages passed in %s s: %s\n' "$SECONDS" "${stages[*]}"
