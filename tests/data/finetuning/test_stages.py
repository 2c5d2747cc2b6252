"""The fine-tuning data module under Lightning: resumed, on two processes, each stage alone; and predicting."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.data.recorder import Recorder, recorded, trainer


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [3, 11])
def test_lightning_resumes_exactly(make_data, tmp_path, num_workers, steps):
    """Stopped in and at the end of epochs, with accumulation and with validation in mid-epoch."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
    settings = {"max_steps": 14, "num_sanity_val_steps": 0} | settings
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    trainer(**settings).fit(Recorder(tmp_path / "whole"), make_data(num_workers=num_workers))
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)
    first = trainer(**(settings | {"max_steps": steps, "callbacks": [checkpoint], "enable_checkpointing": True}))
    first.fit(Recorder(tmp_path / "parts"), make_data(num_workers=num_workers))
    resumed = make_data(num_workers=num_workers)
    trainer(**settings).fit(Recorder(tmp_path / "parts"), resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    whole, parts = recorded(tmp_path / "whole"), recorded(tmp_path / "parts")
    assert len(whole) == 28 and whole == parts
    assert resumed.state_dict()["samples"] == 28 * 8


def test_two_processes_read_what_one_reads(make_data, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trainer(max_steps=9, num_sanity_val_steps=-1).fit(Recorder(tmp_path / "one"), make_data(batch_size=16))
    two = trainer(max_steps=9, num_sanity_val_steps=-1, devices=2, strategy="ddp_fork")
    two.fit(Recorder(tmp_path / "two"), make_data(batch_size=8))
    one, ranks = recorded(tmp_path / "one"), [recorded(tmp_path / "two", rank=rank) for rank in range(2)]
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 9
    for together, *parts in zip(one, *ranks, strict=True):
        assert [together["index"][0::2], together["index"][1::2]] == [part["index"] for part in parts]
    validations = [recorded(tmp_path / "two", "validation", rank) for rank in range(2)]
    assert len(validations[0]) == len(validations[1])
    seen = [i for each in validations for batch in each for i in batch["index"] if i >= 0]
    assert sorted(seen) == sorted(i for batch in recorded(tmp_path / "one", "validation") for i in batch["index"])


def test_a_second_fit_starts_anew_and_overfitting_repeats_its_rows(make_data, tmp_path):
    data = make_data()
    for _ in range(2):
        trainer(max_steps=3, num_sanity_val_steps=0).fit(Recorder(tmp_path), data)
    lines = recorded(tmp_path)
    assert len(lines) == 6 and lines[:3] == lines[3:]
    (tmp_path / "over").mkdir()
    trainer(overfit_batches=2, max_epochs=3).fit(Recorder(tmp_path / "over"), make_data())
    lines = recorded(tmp_path / "over")
    assert len({i for line in lines for i in line["index"]}) == 16 and len(lines) == 6


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_each_stage_stands_alone(make_data, tmp_path, stage):
    getattr(trainer(), stage)(Recorder(tmp_path), make_data())
    lines = recorded(tmp_path, "validation" if stage == "validate" else "other")
    assert sum(len(line["index"]) for line in lines) == (20 if stage == "validate" else 60)


# Predicting


def predicted(data):
    data.setup("predict")
    batches = list(data.predict_dataloader())
    texts = {number: text for batch in batches for number, text in zip(batch["index"].tolist(), batch["texts"], strict=True)}
    return [texts[number] for number in range(len(texts))], batches


def test_predict_texts_from_a_string_a_list_and_a_file(make_data, tmp_path):
    (tmp_path / "lines.txt").write_text("\ufeffsecond text\n\n  third  \n", encoding="utf-8")
    assert predicted(make_data(text="one"))[0] == ["one"]
    assert predicted(make_data(text=["one", "two"]))[0] == ["one", "two"]
    assert predicted(make_data(file=str(tmp_path / "lines.txt")))[0] == ["second text", "  third  "]
    data = make_data(text="the first", file=str(tmp_path / "lines.txt"), eval_batch_size=2)
    texts, batches = predicted(data)
    assert texts == ["the first", "second text", "  third  "]
    encode, tokenizer = data.tokenizer.encode, data.tokenizer
    rows = [[tokenizer.bos_id, *encode(text.strip()), tokenizer.eos_id] for text in texts]
    # longest first, so that rows of similar length are batched together; index is the number of the text
    places = [text for batch in batches for text in batch["index"].tolist()]
    assert places == sorted(range(3), key=lambda text: -len(rows[text]))
    assert [ids for batch in batches for ids in batch["input_ids"].tolist()] == [rows[text] for text in places]


def test_predict_pairs(make_data, tmp_path):
    (tmp_path / "lines.txt").write_text("a b\tc d\ne\tf\n")
    pairs = {"task": "RTE", "tokenizer": str(tmp_path / "tokenizer.json"), "source": "nowhere"}
    make_data().tokenizer.save(tmp_path / "tokenizer.json")
    data = make_data(**pairs, text=["x", "y"], text_pair=["1", "2"], file=str(tmp_path / "lines.txt"))
    texts, batches = predicted(data)
    assert texts == [["x", "1"], ["y", "2"], ["a b", "c d"], ["e", "f"]]
    bos, eos, encode = data.tokenizer.bos_id, data.tokenizer.eos_id, data.tokenizer.encode
    batch = next(batch for batch in batches if 2 in batch["index"])
    assert batch["input_ids"][batch["index"].tolist().index(2)].tolist() == [
        bos, *encode("a b"), eos, eos, *encode("c d"), eos,
    ]  # fmt: skip
    assert predicted(make_data(**pairs, text="x", text_pair="1"))[0] == [["x", "1"]]


def test_predict_windows(make_data):
    settings = {"max_length": 16, "max_windows": 2, "window_overlap": 4}
    _, (batch, other) = predicted(make_data(text=["of", *["the " * 40] * 2], **settings))
    assert batch["document"].tolist() == [0, 0, 1, 1] and batch["index"].tolist() == [1, 2]
    assert batch["input_ids"].shape == (4, 16) and "attention_mask" not in batch
    assert other["document"].tolist() == [0] and other["index"].tolist() == [0]


def test_predict_tells_how_many_texts_are_cut(make_data, capsys):
    predicted(make_data(text=["of", *["the " * 40] * 2], max_length=16))
    assert capsys.readouterr().err == "note: 2 of 3 texts cut at data.max_length = 16\n"
    predicted(make_data(text=["of", "the " * 40], max_length=16, max_windows=2, window_overlap=4))
    assert capsys.readouterr().err == "note: 1 of 2 texts cut at 2 windows of data.max_length = 16\n"
    predicted(make_data(text=["of", "the " * 40], max_length=64))
    assert capsys.readouterr().err == ""


def test_predict_leaves_labels_out_that_are_not_the_tasks(make_data, tmp_path, capsys):
    file = tmp_path / "new.csv"
    file.write_text("text,label\nso fine,great\nso bad,neg\nso it is,\nso dull,a long story\n")
    data = make_data(file=str(file))
    data.setup("predict")
    assert [prompt.label for prompt in data.prompts] == [None, 0, None, None]
    (told,) = capsys.readouterr().err.splitlines()
    where = f"the first 'great' in data.file='{file}', line 2"
    assert told == f"note: labels that are not the task's are left out, 2 in all, {where}"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, r"^data.text is not given, nor is data.file; allowed: "),
        ({"text": " "}, r"^data.text is ' '; allowed: something to classify$"),
        ({"file": "no/such/file"}, r"^data.file: no/such/file cannot be read"),
        ({"file": "pairs"}, r"^data.file='.*', line 2 has 2 fields; allowed: one text without a tab$"),
        ({"file": "pairs", "task": "RTE"}, r"^data.file='.*', line 1 has 1 fields; allowed: two texts divided by a tab$"),
        ({"text": "x", "text_pair": "y"}, r"^data.text_pair is 'y'; allowed: none, since the task has one text per row$"),
        (
            {"text": ["x", "y"], "text_pair": "z", "task": "RTE"},
            r"^data.text_pair has 1 texts; allowed: as many as data.text, 2",
        ),
    ],
)
def test_bad_predictions(make_data, tmp_path, settings, message):
    if settings.get("file") == "pairs":
        (tmp_path / "pairs").write_text("one\ntwo\tthree\n")
        settings = settings | {"file": str(tmp_path / "pairs")}
    with pytest.raises(ValueError, match=message):
        make_data(**settings).setup("predict")
