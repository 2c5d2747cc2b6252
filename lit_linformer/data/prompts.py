"""What `predict` is given: prompts with mask tokens to fill in, or texts (and pairs of texts) to classify."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from lit_linformer.data.files import text_lines
from lit_linformer.data.layout import RowLayout
from lit_linformer.data.pieces import encode_texts
from lit_linformer.data.tokenizer import Tokenizer

LONGEST_PROMPT = 1_000_000  # characters: a row of tokens holds far fewer, and none is cut


def read_prompts(text: str | list[str] | None, file: str | None) -> list[tuple[str, str]]:
    """(where it comes from, text) of every prompt: `text`, then the lines of `file` that are not blank."""
    texts = [text] if isinstance(text, str) else list(text or [])
    prompts = [("data.text", prompt) for prompt in texts]
    if file is not None:
        lines = text_lines(Path(file), "data.file")
        prompts += [(f"data.file={file!r}, line {number}", line) for number, line, _ in lines if line.strip()]
    if not prompts:
        raise ValueError("nothing to predict: give data.text (one text or a list) or data.file (one text a line)")
    return prompts


def encode_prompts(prompts: list[tuple[str, str]], tokenizer: Tokenizer, max_length: int) -> list[dict]:
    """Checks and encodes every prompt as bos … eos."""
    encoded = []
    for where, text in prompts:
        if len(text) > LONGEST_PROMPT:
            raise ValueError(f"{where} has {len(text):,} characters; allowed: up to {LONGEST_PROMPT:,}")
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        if tokenizer.mask_id not in ids:
            mask = tokenizer.mask_token
            raise ValueError(f"{where}: {_start(text)!r} has nothing to fill in: write {mask} where a word is missing")
        if len(ids) > max_length:
            raise ValueError(f"{where}: {len(ids)} tokens with bos and eos, more than data.max_length={max_length}")
        encoded.append({"text": text, "ids": ids})
    return encoded


def _start(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def prompt_loader(encoded: list[dict], tokenizer: Tokenizer, batch_size: int) -> DataLoader:
    """Batches of input_ids and attention_mask (B, L), texts, and rows, columns: where the mask tokens are, in order."""

    def collate(prompts: list[dict]) -> dict:
        longest = max(len(prompt["ids"]) for prompt in prompts)
        padded = [prompt["ids"] + [tokenizer.pad_id] * (longest - len(prompt["ids"])) for prompt in prompts]
        lengths = torch.tensor([len(prompt["ids"]) for prompt in prompts])
        input_ids = torch.tensor(padded)
        rows, columns = (input_ids == tokenizer.mask_id).nonzero(as_tuple=True)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.arange(longest) < lengths[:, None],
            "rows": rows,
            "columns": columns,
            "texts": [prompt["text"] for prompt in prompts],
        }

    return DataLoader(encoded, batch_size=batch_size, collate_fn=collate, generator=torch.Generator())


def read_texts(
    text: str | list[str] | None, text_pair: str | list[str] | None, file: str | None, pair: bool
) -> list[tuple[str, ...]]:
    """Texts, or pairs of texts, to classify: `text` with `text_pair`, then the lines of `file`, a pair's divided by a tab."""
    firsts, seconds = ([each] if isinstance(each, str) else list(each or []) for each in (text, text_pair))
    if not pair and text_pair is not None:
        raise ValueError(f"data.text_pair={text_pair!r} must be left out: the task has one text a row")
    if pair and len(firsts) != len(seconds):
        raise ValueError(f"data.text_pair must have as many texts as data.text, {len(firsts)}, it has {len(seconds)}")
    found = [("data.text", texts) for texts in (zip(firsts, seconds, strict=True) if pair else zip(firsts))]
    if file is None and not found:
        read_prompts(None, None)  # which says what to give
    for where, line in read_prompts(None, file) if file is not None else []:
        fields = tuple(line.split("\t"))
        if len(fields) != 1 + pair:
            must = "two texts divided by a tab" if pair else "one text without a tab"
            raise ValueError(f"{where} has {len(fields)} fields: it must hold {must}")
        found.append((where, fields))
    for where, texts in found:
        if not all(each.strip() for each in texts):
            raise ValueError(f"{where}: {texts} holds an empty text: there must be something to classify")
    return [texts for _, texts in found]


def text_loader(texts: list[tuple[str, ...]], tokenizer: Tokenizer, layout: RowLayout, batch_size: int) -> DataLoader:
    """Batches as training has them, without labels, in the order given; texts: a string or [string, string] of each."""
    ids = encode_texts((each.strip() for row in texts for each in row), tokenizer)
    encoded = [[next(ids) for _ in row] for row in texts]
    if (row := layout.too_long(np.array([[len(ids) for ids in row] for row in encoded]))) is not None:
        raise ValueError(
            f"data.text or data.file: {[_start(text) for text in texts[row]]} is too long for data.truncation="
            f"{layout.truncation!r}: the text that is not cut must leave room in data.max_length={layout.max_length}"
        )

    def collate(rows: list[int]) -> dict:
        batch = layout.batch([encoded[row] for row in rows])
        batch["index"] = torch.tensor(rows)
        return batch | {"texts": [list(texts[row]) if layout.pair else texts[row][0] for row in rows]}

    return DataLoader(range(len(texts)), batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
