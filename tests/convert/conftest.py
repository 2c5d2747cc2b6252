"""Hugging Face folders with random weights."""

import shutil

import pytest
import torch

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
FAMILIES = {
    "roberta": ("Roberta", SIZES | {"max_position_embeddings": 34, "type_vocab_size": 1, "pad_token_id": 1}),
    "bert": ("Bert", SIZES | {"max_position_embeddings": 32}),
    "distilbert": ("DistilBert", DISTIL | {"max_position_embeddings": 32}),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def made(tmp_path_factory, pretrained):
    """A function that makes a Hugging Face folder with random weights and the tiny run's tokenizer (300 tokens)."""
    transformers = pytest.importorskip("transformers")

    def make(family, kind="ForMaskedLM", vocab_size=300, **settings):
        folder = tmp_path_factory.mktemp(family) / family
        name, sizes = FAMILIES[family]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(vocab_size=vocab_size, **sizes | settings)
        model = getattr(transformers, f"{name}{kind}")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        shutil.copy(pretrained / "tokenizer.json", folder)
        return folder

    return make


@pytest.fixture(scope="session")
def roberta(made):
    return made("roberta")


@pytest.fixture
def copied(roberta, tmp_path):
    """A copy of the RoBERTa folder, to be damaged."""
    return shutil.copytree(roberta, tmp_path / "model")
