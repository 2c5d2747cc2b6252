"""`embed`: what a vector is, what is written, the same computation as Sentence Transformers, STS-B, bad input."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from lit_linformer.runs.trained_model import open_checkpoint
from lit_linformer.studies.embed import embed, similarity
from tests.cli.test_errors import complaint
from tests.helpers import output

TEXTS = ["a good film", "  so very awful, the plot we saw ", "the film", "word " * 60]


@pytest.fixture(scope="module")
def model(pretrained):
    return open_checkpoint(pretrained)


def test_a_vector_is_the_mean_of_a_texts_tokens_whatever_is_beside_it(model):
    vectors, cut = embed(model, TEXTS, batch_size=3)
    assert vectors.shape == (4, 16) and vectors.dtype == np.float32 and cut == 1
    for text, vector in zip(TEXTS[:3], vectors, strict=False):
        ids = [model.tokenizer.bos_id, *model.tokenizer.encode(text.strip()), model.tokenizer.eos_id]
        with torch.inference_mode():
            mean = model.net.encoder(torch.tensor([ids]))[0].mean(0)
        assert vector == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)


def test_files_hold_them_in_order(model, pretrained, tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]) + "\n")
    argv = ["embed", "--ckpt_path", str(pretrained), "--text", "first", "--file", "texts.txt"]
    shown = output([*argv, "--output", "a.npy", "b.parquet"], tmp_path)
    assert "4 texts, 16 numbers each → a.npy" in shown and "→ b.parquet" in shown and "cut" not in shown
    (tmp_path / "texts.csv").write_text('text\n"a ""good"" film,\nso fine"\nthe film\n')
    output([*argv[:-1], "texts.csv", "--output", "c.npy"], tmp_path)
    texts = ["first", 'a "good" film,\nso fine', "the film"]
    assert np.load(tmp_path / "c.npy") == pytest.approx(embed(model, texts)[0], abs=1e-6)
    output([*argv, "--file", "texts.csv", "--output", "d.npy"], tmp_path)
    assert np.load(tmp_path / "d.npy") == pytest.approx(embed(model, ["first", *TEXTS[:3], *texts[1:]])[0], abs=1e-6)
    expected, _ = embed(model, ["first", *TEXTS[:3]])
    table = pyarrow.parquet.read_table(tmp_path / "b.parquet")
    assert table["text"].to_pylist() == ["first", *TEXTS[:3]]
    for found in (np.load(tmp_path / "a.npy"), np.stack(table["embedding"].to_pylist())):
        assert found == pytest.approx(expected, abs=1e-6)


def test_sentence_transformers_finds_the_same(model, tmp_path):
    """Follows its modules.json: the encoder, the mean where attention_mask is 1, length 1."""
    transformers = pytest.importorskip("transformers")
    from lit_linformer.export import huggingface_folder

    huggingface_folder.write(model, tmp_path)
    steps = [step["type"].rpartition(".")[2] for step in json.loads((tmp_path / "modules.json").read_text())]
    pooling = json.loads((tmp_path / "1_Pooling/config.json").read_text())
    assert steps == ["Transformer", "Pooling", "Normalize"] and pooling["word_embedding_dimension"] == 16
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [text.strip() for text in TEXTS]
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = transformers.AutoModel.from_pretrained(tmp_path).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    assert embed(model, texts)[0] == pytest.approx(expected, abs=1e-5)


def test_sentence_transformers_itself(model, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    from lit_linformer.export import huggingface_folder

    huggingface_folder.write(model, tmp_path)
    texts = [text.strip() for text in TEXTS]
    assert package.SentenceTransformer(str(tmp_path)).encode(texts) == pytest.approx(embed(model, texts)[0], abs=1e-5)


def test_stsb_is_spearmans_correlation_of_cosines(model, pretrained, tmp_path):
    from tests.data.finetuning.glue import write_glue

    rows = write_glue(tmp_path, "STS-B")["validation"]
    sides = [embed(model, [row.texts[side] for row in rows])[0] for side in (0, 1)]
    expected = spearmanr((sides[0] * sides[1]).sum(1), [row.label for row in rows]).statistic
    found = similarity(model, str(tmp_path))
    assert found["pairs"] == len(rows) > 2 and found["spearman"] == pytest.approx(expected, abs=1e-3)
    shown = output(["embed", "--ckpt_path", str(pretrained), "--sts", str(tmp_path)], tmp_path)
    assert f"STS-B, {len(rows)} pairs: cosine against rating, Spearman {found['spearman']:.4f}" in shown


def test_a_blank_text_is_refused(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["embed", "--ckpt_path", str(pretrained), "--text", "one", " ", "--output", "a.npy"]
    assert "error: text is ' '; allowed: something to embed" in complaint(argv, tmp_path)
    (tmp_path / "texts.txt").write_text("one\n\ntwo\n")
    argv = ["embed", "--ckpt_path", str(pretrained), "--file", "texts.txt", "--output", "a.npy"]
    assert "file: texts.txt, line 2 is blank; allowed: a text on each line" in complaint(argv, tmp_path)
    for name, content in (("none.txt", ""), ("none.csv", "text,label\n")):  # they wrote nothing, without a word
        (tmp_path / name).write_text(content)
        argv = ["embed", "--ckpt_path", str(pretrained), "--file", name, "--output", "a.npy"]
        assert f"file is ['{name}'], which holds no text; allowed: a text on each line" in complaint(argv, tmp_path)
    (tmp_path / "texts.csv").write_text('id,review\n1,"one, two"\n2,\n')
    argv = ["embed", "--ckpt_path", str(pretrained), "--file", "texts.csv", "--output", "a.npy", "--column", "review"]
    assert "file: " in (line := complaint(argv, tmp_path)) and "texts.csv, line 3" in line
    assert "texts.csv has no column 'text'" in (line := complaint(argv[:-2], tmp_path)) and "'id', 'review'" in line, line
    assert "data." not in line  # not a setting of this command
    assert not (tmp_path / "a.npy").exists()
    (tmp_path / "texts.csv").write_text("id,label\n1,one\n2,two\n")
    output([*argv[:-1], "label"], tmp_path)  # an ordinary column: no labels are read
    assert np.load(tmp_path / "a.npy").shape[0] == 2


def test_an_error_names_the_setting_that_was_typed(pretrained, tmp_path, monkeypatch):
    """Not data.source and data.tokenizer, which the code that reads them uses for fit."""
    monkeypatch.chdir(tmp_path)
    run = str(pretrained)
    assert "error: sts is 'nowhere/', which" in complaint(["embed", "--ckpt_path", run, "--sts", "nowhere/"], tmp_path)
    for argv in (["spectrum", "--run", run, "--output", "s"], ["convert", "--from", run, "--name", "c", "--max_length", "64"]):
        line = complaint([*argv, "--source", "nowhere/"], tmp_path)
        assert "source is 'nowhere/'" in line and "data." not in line, line
    line = complaint(["benchmark", "--what", "preparation", "--tokenizer=nowhere.json", "--output", "p"], tmp_path)
    assert "error: tokenizer is 'nowhere.json'" in line
