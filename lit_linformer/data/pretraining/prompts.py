"""Prompts with mask tokens to fill in, for `predict`."""

import torch
from torch.utils.data import DataLoader

from lit_linformer.data.prompts import shortened
from lit_linformer.data.tokenizer import Tokenizer

LONGEST_PROMPT = 1_000_000  # characters: a row of tokens holds far fewer, and none is cut


def encode_prompts(prompts: list[tuple[str, str]], tokenizer: Tokenizer, max_length: int) -> list[dict]:
    """Checks and encodes every prompt as bos … eos."""
    encoded = []
    for where, text in prompts:
        if len(text) > LONGEST_PROMPT:
            raise ValueError(f"{where} has {len(text):,} characters; allowed: up to {LONGEST_PROMPT:,}")
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        if tokenizer.mask_id not in ids:
            mask = tokenizer.mask_token
            raise ValueError(f"{where}: {shortened(text)!r} has nothing to fill in: write {mask} where a word is missing")
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
