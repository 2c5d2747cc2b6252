"""An exported folder in transformers: Auto classes, pipelines, tokenizer, saving, activation checkpointing, Trainer."""

import json
import re
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lit_linformer.export import huggingface_folder as hf_folder  # noqa: E402
from lit_linformer.export.card import card  # noqa: E402
from lit_linformer.export.huggingface import LinformerConfig, LinformerForMaskedLM  # noqa: E402
from lit_linformer.runs.trained_model import open_checkpoint  # noqa: E402
from tests.helpers import inside, output  # noqa: E402

AutoModelForMaskedLM, AutoTokenizer = transformers.AutoModelForMaskedLM, transformers.AutoTokenizer


@pytest.fixture(scope="module")
def folders(pretrained, finetuned, tmp_path_factory):
    """Both runs, exported in the huggingface format."""
    made = {}
    for name, run in (("mlm", pretrained), ("task", finetuned)):
        made[name] = tmp_path_factory.mktemp(name)
        hf_folder.write(open_checkpoint(run), made[name])
    return made


def equal_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_fill_mask_answers_as_predict_does(folders, pretrained, tmp_path, monkeypatch):
    texts = ["one <mask> here", "  the <mask>, and  more </s> ", "<mask>"]
    with inside(pretrained.parents[1]):
        output(["predict", "--config", "runs/tiny/config.yaml", "--data.text", json.dumps(texts)], tmp_path)
        records = [json.loads(line) for line in (pretrained / "predictions.jsonl").read_text().splitlines()]
    answers = transformers.pipeline("fill-mask", str(folders["mlm"]))(texts)
    for record, answer in zip(records, answers, strict=True):
        assert [word["id"] for word in record["top"]] == [word["token"] for word in answer]
        assert [word["token"] for word in record["top"]] == [word["token_str"] for word in answer]
        assert [w["probability"] for w in record["top"]] == pytest.approx([w["score"] for w in answer], rel=1e-4)


def test_text_classification_answers_as_predict_does(folders, finetuned, tmp_path):
    texts = ["a good film", "  awful <mask> plot ", "we saw the </s> film"]
    with inside(finetuned.parents[1]):
        output(["predict", "--config", "runs/task/config.yaml", "--data.text", json.dumps(texts)], tmp_path)
        records = [json.loads(line) for line in (finetuned / "predictions.jsonl").read_text().splitlines()]
    answers = transformers.pipeline("text-classification", str(folders["task"]), top_k=None)(texts)
    for record, answer in zip(records, answers, strict=True):
        assert [found["label"] for found in record["top"]] == [found["label"] for found in answer]
        assert [f["probability"] for f in record["top"]] == pytest.approx([f["score"] for f in answer], rel=1e-4)


def test_the_cards_example_cuts_a_long_text_as_predict_does(folders, finetuned, tmp_path):
    text = "a good film " * 40
    with inside(finetuned.parents[1]):
        output(["predict", "--config", "runs/task/config.yaml", "--data.text", text], tmp_path)
        record = json.loads((finetuned / "predictions.jsonl").read_text())
    (code,) = re.findall(r"```python\n(.*?)```", card(open_checkpoint(finetuned), "huggingface", [], False), re.DOTALL)
    code = code.replace("path/to/this/folder", str(folders["task"])).replace("some text", text)
    names = {}
    exec(code.replace("print(", "found = ("), names)
    (found,) = names["found"]
    assert found["label"] == record["prediction"]
    assert found["score"] == pytest.approx(record["top"][0]["probability"], rel=1e-4)


def test_tokenizer_builds_rows_as_this_project_does(folders, finetuned):
    tokenizer, own = AutoTokenizer.from_pretrained(folders["task"]), open_checkpoint(finetuned).tokenizer
    first, second = own.encode_plain(["a <mask> film", "so good"])
    bos, eos = own.bos_id, own.eos_id
    assert tokenizer(" a <mask> film")["input_ids"] == [bos, *first, eos]
    assert tokenizer("a <mask> film", "so good")["input_ids"] == [bos, *first, eos, eos, *second, eos]
    assert tokenizer.model_max_length == 32 and list(tokenizer("a")) == ["input_ids", "attention_mask"]
    batch = tokenizer(["a", "a longer one"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, -1] == own.pad_id == tokenizer.pad_token_id and batch["attention_mask"][0].tolist()[-1] == 0
    assert len(tokenizer("film " * 100, truncation=True)["input_ids"]) == 32
    names = {"bos": "bos", "eos": "eos", "cls": "bos", "sep": "eos", "mask": "mask", "unk": "unk"}
    assert all(getattr(tokenizer, f"{theirs}_token_id") == getattr(own, f"{ours}_id") for theirs, ours in names.items())


def test_an_export_of_an_exported_classifier_has_the_same_tokenizer(folders, tmp_path):
    """Each export added a normalizer; of two, --data.tokenizer of the pretraining was called another tokenizer."""
    hf_folder.write(open_checkpoint(folders["task"]), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == (folders["task"] / "tokenizer.json").read_text()


def test_save_and_load_again_is_bit_equal(folders, tmp_path):
    for name in ("mlm", "task"):
        auto = AutoModelForMaskedLM if name == "mlm" else transformers.AutoModelForSequenceClassification
        model, tokenizer = auto.from_pretrained(folders[name]), AutoTokenizer.from_pretrained(folders[name])
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        again, words = auto.from_pretrained(tmp_path / name), AutoTokenizer.from_pretrained(tmp_path / name)
        assert equal_weights(model, again)
        assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}
        assert words("a <mask>")["input_ids"] == tokenizer("a <mask>")["input_ids"]
    assert model.config.id2label == {0: "negative", 1: "positive"} and model.config.pooling == "mean"


def test_encoder_alone_hidden_states_and_maps(folders):
    model = AutoModelForMaskedLM.from_pretrained(folders["mlm"]).eval()
    encoder = transformers.AutoModel.from_pretrained(folders["mlm"]).eval()
    ids, mask = torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    found = model(ids, mask, output_hidden_states=True, output_attentions=True)
    assert torch.allclose(encoder(ids, mask)[0], found.hidden_states[-1], atol=1e-5)
    assert len(found.hidden_states) == 3 and all(state.shape == (2, 4, 16) for state in found.hidden_states)
    assert [maps.shape for maps in found.attentions] == [(2, 2, 4, 8)] * 2
    logits = model(ids, mask, return_dict=False)[0]
    assert torch.allclose(logits, found.logits, atol=1e-4)
    assert torch.equal(model(ids, mask.bool()).logits, logits)
    assert torch.allclose(model(ids[1:, :3]).logits, logits[1:, :3], atol=1e-4)  # padding does not matter


def test_loss_is_that_of_this_project(folders, pretrained):
    model, own = AutoModelForMaskedLM.from_pretrained(folders["mlm"]).eval(), open_checkpoint(pretrained).net
    ids, labels = torch.randint(5, 300, (2, 9)), torch.full((2, 9), -100)
    labels[0, 3], labels[1, 5] = 40, 50
    mine = own.loss(ids, torch.tensor([[3], [5]]), torch.tensor([[40], [50]]))
    assert model(ids, labels=labels).loss.item() == pytest.approx(mine.item(), rel=1e-5)
    task = transformers.AutoModelForSequenceClassification.from_pretrained(
        folders["task"], num_labels=1, ignore_mismatched_sizes=True
    )
    assert task(ids, labels=torch.tensor([0.5, 2.0])).loss.isfinite()


def test_what_no_model_reads_is_refused_but_none_is_accepted(folders):
    """PEFT passes inputs_embeds=None to each model; a masked language model silently ignored position_ids and the like."""
    ids = torch.tensor([[0, 5, 6, 2]])
    for auto in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
        model = getattr(transformers, auto).from_pretrained(folders["mlm"]).eval()
        assert torch.equal(model(input_ids=ids, inputs_embeds=None)[0], model(ids)[0])
        with pytest.raises(ValueError, match="inputs_embeds are given; allowed: None"):
            model(ids, inputs_embeds=torch.zeros(1, 4, 16))
        with pytest.raises(TypeError, match="position_ids"):
            model(ids, position_ids=torch.arange(4)[None] + 3)


def test_loss_of_accumulated_batches_is_divided_by_their_tokens(folders):
    model = AutoModelForMaskedLM.from_pretrained(folders["mlm"]).eval()
    assert model.accepts_loss_kwargs  # so that the Trainer passes num_items_in_batch
    ids = torch.randint(5, 300, (2, 9))
    assert model(ids, labels=ids, num_items_in_batch=36).loss.item() == pytest.approx(model(ids, labels=ids).loss.item() / 2)


def test_a_masked_language_model_starts_a_classifier(folders):
    torch.manual_seed(0)
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        folders["mlm"], num_labels=3, output_loading_info=True
    )
    pretrained = AutoModelForMaskedLM.from_pretrained(folders["mlm"])
    assert equal_weights(model.linformer, pretrained.linformer)
    assert all(name.startswith("classifier.") for name in report["missing_keys"])
    assert 0 < model.classifier.output.weight.std() < 0.1 and not model.classifier.dense.bias.any()


def test_what_a_folder_lacks_starts_as_in_a_new_model(folders, tmp_path):
    """With settings changed on loading, weights missing in the folder are initialised as the encoder does, not as noise."""
    settings = {"local_width": 5, "sharing": "headwise", "projection_dim": 4}
    model = AutoModelForMaskedLM.from_pretrained(folders["task"], **settings, ignore_mismatched_sizes=True)
    fresh = LinformerForMaskedLM(model.config)
    for name, tensor in model.state_dict().items():
        if ".E." in name or ".F." in name or "local" in name or name == "lm_head.bias":
            assert torch.equal(tensor, fresh.state_dict()[name]), name


def test_more_tokens(folders, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(folders["mlm"]).eval()
    before = model(torch.tensor([[0, 5, 2]])).logits
    model.resize_token_embeddings(310)
    model.save_pretrained(tmp_path)
    after = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()(torch.tensor([[0, 5, 2]])).logits
    assert after.shape[-1] == 310 and torch.equal(after[..., :300], before)
    model.resize_token_embeddings(40)
    assert torch.equal(model(torch.tensor([[0, 5, 2]])).logits, before[..., :40])


def test_activation_checkpointing_is_exact(folders):
    def step(on):
        model = AutoModelForMaskedLM.from_pretrained(folders["mlm"]).train()  # its dropout is 0.2
        if on:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            assert model.linformer.encoder.config.activation_checkpointing
        torch.manual_seed(1)
        ids = torch.arange(5, 35).view(2, 15)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    (plain, gradients), (recomputed, others) = step(False), step(True)
    assert torch.equal(plain, recomputed) and all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_trainer_trains_saves_and_resumes(folders, tmp_path):
    pytest.importorskip("accelerate")
    tokenizer = AutoTokenizer.from_pretrained(folders["mlm"])
    texts = [{"input_ids": tokenizer(f"text {i} of {i * i} words")["input_ids"]} for i in range(16)]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=0)

    def train(folder, steps, resume=False):
        model = AutoModelForMaskedLM.from_pretrained(folder)
        arguments = transformers.TrainingArguments(
            tmp_path,
            max_steps=steps,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            save_steps=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, data_collator=collate, train_dataset=texts, processing_class=tokenizer)
        # Having resumed, transformers leaves torch without NumPy's types, which other tests' checkpoints hold.
        allowed = torch.serialization.get_safe_globals()
        trainer.train(resume_from_checkpoint=resume)
        torch.serialization.add_safe_globals(allowed)
        return trainer

    done = train(folders["mlm"], 4)
    losses = [line["loss"] for line in done.state.log_history if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-4")
    assert equal_weights(saved, done.model) and not saved.config.activation_checkpointing
    assert train(tmp_path / "checkpoint-4", 6, resume=True).state.global_step == 6


def test_a_model_that_transformers_alone_made_is_exported_and_converted(folders, tmp_path, monkeypatch):
    """Nothing is known of its training; a KeyError followed what had been written."""
    monkeypatch.chdir(tmp_path)
    config = transformers.AutoConfig.from_pretrained(folders["mlm"], lit_linformer=None)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "made")
    shutil.copy(folders["mlm"] / "tokenizer.json", tmp_path / "made")
    shown = output(["export", "--ckpt_path", "made", "--format", "safetensors", "--output", "out"], tmp_path)
    assert "parameters\n" in shown and "step" not in shown
    assert "parameters\n" in output(["convert", "--from", "made", "--name", "longer", "--max_length", "64"], tmp_path)


def test_settings_are_checked_as_the_encoders_are():
    with pytest.raises(ValueError, match="sharing is 'both'; allowed"):
        LinformerConfig(sharing="both")
    config = LinformerConfig(num_layers=2, projection_dim=[4, 8], sharing="key-value", max_position_embeddings=64)
    assert config.num_hidden_layers == 2 and config.encoder().max_length == 64 and config.encoder().projection_dims == [4, 8]


def test_pipeline_gives_the_value_of_a_regression(folders, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folders["task"], id2label={0: "LABEL_0"}, problem_type="regression", ignore_mismatched_sizes=True
    )
    model.classifier.output.bias.data.fill_(3.5)
    tokenizer = AutoTokenizer.from_pretrained(folders["task"])
    (found,) = transformers.pipeline("text-classification", model=model.eval(), tokenizer=tokenizer)("a film")
    ids = torch.tensor([tokenizer("a film")["input_ids"]])
    assert found["score"] == pytest.approx(model(ids).logits.item(), rel=1e-5) and abs(found["score"]) > 1


def test_padding_on_the_left_is_refused(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["mlm"], padding_side="left")
    model = AutoModelForMaskedLM.from_pretrained(folders["mlm"])
    with pytest.raises(ValueError, match=r"pads before real tokens; allowed: .* padding_side='right'"):
        model(**tokenizer(["one", "one two three"], padding=True, return_tensors="pt"))
