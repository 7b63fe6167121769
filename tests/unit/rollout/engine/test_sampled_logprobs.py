from __future__ import annotations

from types import SimpleNamespace

from rollout.engine.request_state import sampled_logprobs


def output(token_ids: list[int], positions: list[list[float]], finish_reason: str | None = None) -> SimpleNamespace:
    """An output with flat log-probs: per position the sampled token's first, then those of the best tokens."""
    starts = [sum(len(p) for p in positions[:i]) for i in range(len(positions))]
    flat = SimpleNamespace(logprobs=[value for p in positions for value in p], start_indices=starts)
    return SimpleNamespace(token_ids=token_ids, logprobs=flat, finish_reason=finish_reason)


def test_the_first_logprob_of_a_position_is_that_of_the_sampled_token() -> None:
    assert sampled_logprobs(output([5, 6], [[-1.0, -0.5], [-2.0]])) == [-1.0, -2.0]


def test_an_abort_without_new_tokens_has_no_new_logprobs() -> None:
    """vLLM 0.25.1 sends the log-probs of all earlier tokens again."""
    assert sampled_logprobs(output([], [[-1.0], [-2.0], [-3.0]], "abort")) == []


def test_an_abort_that_was_merged_into_unread_tokens_leaves_them_theirs() -> None:
    """Those two were not read yet when it came, and its log-probs of all five tokens were put behind theirs."""
    earlier = [[-1.0], [-2.0], [-3.0]]
    unread = [[-4.0, -0.5], [-5.0]]
    assert sampled_logprobs(output([8, 9], [*unread, *earlier, *unread], "abort")) == [-4.0, -5.0]


def test_too_many_logprobs_are_not_hidden_anywhere_else() -> None:
    assert len(sampled_logprobs(output([8], [[-1.0], [-2.0]]))) == 2
    assert len(sampled_logprobs(output([8], [[-1.0], [-2.0]], "stop"))) == 2
