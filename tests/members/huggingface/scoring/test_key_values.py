"""Keys and values of earlier tokens, put before those of a pass."""

from __future__ import annotations


def test_each_row_of_a_pass_is_behind_its_row_of_the_batch() -> None:
    import torch

    from ensemble.members.huggingface.scoring.key_values import LayerBehind

    prefix, prompts, states = torch.randn(1, 2, 3, 4), torch.randn(3, 2, 5, 4), torch.randn(4, 2, 1, 4)
    rows = torch.tensor([0, 2, 2, 1])
    layer = LayerBehind([(prefix, -prefix), (prompts, -prompts)], rows)
    assert layer.get_seq_length() == 8
    keys, values = layer.update(states, -states)
    expected = torch.cat([prefix.expand(4, -1, -1, -1), prompts[rows], states], dim=-2)
    torch.testing.assert_close(keys, expected, rtol=0, atol=0)
    torch.testing.assert_close(values, -expected, rtol=0, atol=0)


def test_a_pass_over_some_rows_of_a_batch_copies_one_layer_at_a_time() -> None:
    """As many copies as layers would take the memory of all keys and values once more."""
    import torch

    from ensemble.members.huggingface.scoring.key_values import LayerBehind

    prompts = torch.randn(3, 2, 5, 4)
    layers = [LayerBehind([(prompts, prompts)], torch.tensor([0, 0])) for _ in range(2)]
    held = [part for layer in layers for pair in layer._earlier for part in pair]
    assert all(part.data_ptr() == prompts.data_ptr() for part in held)
    for layer in layers:
        layer.update(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
    assert all(part.shape == prompts.shape for layer in layers for pair in layer._earlier for part in pair)
