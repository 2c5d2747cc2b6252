"""What all tasks share."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.parsing import lightning_setattr

from lit_linformer.model import Encoder, EncoderConfig
from lit_linformer.runs.trained_model import read_model
from lit_linformer.tasks import MLM, SequenceClassification, TrainingModule
from lit_linformer.tasks.classification import task_of_rows
from lit_linformer.tasks.optim import Optimization
from lit_linformer.tasks.scores import task_loss
from lit_linformer.tasks.sharding import check_whole
from lit_linformer.utils.errors import UserError
from tests.helpers import assert_same, plain_trainer

SHAPE = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8, "projection_dim": 4}


@pytest.mark.parametrize("equal", [True, False])
def test_cudnn_s_attention_is_for_rows_of_one_length_and_never_for_the_texts_of_predict(equal):
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **SHAPE))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(equal_rows=equal))
    module.trainer = trainer
    found = {}
    for stage in ("fit", "validate", "test", "predict"):
        module.setup(stage)
        found[stage] = torch.backends.cuda.cudnn_sdp_enabled()
        module.teardown(stage)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert found == {"fit": equal, "validate": equal, "test": equal, "predict": False}


def test_a_fit_that_failed_does_not_turn_off_cudnn_s_attention_for_those_that_follow():
    """Lightning calls no teardown then."""
    config, equal = EncoderConfig(vocab_size=9, max_length=8, **SHAPE), SimpleNamespace(equal_rows=True)
    failed, module = MLM(config), MLM(config)
    failed.trainer, module.trainer = SimpleNamespace(datamodule=None), SimpleNamespace(datamodule=equal)
    failed.setup("fit")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    module.setup("fit")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    module.teardown("fit")
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_setup_of_one_s_own_need_not_call_ours():
    class Own(TrainingModule):
        def setup(self, stage):
            pass

    module = Own()
    module.setup("fit")
    module.teardown("fit")
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("task", [MLM, SequenceClassification])
def test_what_a_subclass_has_beside_its_net_is_trained_too(task):
    class Own(task):
        def __init__(self, encoder, **more):
            super().__init__(encoder=encoder, **more)
            self.generator = Encoder(encoder)
            self.generator.tokens = self.net.encoder.tokens  # shared embeddings

    more = {"num_labels": 2} if task is SequenceClassification else {}
    module = Own(encoder=EncoderConfig(vocab_size=9, max_length=8, **SHAPE), **more)
    trained = [weight for group in module.parameter_groups() for weight in group["params"]]
    assert len(trained) == len(set(trained)) and set(trained) == set(module.parameters())
    check_whole(module.net, module.net)
    with pytest.raises(UserError, match=r"generator\.positions.weight, and trainer.strategy shards"):
        check_whole(module, module.net)


class Ids(LightningDataModule):
    """Two rows of eight tokens, of which the first is to be predicted."""

    num_tokens = 9

    def train_dataloader(self):
        ids = torch.arange(8).repeat(2, 1)
        batch = {"input_ids": ids, "positions": ids[:, :1], "labels": ids[:, :1]}
        return torch.utils.data.DataLoader([batch], batch_size=None)


def fit(module, data):
    settings = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", devices=1, max_steps=1, **settings).fit(module, datamodule=data)


def test_the_members_of_an_ensemble_trained_in_one_process_begin_with_different_weights():
    starts = []
    for _ in range(3):
        module = MLM(EncoderConfig(max_length=8, **SHAPE), vocab_size=9, warmup_steps=0)
        starts.append(module.net.head.dense.weight[0, 0].item())
        fit(module, Ids())
    assert len(set(starts)) == 3


def test_a_vocabulary_by_default_beside_data_that_have_another_is_told(capfd):
    fit(MLM(EncoderConfig(max_length=8, **SHAPE), warmup_steps=0), Ids())
    told = "Ids.num_tokens is 9: the model's vocabulary is the default of model.encoder.vocab_size, 50,265"
    assert told in "".join(capfd.readouterr())


def test_ids_without_an_embedding_are_refused_before_predict_reads_them(tmp_path):
    class Wrong(Ids):
        metrics, evaluation_names = ("accuracy",), ("",)

        def predict_dataloader(self):
            batch = {"input_ids": torch.tensor([[1, 9]]), "index": torch.zeros(1, dtype=torch.int64)}
            return torch.utils.data.DataLoader([batch], batch_size=None)

    module = SequenceClassification(encoder=EncoderConfig(vocab_size=9, max_length=8, **SHAPE))
    with pytest.raises(UserError, match="input_ids of a batch hold 9; allowed: 0 to 8"):
        plain_trainer(tmp_path).predict(module, datamodule=Wrong())


def test_a_classifier_refuses_data_that_do_not_say_how_to_score_it_or_have_other_classes():
    class Labelled(Ids):
        num_labels, metrics, evaluation_names = 3, ("accuracy",), ("",)

    for data, message in (
        (None, "the trainer has no data module; allowed: one with metrics and evaluation_names"),
        (Ids(), "Ids has no metrics; allowed: one with metrics and evaluation_names"),
        (Labelled(), "model.num_labels is 2; allowed: 3, as the data have"),
    ):
        module = SequenceClassification(encoder=EncoderConfig(max_length=8, **SHAPE), vocab_size=9)
        module.trainer = SimpleNamespace(datamodule=data)
        with pytest.raises(UserError, match=message):
            module.setup("fit")


@pytest.mark.parametrize(("weights", "loss"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_loss_of_a_classifier_is_in_float32_or_as_exact_as_its_weights(weights, loss):
    module = SequenceClassification(encoder=EncoderConfig(max_length=8, **SHAPE), vocab_size=9).to(weights)
    batch = {"input_ids": torch.arange(8).repeat(2, 1), "labels": torch.tensor([0, 1]), "index": torch.arange(2)}
    assert module.training_loss(batch).dtype == loss


@pytest.mark.parametrize("task", [MLM, SequenceClassification])
def test_a_module_is_saved_without_training(task, tmp_path):
    module, trainer = task(encoder=EncoderConfig(vocab_size=9, max_length=8, **SHAPE)), plain_trainer(tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    again = task.load_from_checkpoint(tmp_path / "new.ckpt", weights_only=True)
    assert_same(dict(again.state_dict()), dict(module.state_dict()))
    assert_same(read_model(tmp_path / "new.ckpt").weights, dict(module.net.state_dict()))


def test_a_checkpoint_of_weights_alone_is_not_said_to_have_trained_nothing():
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **SHAPE))
    module.trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    with pytest.raises(UserError, match=r"a model that was saved without its optimiser's state; allowed: .* model.pretrained"):
        module.on_load_checkpoint({"global_step": 3, "state_dict": module.state_dict()})


@pytest.mark.parametrize(
    ("batch", "what"), [({"input_ids": 0, "labels": 0}, "holds input_ids, labels"), ([0, 0], "is a list")], ids=["dict", "list"]
)
def test_masked_language_modelling_says_what_a_batch_lacks(batch, what):
    """As transformers makes it, with labels (B, N), or a TensorDataset."""
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **SHAPE))
    with pytest.raises(UserError, match=rf"a batch {what}; allowed: a dict that holds .*positions.*, as Pretraining"):
        module.training_loss(batch)


@pytest.mark.parametrize(("classes", "shape"), [(1, (4, 1)), (3, (4, 3)), (3, (4, 1))])
def test_labels_of_another_shape_are_refused(classes, shape):
    """A column of values was compared with those of all rows, with no more than a warning of torch."""
    with pytest.raises(UserError, match=r"labels of a batch have the shape \(4, .\); allowed: \(4,\), a class or value"):
        task_loss(torch.zeros(4, classes), torch.zeros(shape))


@pytest.mark.parametrize("names", [{}, {"labels": None}])
def test_classes_without_names_are_named_by_their_numbers(names):
    data = SimpleNamespace(metrics=("accuracy",), evaluation_names=("",), **names)
    assert task_of_rows(data, 3).labels == ("0", "1", "2")


def module_in(trainer, **settings):
    module = MLM(EncoderConfig(vocab_size=9, max_length=8, **SHAPE), **settings)
    module.trainer = SimpleNamespace(datamodule=None, world_size=2, **trainer)
    return module


@pytest.mark.parametrize("task", [MLM, SequenceClassification])
def test_the_learning_rate_that_a_tuner_finds_is_used(task):
    module = task(encoder=EncoderConfig(vocab_size=9, max_length=8, **SHAPE), lr=0.5)
    assert {group["lr"] for group in module.parameter_groups()} == {0.5, 0.01}  # E's
    lightning_setattr(module, "lr", 0.25)  # as Tuner.lr_find does
    assert {group["lr"] for group in module.parameter_groups()} == {0.25, 0.005}


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "constant", "wsd"])
def test_every_setting_of_the_optimiser_reaches_it(schedule):
    shape = {"schedule": schedule, "power": 3.0, "final_lr_factor": 0.2, "decay_share": 0.6}
    module = module_in({"estimated_stepping_batches": 40}, warmup_steps=4, **shape, betas=(0.8, 0.7), eps=1e-3, lr=0.5)
    made = module.configure_optimizers()
    (factor, *_), groups = made["lr_scheduler"]["scheduler"].lr_lambdas, made["optimizer"].param_groups
    for step in range(41):
        assert factor(step) == Optimization(**shape).lr_factor(step, 4, 40)
    assert all((group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3) for group in groups)
    assert {group["name"]: group["initial_lr"] for group in groups} == {"decay": 0.5, "no_decay": 0.5, "projection": 0.01}


def test_dropout_differs_between_batches_and_processes():
    seeds = set()
    for rank in (0, 1):
        module = module_in({"global_rank": rank})
        for batch in (7, 8):
            module.batches_seen = batch
            module.on_train_batch_start({}, 0)
            seeds.add(torch.initial_seed())
    assert len(seeds) == 4


def test_tokens_of_all_processes_count():
    module = module_in({"global_rank": 0, "fit_loop": SimpleNamespace(total_batch_idx=0)})
    for _ in range(3):
        module.on_train_batch_start({"input_ids": torch.zeros(4, 5, 6, dtype=torch.long)}, 0)
    assert (module.batches_seen, module.tokens_seen) == (3, 3 * 4 * 5 * 2)
    for other in ({"first": torch.zeros(4, 5), "second": torch.zeros(4, 5)}, [torch.zeros(4, 5)]):  # of a user's own data
        module.on_train_batch_start(other, 0)
    assert (module.batches_seen, module.tokens_seen) == (5, 3 * 4 * 5 * 2)
