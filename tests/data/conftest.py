"""Small corpora, a small tokenizer and a task for the tests of the data layer."""

import json
import random

import pytest

WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most made
after also did many before must through years where much your way well down should because long each just state people
attention matrix rank linear projection sequence length memory token window kernel gradient naïve café größer Εὐκλείδης
""".split()


def make_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Documents of a few paragraphs of random words, the same for the same seed."""
    rng = random.Random(seed)

    def paragraph():
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, words))) + rng.choice([".", "?", " 42.", "!"])

    return ["\n".join(paragraph() for _ in range(rng.randint(1, 4))) for _ in range(count)]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(200)


@pytest.fixture(scope="session")
def tokenizer(documents):
    from lit_linformer.data.tokenizer import train_tokenizer

    return train_tokenizer("bpe", documents, 500)


@pytest.fixture(scope="session")
def text_file(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def imdb(tmp_path_factory):
    """IMDB's layout: 203 training rows of 1 to 40 words, sorted by class; 60 test rows, 7 of which are also training rows."""
    root = tmp_path_factory.mktemp("imdb")
    texts = [" ".join(text.split()[: 1 + i % 40]) + f" {i}" for i, text in enumerate(make_documents(260, 5))]
    train, test = texts[:203], texts[200:]
    trains = [{"text": t, "label": "neg" if i < 100 else "pos"} for i, t in enumerate(train)]
    tests = [{"text": t, "label": i % 2} for i, t in enumerate([*test[3:56], *train[:4], *test[:3]])]
    for split, rows in (("train", trains), ("test", tests)):
        (root / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


@pytest.fixture(scope="session")
def imdb_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def make_data(imdb, imdb_cache):
    """Makes the fine-tuning data module, by default on IMDB."""
    from lit_linformer.data import FineTuningData

    def make(**settings):
        small = {"vocab_size": 300, "max_length": 64, "batch_size": 8, "tokenizer": "bpe"}
        return FineTuningData(**({"task": "IMDB", "source": str(imdb), "cache_dir": imdb_cache} | small | settings))

    return make


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def make(text_file, corpus_cache):
    """Makes the pretraining data module, on a small corpus."""
    from lit_linformer.data import PretrainingData

    def make(**settings):
        small = {"vocab_size": 400, "max_length": 64, "batch_size": 8}
        settings = {"source": str(text_file), "cache_dir": corpus_cache} | small | settings
        if "validation_source" not in settings:
            settings = {"validation_fraction": 0.1} | settings
        return PretrainingData(**({"test_fraction": 0.05} | settings))

    return make
