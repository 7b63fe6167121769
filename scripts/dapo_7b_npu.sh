#!/usr/bin/env bash
# scripts/dapo_7b.sh on Ascend NPUs, after `bash scripts/install.sh npu`. Not run on hardware yet.
# Reads the set_env.sh of CANN if no shell has: ASCEND_HOME_PATH says where CANN is.
# Usage: scripts/dapo_7b_npu.sh [KEY=VALUE ...]
set -euo pipefail
environment=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}/set_env.sh
if [ -z "${ASCEND_HOME_PATH:-}" ] && [ -f "$environment" ]; then
  set +u # it reads variables that may be missing
  # shellcheck disable=SC1090
  source "$environment"
  set -u
fi
exec "$(dirname "$0")/dapo_7b.sh" device=npu "$@"
