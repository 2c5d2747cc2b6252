"""The overhead of `fit`: a training step with Lightning and this project's data, against the model in a bare PyTorch loop.

Both train the model of --config on the same batches. The bare loop has its batches ready in memory: its step is forward, loss,
backward, clipping and AdamW. They take turns in one process; the first steps of each turn are not counted. Writes loop.json.

    OMP_NUM_THREADS=1 python run.py benchmark --what loop --config conf/quickstart.yaml --steps 40 --rounds 5
"""

import statistics
from pathlib import Path
from typing import Any

from lit_linformer.studies.benchmark.subject import DEVICE, ROUNDS, THREADS, WHAT, begin, output, spread, write
from lit_linformer.utils.arguments import Setting, choice, whole, word
from lit_linformer.utils.configs import read_config
from lit_linformer.utils.errors import SettingError

SETTINGS = {
    "what": WHAT,
    "config": Setting(word("FILE"), "what is trained: MLM on PretrainingData", "conf/quickstart.yaml"),
    "steps": Setting(whole("N", 2), "steps in each round; two more for warm-up", 40),
    "rounds": ROUNDS,
    "device": DEVICE,
    "precision": Setting(choice("float32", "bf16"), "bf16: autocast", "float32"),
    "threads": THREADS,
    "output": output("runs/benchmark-loop"),
}


def main(argv: list[str]) -> None:
    """Measures, writes and prints; ValueError for a bad setting."""
    settings = begin("loop", __doc__, SETTINGS, argv, "loop") | {"compile": False, "clock": "wall"}
    encoder, data = read_training(Path(settings["config"]))
    import torch

    from lit_linformer.callbacks import Throughput
    from lit_linformer.model import EncoderConfig, MaskedLanguageModel
    from lit_linformer.studies.benchmark.steps import WARM, Clock, by_hand, by_trainer, quiet
    from lit_linformer.tasks import MLM

    torch.set_num_threads(settings["threads"])
    quiet()
    data.prepare_data()
    data.setup("fit")
    loader = iter(data.train_dataloader())
    batches = [{key: value.to(settings["device"]) for key, value in next(loader).items()} for _ in range(settings["steps"])]
    ratios, waits = [], []
    for number in range(settings["rounds"]):
        throughput = Throughput()
        torch.manual_seed(0)
        ours = by_trainer(MLM(EncoderConfig(**encoder), data.num_tokens), data, settings, [throughput])
        torch.manual_seed(0)
        step = by_hand(MaskedLanguageModel(EncoderConfig(**{**encoder, "vocab_size": data.num_tokens})), settings)
        bare = Clock(settings)
        for place in range(WARM + settings["steps"]):
            step(batches[place % len(batches)])
            bare.tick()
        ratios.append(ours / bare.seconds)
        waits.append(throughput.summary()["data_wait"])
        times = f"Lightning {ours * 1e3:.1f} ms, bare {bare.seconds * 1e3:.1f} ms a step"
        print(f"round {number + 1}: {times}, ratio {ratios[-1]:.3f}, waiting for data {waits[-1]:.2%}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}, waiting for data {statistics.median(waits):.2%}")
    content = {"settings": settings, "ratios": ratios, "ratio": spread(ratios), "data_wait": spread(waits)}
    write(settings["output"], "loop", argv, settings["device"], content)


def read_training(path: Path) -> tuple[dict[str, Any], Any]:
    """The encoder's settings and the data of a config; ValueError for one that trains something else."""
    from omegaconf import OmegaConf

    from lit_linformer.data import PretrainingData

    config = OmegaConf.to_container(OmegaConf.create(read_config(path)), resolve=True)
    model, data = (part if isinstance(part := config.get(key), dict) else {"class_path": part} for key in ("model", "data"))
    classes = [str(part.get("class_path")) for part in (model, data)]
    if classes != ["lit_linformer.tasks.MLM", "lit_linformer.data.PretrainingData"]:
        raise SettingError("config", path, "a config of MLM and PretrainingData", more=f", of {' and '.join(classes)}")
    if "encoder" not in model.get("init_args", {}):
        raise SettingError("config", path, "a config with an encoder of its own", more=", which names no model.encoder")
    # A batch is a step, as in the bare loop: none are accumulated.
    return model["init_args"]["encoder"], PretrainingData(**data.get("init_args", {}) | {"global_batch_size": None})
