"""Step 1: the model and its sizes."""

import pytest
import torch
from torch import nn

from step01_model_def.model_def import (
    CONFIGS,
    SIZES,
    TinyTransformerClassifier,
    config_problems,
    count_meta_parameters,
    count_parameters,
    fixed_sequences,
    format_bytes,
    parameters_by_formula,
    run_script,
)


def test_tiny_has_the_parameters_of_a_hand_count():
    token, position = 128 * 64, 16 * 64
    attention = 192 * 64 + 192 + 64 * 64 + 64
    feed_forward = 256 * 64 + 256 + 64 * 256 + 64
    norms = 2 * (64 + 64)
    by_hand = token + position + 3 * (attention + feed_forward + norms) + 64 * 2 + 2
    model = TinyTransformerClassifier(**CONFIGS["tiny"])
    assert by_hand == count_parameters(model) == parameters_by_formula(**CONFIGS["tiny"]) == 159298
    assert len(list(model.parameters())) == len(model.state_dict()) == 40


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_counts_every_configuration(name):
    with torch.device("meta"):
        model = TinyTransformerClassifier(**CONFIGS[name])
    assert parameters_by_formula(**CONFIGS[name]) == count_parameters(model)


def test_the_configurations_have_the_sizes_that_the_course_needs():
    size = {name: 4 * parameters_by_formula(**config) for name, config in CONFIGS.items()}
    assert 90e6 < size["small"] < 110e6
    assert 780e6 < size["medium"] < 820e6
    assert size["giant"] >= 4 * 60e9


def test_forward_is_the_encoder_that_the_text_says():
    torch.manual_seed(0)
    model = TinyTransformerClassifier(**CONFIGS["tiny"]).eval()
    ids = torch.randint(128, (3, 5))  # (batch, seq)
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[:5]  # (batch, seq, hidden)
    for layer in model.encoder.layers:
        assert layer.linear1.out_features == 4 * 64 and layer.dropout.p == 0 and layer.self_attn.batch_first
        attended = layer.self_attn(x, x, x, need_weights=False)[0]
        x = layer.norm1(x + attended)
        x = layer.norm2(x + layer.linear2(nn.functional.gelu(layer.linear1(x))))
    expected = x.mean(1) @ model.classifier.weight.T + model.classifier.bias
    with torch.inference_mode():
        assert torch.allclose(model(ids), expected, atol=1e-5)


def test_sequences_longer_than_the_model_are_refused():
    model = TinyTransformerClassifier(**CONFIGS["tiny"])
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 2)
    with pytest.raises(ValueError, match="17 tokens .* max_length=16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_everything_wrong_with_a_configuration_is_said_at_once():
    with pytest.raises(ValueError, match=r"vocab_size .* not 0; num_layers .* not '3'; num_classes .* not True"):
        TinyTransformerClassifier(0, 64, 4, "3", True, 16)
    with pytest.raises(ValueError, match="num_heads=5 does not divide hidden_size=64"):
        TinyTransformerClassifier(**CONFIGS["tiny"] | {"num_heads": 5})
    assert [config_problems(**config) for config in CONFIGS.values()] == [[]] * 4
    assert tuple(CONFIGS["tiny"]) == SIZES


def test_meta_and_tied_parameters_are_counted():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, device="meta"))
    assert count_meta_parameters(model) == 2
    model[1].weight = model[0].weight
    assert count_parameters(model) == 9 + 3 and count_meta_parameters(model) == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (1536 * 2**20, "1.5 GiB"),
     (2**50, "1024.0 TiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_fixed_sequences_are_the_same_for_everybody():
    assert fixed_sequences(128, seq=3).tolist() == [[0, 1, 2], [2, 1, 0]]
    assert int(fixed_sequences(4).max()) == 3


def test_an_error_that_can_be_mended_is_one_line():
    def fails():
        raise ValueError("the width is wrong; choose 8")

    with pytest.raises(SystemExit, match="^ValueError: the width is wrong; choose 8$"):
        run_script(fails)
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 / 0)


def test_every_layer_has_its_own_values():
    """`nn.TransformerEncoder` copies one layer; then no comparison of logits would notice one in another's place."""
    layers = TinyTransformerClassifier(**CONFIGS["tiny"]).encoder.layers
    weights = [torch.cat([p.flatten() for p in layer.parameters() if p.dim() > 1]) for layer in layers]
    assert not any(torch.equal(a, b) for a in weights for b in weights if a is not b)
