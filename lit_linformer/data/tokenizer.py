"""Tokenizer: text ↔ token ids, trained here or loaded from the files of a pretrained model.

    tokenizer = load_tokenizer("roberta-base/")            # or a tokenizer.json, or BERT's vocab.txt
    tokenizer = train_tokenizer("bpe", documents, 16384)
    tokenizer.encode("some text"), len(tokenizer), tokenizer.mask_id

Wherever it comes from, it knows its special tokens by role, and never truncates, pads or adds tokens.
"""

import hashlib
import importlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from lit_linformer.data.training_text import frequent_characters, stands_alone, training_text, unpacked
from lit_linformer.utils.errors import SettingError, first_line
from lit_linformer.utils.files import write_text

# Special tokens that a masked language model needs, by role, and the names they go by.
ROLES = {
    "bos": ("<s>", "[CLS]", "<bos>", "<cls>"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("</s>", "[SEP]", "<eos>", "<sep>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
SPECIAL = {  # in the order of RoBERTa's and BERT's own ids
    "bpe": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
}
SMALLEST = {"bpe": 256 + len(ROLES), "wordpiece": 256}  # every byte has a token, so that no text is unknown


class Tokenizer:
    """A `tokenizers.Tokenizer` (as `.backend`) that knows the ids a masked language model needs.

    Args:
        backend: The tokenizer; its truncation and padding are switched off, since they would remove or add tokens.
        origin: What error messages call it.
    """

    def __init__(self, backend, origin: str):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1 if vocabulary else 0
        found = {role: next((n for n in names if n in vocabulary), None) for role, names in ROLES.items()}
        for role in ("mask", "bos", "eos", "pad"):
            if found[role] is None:
                names = " or ".join(ROLES[role])
                raise SettingError("data.tokenizer", origin, f"one with {names}", more=f", which has no {role} token")
        self.mask_token = found["mask"]
        self.bos_id, self.pad_id, self.eos_id, self.unk_id, self.mask_id = (vocabulary.get(found[r]) for r in ROLES)
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        # A file of one's own may have them as plain words, which would not be found in "ACGT<mask>ACGT".
        _add_special(backend, [name for name in found.values() if name is not None and vocabulary[name] not in special])
        self.special_ids = sorted(special | {vocabulary[name] for name in found.values() if name is not None})

    def __len__(self) -> int:
        """Number of ids, added tokens included: the rows that an embedding needs, whatever vocab_size was set."""
        return self.size

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without bos and eos; names of special tokens in it become those tokens."""
        self.backend.encode_special_tokens = False
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_plain(self, texts: list[str]) -> Iterator[list[int]]:
        """Ids of each text; "<mask>" or "</s>" in a text, such as a manual that mentions them, is plain text.

        The texts are tokenised at once, in parallel; the ids are converted one by one as they are asked for.
        """
        self.backend.encode_special_tokens = True
        return (self._as_text(found.ids) for found in self.backend.encode_batch_fast(texts, add_special_tokens=False))

    def _as_text(self, ids: list[int]) -> list[int]:
        if not self._read_names:
            return ids
        unknown = [] if self.unk_id is None else [self.unk_id]
        return [i for each in ids for i in (unknown if each in self._read_names else [each])]

    @cached_property
    def _read_names(self) -> set[int]:
        """The special tokens whose names the model itself finds in plain text, as Unigram and WordLevel do."""
        self.backend.encode_special_tokens = True
        names = [self.backend.id_to_token(i) for i in self.special_ids]
        found = {i for name in names for i in self.backend.encode(name, add_special_tokens=False).ids}
        return found & set(self.special_ids) - {self.unk_id}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def save(self, path) -> None:
        """Writes tokenizer.json, which `load_tokenizer` and Hugging Face's PreTrainedTokenizerFast read."""
        write_text(Path(path), self.to_str())

    def to_str(self) -> str:
        """The text of tokenizer.json."""
        return self.backend.to_str(pretty=True)

    @classmethod
    def from_file(cls, path) -> "Tokenizer":
        with _refused(path, "a tokenizer.json"):
            text = Path(path).read_text(encoding="utf-8")
        return cls.from_str(text, str(path))

    @classmethod
    def from_str(cls, text: str, origin: str) -> "Tokenizer":
        """From the text of a tokenizer.json; error messages call it `origin`."""
        from tokenizers import Tokenizer as Backend

        with _refused(origin, "a tokenizer.json"):
            backend = Backend.from_str(text)
        return cls(backend, origin)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    @property
    def of_plain_text(self) -> str:
        """What the ids of `encode_plain` depend on: sha256, and whether `_as_text` has to replace special tokens."""
        return f"{self.sha256} names" if self._read_names else self.sha256

    @cached_property
    def _config(self) -> dict:
        return json.loads(self.backend.to_str())

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether both turn texts into the same ids, apart from what an export adds (bos and eos, stripped white space)."""
        return self.rules == other.rules

    @cached_property
    def rules(self) -> dict:
        """The parts of tokenizer.json that determine a text's ids."""
        kept = self._config | {"post_processor": None}
        whole = kept["normalizer"]
        parts = [] if whole is None else whole.get("normalizers", [whole])
        kept["normalizer"] = parts[1:] if self.strips else parts
        return kept

    @cached_property
    def strips(self) -> bool:
        """Whether it begins by dropping white space around a text, as that of an exported classifier does."""
        parts = (self._config["normalizer"] or {}).get("normalizers")
        return bool(parts) and parts[0] == {"type": "Strip", "strip_left": True, "strip_right": True}

    @cached_property
    def splits_at_newlines(self) -> bool:
        """Whether a text cut before a newline (one after a visible character) gives the same tokens.

        True if a newline is always a word of its own, or dropped, and no prefix is added to a text's first word.
        """
        before, normalizer = self._config["pre_tokenizer"] or {}, self._config["normalizer"] or {}
        if before.get("type") == "ByteLevel":
            return not normalizer and not before["add_prefix_space"] and before["use_regex"]
        return before.get("type") == "BertPreTokenizer" and normalizer.get("type") == "BertNormalizer"

    def word_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Two boolean arrays over the vocabulary: `joins` (may continue the word before it) and `ends_word`.

        Token b continues the word of the token a before it if joins[b] & ends_word[a].
        """
        from tokenizers import decoders

        prefix = self._config["model"].get("continuing_subword_prefix") or ""
        byte_level = '"ByteLevel"' in json.dumps(self._config["pre_tokenizer"])
        joins, ends_word = np.zeros(len(self), dtype=bool), np.zeros(len(self), dtype=bool)
        decoder = decoders.ByteLevel()
        for token, i in self.backend.get_vocab(with_added_tokens=True).items():
            if prefix:
                joins[i], ends_word[i] = token.startswith(prefix), True
                continue
            if byte_level:
                token = decoder.decode([token])  # a part of a character becomes U+FFFD, and such characters are mostly letters
            joins[i], ends_word[i] = _is_word(token[:1]), _is_word(token[-1:])
        joins[self.special_ids] = ends_word[self.special_ids] = False
        return joins, ends_word


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "\ufffd"


@contextmanager
def _refused(origin: object, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the Rust side raises bare Exception
        raise SettingError("data.tokenizer", str(origin), f"{what} ({first_line(error)})") from error


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads a tokenizer; SettingError if ``spec`` names none.

    spec: a tokenizer.json, BERT's vocab.txt, or a folder with one of them or with RoBERTa's vocab.json and merges.txt; or a
    checkpoint of this project, whatever its name, which holds the tokenizer that its model was trained with.
    """
    path = Path(spec)
    if zipfile.is_zipfile(path) or (path.suffix == ".ckpt" and path.exists()):
        checkpoints = importlib.import_module("lit_linformer.runs.checkpoints")  # by name, since runs imports data
        return Tokenizer.from_str(checkpoints.carried_tokenizer(path, "data.tokenizer"), spec)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return Tokenizer.from_file(path / "tokenizer.json")
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _load_roberta(path)
        if (path / "vocab.txt").is_file():
            return _load_bert(path / "vocab.txt")
        raise SettingError(
            "data.tokenizer", spec, "a folder with tokenizer.json, with vocab.json and merges.txt, or with vocab.txt"
        )
    if not path.is_file():
        raise SettingError("data.tokenizer", spec, "bpe, wordpiece, or a file or folder that exists")
    return _load_bert(path) if path.suffix == ".txt" else Tokenizer.from_file(path)


def _load_roberta(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with _refused(folder, "vocab.json and merges.txt of a byte-level BPE"):
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = _as_roberta(Backend(model))
    _add_special(backend, SPECIAL["bpe"])
    return Tokenizer(backend, str(folder))


def _load_bert(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with _refused(file, "a WordPiece vocabulary"):
        model = models.WordPiece.from_file(str(file), unk_token="[UNK]")
        backend = Backend(model)
        tokens = [token for token in backend.get_vocab() if not token.startswith("[")]
        config = file.with_name("tokenizer_config.json")
        told = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        lower = told.get("do_lower_case")
        if lower is None:
            lower = all(token == token.lower() for token in tokens)
        chinese = told.get("tokenize_chinese_chars") is not False
        _as_bert(backend, lower, strip_accents=told.get("strip_accents"), handle_chinese_chars=chinese)
    _add_special(backend, SPECIAL["wordpiece"])
    return Tokenizer(backend, str(file))


def train_tokenizer(kind: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer; the same documents give the same tokenizer.

    Args:
        kind: "bpe" (byte-level with RoBERTa's special tokens) or "wordpiece" (BERT's, lower-cased).
        documents: Training text; `training_text` says how much of it is read.
        vocab_size: Number of tokens; small texts give fewer.
    """
    check_vocab_size(kind, vocab_size)
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    texts = training_text(documents, single_characters=kind == "wordpiece")
    settings = {"vocab_size": vocab_size, "min_frequency": 2, "show_progress": False}
    if kind == "bpe":
        backend = _as_roberta(Backend(models.BPE()))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special = _special_tokens(SPECIAL[kind])
        trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **settings)
        backend.train_from_iterator(texts, trainer)
        return Tokenizer(backend, kind)

    # The trainer numbers ##x in the order of a randomly seeded hash map, and merges equally frequent pairs in the order of
    # their numbers, so two trainings differ (tokenizers 0.23). With ##x numbered beforehand, as special tokens, they do not.
    packed = [zlib.compress(text.encode(), 1) for text in texts]  # read twice: first to count characters
    backend = _as_bert(Backend(models.WordPiece(unk_token="[UNK]")), lower=True)
    # a character may have two tokens, x and ##x: a quarter leaves half of the vocabulary to words
    alphabet = frequent_characters(unpacked(packed), backend.normalizer, limit=min(1000, vocab_size // 4))
    inside = [f"##{character}" for character in alphabet if not stands_alone(character)]
    trainer = trainers.WordPieceTrainer(
        special_tokens=SPECIAL[kind] + inside, initial_alphabet=alphabet, limit_alphabet=len(alphabet), **settings
    )
    backend.train_from_iterator(unpacked(packed), trainer)
    backend = _as_bert(Backend(models.WordPiece(backend.get_vocab(), unk_token="[UNK]")), lower=True)
    _add_special(backend, SPECIAL[kind])
    return Tokenizer(backend, kind)


def check_vocab_size(kind: str, vocab_size: int) -> None:
    """Raises ValueError for fewer tokens than training a tokenizer of that kind needs; a loaded tokenizer has its own size."""
    if vocab_size < SMALLEST.get(kind, 0):
        raise SettingError("data.vocab_size", vocab_size, f"{SMALLEST[kind]} or more with data.tokenizer {kind}")


def _as_roberta(backend):
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _as_bert(backend, lower: bool, **others: bool | None):
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, **others)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _add_special(backend, names: list[str]) -> None:
    """Declares as special tokens those names that the vocabulary holds; adds none to it."""
    backend.add_special_tokens(_special_tokens([name for name in names if backend.token_to_id(name) is not None]))


def _special_tokens(names: list[str]) -> list:
    from tokenizers import AddedToken

    # RoBERTa's mask includes the space left of it: in "The <mask> is" the missing word is " cat", not "cat"
    return [AddedToken(name, special=True, normalized=False, lstrip=name == "<mask>") for name in names]
