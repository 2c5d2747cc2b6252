"""Long Range Arena's data module: rows, splits, masks, files in the authors' layout, and what it refuses."""

import copy
import itertools
import json
import pickle
import warnings

import numpy as np
import pytest
import torch

from lit_linformer.data import LongRangeData
from lit_linformer.data.loader import FILLER
from lit_linformer.data.longrange import listops, pathfinder, sources
from lit_linformer.data.longrange.datamodule import BOS, EOS, MASK, PAD, SPECIAL
from lit_linformer.data.longrange.sources import CIFAR_CLASSES, GRAY
from lit_linformer.data.pretraining.masking import VALIDATION_MASK_RATE, VALIDATION_SEED
from lit_linformer.data.pretraining.token_files import SPLITS
from lit_linformer.model.heads import IGNORED
from tests.data.longrange.files import write_long_range
from tests.data.recorder import Recorder, recorded, trainer


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def data(cache, task="listops", stage="fit", **settings):
    made_here = task in ("listops", "pathfinder") and "source" not in settings
    settings = {"rows": 12, "held_out_rows": 5} | settings if made_here else settings
    made = LongRangeData(task=task, batch_size=4, cache_dir=str(cache), **settings)
    made.prepare_data()
    made.setup(stage)
    return made


def rows_of(loader):
    """{index: (symbols, label)} of a held-out set."""
    found = {}
    for batch in loader:
        for row, (ids, label, index) in enumerate(zip(batch["input_ids"], batch["labels"], batch["index"], strict=True)):
            real = batch["attention_mask"][row] if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
            assert (ids[~real] == PAD).all() and ids[0] == BOS and ids[real][-1] == EOS
            found[int(index)] = ((ids[real][1:-1] - SPECIAL).tolist(), int(label))
    return found


def test_rows_of_listops_come_with_their_value(cache):
    made = data(cache)
    assert (made.num_tokens, made.num_labels, made.metrics) == (19, 10, ("accuracy",))
    rows = [listops.row("validation", "hard", number) for number in range(5)]
    wanted = [(tokens.tolist(), label) for (tokens,), label in rows]
    assert rows_of(made.val_dataloader()) == dict(enumerate(wanted))
    batch = next(iter(made.train_dataloader()))
    for ids, label in zip(batch["input_ids"], batch["labels"].tolist(), strict=True):
        symbols = ids[(ids >= SPECIAL)] - SPECIAL
        assert listops.value(symbols.numpy().astype(np.uint8)) == label


def test_it_is_copied_and_pickled(cache):
    made = data(cache)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert rows_of(again.val_dataloader()) == rows_of(made.val_dataloader())


def test_rows_of_pathfinder_are_its_pixels(cache):
    made = data(cache, "pathfinder", "test", max_length=1026, cut=False, level="easy")
    wanted = [(pixels.tolist(), label) for (pixels,), label in (pathfinder.row("test", "easy", number) for number in range(5))]
    assert rows_of(made.test_dataloader()) == dict(enumerate(wanted)) and made.image_tokens == 1026


def test_patches_are_squares_of_an_image(cache):
    made = data(cache, "pathfinder", "test", max_length=16, patch=8, level="easy")
    assert (made.input_size, made.image_tokens) == (64, 16)
    assert made.summary()["test"] | {"rows": 5, "tokens": 80, "max_length": 16} == made.summary()["test"]
    seen = set()
    for batch in made.test_dataloader():
        assert batch.keys() == {"input_ids", "labels", "index"}
        for patches, label, index in zip(batch["input_ids"], batch["labels"], batch["index"].tolist(), strict=True):
            (pixels,), wanted = pathfinder.row("test", "easy", index)
            image = torch.from_numpy(pixels).view(32, 32) / 255
            corners = itertools.product(range(0, 32, 8), repeat=2)
            squares = [image[row : row + 8, column : column + 8].flatten() for row, column in corners]
            torch.testing.assert_close(patches, torch.stack(squares), rtol=0, atol=0)
            assert label == wanted
            seen.add(index)
    assert seen == set(range(5))
    alone = made.test_dataloader().dataset[[(0, FILLER)]]
    assert alone["input_ids"].shape == (1, 16, 64) and alone["labels"].tolist() == [IGNORED]


def test_processes_draw_the_rows_that_one_draws_in_order(monkeypatch):
    source = sources.GeneratedSource("listops", dict.fromkeys(SPLITS, 12), "hard")
    alone, state = list(source.rows("train")), torch.get_rng_state()
    monkeypatch.setattr(sources, "FEW", 2)
    monkeypatch.setattr(sources, "cores", lambda: 3)
    together = list(source.rows("train"))
    assert [(tokens.tolist(), label) for (tokens,), label in together] == [
        (tokens.tolist(), label) for (tokens,), label in alone
    ]
    assert (torch.get_rng_state() == state).all()  # so a model's initialisation does not depend on whether rows were cached


def test_masks_leave_the_rest_of_a_row_alone(cache):
    plain, masked = data(cache), data(cache, masked=True, mask_rate=0.1, seed=7)
    whole = {tuple(symbols) for symbols, _ in rows_of(plain.val_dataloader()).values()}
    again = [batch["input_ids"].tolist() for batch in masked.val_dataloader()]
    for batch, ids in zip(masked.val_dataloader(), again, strict=True):
        assert batch["input_ids"].tolist() == ids  # the same in every epoch
        restored, targets = batch["input_ids"].clone(), batch["labels"] >= 0
        for row, positions, labels, real in zip(restored, batch["positions"], batch["labels"], targets, strict=True):
            assert (labels[real] >= SPECIAL).all()
            row[positions[real]] = labels[real]
            assert tuple((row[row >= SPECIAL] - SPECIAL).tolist()) in whole
        assert (batch["input_ids"] == MASK).sum() == pytest.approx(0.8 * targets.sum().item(), rel=0.15)
    maskers = [loader.dataset.masker for loader in (masked.train_dataloader(), masked.val_dataloader())]
    assert [(one.mask_rate, one.seed) for one in maskers] == [(0.1, 7), (VALIDATION_MASK_RATE, VALIDATION_SEED)]


def test_texts_are_their_bytes_and_a_share_of_train_is_held_out(cache, tmp_path):
    folder = write_long_range(tmp_path, "text")
    made = data(cache, "text", source=str(folder), validation_fraction=0.25)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    held_out = rows_of(made.val_dataloader())
    assert len(held_out) == 2 and len(made.sets["train"]) == 6
    for index, (symbols, label) in held_out.items():
        assert (bytes(symbols).decode(), label) == (rows[index]["text"].strip(), rows[index]["label"])
    cut = data(cache, "text", source=str(folder), max_length=100)
    assert max(len(batch["input_ids"][0]) for batch in cut.val_dataloader()) == 100
    with pytest.raises(
        ValueError, match=r"data.max_length is 100; allowed with data.cut false: \d{4} or more, the train split"
    ):
        data(cache, "text", source=str(folder), max_length=100, cut=False)


def test_pairs_stand_in_one_row(cache, tmp_path):
    folder = write_long_range(tmp_path, "retrieval")
    made = data(cache, "retrieval", "test", source=str(folder))
    (batch,) = made.test_dataloader()
    row = batch["input_ids"][batch["index"] == 2][0]
    row = row[row != PAD].tolist()
    second = row.index(EOS)
    assert row[second + 1] == EOS and bytes(token - SPECIAL for token in row[1:second]).decode() == "one " * 3
    assert bytes(token - SPECIAL for token in row[second + 2 : -1]).decode() == "test " + "two " * 200
    assert batch["labels"][batch["index"] == 2].item() == 1
    longest = int(made.sets["test"].lengths.max())
    with pytest.raises(ValueError, match=rf"data.max_length is {longest - 1}; allowed with data.cut false: {longest} or more"):
        data(cache, "retrieval", "test", source=str(folder), max_length=longest - 1, cut=False)


def test_images_are_gray_and_in_the_files_order(cache, tmp_path):
    folder = write_long_range(tmp_path, "image")
    made = data(cache, "image", "test", source=str(folder), max_length=1026, cut=False)
    images = np.frombuffer((folder / "test_batch.bin").read_bytes(), np.uint8).reshape(-1, 3073)
    for index, (pixels, label) in rows_of(made.test_dataloader()).items():
        red, green, blue = images[index, 1:].reshape(3, 1024).astype(float)
        assert (
            label == images[index, 0] and np.abs(np.array(pixels) - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 0.5
        )
    assert GRAY.sum() == pytest.approx(1) and len(CIFAR_CLASSES) == 10
    assert data(cache, "image", source=str(folder)).source.splits() == ["train", "test"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "image"}, "data.source is not given; allowed: a folder with data_batch_1.bin"),
        (
            {"task": "image", "source": "nowhere"},
            "data.source is 'nowhere', where none is found; allowed: a folder with data_b",
        ),
        ({"task": "pathfinder", "source": "x"}, "data.source is 'x'; allowed with data.task pathfinder: none"),
        ({"task": "retrieval", "rows": 9}, "data.rows is 9; allowed with rows that are read from files: none"),
        ({"task": "chess"}, "data.task is 'chess'; allowed: listops, text, retrieval, image, pathfinder"),
        ({"level": "easy"}, "data.level is 'easy'; allowed with data.task listops: 3, 5, hard"),
        ({"task": "pathfinder", "level": "5"}, "data.level is '5'; allowed with data.task pathfinder: 2, 3, easy"),
        ({"task": "text", "level": "3"}, "data.level is '3'; allowed with rows that are read from files: none"),
        ({"verify": "now"}, "data.verify is 'now'; allowed"),
        ({"patch": 4}, "data.patch is 4; allowed with data.task listops: 0"),
        ({"patch": 4, "task": "pathfinder", "masked": True}, "data.patch is 4; allowed with data.masked true: 0"),
        ({"patch": 5, "task": "pathfinder"}, "data.patch is 5; allowed: a divisor of 32, the side of the images"),
        (
            {"patch": 4, "task": "pathfinder", "max_length": 63},
            "data.max_length is 63; allowed with data.patch 4: 64 or more, the patches of an image",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        LongRangeData(**settings)


@pytest.mark.parametrize(
    ("task", "name", "content", "said"),
    [
        ("listops", "a_test.tsv", b"Source\tTarget\n1\t1\n\xff\t1\n", "a_test.tsv, line 3 is not UTF-8"),
        ("listops", "a_test.tsv", b"Source\tTarget\n", "data.source has no rows in its test split; allowed: one or more"),
        ("image", "test_batch.bin", b"", "data.source has no rows in its test split; allowed: one or more"),
        ("image", "test_batch.bin", b"\0" * 3072, r"test_batch.bin has 3072 bytes; allowed: 3073 for each image"),
        ("image", "test_batch.bin", b"\x0b" + b"\0" * 3072, r"test_batch.bin, image 1 has the label 11; allowed: 0 to 9"),
        ("retrieval", "a.test.tsv", b"2\ta\tb\tone\ttwo\n", r"a.test.tsv:1 has the label '2'.*; allowed: 0 or 1, two ids"),
        ("retrieval", "a.test.tsv", b"1\ta\tb\tone\n", r"a.test.tsv:1 has the label '1' and 3 fields more; allowed"),
    ],
)
def test_files_that_are_broken_are_named(task, name, content, said, cache, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        LongRangeData(task=task, source=str(tmp_path), cache_dir=str(cache)).setup("test")


@pytest.mark.parametrize(
    ("task", "name", "wanted"),
    [("listops", "a_test.tsv", r"\*_train.tsv"), ("text", "readme.txt", "train.tsv, .* or train/LABEL")],
)
@pytest.mark.parametrize("step", [LongRangeData.prepare_data, LongRangeData.setup])
def test_without_rows_to_train_on_nothing_is_prepared(step, task, name, wanted, cache, tmp_path):
    (tmp_path / name).write_bytes(b"Source\tTarget\n( [MAX 1 2 ] )\t2\n")
    with pytest.raises(ValueError, match=rf"data.source is '{tmp_path}', which has no train split; allowed: {wanted}"):
        step(LongRangeData(task=task, source=str(tmp_path), cache_dir=str(cache)))


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_split_without_files_is_evaluated_alone(stage, cache, tmp_path):
    folder = write_long_range(tmp_path, "image")
    settings = {"source": str(folder), "max_length": 1026, "validation_fraction": 0.3}
    fitted, alone = data(cache, "image", **settings), data(cache, "image", stage, **settings)
    if stage == "validate":
        assert rows_of(alone.val_dataloader()) == rows_of(fitted.val_dataloader())
    else:
        assert len(rows_of(alone.test_dataloader())) == len(alone.sets["test"])


def test_a_test_makes_no_training_rows(tmp_path):
    made = LongRangeData(rows=12, held_out_rows=5, cache_dir=str(tmp_path))
    trainer().test(Recorder(tmp_path), made)
    (folder,) = tmp_path.glob("texts-*[!k]")
    assert folder == made.sets["test"].files.folder and len(made.sets["test"]) == 5


def test_validating_rows_that_a_checkpoint_trained_on_is_announced(cache, tmp_path):
    settings = {"source": str(write_long_range(tmp_path, "image")), "max_length": 1026}
    trained = data(cache, "image", validation_fraction=0.3, **settings).state_dict()
    with pytest.warns(UserWarning, match="saw other data .* it may have trained on what is held out here"):
        data(cache, "image", "validate", validation_fraction=0.5, **settings).load_state_dict(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stage in ("validate", "test"):
            data(cache, "image", stage, validation_fraction=0.3, **settings).load_state_dict(trained)
            data(cache, "listops", stage).load_state_dict(data(cache, "listops").state_dict())


def masks_of(made, batch_size):
    """{symbols and masks of a row, without padding: (positions, labels)}."""
    made.eval_batch_size, found = batch_size, {}
    for batch in made.val_dataloader():
        for ids, positions, labels in zip(batch["input_ids"], batch["positions"], batch["labels"], strict=True):
            real = labels != IGNORED
            found[tuple(ids[ids != PAD].tolist())] = positions[real].tolist(), labels[real].tolist()
    return found


def test_masks_do_not_depend_on_the_rows_beside(cache):
    made = data(cache, masked=True)
    alone = masks_of(made, 1)
    assert len({len(ids) for ids in alone}) > 1 and alone == masks_of(made, 5)
    for ids, (positions, _) in alone.items():
        assert len(positions) == max(1, round(0.15 * len(ids))) and max(positions) < len(ids)


def test_two_processes_read_each_row_once(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, devices in (("one", {}), ("two", {"devices": 2, "strategy": "ddp_fork"})):
        (tmp_path / name).mkdir()
        trainer(max_steps=2, num_sanity_val_steps=-1, **devices).fit(Recorder(tmp_path / name), data(cache))
    lines = {name: recorded(tmp_path / name, "validation", rank) for name, rank in (("one", 0), ("two", 1))}
    lines["two"] += recorded(tmp_path / "two", "validation", 0)
    first, both = ({index for line in lines[name] for index in line["index"] if index >= 0} for name in ("one", "two"))
    assert first == both == set(range(5))
