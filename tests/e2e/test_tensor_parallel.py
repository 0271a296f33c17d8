"""A server whose engine has four simulated devices (``--tensor-parallel-size 4``)."""

from jaxserve.testing.one_step import logits_of
from jaxserve.testing.tiny import tiny_config, write_checkpoint


def test_four_devices_serve_the_tokens_of_the_model(serve, tmp_path) -> None:
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4)
    folder = write_checkpoint(tmp_path / "tiny", config)
    prompt = [5, 60, 300, 17] * 10
    flags = ("--tensor-parallel-size", "4", "--no-warmup")
    with serve(folder, *flags) as server, server.client() as client:
        reply = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        seeded = [
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0.8, seed=7
            )
            for _ in range(2)
        ]
    tokens = reply.choices[0].token_ids  # type: ignore[attr-defined]
    # The model without an engine, over the whole sequence at once.
    logits = logits_of(folder, [*prompt, *tokens])
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert seeded[0].choices[0].text == seeded[1].choices[0].text
