"""On a GPU: compiled bf16 against plain float32, fused attention against unfused, padding, DDP, resuming."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_linformer.model import EncoderConfig, MaskedLanguageModel
from lit_linformer.model.attention import attend, log_mass, softmax
from lit_linformer.tasks.compiling import compile_training
from tests.gpu.conftest import ON
from tests.helpers import HANGS, read_log

RUN = str(Path(__file__).parents[2] / "run.py")
SHAPE = {"vocab_size": 1000, "max_length": 256, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "intermediate_size": 256}
PLAIN = {"projection_dim": 64, "dropout": 0.0, "attention_dropout": 0.0, "norm": "pre"}
KINDS = {
    "recommended": {"local_width": 5},
    "headwise": {"sharing": "headwise"},
    "none": {"sharing": "none"},
    "full": {"attention": "full", "local_width": 5},
    "lookup": {"attention": "lookup", "short_rows": "mean", "local_width": 5},
    "window": {"attention": "window"},
    "coarse": {"attention": "coarse", "attention_options": {"best": 4}},
    "lsh": {"attention": "lsh"},
    "luna": {"attention": "luna"},
    "nystrom": {"attention": "nystrom"},
    "sparse": {"attention": "sparse"},
}


def batch_on(device):
    torch.manual_seed(1)
    ids, labels = (torch.randint(1, 1000, (4, n), device=device) for n in (256, 37))
    return {"input_ids": ids, "labels": labels, "positions": torch.arange(0, 256, 7, device=device).repeat(4, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [64, 256])
def test_fused_attention_is_the_written_out_one(keys, dtype, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 32, device=device, dtype=dtype) for n in (256, keys, keys))
    bias = log_mass((torch.arange(keys, device=device) < keys // 2)[None, None], dtype)
    for shift in (None, bias):
        fused, written_out = (attend(q, k, v, shift, 0.0, need_weights)[0] for need_weights in (False, True))
        assert torch.allclose(fused, written_out, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_under_autocast_weights_are_stored_as_scores_are(device):
    scores = torch.randn(2, 3, 5, 7, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        assert softmax(scores).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_row_is_the_unpadded_one(kind, device):
    torch.manual_seed(0)
    model = MaskedLanguageModel(EncoderConfig(**SHAPE, **PLAIN, **KINDS[kind])).to(device).eval()
    ids = torch.randint(1, 1000, (2, 200), device=device)
    padded = torch.nn.functional.pad(ids, (0, 56))
    mask = torch.arange(256, device=device).expand(2, 256) < 200
    with torch.inference_mode():
        assert torch.allclose(model.encoder(ids), model.encoder(padded, mask)[:, :200], atol=1e-4)


def fit(tiny, tmp_path, name, *extra, kill_at=-1, status=0):
    """Runs `fit` on the GPU; its log: {batch: line}."""
    log = ["--trainer.callbacks+", "tests.helpers.BatchLog", "--trainer.callbacks.path", str(tmp_path / name)]
    log += ["--trainer.callbacks.kill_at", str(kill_at), "--trainer.accelerator", "gpu" if ON == "cuda" else "cpu"]
    command = [sys.executable, RUN, "fit", *tiny, "--name", name, "--trainer.precision", "bf16-mixed", *extra, *log]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=HANGS)
    assert done.returncode == status, done.stdout + done.stderr
    return read_log(tmp_path / f"{name}.0")


def losses(log):
    return [float.fromhex(line["loss"]) for line in log.values()]


def test_resumed_and_ddp_runs_are_the_whole_one(tiny, tmp_path):
    whole, again = (fit(tiny, tmp_path, name) for name in ("whole", "again"))
    # Some GPU kernels add in any order: a resumed run must come as near as a second one does, exactly if those are equal.
    noise = max(abs(a - b) for a, b in zip(losses(whole), losses(again), strict=True))
    assert noise < 1e-2
    fit(tiny, tmp_path, "killed", kill_at=8, status=-9)
    resumed = fit(tiny, tmp_path, "killed", "--ckpt_path", "last")
    assert [line["inputs"] for line in resumed.values()] == [line["inputs"] for line in whole.values()]
    assert losses(resumed) == pytest.approx(losses(whole), abs=4 * noise)
    ddp = fit(tiny, tmp_path, "ddp", "--trainer.strategy", "ddp")
    assert losses(ddp) == pytest.approx(losses(whole), abs=max(4 * noise, 1e-3))
    result = json.loads((tmp_path / "runs/whole/result.json").read_text())
    assert result["throughput"]["tokens_per_second"] > 0 and result["throughput"]["peak_memory_gib"] > 0


# Last, as each kind compiles for several seconds.
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_bf16_is_plain_float32_but_for_rounding(kind, device):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = MaskedLanguageModel(EncoderConfig(**SHAPE, **PLAIN, **KINDS[kind])).to(device)
    batch, gradients, losses = batch_on(device), [], []
    for fast in (False, True):
        model.zero_grad()
        if fast:
            compile_training(model)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            value = model.loss(**batch)
        value.backward()
        losses.append(value.item())
        gradients.append(torch.cat([weight.grad.flatten().float() for weight in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.995
