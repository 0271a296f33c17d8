"""The sampling defaults and end tokens of a checkpoint."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.front.generation_defaults import GenerationDefaults


def test_values_that_are_set_become_defaults() -> None:
    generation = {"temperature": 0.2, "top_k": None, "top_p": 0.9, "do_sample": False, "other": 1}
    defaults = GenerationDefaults.from_checkpoint(generation | {"max_new_tokens": 7})
    assert defaults.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert defaults.max_tokens == 7
    values, source = defaults.describe()
    assert values == "temperature 0.2, top_p 0.9, max_tokens 7"
    assert "generation_config.json" in source
    assert GenerationDefaults().describe()[0] == "temperature 1, top_p 1"


def test_end_tokens_do_not_depend_on_the_sampling_defaults() -> None:
    both = {"eos_token_id": [2, 7], "temperature": 0.5}
    defaults = GenerationDefaults.from_checkpoint(both, use_sampling=False)
    assert defaults == GenerationDefaults(eos_token_ids=(2, 7))
    assert GenerationDefaults.from_checkpoint({"eos_token_id": 3}).eos_token_ids == (3,)
    assert GenerationDefaults.from_checkpoint({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": "x"}, {"max_new_tokens": 0}])
def test_an_error_about_a_value_names_its_file(bad) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        GenerationDefaults.from_checkpoint(bad)
    GenerationDefaults.from_checkpoint(bad, use_sampling=False)


def test_overrides_replace_values_of_the_checkpoint() -> None:
    of_checkpoint = {"eos_token_id": [2, 7], "temperature": 0.5, "top_p": 0.9}
    for use_sampling, expected in (
        (True, {"temperature": 0, "top_p": 0.9}),
        (False, {"temperature": 0}),
    ):
        defaults = GenerationDefaults.from_checkpoint(
            of_checkpoint, use_sampling=use_sampling, overrides={"temperature": 0}
        )
        assert defaults == GenerationDefaults(expected, eos_token_ids=(2, 7))
    defaults = GenerationDefaults.from_checkpoint(
        of_checkpoint, overrides={"top_p": None, "eos_token_id": 5}
    )
    assert defaults == GenerationDefaults({"temperature": 0.5}, eos_token_ids=(5,))
