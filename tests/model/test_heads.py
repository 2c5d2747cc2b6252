"""The masked-language-model head and its losses."""

import pytest
import torch

from lit_linformer.model import MaskedLanguageModel, SequenceClassifier, make_projection
from lit_linformer.model.heads import IGNORED, pool
from lit_linformer.model.projection import mean_token
from tests.model.test_encoder import tiny


def batch():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (3, 16))
    positions = torch.stack([torch.randperm(16)[:4].sort().values for _ in range(3)])
    labels = torch.randint(0, 50, (3, 4))
    labels[1, 3] = IGNORED
    return ids, positions, labels


def test_logits_at_positions_are_rows_of_the_full_logits():
    model = MaskedLanguageModel(tiny()).double().eval()
    ids, positions, _ = batch()
    full = model(ids)
    assert full.shape == (3, 16, 50)
    for row in range(3):
        torch.testing.assert_close(model(ids, positions=positions)[row], full[row, positions[row]])


def test_loss_is_cross_entropy_over_what_is_asked():
    model = MaskedLanguageModel(tiny()).double()
    ids, positions, labels = batch()
    log_probabilities = model(ids, positions=positions).log_softmax(-1)
    asked = labels != IGNORED
    expected = -log_probabilities[asked].gather(-1, labels[asked][:, None]).mean()
    torch.testing.assert_close(model.loss(ids, positions, labels), expected)


def test_nll_sums_to_the_loss_and_is_float32_under_autocast():
    model = MaskedLanguageModel(tiny())
    ids, positions, labels = batch()
    nll = model.nll(ids, positions, labels)
    assert nll.shape == (3, 4) and nll[1, 3] == 0
    torch.testing.assert_close(nll.sum() / 11, model.loss(ids, positions, labels))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.nll(ids, positions, labels).dtype == model.exact_logits(ids, positions).dtype == torch.float32


def test_nll_of_a_float64_model_is_not_rounded():
    model = MaskedLanguageModel(tiny()).double()
    ids, positions, labels = batch()
    mean, loss = model.nll(ids, positions, labels).sum() / 11, model.loss(ids, positions, labels)
    torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)


def test_a_batch_without_a_masked_token_teaches_nothing():
    model = MaskedLanguageModel(tiny())
    ids, positions, labels = batch()
    loss = model.loss(ids, positions, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss == 0 and all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


def test_output_matrix_is_tied_to_the_embedding():
    model = MaskedLanguageModel(tiny())
    assert not any(parameter.shape == (50, 8) for name, parameter in model.named_parameters() if "tokens" not in name)
    ids, positions, labels = batch()
    model.loss(ids, positions, labels).backward()
    unused = torch.tensor(sorted(set(range(50)) - set(ids.flatten().tolist())))
    assert model.encoder.tokens.weight.grad[unused].abs().sum() > 0, "the output side reaches tokens that are not in the input"


@pytest.mark.parametrize("kind", ["masked", "classifier"])
def test_weights_start_with_the_standard_deviation_that_is_set(kind):
    torch.manual_seed(0)
    config = tiny(initializer_range=0.5, hidden_size=32)
    model = MaskedLanguageModel(config) if kind == "masked" else SequenceClassifier(config, 3)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            assert module.weight.std().item() == pytest.approx(0.5, rel=0.3), name
            assert getattr(module, "bias", None) is None or not module.bias.any(), name


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("attention", ["linformer", "full"])
def test_padding_does_not_change_a_classification(pooling, attention):
    torch.manual_seed(0)
    model = SequenceClassifier(tiny(attention=attention), 3, pooling).double().eval()
    ids = torch.randint(0, 50, (2, 9))
    padded = torch.cat([ids, torch.randint(0, 50, (2, 5))], 1)
    mask = torch.arange(14) < torch.tensor([[9], [9]])
    torch.testing.assert_close(model(padded, mask), model(ids))


def test_logits_of_a_document_are_the_mean_of_its_windows():
    torch.manual_seed(0)
    model = SequenceClassifier(tiny(), 3).double().eval()
    ids = torch.randint(0, 50, (5, 9))
    rows = model(ids)
    logits = model(ids, None, torch.tensor([0, 0, 1, 2, 2]), 3)
    torch.testing.assert_close(logits, torch.stack([rows[:2].mean(0), rows[2], rows[3:].mean(0)]))
    assert model.bfloat16()(ids, None, torch.tensor([0, 0, 1, 2, 2]), 3).dtype == torch.float32  # bfloat16 cannot count them


def test_documents_are_exported_for_any_number_of_windows():
    model, windows = SequenceClassifier(tiny(), 3).eval(), {0: torch.export.Dim("windows", min=2, max=64)}
    ids, document = torch.randint(0, 50, (5, 9)), torch.tensor([0, 0, 1, 1, 2])
    inputs = ids, torch.ones_like(ids), document, 3
    program = torch.export.export(model, inputs, dynamic_shapes=(windows, windows, windows, None)).module()
    fewer = ids[1:], torch.ones_like(ids[1:]), document[1:], 3
    torch.testing.assert_close(program(*fewer), model(*fewer))


def test_autocast_does_not_round_the_values_of_a_regression():
    torch.manual_seed(0)
    model = SequenceClassifier(tiny(), 1).eval()
    torch.nn.init.constant_(model.head.output.bias, 1977.0)
    ids = torch.randint(0, 50, (5, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = model(ids)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, model(ids), rtol=0, atol=0.01)  # bfloat16's neighbours of 1976 are 1968 and 1984


def test_classifier_refuses_what_it_cannot_be():
    with pytest.raises(ValueError, match="num_labels is 0; allowed"):
        SequenceClassifier(tiny(), 0)
    with pytest.raises(ValueError, match="pooling is 'max'; allowed: first, mean"):
        SequenceClassifier(tiny(), 2, "max")


def test_weights_of_bfloat16_do_not_round_the_loss():
    ids, positions, labels = batch()
    model = MaskedLanguageModel(tiny()).bfloat16().eval()
    logits = model(ids, positions=positions)
    loss = model.loss(ids, positions, labels)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_long_rows_fit_into_half_precision(dtype):
    """The sum over 9,000 tokens is beyond float16, their number beyond bfloat16's digits."""
    x = torch.full((2, 9000, 3), 10.0, dtype=dtype)
    mask = torch.arange(9000) < torch.tensor([[9000], [257]])
    expected = torch.full((2, 3), 10.0, dtype=dtype)
    assert torch.equal(pool(x, mask, "mean"), expected)
    assert torch.equal(mean_token(x * mask[..., None], mask)[:, 0], expected)
    for projection in (make_projection("mean", 9000, 1), make_projection("mean", 18000, 2)):
        assert torch.equal(projection(x * mask[..., None], mask)[:, 0], expected)
