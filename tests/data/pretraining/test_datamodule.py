"""The data module: with Lightning and without, resumed, on two processes, and errors for bad settings."""

import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_linformer.data import PretrainingData
from lit_linformer.data.pretraining.token_files import Holdout, least_fraction
from lit_linformer.model.heads import IGNORED
from tests.data.recorder import Recorder, recorded, trainer
from tests.helpers import slow


@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
def test_loaders_before_setup_are_one_line(make, split):
    with pytest.raises(ValueError, match=r"^PretrainingData has not opened '.*'; allowed: its loaders after prepare_data"):
        getattr(make(), f"{split}_dataloader")()


def test_without_a_trainer(make):
    data = make()
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (8, 64) and batch["positions"].shape == batch["labels"].shape == (8, 10)
    assert data.num_tokens == len(data.tokenizer) <= 400
    assert (batch["input_ids"] == data.mask_id).any() and not (batch["input_ids"] == data.pad_id).any()


@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_lightning_resumes_exactly(make, tmp_path, num_workers):
    """Stopped in and at the end of epochs, with accumulation and with validation in mid-epoch."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}
    (tmp_path / "whole").mkdir()
    module = Recorder(tmp_path / "whole")
    data = make(num_workers=num_workers, batch_size=12, max_length=300)
    trainer(max_steps=16, num_sanity_val_steps=0, **settings).fit(module, data)
    assert len(data.train_dataloader()) in range(4, 16)  # so 32 micro-batches are several epochs

    for steps in (3, 5, 11):
        (folder := tmp_path / f"stopped{steps}").mkdir()
        checkpoint = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)
        first = trainer(max_steps=steps, callbacks=[checkpoint], enable_checkpointing=True, num_sanity_val_steps=0, **settings)
        first.fit(Recorder(folder), make(num_workers=num_workers, batch_size=12, max_length=300))
        resumed = make(num_workers=num_workers, batch_size=12, max_length=300)
        trainer(max_steps=16, num_sanity_val_steps=0, **settings).fit(
            Recorder(folder), resumed, ckpt_path=folder / "last.ckpt", weights_only=True
        )
        whole, parts = recorded(tmp_path / "whole"), recorded(folder)
        assert len(whole) == 32 and whole == parts
        assert resumed.state_dict()["samples"] == 32 * 12


def test_a_second_fit_starts_anew(make, tmp_path):
    data = make()
    for _ in range(2):
        trainer(max_steps=3, num_sanity_val_steps=0).fit(Recorder(tmp_path), data)
    lines = recorded(tmp_path)
    assert len(lines) == 6 and lines[:3] == lines[3:]


def test_each_trainer_divides_the_global_batch_once(make):
    data = make(global_batch_size=32)
    data.prepare_data()
    for given in (trainer(val_check_interval=3), trainer()):
        data.trainer = given
        for _ in range(2):
            data.setup("fit")
        assert given.accumulate_grad_batches == 4 and given.val_check_interval in (12, 1.0)


def test_two_processes_read_what_one_reads(make, tmp_path, monkeypatch):
    """Also with Lightning's use_distributed_sampler left on, which must not replace our samplers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trainer(max_steps=9, num_sanity_val_steps=-1).fit(Recorder(tmp_path / "one"), make(batch_size=16))
    two = trainer(max_steps=9, num_sanity_val_steps=-1, devices=2, strategy="ddp_fork")
    two.fit(Recorder(tmp_path / "two"), make(batch_size=8))

    def rows(batches):
        return [
            (ids, positions, labels)
            for batch in batches
            for ids, positions, labels in zip(batch["input_ids"], batch["positions"], batch["labels"], strict=True)
            if set(labels) != {IGNORED}
        ]

    one = recorded(tmp_path / "one")
    ranks = [recorded(tmp_path / "two", rank=r) for r in range(2)]
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 9
    for together, *parts in zip(one, *ranks, strict=True):
        assert sorted(rows([together])) == sorted(rows(parts))
    validations = [recorded(tmp_path / "two", "validation", r) for r in range(2)]
    assert len(validations[0]) == len(validations[1])
    expected = rows(recorded(tmp_path / "one", "validation"))
    assert sorted(expected) == sorted(rows(validations[0]) + rows(validations[1]))


def test_overfit_batches_repeats_the_same_rows(make, tmp_path):
    trainer(overfit_batches=2, max_epochs=3).fit(Recorder(tmp_path), make(batch_size=4, mask_rate=0.01))
    epochs = [recorded(tmp_path)[i : i + 2] for i in (0, 2, 4)]

    def unmasked(batches):
        texts = []
        for ids, positions, labels in ((r, p, y) for b in batches for r, p, y in zip(*(b[k] for k in KEYS), strict=True)):
            for position, label in zip(positions, labels, strict=True):
                ids[position] = label
            texts.append(ids)
        return sorted(texts)

    assert unmasked(epochs[0]) == unmasked(epochs[1]) == unmasked(epochs[2])
    data = make(batch_size=4)
    data.prepare_data()
    data.setup("fit")
    data.trainer = SimpleNamespace(  # of two processes
        overfit_batches=2, accumulate_grad_batches=3, limit_train_batches=2, fast_dev_run=False,
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}, strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    assert data.train_dataloader().sampler.num_samples == 2 * 2 * 4 and data.rows_per_step == 2 * 3 * 4


KEYS = ("input_ids", "positions", "labels")


@pytest.mark.parametrize(("stage", "loader"), [("validate", "val_dataloader"), ("test", "test_dataloader")])
def test_held_out_batches_are_the_same_whatever_training_uses(stage, loader, make):
    batches = []
    for settings in ({}, {"mask_rate": 0.4, "whole_word": True, "seed": 7, "num_workers": 2}):
        data = make(**settings)
        data.prepare_data()
        data.setup(stage)
        batches.append(list(getattr(data, loader)()))
    for a, b in zip(*batches, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_of_the_last_row_too_15_percent_are_masked(make, batch_size):
    data = make(batch_size=batch_size)
    data.prepare_data()
    data.setup("validate")
    *_, last = data.val_dataloader()
    real, asked = last["attention_mask"].sum(1), (last["labels"] != IGNORED).sum(1)
    assert real[-1] < 64 and asked.tolist() == [max(1, round(0.15 * tokens)) for tokens in real.tolist()]
    assert last["positions"].shape[1] == 10  # as in every other batch


def test_training_masks_as_the_settings_say(make):
    for settings, expected in (
        ({}, (0.15, 0, False)),
        ({"mask_rate": 0.3, "seed": 7, "whole_word": True}, (0.3, 7, True)),
    ):
        data = make(**settings)
        data.prepare_data()
        data.setup("fit")
        masker = data.train_dataloader().dataset.masker
        assert (masker.mask_rate, masker.seed, masker.word_tables is not None) == expected


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_source_of_its_own_for_validation_or_test(split, make, tmp_path):
    (tmp_path / "other.txt").write_text("held out the matrix\n\nof attention")
    data = make(**{f"{split}_source": str(tmp_path / "other.txt")})  # of data.source nothing is held out for it
    data.prepare_data()
    data.setup("test" if split == "test" else "validate")
    blocks = data.blocks[split]
    encode, eos = data.tokenizer.encode, data.tokenizer.eos_id
    expected = [*encode("held out the matrix"), eos, *encode("of attention"), eos]
    assert blocks.rows([0])[0, 1 : 1 + blocks.tokens].tolist() == expected


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_text_that_is_trained_on_is_refused(make, tmp_path, documents, tokenizer, split):
    folder = tmp_path / "texts"
    folder.mkdir()
    tokenizer.save(tmp_path / "tokenizer.json")
    for number in range(2):
        (folder / f"{number}.txt").write_text("\n\n".join(documents[50 * number : 50 * number + 50]))
    (tmp_path / "link.txt").symlink_to(folder / "1.txt")
    for source, held_out in ((folder, folder / "1.txt"), (folder / "1.txt", tmp_path / "link.txt"), (folder, folder / "*.txt")):
        settings = {"source": str(source), f"{split}_source": str(held_out)}
        data = make(**settings, tokenizer=str(tmp_path / "tokenizer.json"))
        message = rf"^data.{split}_source is '.*', and data.source reads .*\.txt, too; allowed: text that is not trained on, or"
        with pytest.raises(ValueError, match=message):
            data.prepare_data()  # `prepare`
        with pytest.raises(ValueError, match=message):
            trainer(max_steps=1).fit(Recorder(tmp_path), data)
        with pytest.raises(ValueError, match=message):
            _ = make(**settings).tokenizer  # before it is trained
        getattr(trainer(), "validate" if split == "validation" else "test")(Recorder(tmp_path), data)  # these do not train
    make(source=str(folder / "0.txt"), **{f"{split}_source": str(folder / "1.txt")}).prepare_data()


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_each_stage_stands_alone(make, tmp_path, stage):
    getattr(trainer(), stage)(Recorder(tmp_path), make())
    assert recorded(tmp_path, "validation" if stage == "validate" else "other")


def test_no_validation_where_none_is_asked_for(make, tmp_path):
    trainer(max_steps=2).fit(Recorder(tmp_path), make(validation_fraction=0))
    assert len(recorded(tmp_path)) == 2 and not recorded(tmp_path, "validation")


def test_another_length_needs_no_new_preparation(make, corpus_cache):
    make().prepare_data()
    before = sorted(os.listdir(corpus_cache))
    data = make(max_length=32, batch_size=3, mask_rate=0.3, seed=5, whole_word=True)
    data.prepare_data()
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["input_ids"].shape == (3, 32)
    assert sorted(os.listdir(corpus_cache)) == before


def test_tokenizer_learns_from_training_documents_only(tmp_path):
    words = [f"{'abcdefgh'[i % 8] * 6}{i}" for i in range(300)]
    (tmp_path / "text.txt").write_text("\n\n".join(f"{word} {word} {word}" for word in words))
    data = PretrainingData(str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "c"), vocab_size=5000, validation_fraction=0.3)
    held_out = [word for i, word in enumerate(words) if data.holdout.split(i) != "train"]
    learnt = set(data.tokenizer.backend.get_vocab())
    assert held_out and not {f"Ġ{word}" for word in held_out} & learnt
    assert {f"Ġ{word[:6]}" for word in words if word not in held_out} & learnt


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"validation_fraction": 1.0}, r"^data.validation_fraction is 1.0; allowed: at least 0, less than 1$"),
        ({"test_fraction": -0.1}, r"^data.test_fraction is -0.1; allowed: at least 0"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, r"is 0.5 \+ 0.5; allowed: less than 1 in all$"),
        ({"mask_rate": 0.0}, r"^data.mask_rate is 0.0; allowed: more than 0, less than 1$"),
        ({"mask_rate": 1.0}, r"^data.mask_rate is 1.0; allowed"),
        ({"max_length": 7}, r"^data.max_length is 7; allowed: 8 or more$"),
        ({"batch_size": 0}, r"^data.batch_size is 0; allowed: 1 or more$"),
        ({"num_workers": -1}, r"^data.num_workers is -1; allowed: 0 to 256$"),
        ({"seed": -1}, r"^data.seed is -1; allowed: 0 to 4294967295$"),
        ({"vocab_size": 100}, r"^data.vocab_size is 100; allowed: 261 or more with data.tokenizer bpe$"),
        ({"source": ""}, r"^data.source is ''; allowed"),
        ({"verify": "maybe"}, r"^data.verify is 'maybe'; allowed: once, always, never$"),
        ({"document_start": "["}, r"^data.document_start is '\['; allowed: a regular expression"),
        ({"validation_source": "hub:x"}, r"^data.validation_source is 'hub:x'; allowed: hub:NAME:SPLIT"),
    ],
)
def test_bad_settings_are_refused_when_the_object_is_built(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"max_length": 100_000},
            r"^data.max_length is 100000; allowed: up to the training text's \d+ tokens \(of \d+ documents",
        ),
        (
            {"validation_fraction": 1e-9},
            r"^data.validation_fraction is 1e-09, which holds out none of 200 documents; allowed: 0.01 or more, or",
        ),
        ({"source": "no/such/file.txt"}, r"^data.source is 'no/such/file.txt', which is not there; allowed"),
        ({"test_source": "no/such/file.txt"}, r"^data.test_source is 'no/such/file.txt', which is not there; allowed"),
        ({"tokenizer": "no/such/folder"}, r"^data.tokenizer is 'no/such/folder'; allowed: bpe"),
    ],
)
def test_bad_corpora_are_refused_in_preparation(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings).prepare_data()


def test_a_batch_of_far_more_rows_than_there_are_is_refused(make):
    data = make(batch_size=50_000, max_length=32)
    data.setup("fit")
    rows = len(data.blocks["train"])
    with pytest.raises(ValueError, match=rf"^data.batch_size is 50000; allowed: up to 4096, with {rows} training rows$"):
        data.train_dataloader()
    few = make(batch_size=rows + 10, max_length=32)  # as in a quick trial: some rows occur twice
    few.setup("fit")
    assert len(next(iter(few.train_dataloader()))["input_ids"]) == rows + 10


def test_a_share_of_a_pass_is_of_whole_steps(make):
    data = make(max_length=32)
    data.prepare_data()

    def batches(share, each):
        data.trainer = trainer(limit_train_batches=share, accumulate_grad_batches=each)
        data.setup("fit")
        return len(data.train_dataloader())

    whole = batches(1.0, 4)
    assert batches(4.5 / whole, 4) == batches(0.3, 1) // 4 * 4 == whole
    with pytest.raises(ValueError, match=rf", 6 of {whole} batches; allowed: a multiple of 4, as many batches as a step has$"):
        batches(6.5 / whole, 4)


def test_a_damaged_tokenizer_in_the_cache_is_one_line(text_file, tmp_path):
    settings = {"source": str(text_file), "cache_dir": str(tmp_path), "vocab_size": 300}
    assert PretrainingData(**settings).tokenizer
    (file,) = tmp_path.glob("tokenizer-*/tokenizer.json")
    file.write_text(file.read_text()[:1000])
    with pytest.raises(
        ValueError, match=r"tokenizer.json is damaged: it is no tokenizer; delete the folder .*, it will be made"
    ):
        _ = PretrainingData(**settings).tokenizer


def test_other_data_on_resume_is_announced(make):
    data = make()
    data.setup("fit")
    with pytest.warns(UserWarning, match=r"the checkpoint saw other data \(tokens-0123, now tokens-"):
        data.load_state_dict({"samples": 40, "tokens": "tokens-0123"})
    assert data.train_dataloader().samples == 40


@pytest.mark.parametrize(("split", "stage"), [("validation", "validate"), ("test", "test")])
def test_a_split_that_is_not_there_is_not_evaluated(make, split, stage):
    data = make(**{f"{split}_fraction": 0.0})
    with pytest.raises(ValueError, match=f"^data.{split}_fraction is 0; allowed with {stage}: more, or data.{split}_source"):
        data.setup(stage)


def test_the_least_share_that_holds_out_a_document(tmp_path, make):
    text = tmp_path / "few.txt"
    text.write_text("\n\n".join(f"document {number} " * 30 for number in range(12)))
    with pytest.raises(ValueError, match=r"holds out none of 12 documents; allowed: 0.1 or more, or data.validation_source"):
        make(source=str(text), validation_fraction=0.05, test_fraction=0.0).prepare_data()
    data = make(source=str(text), validation_fraction=0.1, test_fraction=0.0, max_length=16)
    data.prepare_data()
    data.setup("validate")
    assert len(data.blocks["validation"])
    for before, least in ((0.0, 0.1), (0.3, least_fraction(12, 0.3))):  # in whole percent
        held_out = [["test" in map(Holdout(before, share).split, range(12))] for share in (least - 0.01, least)]
        assert held_out == [[False], [True]]


def test_one_document_that_is_held_out(tmp_path, make):
    text = tmp_path / "one.txt"
    text.write_text("a line of it\n" * 500)
    with pytest.raises(ValueError, match=r"^data.source is .*, which is one document, and that is held out; allowed: several"):
        make(source=str(text), validation_fraction=0.05, test_fraction=0.05).prepare_data()
