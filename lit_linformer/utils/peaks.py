"""Peak FLOP/s of devices: the denominator of model FLOPs utilisation.

Dense TFLOP/s as the vendors state them, at boost clock, with float32 accumulation, without structured sparsity (half, if a
data sheet gives only "with sparsity"). bf16, fp16 and tf32 are those of the tensor or matrix cores; fp32 is that of the
ordinary units, on AMD that of the matrix cores. Sources, by name: NVIDIA's data sheets of B200 (HGX), H200, H100 (SXM, PCIe,
NVL), GH200, A100, A40, A10, L40S, L40, L4, V100, T4, RTX A6000, RTX 6000 Ada; NVIDIA's white papers GA102 (RTX 3090), Ada
(RTX 4090) and Blackwell (RTX 5090); AMD's data sheets of MI300X and MI325X.
"""

import re

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
# (regular expression for torch's device name; bf16, fp16, tf32, fp32). The first that matches counts.
# V100 and T4 have no bf16 units and no TF32.
_PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    (r"\bB200\b", (2250.0, 2250.0, 1100.0, 75.0)),
    (r"\bGH200\b", (989.4, 989.4, 494.7, 66.9)),
    (r"\bH[12]00 NVL\b", (835.5, 835.5, 417.5, 60.0)),
    (r"\bH200\b", (989.4, 989.4, 494.7, 66.9)),
    (r"\bH100 PCIe\b", (756.0, 756.0, 378.0, 51.2)),
    (r"\bH100\b", (989.4, 989.4, 494.7, 66.9)),
    (r"\bA100\b", (312.0, 312.0, 156.0, 19.5)),
    (r"\bA40\b", (149.7, 149.7, 74.8, 37.4)),
    (r"\bA10\b", (125.0, 125.0, 62.5, 31.2)),
    (r"\bL40S\b", (362.0, 362.0, 183.0, 91.6)),
    (r"\bL40\b", (181.0, 181.0, 90.5, 90.5)),
    (r"\bL4\b", (121.0, 121.0, 60.0, 30.3)),
    (r"\bV100S", (None, 130.0, None, 16.4)),
    (r"\bV100-PCIE", (None, 112.0, None, 14.0)),
    (r"\bV100-SXM2", (None, 125.0, None, 15.7)),
    (r"\bT4\b", (None, 65.0, None, 8.1)),
    (r"\bRTX A6000\b", (154.8, 154.8, 77.4, 38.7)),
    (r"\bRTX 6000 Ada\b", (364.2, 364.2, 182.1, 91.1)),
    (r"\bRTX 5090$", (209.5, 209.5, 104.8, 104.8)),
    (r"\bRTX 4090$", (165.2, 165.2, 82.6, 82.6)),
    (r"\bRTX 3090$", (71.0, 71.0, 35.6, 35.6)),
    (r"\bMI3(00|25)X\b", (1307.4, 1307.4, 653.7, 163.4)),
)


def peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the device that torch calls ``name``; None if it is not known, since no MFU is better than a guessed one.

    That of a slice of a GPU (MIG) is not known, either.

    Args:
        name: torch's name of the device, such as NVIDIA H200.
        precision: bf16 | fp16 | tf32 | fp32.
    """
    if " MIG " in name:
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, name):
            tera = peaks[PRECISIONS.index(precision)]
            return None if tera is None else tera * 1e12
    return None


def matmul_precision(precision: str) -> str | None:
    """The type in which matrix products are computed with one of Lightning's or the benchmark's precisions; None: 64 bits."""
    import torch

    if precision.startswith("bf16"):
        return "bf16"
    if precision in ("fp16", "float16") or precision.startswith("16"):
        return "fp16"
    if precision == "float32" or precision.startswith("32"):
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return None


def device_peak(device: str, precision: str) -> float | None:
    """``peak_flops`` of a device of this machine; None for a CPU, whose peak depends on clocks that it does not report."""
    if not device.startswith("cuda") or (kind := matmul_precision(precision)) is None:
        return None
    import torch

    return peak_flops(torch.cuda.get_device_properties(device).name, kind)
