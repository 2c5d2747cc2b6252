"""Prompts: texts with mask tokens in them, for `predict` to fill in."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lit_linformer.data.tokenizer import Tokenizer


def read_prompts(text: str | list[str] | None, file: str | None) -> list[tuple[str, str]]:
    """(where it comes from, text) of every prompt: `text`, then the lines of `file` that are not blank."""
    texts = [text] if isinstance(text, str) else list(text or [])
    prompts = [("data.text", prompt) for prompt in texts]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data.file={file!r} cannot be read: {error}") from error
        prompts += [(f"data.file={file!r}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError("nothing to predict: give data.text (one text or a list) or data.file (one text a line)")
    return prompts


def encode_prompts(prompts: list[tuple[str, str]], tokenizer: Tokenizer, max_length: int) -> list[dict]:
    """Checks and encodes every prompt as bos … eos."""
    encoded = []
    for where, text in prompts:
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        if tokenizer.mask_id not in ids:
            mask = tokenizer.mask_token
            raise ValueError(f"{where}: {text!r} has nothing to fill in: write {mask} where a word is missing")
        if len(ids) > max_length:
            raise ValueError(f"{where}: {len(ids)} tokens with bos and eos, more than data.max_length={max_length}")
        encoded.append({"text": text, "ids": ids})
    return encoded


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
