"""A stage in a file outside the tree: in the server, the batch program and `LLM`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve import SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.offline import __main__ as offline

CODE = '''
"""A stage that removes the tokens of the prompt and the output, and lowers some others."""

import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.declaration import ALL_TOKENS, Parameter, Stage


def apply(logits, rows):
    index = jnp.arange(len(logits))[:, None]
    lowered = logits.at[index, rows["ids"]].add(-rows["by"][:, None], mode="drop")
    removed = lowered.at[index, rows.tokens].set(-jnp.inf, mode="drop")
    return jnp.where(rows["once"][:, None] > 0, removed, lowered)


def arrays(values):
    ids = np.full(8, 2**31 - 1)
    ids[: len(values["ids"])] = values["ids"]
    return {"ids": ids, "by": values["by"], "once": values["once"]}


stage = Stage(
    name="avoid",
    parameters=(
        Parameter("ids", "token", [], most=8),
        Parameter("by", "float", 0.0),
        Parameter("once", "bool", False),
    ),
    apply=apply,
    arrays=arrays,
    num_tokens=ALL_TOKENS,
)
'''
PROMPT = [5, 6, 7, 8]
FLAG = ["--logits-processor", "avoid_stage:stage"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder with the module of the stage, from which this process and its children import."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "avoid_stage.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


def body(**arguments: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
        "return_token_ids": True,
        "vllm_xargs": arguments,
    }


async def ask_all(server, asked: list[dict[str, Any]]) -> tuple[list[list[int]], ...]:
    """Returns the tokens of each body, sent alone, and of all of them four times at once."""
    async with server.async_client() as client:

        async def ask(one: dict[str, Any]) -> list[int]:
            extra = {name: one[name] for name in ("vllm_xargs", "return_token_ids")}
            named = {name: value for name, value in one.items() if name not in extra}
            reply = await client.completions.create(model="tiny", **named, extra_body=extra)
            return reply.choices[0].token_ids  # type: ignore[attr-defined]

        plain = body() | {"vllm_xargs": None}
        first = await ask(plain)  # the metrics show the engine's state after its first step
        compilations = server.metric("compilations_total", engine="0")
        alone = [await ask(one) for one in asked]
        assert alone[0] == first
        together = await asyncio.gather(*(ask(one) for one in asked * 4))
        with pytest.raises(openai.BadRequestError, match=r"vllm_xargs\.ids must be") as caught:
            await ask(body(ids=[-1]))
        assert caught.value.param == "vllm_xargs.ids"
        assert server.metric("compilations_total", engine="0") == compilations > 0
        # A stage of the tree, which leaves only the most likely token.
        narrow = body(top_n_sigma=1e-6) | {"temperature": 5.0}
        assert await ask(narrow) == first
        assert await ask(narrow | {"vllm_xargs": None}) != first
    return alone, together


def test_server_batch_program_and_llm_run_a_stage_from_outside(
    serve, settings, flags, tiny_model: Path, tmp_path: Path, folder: Path
) -> None:
    asked = [
        body(),
        body(once=True),
        body(by=100.0, ids=[40, 41]) | {"temperature": 1.0, "seed": 3},
        body(once=True, by=5.0, ids=[1, 2, 3]),
    ]
    with serve(tiny_model, *FLAG) as server:
        alone, served = asyncio.run(ask_all(server, asked))
    assert served == alone * 4
    for tokens in (alone[1], alone[3]):
        assert len({*tokens, *PROMPT}) == len(tokens) + len(PROMPT)
    assert len(set(alone[0])) < len(alone[0]), "without the stage, tokens repeat"
    assert not {40, 41} & set(alone[2])

    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": one}
        for i, one in enumerate([*asked, body(unknown=1)])
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert offline.main(["--model", str(tiny_model), *flags, *FLAG, "--no-warmup", *files]) == 0
    results = {
        line["custom_id"]: line["response"]
        for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    batched = [results[str(i)]["body"]["choices"][0]["token_ids"] for i in range(len(asked))]
    assert batched == alone
    assert results["4"]["status_code"] == 400
    assert results["4"]["body"]["error"]["param"] == "vllm_xargs.unknown"

    # The folder of compiled programs is a setting of the whole process, so this engine sets none.
    quiet = {"compilation_cache_dir": "", "warmup": False, "show_progress": False}
    with LLM(str(tiny_model), **{**settings, **quiet}, logits_processors=[FLAG[1]]) as llm:
        params = [
            SamplingParams(
                temperature=one["temperature"], seed=one.get("seed"), max_tokens=30,
                extra_args=one["vllm_xargs"],
            )
            for one in asked
        ]  # fmt: skip
        outputs = llm.generate([PROMPT] * len(asked), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_a_name_that_is_no_stage_ends_the_start(flags, tiny_model: Path, folder: Path, capsys):
    arguments = ["--model", str(tiny_model), *flags, "--prompt", "hello", "--logits-processor"]
    assert offline.main([*arguments, "avoid_stage:apply"]) == 1
    message = "--logits-processor avoid_stage:apply: expected an object of type .*Stage, got"
    assert "got function" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=message):
        LLM(
            str(tiny_model),
            logits_processors=["avoid_stage:apply"],
            compilation_cache_dir="",
            show_progress=False,
        )
