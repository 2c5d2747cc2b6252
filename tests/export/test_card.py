"""What config.json and the card say about an exported model."""

import json
import re

import torch

from lit_linformer.model import EncoderConfig, MaskedLanguageModel, SequenceClassifier
from lit_linformer.runs.trained_model import TrainedModel, _add_facts
from lit_linformer.utils.markdown import plain
from tests.export.models import export


def test_config_and_card_tell_what_was_trained(pretrained, finetuned, tmp_path):
    export(pretrained, "safetensors", tmp_path / "mlm", tmp_path)
    export(finetuned, "safetensors", tmp_path / "task", tmp_path)
    mlm, task = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("mlm", "task"))
    assert mlm["task"] == "masked-lm" and mlm["encoder"]["projection_dim"] == 8
    facts = mlm["lit_linformer"]
    assert facts["step"] in (4, 8) and facts["tokens"] == facts["step"] * 4 * 32 and facts["text"] == "text.txt"
    assert facts["perplexity"] == facts["best_perplexity"] > 1 and facts["version"]
    assert task["labels"] == ["negative", "positive"] and task["pooling"] == "mean" and task["lit_linformer"]["task"] == "SST-2"
    card = (tmp_path / "mlm/README.md").read_text()
    assert f"| {facts['step']:,} | {facts['tokens']:,} | {facts['perplexity']:,.2f} |" in card
    assert "| projection_dim | 8 |" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(code.replace("path/to/this/folder", str(tmp_path / "mlm")), {})
    scores = task["lit_linformer"]["scores"]
    assert f"| validation accuracy | {scores['accuracy']:.4f} |" in (tmp_path / "task/README.md").read_text()


def test_a_name_in_a_card_is_only_a_name():
    from markdown import markdown

    name = "# <script>alert(1)</script> | [a](javascript:b) *c* `d` & _e_ a_b \\\n# f"
    shown = markdown(f"# {plain(name)}")
    assert shown.startswith("<h1># &lt;script&gt;") and shown.count("<") == 2 and "<em>" not in shown and "\n" not in shown
    assert plain("runs/quick_start-2") == "runs/quick_start-2"


def test_card_has_what_the_user_and_other_runs_say(pretrained, finetuned, tmp_path):
    """Text given for it, the training command and machine, results of other runs, a picture; the same again from the folder."""
    told = ["--name", "small", "--license", "mit", "--text", "Wikipedia (CC BY-SA)", "--results", str(finetuned)]
    export(pretrained, "huggingface", tmp_path / "out", tmp_path, *told)
    result = json.loads((finetuned / "result.json").read_text())
    for folder in ("out", "again"):
        card = (tmp_path / folder / "README.md").read_text()
        head = "---\nlicense: mit\npipeline_tag: fill-mask\nlibrary_name: transformers\ntags: [linformer]\n---\n\n# small\n"
        assert (
            card.startswith(head) and "| text | Wikipedia (CC BY-SA) |" in card and "| license of the weights | mit |" in card
        )
        assert f"| task | val/accuracy | {result['best_metrics']['val/accuracy']:.4g} |" in card
        assert f"```sh\n{result['command']}\n```" in card and "```sh\npython run.py fit --config tiny.yaml" in card
        assert f"| hardware | {result['environment']['hardware']} |" in card
        assert "(perplexity.png)" in card and (tmp_path / folder / "perplexity.png").read_bytes()[1:4] == b"PNG"
        rows = (tmp_path / folder / "perplexity.csv").read_text().splitlines()
        assert rows[0] == "step,tokens,perplexity" and rows[1].startswith("0,0,")
        if folder == "out":
            export(tmp_path / "out", "huggingface", tmp_path / "again", tmp_path)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_card_of_a_model_that_reads_windows_says_that_its_example_reads_one_row(finetuned, tmp_path):
    checkpoint = torch.load(max(finetuned.glob("checkpoints/*.ckpt")), weights_only=False)
    assert "max_windows: 1\n" in checkpoint["config"]
    checkpoint["config"] = checkpoint["config"].replace("max_windows: 1\n", "max_windows: 3\n")
    torch.save(checkpoint, tmp_path / "windows.ckpt")
    for source, folder in (("windows.ckpt", "out"), ("out", "again")):
        export(tmp_path / source, "safetensors", tmp_path / folder, tmp_path)
        assert "tokens was read in up to 3 windows" in (tmp_path / folder / "README.md").read_text()


def test_a_checkpoint_file_alone_is_enough(pretrained, tmp_path):
    (tmp_path / "alone.ckpt").write_bytes((pretrained / "checkpoints/last.ckpt").read_bytes())
    assert "alone: linformer, k = 8" in export(tmp_path / "alone.ckpt", "safetensors", tmp_path / "out", tmp_path)
    facts = json.loads((tmp_path / "out/config.json").read_text())["lit_linformer"]
    assert facts["step"] == 8 and facts["best_perplexity"] > 1  # the checkpoint carries the curve


def test_facts_are_those_of_the_checkpoints_step(tmp_path):
    curve = [(1, 10, 9.0), (2, 20, 5.0), (3, 30, 7.0), (4, 40, 4.0)]
    lines = "".join(f"{step},{tokens},{perplexity}\n" for step, tokens, perplexity in curve)
    (tmp_path / "perplexity.csv").write_text(f"step,tokens,perplexity\n{lines}")
    (tmp_path / "scores.csv").write_text("step,val/score\n1,0.6\n3,0.5\n3,0.7\n4,0.8\n")  # validated twice: owed after a kill
    config = EncoderConfig(vocab_size=9, max_length=8, hidden_size=8, num_layers=1, num_heads=1, projection_dim=2)
    reader, classifier = (
        TrainedModel("run", net, None, 8) for net in (MaskedLanguageModel(config), SequenceClassifier(config, 2, "mean"))
    )
    for model in (reader, classifier):
        _add_facts(model, {"global_step": 3}, tmp_path)
    assert (reader.facts["perplexity"], reader.facts["best_perplexity"], reader.curve) == (7.0, 5.0, curve[:3])
    assert classifier.facts["scores"] == {"score": 0.7}
