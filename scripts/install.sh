#!/usr/bin/env bash
# Makes .venv and installs Tandem into it, for CPU. Used by quickstart.sh and test.sh; safe to run again.
# Usage: scripts/install.sh [EXTRAS]      EXTRAS as in pyproject.toml, default "cpu"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-cpu}
torch=2.13.0
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 1; }

# Caches stay inside the repository: nothing else on the machine is touched.
export XDG_CACHE_HOME="$PWD/.cache" PIP_DISABLE_PIP_VERSION_CHECK=1

versions=$(cat pyproject.toml constraints/cpu.txt scripts/install.sh | sha256sum | cut -c1-16)
stamp=".venv/.installed-$versions-${extras//,/-}"
if [ -f "$stamp" ]; then say "already installed ($extras)"; exit 0; fi

if [ ! -x .venv/bin/python ]; then
  python=
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
  [ -n "$python" ] || die "needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/python"
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || die "cannot make .venv; on Debian: apt install python3-venv"
fi
pip() { .venv/bin/python -m pip "$@"; }
pip_install() { pip install -q --no-compile "$@"; } # compiled at the end, on all cores

if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__ != '$torch+cpu')" 2>/dev/null; then
  say "installing torch $torch (CPU)"
  pip_install "torch==$torch+cpu" 2>/dev/null ||
    pip_install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu ||
    die "cannot install torch $torch+cpu, neither from the configured index nor from PyTorch's own"
fi
say "installing Tandem ($extras)"
pip_install -c constraints/cpu.txt -e ".[$extras]"
say "compiling"
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true # some packages bring templates that are no Python

# vLLM asks for these. Builds that do not fit the CPU build of torch break `import transformers`; Tandem needs none.
for package in torchvision torchaudio torchcodec; do
  if pip show -q "$package" 2>/dev/null && ! .venv/bin/python -c "import $package" >/dev/null 2>&1; then
    say "removing $package, which does not import here"
    pip uninstall -q -y "$package"
  fi
done
find .venv -maxdepth 1 -name ".installed-*" ! -name ".installed-$versions-*" -delete
touch "$stamp"
say "installed into .venv"
