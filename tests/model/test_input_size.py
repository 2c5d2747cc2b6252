"""Tokens that are numbers instead of ids: EncoderConfig.input_size."""

import pytest
import torch

from lit_linformer.model import Encoder, MaskedLanguageModel
from tests.model.test_encoder import randomised, tiny


@pytest.mark.parametrize("settings", [{}, {"attention": "full"}, {"position": "rotary", "order": "project_first"}])
def test_a_token_of_numbers_is_a_linear_layers(settings):
    """With ids as one-hot vectors the linear layer is the embedding; padding does not matter, whatever it holds."""
    of_ids = randomised(tiny(**settings))
    of_numbers = Encoder(tiny(**settings, input_size=50)).double().eval()
    weights = of_ids.state_dict()
    weights["tokens.weight"] = weights["tokens.weight"].T.contiguous()
    of_numbers.load_state_dict(weights | {"tokens.bias": torch.zeros(8, dtype=torch.float64)})
    ids, mask = torch.randint(50, (2, 12)), torch.arange(12) < torch.tensor([[12], [7]])
    numbers = torch.nn.functional.one_hot(ids, 50).double()
    pads = numbers.masked_fill(~mask[..., None], 3.0)
    torch.testing.assert_close(of_numbers(pads, mask)[mask], of_ids(ids, mask)[mask])
    torch.testing.assert_close(of_numbers(numbers[1:, :7]), of_ids(ids[1:], mask[1:])[:, :7])


@pytest.mark.parametrize(
    ("input_size", "tokens", "said"),
    [
        (
            3,
            torch.zeros(2, 16),
            r"input_ids are float32 of shape \(2, 16\); allowed with input_size=3: floats of shape \(B, N",
        ),
        (3, torch.zeros(2, 16, 4), r"input_ids are float32 of shape \(2, 16, 4\); allowed with input_size=3"),
        (3, torch.zeros(2, 16, 3, dtype=torch.int64), "input_ids are int64 of shape"),
        (0, torch.zeros(2, 16, 3), r"input_ids have shape \(2, 16, 3\); allowed: \(B, N\), or an input_size"),
    ],
)
def test_tokens_of_another_shape_are_refused(input_size, tokens, said):
    with pytest.raises(ValueError, match=said):
        Encoder(tiny(input_size=input_size))(tokens)


def test_a_masked_language_model_of_numbers_is_refused():
    with pytest.raises(ValueError, match="input_size is 3; allowed with a masked language model, which predicts ids: 0"):
        MaskedLanguageModel(tiny(input_size=3))
