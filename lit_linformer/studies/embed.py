"""Texts as vectors: `python run.py embed --ckpt_path models/small --file texts.txt --output texts.npy`.

A text's vector is the mean of the encoder's hidden states over its tokens, bos and eos included, scaled to length 1: the cosine
similarity of two texts is the dot product of their vectors. Sentence Transformers computes the same from what
`export --format huggingface` writes, except for a text with the name of a special token, such as <mask>, which is plain text
here. Texts of more than n tokens are cut.

    texts.npy          float32, one row per text, in their order
    texts.parquet      the columns text and embedding

--sts FOLDER measures how good the similarities are: Spearman's correlation with human ratings of the pairs in STS-B's
validation split; the folder is as for data.source with data.task STS-B.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_linformer.utils.arguments import Setting, check_device, parse, several, whole, word
from lit_linformer.utils.errors import SettingError, UserError
from lit_linformer.utils.files import write_bytes

if TYPE_CHECKING:  # the help needs no torch
    import numpy as np

    from lit_linformer.runs.trained_model import TrainedModel

SETTINGS = {
    "ckpt_path": Setting(word("FILE|RUN|FOLDER"), "checkpoint, run (its best checkpoint), or exported folder", required=True),
    "text": Setting(several(word("TEXT")), "texts", []),
    "file": Setting(several(word("FILE")), "texts, one on each line; or tables: CSV, TSV, JSON lines, Parquet", []),
    "column": Setting(word("NAME"), "a table's column of texts", "text"),
    "output": Setting(several(word("FILE.npy|FILE.parquet")), "where to write", []),
    "sts": Setting(word("FOLDER"), "folder of STS-B, to evaluate on"),
    "batch_size": Setting(whole("ROWS", 1), "texts at once, of about the same length", 32),
    "device": Setting(word("auto|cpu|cuda"), "where to compute", "auto"),
}
SUFFIXES = (".npy", ".parquet")


def main(argv: list[str]) -> None:
    """Embeds, writes and prints; raises ValueError, in one line, for bad input."""
    given = parse("embed", __doc__, SETTINGS, argv)
    outputs = [Path(name) for name in given["output"]]
    if wrong := [path for path in outputs if path.suffix not in SUFFIXES or path.is_dir()]:
        raise SettingError("output", wrong[0], f"files that end in {' or '.join(SUFFIXES)}")
    if blank := [text for text in given["text"] if not text.strip()]:
        raise SettingError("text", blank[0], "something to embed")
    asked = bool(given["text"] or given["file"])
    if not asked and not given["sts"]:
        raise UserError("nothing to embed: give --text, --file or --sts")
    if asked and not outputs:
        raise UserError("--output is not given", f"files that end in {' or '.join(SUFFIXES)}", when="with --text or --file")
    if outputs and not asked:
        raise UserError("--output is given, but neither --text nor --file", "texts to write the vectors of")
    texts = [*given["text"], *(text for name in given["file"] for text in read_texts(Path(name), given["column"]))]
    if asked and not texts:
        raise SettingError("file", given["file"], "a text on each line, or a table's rows", more=", which holds no text")

    from lit_linformer.runs.trained_model import open_checkpoint

    model, device = open_checkpoint(given["ckpt_path"]), check_device(given["device"])
    if texts:
        vectors, cut = embed(model, texts, given["batch_size"], device)
        for path in outputs:
            write(path, texts, vectors)
            print(f"{len(texts)} text{'s' * (len(texts) != 1)}, {vectors.shape[1]} numbers each → {path}", flush=True)
        if cut:
            print(f"{cut} of them were cut to n = {model.max_length} tokens")
    if given["sts"]:
        found = similarity(model, given["sts"], given["batch_size"], device)
        print(f"STS-B, {found['pairs']} pairs: cosine against rating, Spearman {found['spearman']:.4f}", flush=True)


def read_texts(path: Path, column: str) -> list[str]:
    """A table's column, or a file's lines. ValueError for a blank one, since only its row number identifies a vector."""
    from lit_linformer.data.finetuning.labelled_rows import LabelledSource
    from lit_linformer.data.finetuning.text_tasks import TextTask
    from lit_linformer.data.reading import text_lines
    from lit_linformer.data.tables import TABLES, kind_of

    if kind_of(path) in TABLES and path.is_file():
        task = TextTask("texts", ((column,),), label_column=())
        rows = LabelledSource(str(path), task, setting="file").texts("train", needs_label=False)
        return [text for _, (text,), _ in rows]
    texts = []
    for number, line, _ in text_lines(path, "file"):
        if not line.strip():
            raise UserError(f"file: {path}, line {number} is blank", "a text on each line")
        texts.append(line)
    return texts


def embed(
    model: "TrainedModel", texts: list[str], batch_size: int = 32, device: str = "cpu"
) -> "tuple[np.ndarray[Any, Any], int]":
    """Vectors (S texts, D), float32, of length 1, and how many texts were cut to model.max_length tokens."""
    import numpy as np
    import torch
    from torch.nn.functional import normalize

    from lit_linformer.data.finetuning.row_layout import RowLayout
    from lit_linformer.data.loader import by_length
    from lit_linformer.data.pieces import encode_texts
    from lit_linformer.model.heads import pool

    tokenizer = model.tokenizer
    layout = RowLayout(tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, model.max_length)
    found = list(encode_texts((text.strip() for text in texts), tokenizer))
    lengths = np.array([[len(ids)] for ids in found])
    vectors = np.zeros((len(found), model.encoder.hidden_size), np.float32)
    encoder = model.net.encoder.to(device)
    with torch.inference_mode():
        for places in by_length(layout.lengths(lengths).tolist(), batch_size):
            batch = {name: part.to(device) for name, part in layout.batch([[found[i]] for i in places]).items()}
            mask = batch.get("attention_mask")
            hidden = pool(encoder(batch["input_ids"], mask), mask, "mean")
            vectors[places] = normalize(hidden.float()).cpu().numpy()
    return vectors, int(layout.is_cut(lengths).sum())


def write(path: Path, texts: list[str], vectors: "np.ndarray[Any, Any]") -> None:
    """Writes .npy, or .parquet with the texts."""
    content = io.BytesIO()
    if path.suffix == ".npy":
        import numpy as np

        np.save(content, vectors)
    else:
        import pyarrow
        import pyarrow.parquet

        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), vectors.shape[1])
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "embedding": column}), content)
    write_bytes(path, content.getvalue())


def similarity(model: "TrainedModel", source: str, batch_size: int = 32, device: str = "cpu") -> dict[str, float]:
    """{"pairs", "spearman"} of STS-B's validation split: cosines of its pairs against their ratings."""
    import torch
    from torchmetrics.functional import spearman_corrcoef

    from lit_linformer.data.finetuning.labelled_rows import LabelledSource
    from lit_linformer.data.finetuning.text_tasks import find_task

    rows = list(LabelledSource(source, find_task("STS-B"), setting="sts").rows("validation"))
    vectors, _ = embed(model, [text for row in rows for text in row.texts], batch_size, device)
    cosines = torch.from_numpy((vectors[::2] * vectors[1::2]).sum(1))
    ratings = torch.tensor([row.label for row in rows], dtype=torch.float32)
    return {"pairs": len(rows), "spearman": spearman_corrcoef(cosines, ratings).item()}
