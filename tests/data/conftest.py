"""Small corpora and a small tokenizer for the tests of the data layer."""

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
