#!/usr/bin/env bash
# scripts/dapo_7b.sh on AMD GPUs, after `bash scripts/install.sh rocm` or in an image with vLLM for ROCm. Not run on hardware yet.
# A container needs --device /dev/kfd --device /dev/dri --ipc=host --pid=host. Nothing has to be set before: docs/backends.md.
# Usage: scripts/dapo_7b_rocm.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "$0")/dapo_7b.sh" device=rocm "$@"
