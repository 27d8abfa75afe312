#!/usr/bin/env bash
# Qwen3-32B → Qwen3-4B on a TweetEval task in verl, with a gate of gatespace. Six GPUs of 80 GB.
#
#   bash examples/verl/run_qwen3_32b_to_4b.sh                                   # emotion, G5, 100 steps
#   TASK=tweeteval/hate GATE=G4 STEPS=200 bash examples/verl/run_qwen3_32b_to_4b.sh
#   bash examples/verl/run_qwen3_32b_to_4b.sh distillation.distillation_loss.topk=128      # verl's own overrides
#
# Needs verl 0.9.1 with vLLM, and gatespace beside it: pip install '.[verl]' in a clone.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
TASK="${TASK:-tweeteval/emotion}"
GATE="${GATE:-G5}"
STEPS="${STEPS:-100}"
SEED="${SEED:-42}"
DATA="${DATA:-$PWD/data/${TASK//\//-}}"

# Ray starts its workers with this environment; the configuration would bring the plug-in in too, but later.
export VERL_USE_EXTERNAL_MODULES="gatespace.integrations.verl${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}"

python "$here/prompts.py" --task "$TASK" --output "$DATA"
exec python -m verl.trainer.main_ppo --config-path "$here" --config-name gated_distillation \
  "data.train_files=$DATA/train.jsonl" "data.val_files=$DATA/test.jsonl" "data.seed=$SEED" \
  "actor_rollout_ref.rollout.seed=$SEED" \
  "reward.custom_reward_function.path=$here/label_reward.py" \
  "distillation.distillation_loss.gate='$GATE'" \
  "trainer.total_training_steps=$STEPS" "trainer.experiment_name=${TASK##*/}-${GATE//[^A-Za-z0-9.+-]/_}-s$SEED" "$@"
