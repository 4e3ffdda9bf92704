"""Known GPUs, a row each: for MFU, for plans, and for compiling for a GPU that is not present. Whether ranks may share
one. Needs no torch.

Sources: NVIDIA data sheets of A100, A800, A10, A40, L4, L40, L40S, H100 (one for SXM, PCIe, NVL), H200, GH200, HGX
B200, GB200 NVL72; NVIDIA whitepapers of the GeForce Ampere, Ada and Blackwell architectures for RTX cards; AMD data
sheets of the Instinct MI300X, MI325X, MI350X, MI355X. Network: NVIDIA's DGX A100, H100, H200 and B200 data sheets; 400
Gbit/s per GPU for MI300X platforms. Chips: table "Technical Specifications per Compute Capability" of the CUDA
programming guide.
"""

import os
import re
from dataclasses import dataclass

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # read by NCCL 2.30 and later


def ranks_may_share_gpus() -> bool:
    """Whether several ranks may compute on one GPU. They take turns on it, so this is for tests."""
    return os.environ.get(SHARING) == "1"


@dataclass(frozen=True)
class Gpu:
    """One model of a GPU."""

    pattern: str  # finds it in `torch.cuda.get_device_name()`
    bf16_flops: float  # dense, with float32 accumulation; data sheets often give the figure "with sparsity", twice that
    name: str = ""  # torch's spelling; "" for a GPU that no plan can name
    memory_bytes: int = 0  # for torch: of an H200's 141 GB, 139 GiB
    within_node: float | None = None  # bytes/s in one direction to the other GPUs of a machine, over all links
    between_nodes: float | None = None  # bytes/s in one direction, its share of its machine's network
    capability: tuple[int, int] | None = None  # compute capability, of NVIDIA GPUs
    copied: float = 0.0  # bytes/s read and written, measured in copies within the device; 0 if not measured
    # Multiprocessors, bytes of shared memory of a block of threads, and of the level-2 cache; None for a GPU that
    # cannot be simulated.
    chip: tuple[int, int, int] | None = None


# A device's row is the first whose pattern is in the device's name.
GPUS: dict[str, Gpu] = {
    "A100": Gpu(
        r"\bA100\b", 312e12, "NVIDIA A100-SXM4-80GB", 80 * 2**30, 300e9, 25e9, (8, 0),
        chip=(108, 166912, 40 * 2**20),
    ),
    "A800": Gpu(r"\bA800\b", 312e12),
    "H100 PCIe": Gpu(r"\bH100 PCIe", 756e12),
    "NVL": Gpu(r"\bH[12]00 NVL", 835e12),
    # Meta's: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W (torchtitan, benchmarks/asyncTP_llama3_h100_2025-06); its
    # copies: torchao, testing/training/roofline_utils.py. torch calls it "NVIDIA H100", so only a plan can name it.
    "H100 500W": Gpu(
        r"\bH100 500W\b", 989e12, "NVIDIA H100 500W", 95 * 2**30, 450e9, 50e9, (9, 0), copied=2.3e12
    ),
    "H100": Gpu(r"\bH100\b", 989e12, "NVIDIA H100 80GB HBM3", 80 * 2**30, 450e9, 50e9, (9, 0), copied=3.0e12),
    "H200": Gpu(
        r"\bH200\b", 989e12, "NVIDIA H200", 139 * 2**30, 450e9, 50e9, (9, 0), copied=4.3e12,
        chip=(132, 232448, 50 * 2**20),
    ),
    "H800": Gpu(r"\bH800\b", 989e12),
    "GH200": Gpu(r"\bGH200\b", 989e12),
    "H20": Gpu(r"\bH20\b", 148e12),
    "GB200": Gpu(r"\bGB200\b", 2500e12),
    "B200": Gpu(
        r"\bB200\b", 2250e12, "NVIDIA B200", 180 * 2**30, 900e9, 50e9, (10, 0), chip=(148, 232448, 126 * 2**20)
    ),
    "L40S": Gpu(r"\bL40S\b", 362e12),
    "L40": Gpu(r"\bL40\b", 181e12),
    "L4": Gpu(r"\bL4\b", 121e12),
    "A40": Gpu(r"\bA40\b", 149.7e12),
    "A10": Gpu(r"\bA10\b", 125e12),
    "RTX A6000": Gpu(r"\bRTX A6000\b", 154.8e12),
    "RTX 3090": Gpu(r"\bRTX 3090\b(?! Ti)", 71e12),
    "RTX 4090": Gpu(r"\bRTX 4090\b(?! [DL])", 165.2e12),
    "RTX 5090": Gpu(r"\bRTX 5090\b(?! [DL])", 209.5e12),
    "MI300X": Gpu(r"\bMI300X", 1307.4e12, "AMD Instinct MI300X", 192 * 2**30, 448e9, 50e9),
    "MI325X": Gpu(r"\bMI325X", 1307.4e12),
    "MI350X": Gpu(r"\bMI350X", 2300e12),
    "MI355X": Gpu(r"\bMI355X", 2500e12),
}  # fmt: skip


def find_gpu(device_name: str) -> str:
    """The key of a device in the table; "" if it is not there."""
    return next((key for key, gpu in GPUS.items() if re.search(gpu.pattern, device_name)), "")
