"""GLUE's nine tasks in the format of their own files: the headers are the real ones, the rows few."""

from pathlib import Path

from lit_linformer.data.finetuning.labelled_rows import LabelledRow

QUOTED = 'He said " the " film\'s "best'  # a reader that interprets quotes fails here
TEXTS = [
    ("A fine film.", "It is good."),
    (QUOTED, '"Unbalanced'),
    ("naïve café", "größer\u2028as one line"),
    ("So so.", "Bad."),
]
MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"

# task: (text columns, label column, labels as written, header of train, dev, test)
FILES = {
    "CoLA": ("sentence", "label", "01", None, None, "index sentence"),
    "SST-2": ("sentence", "label", "01", "sentence label", "sentence label", "index sentence"),
    "MRPC": ("#1 String|#2 String", "Quality", "01", "Quality|#1 ID|#2 ID|#1 String|#2 String",
             "Quality|#1 ID|#2 ID|#1 String|#2 String", "index|#1 ID|#2 ID|#1 String|#2 String"),
    "STS-B": ("sentence1 sentence2", "score", ["0.000", "2.500", "5.0", "3"], f"{STSB} score", f"{STSB} score", STSB),
    "QQP": ("question1 question2", "is_duplicate", "01", "id qid1 qid2 question1 question2 is_duplicate",
            "id qid1 qid2 question1 question2 is_duplicate", "id question1 question2"),
    "MNLI": ("sentence1 sentence2", "gold_label", ["entailment", "neutral", "contradiction"],
             f"{MNLI} sentence1 sentence2 label1 gold_label",
             f"{MNLI} sentence1 sentence2 label1 label2 label3 label4 label5 gold_label", f"{MNLI} sentence1 sentence2"),
    "QNLI": ("question sentence", "label", ["entailment", "not_entailment"], "index question sentence label",
             "index question sentence label", "index question sentence"),
    "RTE": ("sentence1 sentence2", "label", ["entailment", "not_entailment"], "index sentence1 sentence2 label",
            "index sentence1 sentence2 label", "index sentence1 sentence2"),
    "WNLI": ("sentence1 sentence2", "label", "01", "index sentence1 sentence2 label", "index sentence1 sentence2 label",
             "index sentence1 sentence2"),
}  # fmt: skip
COLA = "source label star sentence"


def words(text: str) -> list[str]:
    return text.split("|") if "|" in text else text.split()


def write_glue(root: Path, task: str) -> dict[str, list[LabelledRow]]:
    """Writes a task's folder; returns the rows of each split as they should be read."""
    columns, label_column, labels, *headers = FILES[task]
    columns, expected = words(columns), {}
    (root / task).mkdir(parents=True)
    names = {"train": ["train"], "validation": ["dev"], "test": ["test"]}
    if task == "MNLI":
        names = {
            "train": ["train"],
            "validation": ["dev_matched", "dev_mismatched"],
            "test": ["test_matched", "test_mismatched"],
        }
    for (split, files), header in zip(names.items(), headers, strict=True):
        for at, file in enumerate(files):
            # the order differs from set to set, so that none can pass for another
            texts = TEXTS[at:] + TEXTS[:at] if split != "validation" else (TEXTS[at:] + TEXTS[:at])[::-1]
            lines, rows = [] if header is None else [words(header)], []
            for number, pair in enumerate(texts):
                label = labels[number % len(labels)]
                fields = dict(zip(columns, pair, strict=False)) | ({} if split == "test" else {label_column: label})
                lines.append([fields.get(name, f"{name} {number}") for name in words(header or COLA)])
                value = None if split == "test" else float(label) if task == "STS-B" else labels.index(label)
                rows.append(LabelledRow(pair[: len(columns)], value))
            text = "".join("\t".join(line) + "\n" for line in lines)
            mark = b"\xef\xbb\xbf" if task == "MRPC" and split != "test" else b""
            (root / task / f"{file}.tsv").write_bytes(mark + text.encode())
            expected[file.replace("dev", "validation")] = rows
    return expected
