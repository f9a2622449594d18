"""Which keys a packed batch's tokens see, against a mask of all pairs; what a config says of windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ensemble.members.huggingface.loading.architecture import layer_windows
from ensemble.members.huggingface.loading.flex_attention import Packing
from ensemble.members.huggingface.scoring.packing import Layout, lay_out
from ensemble.members.huggingface.spec import FLEX_BLOCK
from tests.sampling import tries

BLOCKS = 5
TOKENS = BLOCKS * FLEX_BLOCK
# Shorter than a block, about one, longer, longer than all tokens, and none.
WINDOWS = (1, 16, FLEX_BLOCK - 1, FLEX_BLOCK, FLEX_BLOCK + 1, 300, 2 * TOKENS, None)
Case = tuple[Layout, np.ndarray]


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """A packed batch, and which pairs [queries, keys] are of a row, by loops over rows."""
    lengths = st.integers(1, 40) | st.sampled_from([FLEX_BLOCK - 1, FLEX_BLOCK, FLEX_BLOCK + 1, 300])
    room = TOKENS - draw(st.integers(0, 200))
    shared = draw(st.sampled_from([0, 0, 1, 50, FLEX_BLOCK, 200]))
    widths: list[int] = []
    for width in draw(st.lists(lengths, min_size=1, max_size=20)):
        if shared + sum(widths) + width <= room:
            widths.append(width)
    layout = lay_out(
        np.zeros(shared, dtype=np.int64), [np.ones(width, dtype=np.int64) for width in widths], TOKENS
    )
    is_of_row = np.eye(TOKENS, dtype=bool)
    is_of_row[:shared, :shared] = True
    start = shared
    for width in widths:
        is_of_row[start : start + width, start : start + width] = True
        is_of_row[start : start + width, :shared] = True
        start += width
    return layout, is_of_row


def packing_of(layout: Layout) -> Packing:
    return Packing(layout.ends, layout.positions, torch.device("cpu"))


def seen(case: Case, window: int | None) -> np.ndarray:
    """Which keys each query sees, bool [queries, keys]: those of its row, not later, and within the window."""
    layout, is_of_row = case
    distance = layout.positions[:, None] - layout.positions
    result: np.ndarray = is_of_row & np.tri(TOKENS, dtype=bool) & (distance < (window or TOKENS + 1))
    return result


@tries(60)
@given(layouts(), st.sampled_from(WINDOWS))
def test_a_token_sees_its_row_up_to_itself_within_the_window(case: Case, window: int | None) -> None:
    mask = packing_of(case[0]).mask(window)
    index = torch.arange(TOKENS)
    sees = mask.mask_mod(0, 0, index[:, None], index[None])
    np.testing.assert_array_equal(sees.numpy(), seen(case, window))


@tries(60)
@given(layouts(), st.sampled_from(WINDOWS))
def test_no_block_is_left_out_that_a_query_sees_and_whole_blocks_are_seen(
    case: Case, window: int | None
) -> None:
    mask = packing_of(case[0]).mask(window)
    blocks = seen(case, window).reshape(BLOCKS, FLEX_BLOCK, BLOCKS, FLEX_BLOCK).swapaxes(1, 2)
    some, every = blocks.any((2, 3)), blocks.all((2, 3))
    part = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (part & whole).any(), "a key would count twice"
    assert not (some & ~part & ~whole).any()
    assert not (whole & ~every).any()


def listed(counts: torch.Tensor, numbers: torch.Tensor) -> np.ndarray:
    """Which blocks of keys a kernel reads for each block of queries, bool [blocks, blocks]."""
    assert counts.shape == (1, 1, BLOCKS)
    assert numbers.shape == (1, 1, BLOCKS, BLOCKS)
    result = np.zeros((BLOCKS, BLOCKS), dtype=bool)
    for query, count in enumerate(counts[0, 0].tolist()):
        result[query, numbers[0, 0, query, :count].numpy()] = True
    return result


def test_blocks_of_other_rows_and_behind_the_window_are_not_read() -> None:
    """What the kernel is faster for: five rows of a block each, or one of five with a window of a block."""
    ones = np.ones(FLEX_BLOCK, dtype=np.int64)
    nothing = ones[:0]
    of_rows = packing_of(lay_out(nothing, [ones] * BLOCKS, TOKENS)).mask(None)
    assert of_rows.kv_num_blocks.tolist() == [[[1] * BLOCKS]]
    assert of_rows.full_kv_num_blocks.sum() == 0
    long = packing_of(lay_out(nothing, [np.tile(ones, BLOCKS)], TOKENS))
    assert long.mask(None).full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 4]]]
    assert long.mask(FLEX_BLOCK).kv_num_blocks.tolist() == [[[1, 2, 2, 2, 2]]]
    assert set(long.masks) == {None, FLEX_BLOCK}


def config(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, num_hidden_layers=4, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "windows"),
    [
        ("gemma2", {"sliding_window": 16}, {16, None}),
        ("gemma3_text", {"sliding_window": 16}, {16}),
        ("gemma3_text", {"sliding_window": 16, "layer_types": ["full_attention"] * 4}, {None}),
        ("mistral", {"sliding_window": 16}, {16}),
        ("mistral", {"sliding_window": None}, {None}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, {None}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, {16, None}),
        ("llama", {}, {None}),
    ],
)
def test_windows_of_layers_by_the_config(
    model_type: str, settings: dict[str, Any], windows: set[int | None]
) -> None:
    assert layer_windows(config(model_type, **settings)) == windows


def test_windows_of_a_model_of_text_and_images() -> None:
    text = {"num_hidden_layers": 6, "sliding_window": 16}
    assert layer_windows(transformers.Gemma3Config(text_config=text)) == {16, None}


@pytest.mark.parametrize(
    ("layer_types", "named"),
    [
        (["full_attention", "chunked_attention"] * 2, "chunked_attention"),
        (["linear_attention", "full_attention"] * 2, "linear_attention"),
        (["conv", "full_attention"] * 2, "conv"),
    ],
)
def test_layers_that_cannot_tell_rows_apart_are_an_error(layer_types: list[str], named: str) -> None:
    other = config("llama")
    other.layer_types = layer_types
    with pytest.raises(ValueError, match=f"{named}.* cannot tell rows apart"):
        layer_windows(other)
