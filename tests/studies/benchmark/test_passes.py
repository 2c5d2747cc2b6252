"""What the benchmark compares: the paper's values, operation counts, models, and how a pass through one is measured."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_linformer.model import SelfAttention
from lit_linformer.studies.benchmark import cells
from lit_linformer.studies.benchmark.models import Layers, WrittenOutAttention, build, encoder_config, operations
from lit_linformer.studies.benchmark.passes import largest, measure_memory, measure_time, peak_memory
from lit_linformer.studies.benchmark.process import Job, measure
from lit_linformer.studies.benchmark.tables import with_ratios
from lit_linformer.studies.paper import MEMORY_SAVED, TIME_SAVED
from tests.studies.conftest import settings_of


def test_paper_values():
    assert TIME_SAVED[512] == {128: 1.5, 256: 1.3} and TIME_SAVED[2048][1024] == 1.3
    assert TIME_SAVED[65536] == {128: 20, 256: 18, 512: 16, 1024: 14, 2048: 7.9}
    assert MEMORY_SAVED[1024] == {128: 3.0, 256: 2.9, 512: 1.8} and MEMORY_SAVED[32768][512] == 36
    assert TIME_SAVED.keys() == MEMORY_SAVED.keys() == {512 << i for i in range(8)}
    for n in TIME_SAVED:
        assert TIME_SAVED[n].keys() == MEMORY_SAVED[n].keys() == {k for k in (128, 256, 512, 1024, 2048) if k < n}


@pytest.mark.parametrize("local_width", [0, 3])
@pytest.mark.parametrize(
    ("sharing", "order"),
    [(sharing, "compress_first") for sharing in ("none", "headwise", "key-value", "layerwise")]
    + [("headwise", "project_first")],
)
def test_operation_counts_are_those_of_the_layers(sharing, order, local_width):
    argv = ["--sharing", sharing, "--order", order, "--local_width", str(local_width), "--intermediate_size", "40"]
    settings = settings_of(*argv, "--num_layers", "2")
    n, x = 64, torch.randn(3, 64, 16)
    for name in ("fused", "written-out", "linformer 8", "lookup 8", "lookup:window=4 8"):
        model = Layers(encoder_config(name, settings, n), name == "written-out")
        # Torch does not count the fused CPU kernel; it does count the same products unfused.
        with FlopCounterMode(display=False) as counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
            model(x)
        assert counter.get_total_flops() == operations(name, settings, n) * x.shape[:2].numel() * 2


def test_operation_counts_by_the_formulas():
    D, n, k = 768, 1024, 128
    settings = settings_of("--hidden_size", str(D), "--num_heads", "12")
    assert operations("fused", settings, n) == 24 * D**2 + 4 * n * D
    assert operations(f"linformer {k}", settings | {"order": "project_first"}, n) == 24 * D**2 + 8 * k * D
    assert operations(f"linformer {k}", settings, n) == 20 * D**2 + 6 * k * D + 4 * D**2 * k / n
    full, ours = (operations(name, settings, 65536) for name in ("fused", f"linformer {k}"))
    assert full / ours == pytest.approx(17.4, abs=0.05)


def test_ratios_by_hand():
    def ratios(kind, **models):
        names = {"written_out": "written-out", "flash": "fused flash", "math": "fused math", "ours": "linformer 8"}
        found = {names[name]: {"status": "ok", **entry} for name, entry in models.items()}
        cell = {"kind": kind, "n": 64, "direction": "forward", "models": found}
        return with_ratios(cell, settings)["ratios"]["linformer 8"]

    settings = settings_of()
    times = {"written_out": [4.0, 6.0, 8.0], "flash": [3.0, 3.0, 3.0], "math": [2.0, 4.0, 9.0], "ours": [1.0, 2.0, 2.0]}
    found = ratios("time", **{name: {"seconds": seconds} for name, seconds in times.items()})
    counts = operations("fused", settings, 64) / operations("linformer 8", settings, 64)
    assert found["written-out"] == {"against": "written-out", "ratio": 4.0, "quartiles": [3.5, 4.0], "operation_counts": counts}
    assert (found["fused"]["against"], found["fused"]["ratio"]) == ("fused flash", 1.5)  # the median of the rounds' ratios
    found = ratios("memory", written_out={"bytes": 800}, flash={"bytes": 700}, math={"bytes": 600}, ours={"bytes": 200})
    assert [found[baseline]["ratio"] for baseline in ("written-out", "fused")] == [4.0, 3.0]
    sizes = {"written_out": (10, False), "flash": (40, True), "math": (20, False), "ours": (40, True)}
    found = ratios("largest_batch", **{name: {"batch": batch, "at_bound": at} for name, (batch, at) in sizes.items()})
    assert found["written-out"] == {"against": "written-out", "ratio": 4.0, "at_least": True}
    assert (found["fused"]["against"], found["fused"]["ratio"]) == ("fused flash", None)  # at the bound nothing is known


def test_written_out_attention_is_the_same_function():
    torch.manual_seed(0)
    fused = SelfAttention(24, 3, 20, local_width=3).double()
    torch.nn.init.normal_(fused.local.weight)
    written_out = WrittenOutAttention(24, 3, 20, local_width=3).double()
    written_out.load_state_dict(fused.state_dict())
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    torch.testing.assert_close(written_out(x)[0], fused(x)[0], rtol=0, atol=1e-10)


def test_models_share_their_weights_and_compute_the_same():
    settings = settings_of("--num_layers", "2")
    first = build("written-out", settings, 64)
    fused, ours = (build(name, settings, 64, first.state_dict(keep_vars=True)) for name in ("fused", "linformer 8"))
    x = torch.randn(2, 64, 16)
    torch.testing.assert_close(first(x), fused(x))
    for model in (fused, ours):
        assert model.layers[1].attention.value.weight is first.layers[1].attention.value.weight
        assert model.layers[0].up.weight is first.layers[0].up.weight
    assert {name for name, _ in ours.named_parameters()} - {name for name, _ in first.named_parameters()} == {"E.weight"}
    for name, k in (("linformer 4", 4), ("luna 8", 8)):  # whose E has another shape
        other = build(name, settings, 64, ours.state_dict(keep_vars=True))
        assert other.E.weight.shape[0] == k and other.layers[0].up.weight is first.layers[0].up.weight


def test_memory_measurement_sees_what_is_allocated():
    size = 200 * 2**20
    assert peak_memory(lambda: torch.ones(size // 4)) == pytest.approx(size, rel=0.1)
    assert peak_memory(lambda: [torch.ones(size // 4) for _ in range(3)] and None) == pytest.approx(3 * size, rel=0.1)
    assert peak_memory(lambda: None) < 0.01 * size  # the earlier peak is forgotten


def test_memory_of_models_in_processes_of_their_own():
    """Scores and softmax of unfused attention are two (H, n, n) tensors; the others have none."""
    job = Job(measure_memory, settings_of(), False, 1024, 1)
    found = measure(job, ["written-out", "fused", "linformer 8"], alone=True)
    scores = 2 * 1024**2 * 4
    assert 2 * scores < found["written-out"]["bytes"] < 3 * scores
    assert found["fused"]["bytes"] < scores and found["linformer 8"]["bytes"] < scores
    assert found["linformer 8"]["weights_bytes"] - found["fused"]["weights_bytes"] == 8 * 1024 * 4


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 37, 1000, 65535, 65536, 10**9])
def test_largest_batch_by_bisection(limit):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= limit

    found = largest(fits, 65536, seconds=60)
    assert min(limit, 65536) / 1.04 <= found <= min(limit, 65536) and len(tried) < 30 and max(tried) <= 65536
    assert all(largest(lambda number: True, bound, seconds=60) == bound for bound in (1, 3, 64, 66, 1000, 1030))
    with pytest.raises(TimeoutError):
        largest(fits, 65536, seconds=-1)


def test_a_pass_that_is_too_long_is_ended():
    """Killed in a pass of many minutes, it costs the other model nothing."""
    settings = settings_of("--cell_seconds", "0.5", "--rounds", "1", "--num_layers", "200")
    found = measure(Job(measure_time, settings, False, 65536, 1), ["fused", "linformer 8"])
    assert found["fused"] == {"status": "over limit"} and found["linformer 8"]["status"] in ("ok", "over limit")


def test_nothing_is_estimated_where_nothing_is_left_to_measure(monkeypatch):
    monkeypatch.setattr(cells, "measure", lambda *_: pytest.fail("a pass was measured"))
    assert cells.seconds_needed(settings_of(), [], ["fused"]) == {}


def test_an_error_of_torch_is_a_result_and_one_of_ours_is_raised():
    """Torch refuses cuDNN attention on a CPU."""
    found = measure(Job(measure_time, settings_of("--device", "cpu"), True, 64, 1), ["fused cudnn", "linformer 8"])
    assert found["fused cudnn"]["status"] == "failed" and found["fused cudnn"]["reason"]
    assert found["linformer 8"]["status"] == "ok" and len(found["linformer 8"]["seconds"]) == 3
    with pytest.raises(RuntimeError, match="KeyError: 'warmup'"):
        measure(Job(measure_time, {k: v for k, v in settings_of().items() if k != "warmup"}, True, 64, 1), ["fused"])
