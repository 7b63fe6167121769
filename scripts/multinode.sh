#!/usr/bin/env bash
# One run over several nodes. Start it on every node, with the same environment and Tandem at the same path; the head
# trains, the others lend their devices until the head is done. docs/multinode.md has the whole story.
# Usage: scripts/multinode.sh head NUM_NODES [KEY=VALUE | --OPTION ...]     as for python -m trainer
#        scripts/multinode.sh worker HEAD_ADDRESS
# Environment: TANDEM_RAY_PORT (6379), TANDEM_NODES_TIMEOUT_S (600), TANDEM_RAY_ARGS (more for `ray start`),
#        RAY_AUTH_MODE (token), PYTHON, TANDEM_HOST (this node's own address that the others reach it at; found where
#        there is one network), TANDEM_NODE (text that names this machine, where machines look alike)
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'multinode: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '4,8s/^# //p' "$0" >&2; exit 2; }

role=${1:-}; shift || usage
case $role in
head)
  num_nodes=${1:-}; shift || usage
  [[ $num_nodes =~ ^[1-9][0-9]*$ ]] || die "NUM_NODES must be a whole number >= 1, got '$num_nodes'"
  ;;
worker) [ $# -eq 1 ] || usage; head=$1 ;;
*) usage ;;
esac
port=${TANDEM_RAY_PORT:-6379}
limit_s=${TANDEM_NODES_TIMEOUT_S:-600}
read -r -a ray_args <<<"${TANDEM_RAY_ARGS:-}"
[[ $port =~ ^[0-9]+$ ]] || die "TANDEM_RAY_PORT must be a port number, got '$port'"
[[ $limit_s =~ ^[0-9]+$ ]] || die "TANDEM_NODES_TIMEOUT_S must be whole seconds, got '$limit_s'"

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -c 'import trainer' || die "Tandem does not import in $python; install it on every node, or set PYTHON"
# Ray hides the devices from processes that ask for none, unless this is set.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=${RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO:-0}

# Whoever reaches a cluster without a token can run code on it. Every node needs the same one, and Ray does not report which
# mode a cluster has: so both are set here.
if [ -z "${RAY_AUTH_MODE:-}" ] && "$python" -c 'from ray.scripts.scripts import get_auth_token' 2>/dev/null; then
  export RAY_AUTH_MODE=token
fi
give_up=$((SECONDS + limit_s))
token() { "$python" -m ray.scripts.scripts get-auth-token "$@" >/dev/null 2>&1; }
if [ "${RAY_AUTH_MODE:-}" = token ] && ! token; then
  if [ "$role" = head ]; then
    token --generate || die "Ray could not make a token; set RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled on all nodes of a closed network"
  else
    say "waiting for a Ray token; the head makes ~/.ray/auth_token, which is here where the home directory is shared"
    until token; do
      [ $SECONDS -lt $give_up ] || die "there is no Ray token on this node: copy ~/.ray/auth_token from the head, or set RAY_AUTH_MODE=disabled on all nodes of a closed network"
      sleep 1
    done
  fi
fi

log=$(mktemp -t tandem-start.XXXXXX)
daemon='' trainer=''
stop() {
  local code=$?
  trap - EXIT INT TERM
  if [ -n "$daemon" ] && kill -TERM "$daemon" 2>/dev/null; then
    for _ in $(seq 50); do kill -0 "$daemon" 2>/dev/null || break; sleep 0.2; done
    kill -KILL "$daemon" 2>/dev/null || true
  fi
  if [ "$code" = 0 ]; then rm -f "$log"; fi
  exit "$code"
}
# The trainer saves and ends by itself; everything else ends now.
pass_on() { if [ -n "$trainer" ]; then kill -s "$1" "$trainer" 2>/dev/null || true; else exit "$2"; fi; }
trap stop EXIT
trap 'pass_on INT 130' INT
trap 'pass_on TERM 143' TERM

# Becomes Python, ended (TERM) by the kernel when this script is gone: after kill -9 nobody else could.
become_python() {
  exec "$python" -c '
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which outlives exec
if os.getppid() == int(sys.argv[1]):  # else it is gone already
    os.execvp(sys.argv[2], sys.argv[2:])' $$ "$python" "$@"
}

# With --block Ray's daemons are children of one process of ours: that alone is what we stop, never another cluster.
# They ignore Ctrl-C, since the trainer needs them while it saves.
begin() {
  say "ray start $*"
  (trap '' INT; become_python -m ray.scripts.scripts start "$@" --block --disable-usage-stats "${ray_args[@]}") >"$log" 2>&1 &
  daemon=$!
}
is_up() { grep -q 'Ray runtime started' "$log"; }
need_daemon() {
  kill -0 "$daemon" 2>/dev/null || { tail -n 5 "$log" >&2; die "ray did not start; $log has all of it. If another cluster has port $port, set TANDEM_RAY_PORT"; }
}

await() { # PID; sets `code`
  while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done # a signal ends a wait, and not what is waited for
  code=0
  wait "$1" || code=$?
}

num_alive() {
  "$python" - "$1" <<'EOF' 2>/dev/null || echo 0
import logging, sys, ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
EOF
}

if [ "$role" = head ]; then
  address=${TANDEM_HOST:-$("$python" -c 'from weight_sync.node import reachable_host; print(reachable_host())')}
  # Problems of the configuration are reported now, and not when all nodes are there.
  problems=$("$python" -m trainer "$@" "ray.address=$address:$port" --cfg job 2>&1 >/dev/null) || {
    printf '%s\n' "$problems" >&2
    exit 2
  }
  begin --head --node-ip-address "$address" --port "$port" --include-dashboard=false
  say "waiting for $num_nodes nodes; on each of the others: scripts/multinode.sh worker $address"
  found=0
  # Until our Ray reports that it runs, whoever responds at this port is another cluster.
  until is_up && found=$(num_alive "$address:$port") && [ "$found" -ge "$num_nodes" ]; do
    need_daemon
    [ $SECONDS -lt $give_up ] || die "only $found of $num_nodes nodes joined within TANDEM_NODES_TIMEOUT_S=$limit_s s; look at the others, or ask for fewer"
    sleep 1
  done
  need_daemon
  say "python -m trainer $* ray.address=$address:$port"
  # Without `trap` it might ignore Ctrl-C until its driver listens: bash starts background jobs so.
  (trap - INT; become_python -m trainer "$@" "ray.address=$address:$port") &
  trainer=$!
  await "$trainer"
  exit "$code"
fi

begin --address "$head:$port" ${TANDEM_HOST:+--node-ip-address "$TANDEM_HOST"}
say "waiting for $head:$port"
until is_up; do
  if grep -q InvalidAuthToken "$log"; then die "the head has another Ray token: copy its ~/.ray/auth_token to this node"; fi
  [ $SECONDS -lt $give_up ] || die "no cluster at $head:$port within $limit_s s; $log has the reason"
  # Where no head listens yet Ray gives up by itself, at once or after minutes: the head may start later than we do.
  kill -0 "$daemon" 2>/dev/null || begin --address "$head:$port" ${TANDEM_HOST:+--node-ip-address "$TANDEM_HOST"}
  sleep 1
done
say "lending this node to $head:$port until the head ends; Ctrl-C takes it back"
await "$daemon"
# Ray ends with an error, too, when the head is gone.
if [ "$code" != 0 ] && "$python" -c 'import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 5)' "$head" "$port" 2>/dev/null; then
  tail -n 20 "$log" >&2
  printf 'multinode: ray on this node ended with code %s, and the head at %s still runs; %s has all of it\n' "$code" "$head:$port" "$log" >&2
  exit 1
fi
