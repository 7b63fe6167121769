"""What other systems call our keys, for the hint at a key that does not exist. docs/coming_from.md has more of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("max_steps", "max_num_steps", "num_steps", "num_rollout", "iterations"), "trainer.total_steps"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "total_epochs", "epochs"), "trainer.total_steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size"), "trainer.groups_per_step"),
    **dict.fromkeys(("eval_steps", "test_freq", "val_period", "eval_interval"), "trainer.eval_every"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "n_samples"), "rollout.group_size"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_completion_length"), "rollout.max_response_tokens"),
    **dict.fromkeys(("max_response_length", "generate_max_len", "max_length"), "rollout.max_response_tokens"),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), "task.max_prompt_tokens"),
    **dict.fromkeys(("tensor_model_parallel_size", "tp", "tp_size"), "rollout.tensor_parallel_size"),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), "learner.lr"),
    **dict.fromkeys(("lr_warmup_steps", "warmup"), "learner.warmup_steps"),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping"), "learner.max_grad_norm"),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), "learner.activation_checkpointing"),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "n_gpus_per_node", "gpus_per_node"), "learner.num_ranks"),
    **dict.fromkeys(("beta", "init_kl_coef", "kl_loss_coef", "kl_ctl"), "algorithm.kl.coef"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio_low"), "algorithm.clip_low"),
    **dict.fromkeys(("epsilon_high", "eps_clip_high", "clip_ratio_high"), "algorithm.clip_high"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval", "save_period"), "checkpoint.every_steps"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from_path", "load_checkpoint"), "checkpoint.resume"),
    **dict.fromkeys(("output_dir", "default_local_dir", "checkpoint_dir", "ckpt_path", "save_path"), "run_dir"),
    **dict.fromkeys(("model_name", "model_name_or_path", "model_path", "hf_checkpoint", "pretrain"), "model.path"),
    **dict.fromkeys(("dataset", "dataset_name", "train_data", "prompt_data"), "task.train_path"),
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_function"), "task.reward.name"),
}
"""The last part of a key of theirs -> the key that does the same job here."""
