"""The settings that --help shows, the most often changed first. `--help_all` lists all of them; a test compares the two.

Descriptions and defaults of a class's settings are read from the class. Those of Lightning's Trainer are here, in this
project's words; those of the run are in defaults.py.
"""

from typing import Any

# {setting: (default, words)}
TRAINER: dict[str, tuple[Any, str]] = {
    "max_steps": (-1, "Optimiser steps; -1: no limit."),
    "max_epochs": (-1, "Passes over the training data; -1: no limit."),
    "max_time": (None, "Time after which training ends, that of earlier starts included: 00:08:00:00 for eight hours."),
    "val_check_interval": (None, "Training batches between validations, or a share of an epoch, such as 0.5."),
    "check_val_every_n_epoch": (1, "Epochs between validations; null: val_check_interval counts batches across epochs."),
    "accumulate_grad_batches": (1, "Batches in an optimiser step."),
    "gradient_clip_val": (None, "Norm to which gradients are clipped; null: no clipping."),
    "accelerator": ("auto", "auto (a GPU if there is one), cpu, gpu."),
    "devices": ("auto", "Number of devices, or the devices' numbers, such as [0,3]."),
    "num_nodes": (1, "Machines; conf/trainer/ddp_nodes.yaml and slurm.yaml start them."),
    "precision": (None, "32-true; bf16-mixed, for a GPU (Ampere or newer); 16-mixed, for an older one."),
    "strategy": ("auto", "auto, ddp, or as an overlay in conf/trainer/ sets it."),
    "callbacks": (None, "Adds a callback; `python run.py list callbacks` has the names."),
    "logger": (None, "TensorBoardLogger (null), CSVLogger, WandbLogger, MLFlowLogger, or your own; false: none."),
    "log_every_n_steps": (None, "Optimiser steps between two points of the loss curve."),
    "limit_val_batches": (None, "Batches in a validation, or a share of them, such as 0.1; 0: no validation."),
    "limit_test_batches": (None, "Batches in the test, or a share of them, such as 0.1."),
    "fast_dev_run": (False, "Run one batch of each split and keep nothing, to see whether it runs at all."),
}
SHAPE = (
    "attention projection_dim sharing projection projection_init local_width norm max_length hidden_size num_layers dropout"
).split()
# For the package's own classes; for a user's class, all settings that its __init__ declares are shown.
OF_CLASSES = {
    "MLM": "lr optimizer warmup_steps schedule weight_decay projection_lr_factor lr_batch_size pretrained compile",
    "Recall": "lr optimizer warmup_steps schedule weight_decay projection_lr_factor lr_batch_size pretrained compile",
    "Distillation": "pretrained teacher logits_weight hidden_weight labels_weight lr warmup_steps schedule",
    "SequenceClassification": (
        "pretrained load_weights trained_layers lr pooling dropout layer_lr_decay warmup_fraction weight_decay schedule"
    ),
    "PretrainingData": (
        "source validation_source column document_start tokenizer vocab_size max_length batch_size global_batch_size mask_rate"
    ),
    "FineTuningData": (
        "task source columns label_column labels validation_fraction max_length max_windows batch_size limit_train"
    ),
    "LongRangeData": "task source masked mask_rate max_length cut rows held_out_rows batch_size",
    "RecallData": "max_length pairs distance gap vocab_size rows validation_rows batch_size num_workers",
}
# Which of the data's settings are shown for commands that do not train.
OF_DATA = {
    "validate": "source validation_source max_length batch_size eval_batch_size",
    "test": "source test_source max_length batch_size eval_batch_size",
    "predict": "text text_pair file column batch_size eval_batch_size",
}
# Where the names that a setting allows are to be found: in a registry of the model, or in a module's constant.
REGISTRIES = {"model.encoder.attention": "ATTENTIONS", "model.encoder.projection": "PROJECTIONS"}
NAMES = {
    "model.encoder.sharing": "lit_linformer.model.linformer.SHARINGS",
    "model.encoder.order": "lit_linformer.model.linformer.ORDERS",
    "model.encoder.projection_init": "lit_linformer.model.starts.PROJECTION_INITS",
}
# {command: [(title of a section, its settings; model.encoder, model and data: the class's own)]}
TRAINING = "max_steps max_epochs val_check_interval gradient_clip_val accumulate_grad_batches"
TRAINING += " accelerator devices num_nodes precision"
SECTIONS: dict[str, list[tuple[str, str]]] = {
    "fit": [
        ("The run", "name ckpt_path overwrite seed_everything"),
        ("Training", " ".join(f"trainer.{name}" for name in f"{TRAINING} strategy callbacks logger".split())),
        ("The model's shape", "model.encoder"),
        ("What it learns, and how fast", "model"),
        ("The data", "data"),
        (
            "What is kept and printed",
            "best.keep best.monitor best.mode last.every_n_steps last.validation progress.every_n_steps progress.live "
            "trainer.log_every_n_steps",
        ),
    ],
    "validate": [
        ("The run", "name ckpt_path"),
        ("The data", "data"),
        ("Where and how much", "trainer.accelerator trainer.devices trainer.precision trainer.limit_val_batches"),
    ],
    "test": [
        ("The run", "name ckpt_path"),
        ("The data", "data"),
        ("Where and how much", "trainer.accelerator trainer.devices trainer.precision trainer.limit_test_batches"),
    ],
    "predict": [
        ("What to predict", "data"),
        ("The run", "name ckpt_path"),
        ("Where", "trainer.accelerator trainer.devices trainer.precision"),
    ],
    "prepare": [("The data", "data")],
}
FURTHER = {"fit": "--name again --seed_everything 1", "predict": "--data.file texts.txt"}  # after the configs that are given
EXAMPLES = {
    "fit": "python run.py fit --config conf/quickstart.yaml --name idea --model.encoder.projection_dim 32",
    "validate": "python run.py validate --config runs/quickstart/config.yaml",
    "test": "python run.py test --config runs/quickstart/config.yaml",
    "predict": 'python run.py predict --model.pretrained models/small --data.text "Paris is the <mask> of France."',
    "prepare": "python run.py prepare --config conf/pretrain/small.yaml --data.source texts/",
}
