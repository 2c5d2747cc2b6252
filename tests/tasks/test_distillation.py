"""Distillation, and what MLM takes over from a pretrained model."""

import json
import re
import shutil

import pytest
import torch
import yaml
from torch.nn import functional

from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.tasks import MLM, Distillation
from lit_linformer.tasks.distillation import _terms
from tests.cli.test_errors import complaint
from tests.helpers import TINY, assert_same, assert_same_runs, fit, inside, load, output, plain_trainer, read_log, run_forked
from tests.model.test_flops import counted
from tests.studies.conftest import tables
from tests.tasks.test_sharding import SHARDED

SHAPE = {"vocab_size": 40, "max_length": 12, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, cache):
    """A folder with runs/teacher, a Transformer of a few steps, and runs/student, a Linformer converted from it."""
    folder = tmp_path_factory.mktemp("teacher")
    with inside(folder):
        (folder / "tiny.yaml").write_text(TINY)
        data = ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
        words = ["--name", "teacher", "--model.encoder.attention", "full"]
        assert run_forked(["fit", "--config", "tiny.yaml", *data, *words]) == 0
        assert run_forked("convert --from runs/teacher --name student --attention linformer".split()) == 0
    return folder


@pytest.fixture
def distill(trained, corpus, cache, tmp_path, monkeypatch):
    """Arguments of fit that train the student, in a folder with both runs."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return arguments(tmp_path, corpus, cache)


def arguments(folder, corpus, cache):
    config = yaml.safe_load(TINY)
    config["model"]["class_path"] = "lit_linformer.tasks.Distillation"
    config["data"]["init_args"]["max_length"] = None
    del config["model"]["init_args"]["encoder"], config["data"]["init_args"]["vocab_size"]
    (folder / "distill.yaml").write_text(yaml.safe_dump(config))
    data = ["--data.source", str(corpus), "--data.cache_dir", str(cache)]
    words = ["--model.pretrained", "runs/student", "--model.teacher", "runs/teacher"]
    return ["--config", str(folder / "distill.yaml"), *data, *words]


@pytest.fixture(scope="module")
def finished_distillation(trained, corpus, cache):
    """What a `fit` of the student with four validations printed and left: runs/new, which `distilled` copies."""
    folder = trained.parent / f"{trained.name}-distilled"
    shutil.copytree(trained, folder)
    with inside(folder):
        words = ["--name", "new", "--trainer.val_check_interval", "3", "--model.compile", "false"]
        return folder, output(["fit", *arguments(folder, corpus, cache), *words], folder)


@pytest.fixture
def distilled(distill, finished_distillation, tmp_path):
    """The same arguments of fit, where runs/new has ended already."""
    shutil.copytree(finished_distillation[0] / "runs/new", tmp_path / "runs/new")
    return distill


def models(**settings):
    nets = []
    for seed, more in ((0, {"projection_dim": 4}), (1, {"attention": "full"})):
        torch.manual_seed(seed)
        nets.append(MaskedLanguageModel(EncoderConfig(**SHAPE | more | settings)).eval())
    with torch.no_grad():
        for net in nets:
            for parameter in net.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return nets


def test_a_trained_model_is_loaded_without_its_teacher(tmp_path):
    module, trainer = Distillation("gone", encoder=EncoderConfig(**SHAPE, projection_dim=4)), plain_trainer(tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "student.ckpt")
    again = Distillation.load_from_checkpoint(tmp_path / "student.ckpt", weights_only=True)
    assert_same(dict(again.state_dict()), dict(module.state_dict()))
    with pytest.raises(ValueError, match=r"model.teacher is not given; allowed: a run or a checkpoint"):
        trainer.fit(again, torch.utils.data.DataLoader([]))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_three_terms_are_what_they_are_said_to_be(norm):
    student, teacher = models(norm=norm)
    draw = torch.Generator().manual_seed(2)
    ids, positions = torch.randint(0, 40, (3, 12), generator=draw), torch.tensor([[1, 4, 0], [2, 3, 9], [5, 0, 0]])
    labels = torch.tensor([[7, 8, -100], [9, 1, 2], [3, -100, -100]])
    mask = torch.arange(12) < torch.tensor([[12], [12], [7]])
    logits, hidden, nll = _terms(student, teacher, (1.0, 1.0, 1.0), ids, positions, labels, mask)

    asked = labels >= 0
    p, q = (net(ids, mask, positions)[asked].softmax(-1) for net in (teacher, student))
    assert torch.allclose(logits, (p * (p / q).log()).sum(-1).mean(), atol=1e-5)
    assert torch.allclose(nll, -q[torch.arange(6), labels[asked]].log().mean(), atol=1e-5)
    shares = []
    x, y = (
        net.encoder.embedding_norm(net.encoder.tokens(ids) + net.encoder.positions.weight[:12]) for net in (student, teacher)
    )
    for mine, theirs in zip(student.encoder.layers, teacher.encoder.layers, strict=True):
        x, y = mine(x, mask, False, student.encoder.shared)[0], theirs(y, mask, False, {})[0]
        shares.append(functional.mse_loss(x[mask], y[mask]) / y[mask].square().mean())
    assert torch.allclose(hidden, sum(shares) / 2, atol=1e-5)
    assert _terms(student, teacher, (0.0, 0.0, 1.0), ids, positions, labels, mask) == (0.0, 0.0, nll)
    assert all(term.abs() < 1e-6 for term in _terms(teacher, teacher, (1.0, 1.0, 0.0), ids, positions, labels, mask)[:2])
    tokens = []  # of each row, that a head reads
    for net in (student, teacher):
        net.head.register_forward_hook(lambda module, inputs, features: tokens.append(features.shape[1]))
    assert _terms(student, teacher, (0.0, 1.0, 0.0), ids, positions, labels, mask) == (0.0, hidden, 0.0)
    assert _terms(student, teacher, (0.0, 1.0, 1.0), ids, positions, labels, mask)[1:] == (hidden, nll)
    assert tokens == [0, 0, 3, 0]
    rounded = _terms(student.bfloat16(), teacher.bfloat16(), (1.0, 1.0, 1.0), ids, positions, labels, mask)
    assert {term.dtype for term in rounded} == {torch.float32}  # not the loss: that is with trainer.precision bf16-true
    exact = _terms(student.double(), teacher.double(), (1.0, 1.0, 1.0), ids, positions, labels, mask)
    assert {term.dtype for term in exact} == {torch.float64}


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_operations_are_those_that_the_terms_need(weights):
    student, teacher = models()
    task = Distillation("a run", *weights, encoder=student.encoder.config)
    task.net, task._teacher = student, (teacher.requires_grad_(False),)
    ids, positions, labels = (torch.randint(1, most, (2, n)) for n, most in ((12, 40), (3, 12), (3, 40)))

    def step():
        terms = _terms(student, teacher, weights, ids, positions, labels, None)
        sum(weight * term for weight, term in zip(weights, terms, strict=True)).backward()

    assert counted(step) == task.training_flops({"input_ids": ids, "positions": positions})


def test_the_teacher_learns_nothing(distilled, finished_distillation, tmp_path):
    before, (_, shown) = load(tmp_path / "runs/student/checkpoints/last.ckpt")["state_dict"], finished_distillation
    checkpoint = load(tmp_path / "runs/new/checkpoints/last.ckpt")
    assert checkpoint["state_dict"].keys() == before.keys()
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(before)
    assert not torch.equal(checkpoint["state_dict"]["net.encoder.tokens.weight"], before["net.encoder.tokens.weight"])
    metrics = json.loads((tmp_path / "runs/new/result.json").read_text())["metrics"]
    assert {"train/logits_loss", "train/hidden_loss", "val/teacher_perplexity"} <= metrics.keys()
    assert "train/labels_loss" not in metrics
    for run, expected in (("teacher", metrics["val/teacher_perplexity"]), ("student", None)):
        output(["validate", "--config", f"runs/{run}/config.yaml", *distilled[2:6]], tmp_path)
        found = json.loads((tmp_path / f"runs/{run}/validate.json").read_text())["metrics"]["val/perplexity"]
        assert expected in (None, pytest.approx(found, rel=1e-5))
        if run == "student":
            assert f"step 0  validation perplexity {found:.2f}  (before training)" in shown


@pytest.mark.slow
def test_a_killed_distillation_resumes_bit_for_bit(distill, tmp_path):
    assert fit(distill, "whole", tmp_path / "whole") == 0
    assert fit(distill, "killed", tmp_path / "killed", kill_at=7) == -9
    assert fit(distill, "killed", tmp_path / "killed", "--ckpt_path", "last") == 0
    assert_same_runs(tmp_path, "whole", "killed")
    of_teacher = [teacher_of(tmp_path / f"runs/{name}") for name in ("whole", "killed")]
    assert of_teacher[0] == of_teacher[1] > 1


def teacher_of(run):
    return json.loads((run / "result.json").read_text())["metrics"]["val/teacher_perplexity"]


def test_a_run_that_goes_on_with_another_teacher_tells_of_that_one(distilled, tmp_path):
    before = teacher_of(tmp_path / "runs/new")
    more = ["--ckpt_path", "last", "--trainer.max_steps", "14", "--model.teacher", "runs/student"]
    output(["fit", *distilled, "--name", "new", *more], tmp_path)
    output(["validate", "--config", "runs/student/config.yaml", *distilled[2:6]], tmp_path)
    found = json.loads((tmp_path / "runs/student/validate.json").read_text())["metrics"]["val/perplexity"]
    assert teacher_of(tmp_path / "runs/new") == pytest.approx(found, rel=1e-5) != pytest.approx(before, rel=1e-3)


def test_a_loss_that_is_nan_ends_the_run(distill, tmp_path):
    words = ["--name", "high", "--model.lr", "1e4", "--model.weight_decay", "100"]
    line = output(["fit", *distill, *words, "--trainer.max_steps", "100"], tmp_path, status=2).splitlines()[-1]
    assert re.match(r"error: the loss is (nan|inf) at step |error: weights, or AdamW's averages", line)
    assert "a lower model.lr (now 10000.0)" in line


@pytest.mark.slow
def test_what_was_distilled_needs_no_teacher(distilled, tmp_path):
    shutil.rmtree(tmp_path / "runs/teacher")
    shutil.rmtree(tmp_path / "runs/student")
    for argv in (["predict", "--data.text", "a <mask> b"], ["validate"], ["test"]):
        output([argv[0], "--config", "runs/new/config.yaml", *argv[1:]], tmp_path)


def test_the_report_tells_what_was_lost_and_regained(distilled, tmp_path):
    output(["report", "--source", "runs/new"], tmp_path)
    page = (tmp_path / "runs/report/report.md").read_text()
    teacher = json.loads((tmp_path / "runs/new/result.json").read_text())["metrics"]["val/teacher_perplexity"]
    rows = [line.split(",") for line in (tmp_path / "runs/new/perplexity.csv").read_text().splitlines()[1:]]
    perplexity = [float(row[3]) for row in rows]
    found = tables(page)["runs/new"][1:6]
    assert [row[0] for row in rows] == ["0", "3", "6", "9", "12"]
    expected = (teacher, perplexity[0], perplexity[2], perplexity[4])
    assert found == [*map("{:,.2f}".format, expected), f"{perplexity[4] / teacher:.3f}"]
    assert "- `python run.py convert --from runs/teacher --name student --attention linformer`" in page
    assert (tmp_path / "runs/report/conversion.png").is_file() and "Other pretraining runs" not in page


@pytest.mark.slow
def test_labels_alone_are_plain_masked_language_modelling(distill, tmp_path):
    alone = ["--model.logits_weight", "0", "--model.hidden_weight", "0", "--model.labels_weight", "1"]
    assert fit([*distill, *alone], "labels", tmp_path / "labels") == 0
    config = yaml.safe_load((tmp_path / "distill.yaml").read_text())
    config["model"]["class_path"] = "lit_linformer.tasks.MLM"
    (tmp_path / "mlm.yaml").write_text(yaml.safe_dump(config))
    assert fit(["--config", str(tmp_path / "mlm.yaml"), *distill[2:-2]], "plain", tmp_path / "plain") == 0
    assert read_log(tmp_path / "labels.0") == read_log(tmp_path / "plain.0")


def test_two_processes(distill, tmp_path):
    words = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--trainer.max_steps", "2"]
    output(["fit", *distill, *words, "--name", "ddp"], tmp_path)


@pytest.mark.slow
def test_hidden_states_alone_where_weights_are_sharded(distill, tmp_path):
    words, losses = ["--model.logits_weight", "0", "--model.warmup_steps", "0", "--trainer.max_steps", "2"], []
    for name, sharded in (("plain", []), ("sharded", [*SHARDED, "--trainer.devices", "1"])):
        assert fit([*distill, *sharded, *words], name, tmp_path / name) == 0
        losses.append([float.fromhex(line["loss"]) for line in read_log(tmp_path / f"{name}.0").values()])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_compiled(distill, tmp_path):
    student, teacher = models()
    ids, positions, labels = (
        torch.zeros(2, 12, dtype=torch.int64),
        torch.tensor([[1, 4], [2, 3]]),
        torch.tensor([[7, 8], [9, 1]]),
    )
    inputs = (student, teacher, (1.0, 1.0, 1.0), ids, positions, labels, None)
    for compiled, eager in zip(torch.compile(_terms, backend="eager")(*inputs), _terms(*inputs), strict=True):
        assert torch.allclose(compiled, eager, rtol=1e-4)
    output(["fit", *distill, "--trainer.max_steps", "2", "--model.compile", "true", "--name", "compiled"], tmp_path)


REFUSED = {
    "--model.logits_weight -1": r"model.logits_weight is -1.0; allowed: 0 or more",
    "--model.logits_weight 0 --model.hidden_weight 0": r"logits_weight, hidden_weight and labels_weight are all 0; allowed",
    "--model.teacher null": r"model.teacher is not given; allowed: a run or a checkpoint",
    "--model.pretrained null": r"model.encoder is not given; allowed: its settings, .*, or model.pretrained with a model",
    "--model.teacher nowhere": r"model.teacher is nowhere, which does not exist; allowed: a run directory",
    "--model.teacher runs/narrow": r"model.teacher is runs/narrow, whose hidden_size is 8, the model's 16; allowed: the same",
    "--model.teacher runs/short": r"data.max_length is 32; allowed: up to the teacher's max_length = 16",
    "--model.pretrained runs/nowhere": r"model.pretrained is runs/nowhere, which does not exist; allowed",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words, distill, tmp_path, corpus, cache):
    if "narrow" in words or "short" in words:
        (tmp_path / "tiny.yaml").write_text(TINY)
        other = (
            "--name narrow --model.encoder.hidden_size 8" if "narrow" in words else "--name short --model.encoder.max_length 16"
        )
        argv = ["fit", "--config", "tiny.yaml", *other.split(), "--trainer.max_steps", "1", "--model.warmup_steps", "0"]
        output([*argv, *distill[2:6]], tmp_path)
    line = complaint(["fit", *distill, "--name", "new", *words.split()], tmp_path)
    assert re.search(REFUSED[words], line), line
    assert not (tmp_path / "runs/new/config.yaml").exists()


def test_mlm_takes_encoder_head_and_tokenizer_over(trained):
    student = load(trained / "runs/student/checkpoints/last.ckpt")
    net = MLM(pretrained=str(trained / "runs/student")).net
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, student["state_dict"][f"net.{name}"])
    asked = EncoderConfig(**{**vars(net.encoder.config), "dropout": 0.5, "vocab_size": 7, "short_rows": "mean"})
    free = MLM(encoder=asked, pretrained=str(trained / "runs/student")).net.encoder.config
    assert (free.dropout, free.vocab_size, free.short_rows) == (0.5, net.encoder.config.vocab_size, "mean")
    with pytest.raises(ValueError, match=r"model.encoder.num_layers is 3, in the checkpoint .* 2; allowed: the same"):
        MLM(encoder=EncoderConfig(**{**vars(net.encoder.config), "num_layers": 3}), pretrained=str(trained / "runs/student"))
    with pytest.raises(ValueError, match=r"data.tokenizer has 999 tokens, model.pretrained=.* \d+; allowed"):
        MLM(pretrained=str(trained / "runs/student"), vocab_size=999)
    with pytest.raises(ValueError, match=r"model.encoder is not given; allowed: its settings, or model.pretrained"):
        MLM()
    with pytest.raises(ValueError, match=r"model.encoder is not given"):
        Distillation(teacher="nowhere")


def test_another_tokenizer_is_refused(distill, tmp_path, trained):
    tokenizer = json.loads((tmp_path / "runs/student/tokenizer.json").read_text())
    tokenizer["decoder"] = None
    (tmp_path / "other.json").write_text(json.dumps(tokenizer))
    line = complaint(["fit", *distill, "--name", "new", "--data.tokenizer", "other.json"], tmp_path)
    assert "is another tokenizer than the one that model.pretrained was trained with" in line


def test_a_teacher_of_another_tokenizer_is_refused(distill, tmp_path, corpus):
    """With equally many tokens, which are other words."""
    other = corpus.read_text().translate(str.maketrans("abcdefghijklm", "nopqrstuvwxyz"))
    (tmp_path / "other.txt").write_text(other)
    (tmp_path / "tiny.yaml").write_text(TINY)
    output(
        ["fit", "--config", "tiny.yaml", "--data.source", "other.txt", "--trainer.max_steps", "4", "--name", "stranger"],
        tmp_path,
    )
    sizes = [
        len(json.loads((tmp_path / f"runs/{run}/tokenizer.json").read_text())["model"]["vocab"])
        for run in ("stranger", "student")
    ]
    assert sizes[0] == sizes[1]
    line = complaint(["fit", *distill, "--name", "new", "--model.teacher", "runs/stranger"], tmp_path)
    assert "is another tokenizer than the one that model.teacher=runs/stranger was trained with; allowed: one of the" in line


def test_an_export_of_the_pretrained_model_has_its_tokenizer(distill, tmp_path):
    """The huggingface format adds bos and eos to tokenizer.json, which still encodes texts to the same ids."""
    output("export --ckpt_path runs/student --format huggingface --output exported".split(), tmp_path)
    assert (tmp_path / "exported/tokenizer.json").read_text() != (tmp_path / "runs/student/tokenizer.json").read_text()
    words = ["--model.pretrained", "exported", "--data.tokenizer", "runs/student/tokenizer.json", "--trainer.max_steps", "1"]
    assert run_forked(["fit", *distill, *words, "--model.warmup_steps", "0", "--name", "of-the-export"]) == 0


def test_of_hidden_states_alone_every_parameter_that_is_trained_has_a_gradient():
    """DDP waits for them (conf/trainer/ddp.yaml has find_unused_parameters false)."""
    model = Distillation("teacher", logits_weight=0.0, encoder=EncoderConfig(**SHAPE, projection_dim=4, norm="pre"))
    _, teacher = models(norm="pre")
    ids = torch.randint(0, 40, (3, 12))
    positions, labels = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.int64)
    sum(_terms(model.net, teacher, (0.0, 1.0, 0.0), ids, positions, labels, None)).backward()
    assert {name for name, parameter in model.net.named_parameters() if parameter.requires_grad} == {
        name for name, parameter in model.net.named_parameters() if parameter.grad is not None
    }
