"""A task that can be learnt in a second: SST-2 in GLUE's files, with words that determine the sentiment."""

import csv
import json
import random

CONFIG = """
seed_everything: 3
name: task
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 3
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks:
    - class_path: lit_linformer.callbacks.TaskScores
model:
  class_path: lit_linformer.tasks.SequenceClassification
  init_args:
    encoder:
      max_length: 32
      hidden_size: 16
      num_layers: 2
      num_heads: 2
      intermediate_size: 32
      projection_dim: 8
      norm: pre
    pooling: mean
    lr: 1.0e-2
data:
  class_path: lit_linformer.data.FineTuningData
  init_args:
    task: SST-2
    source: glue
    tokenizer: bpe
    vocab_size: 300
    batch_size: 8
    seed: ${seed_everything}
last:
  every_n_steps: 5
best:
  monitor: val/score
  mode: max
"""
GOOD, BAD, OTHER = ("good", "fine", "great"), ("bad", "poor", "awful"), ("the", "film", "is", "so", "very", "plot", "we", "saw")


def sentence(draw, label):
    words = draw.choices(OTHER, k=draw.randint(2, 16))
    words.insert(draw.randrange(len(words)), draw.choice(GOOD if label else BAD))
    return " ".join(words)


def write_sst2(folder, rows=120, seed=0):
    """SST-2 as GLUE ships it: train, dev, and a test without labels."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", rows), ("dev", 37)):
        labels = [draw.randrange(2) for _ in range(count)]
        lines = [f"{sentence(draw, label)}\t{label}\n" for label in labels]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    lines = [f"{i}\t{sentence(draw, i % 2)}\n" for i in range(21)]
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(lines))


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "runs/task/predictions.jsonl").read_text().splitlines()]


def scores(path):
    with open(path) as file:
        return list(csv.DictReader(file))
