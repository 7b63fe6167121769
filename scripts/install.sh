#!/usr/bin/env bash
# Makes .venv and installs Tandem into it. Used by quickstart.sh and test.sh; safe to run again.
# Usage: scripts/install.sh [EXTRAS]      as in pyproject.toml, the hardware first: cpu (default), cuda, rocm or npu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-cpu}
torch=2.13.0
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 1; }

hardware=${extras%%,*}
pythons="3.11 3.12 3.13"
case $hardware in
rocm) pythons=3.12 ;; # vLLM's wheels are for no other
npu) pythons="3.11 3.12" ;;
cuda) ;;
*) hardware=cpu ;;
esac

# Caches stay inside the repository: nothing else on the machine is touched.
export XDG_CACHE_HOME="$PWD/.cache" PIP_DISABLE_PIP_VERSION_CHECK=1

versions=$(cat pyproject.toml "constraints/$hardware.txt" scripts/install.sh | sha256sum | cut -c1-16)
stamp=".venv/.installed-$versions-${extras//,/-}"
if [ -f "$stamp" ]; then say "already installed ($extras)"; exit 0; fi

fits() { # shellcheck disable=SC2086
  "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' $pythons 2>/dev/null
}
if [ ! -x .venv/bin/python ]; then
  python=
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if fits "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || die "needs Python ${pythons// / or }; set PYTHON=/path/to/python"
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || die "cannot make .venv; on Debian: apt install python3-venv"
elif ! fits .venv/bin/python; then
  die "$hardware needs Python ${pythons// / or }, and .venv has another; remove .venv and set PYTHON=/path/to/python"
fi
pip() { .venv/bin/python -m pip "$@"; }
pip_install() { pip install -q --no-compile -c "constraints/$hardware.txt" "$@"; } # compiled at the end, on all cores

indexes=()
case $hardware in
cpu)
  if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__ != '$torch+cpu')" 2>/dev/null; then
    say "installing torch $torch (CPU)"
    pip_install "torch==$torch+cpu" 2>/dev/null ||
      pip_install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu ||
      die "cannot install torch $torch+cpu, neither from the configured index nor from PyTorch's own"
  fi
  ;;
rocm) # PyPI's vLLM is for CUDA. The one for ROCm is in an index per version and build, with its torch.
  vllm=$(sed -n 's/^vllm==//p' constraints/rocm.txt)
  say "installing vLLM $vllm"
  pip_install --extra-index-url "https://wheels.vllm.ai/rocm/${vllm%+*}/${vllm#*+}" vllm
  ;;
npu) # PyPI's vLLM is for CUDA; vllm-ascend brings the kernels. Triton is in Ascend's index, torch for x86 in PyTorch's.
  indexes=(--extra-index-url https://mirrors.huaweicloud.com/ascend/repos/pypi --extra-index-url https://download.pytorch.org/whl/cpu)
  say "building vLLM without kernels"
  VLLM_TARGET_DEVICE=empty pip_install "${indexes[@]}" --no-binary vllm vllm
  ;;
esac
say "installing Tandem ($extras)"
pip_install "${indexes[@]}" -e ".[$extras]"
say "compiling"
# Without the tests and the hundreds of models that libraries bring: Python compiles those that are used. Some packages
# bring templates that are no Python.
.venv/bin/python -m compileall -q -j 0 -x '/(tests?|testing|models)/' .venv/lib >/dev/null || true

# vLLM asks for these. Builds that do not fit the CPU build of torch break `import transformers`; Tandem needs none.
for package in $(.venv/bin/python -c 'from importlib.util import find_spec
print(*filter(find_spec, ("torchvision", "torchaudio", "torchcodec")))'); do
  if ! .venv/bin/python -c "import $package" >/dev/null 2>&1; then
    say "removing $package, which does not import here"
    pip uninstall -q -y "$package"
  fi
done
find .venv -maxdepth 1 -name ".installed-*" ! -name ".installed-$versions-*" -delete
touch "$stamp"
say "installed into .venv"
