"""Cache layouts: the groups of layers with the same window."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.models.cache_layout import MAX_GROUPS, CacheLayout
from jaxserve.models.registry import read_spec
from jaxserve.testing.tiny import tiny_config


@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own_that_keeps_what_it_sees(windows):
    layout = CacheLayout.of(windows)
    assert len(set(layout.places)) == len(layout.places) == len(windows)
    assert len(layout.windows) <= MAX_GROUPS
    for window, (group, layer) in zip(windows, layout.places, strict=True):
        assert 0 <= layer < layout.num_layers
        kept = layout.windows[group]
        assert kept == window or len(layout.windows) == 1
        assert kept is None or (window is not None and kept >= window)
    if len(layout.windows) > 1:
        size = layout.num_layers
        assert size == min(windows.count(window) for window in set(windows))
        places = len(layout.windows) * size
        assert places - len(windows) < len(set(windows)) * size, "a group has no layer"


@pytest.mark.parametrize(
    ("windows", "groups", "num_layers"),
    [
        ([None] * 4, (None,), 4),
        ([16] * 4, (16,), 4),
        ([16, None] * 3, (16, None), 3),
        ([16, None, 16, None, 16], (16, 16, None), 2),
        ([16] * 20 + [None], (None,), 21),
        ([16] * 20 + [8], (16,), 21),
    ],
)
def test_groups_of_common_patterns(windows, groups, num_layers):
    layout = CacheLayout.of(windows)
    assert (layout.windows, layout.num_layers) == (groups, num_layers)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "num_groups"),
    [
        ("LlamaForCausalLM", 30, 1),
        ("MistralForCausalLM", 32, 1),
        ("Gemma2ForCausalLM", 26, 2),
        ("Gemma2ForCausalLM", 46, 2),
        ("Gemma3ForCausalLM", 18, 6),
        ("Gemma3ForCausalLM", 26, 7),
        ("Gemma3ForCausalLM", 34, 7),
        ("Gemma3ForCausalLM", 48, 6),
        ("Gemma3ForCausalLM", 62, 7),
    ],
)
def test_groups_of_families(architecture, num_layers, num_groups):
    spec = read_spec(tiny_config(architecture, num_hidden_layers=num_layers, sliding_window=512))
    layout = spec.cache_layout
    assert len(layout.windows) == num_groups
    whole = [window for window in layout.windows if window is None]
    assert len(whole) == (architecture != "MistralForCausalLM")
