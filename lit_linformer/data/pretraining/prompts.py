"""Prompts with mask tokens to fill in, for `predict`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lit_linformer.data.loader import by_length
from lit_linformer.data.notes import note
from lit_linformer.data.pretraining.corpus import Corpus
from lit_linformer.data.prompts import Prompt, at, given_texts, is_table, no_prompts, text_prompts
from lit_linformer.data.tables import table_rows
from lit_linformer.data.tokenizer import Tokenizer
from lit_linformer.utils.errors import SettingError, UserError

LONGEST_PROMPT = 1_000_000  # characters; a row of tokens holds far fewer, and no prompt is cut
FEW = 5  # how many skipped prompts to name


def read_prompts(text: str | list[str] | None, file: str | None, column: str) -> list[Prompt]:
    """`text`, then the lines of `file` that are not blank, or, if it is a table, the texts in that column."""
    prompts = given_texts(text)
    if file is not None:
        prompts += _table_prompts(file, column) if is_table(file) else text_prompts(file)
    if not prompts:
        raise no_prompts(file)
    return prompts


def _table_prompts(file: str, column: str) -> Iterator[Prompt]:
    corpus = Corpus(file, column, setting="data.file")
    for _, where, (value,) in table_rows(Path(file), corpus.choose, "data.file"):
        text, (_, unit, number) = corpus.checked(value, where), where
        if text.strip():
            yield Prompt(at(file, unit, number), (text,), {unit: number})


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer, max_length: int) -> list[dict]:
    """Checks and encodes every prompt as bos … eos; those of a file that cannot be filled in are skipped, with a note."""
    encoded: list[dict] = []
    skipped: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        where, (text,) = prompt.where, prompt.texts
        readable = len(text) <= LONGEST_PROMPT
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] if readable else []
        if tokenizer.mask_id in ids and len(ids) <= max_length:
            encoded.append({"text": text, "ids": ids, "place": dict(prompt.place)})
            continue
        if not readable:
            reason = f"longer than {LONGEST_PROMPT:,} characters"
            error = UserError(f"{where} has {len(text):,} characters", f"up to {LONGEST_PROMPT:,}")
        elif tokenizer.mask_id not in ids:
            mask = tokenizer.mask_token
            reason = f"without {mask}"
            error = SettingError(where, text, f"a text with {mask} where a word is to be filled in")
        else:
            reason = f"longer than data.max_length = {max_length}"
            error = UserError(f"{where} has {len(ids)} tokens with bos and eos", f"up to data.max_length = {max_length}")
        if not prompt.place:  # it comes from data.text
            raise error
        skipped.setdefault(reason, []).append(prompt)
    _tell(skipped, len(prompts), none_left=not encoded)
    return encoded


def _tell(skipped: dict[str, list[Prompt]], prompts: int, none_left: bool) -> None:
    """Prints what was skipped in data.file, and why; ValueError if nothing is left."""
    for reason, found in skipped.items():
        file, (unit,) = found[0].where.rpartition(",")[0], found[0].place
        if none_left:
            raise UserError(f"{file}: all {prompts} {unit}s are {' or '.join(skipped)}", "some that can be filled in")
        units, verb = (f"{unit}s", "are") if len(found) > 1 else (unit, "is")
        numbers = ", ".join(str(prompt.place[unit]) for prompt in found[:FEW]) + ", …" * (len(found) > FEW)
        note(f"{file}: {len(found)} {units} {reason} {verb} skipped: {numbers}")


def prompt_loader(encoded: list[dict], tokenizer: Tokenizer, batch_size: int) -> DataLoader:
    """Batches of prompts of about the same length.

    input_ids and attention_mask (B, L), texts, places; rows, columns: where the M mask tokens are, in order; index (M,): the
    numbers of their prompts in the order given.
    """

    def collate(numbers: list[int]) -> dict:
        prompts = [encoded[number] for number in numbers]
        lengths = torch.tensor([len(prompt["ids"]) for prompt in prompts])
        ids = [torch.tensor(prompt["ids"]) for prompt in prompts]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_id)
        rows, columns = (input_ids == tokenizer.mask_id).nonzero(as_tuple=True)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.arange(input_ids.shape[1]) < lengths[:, None],
            "rows": rows,
            "columns": columns,
            "index": torch.tensor(numbers)[rows],
            "texts": [prompt["text"] for prompt in prompts],
            "places": [prompt["place"] for prompt in prompts],
        }

    batches = by_length([len(prompt["ids"]) for prompt in encoded], batch_size)
    return DataLoader(batches, batch_size=None, collate_fn=collate, generator=torch.Generator())
