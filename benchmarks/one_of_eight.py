"""Llama 3 8B as one of eight GPUs trains it, on one GPU: all 32 layers, an eighth of the states, simulated links.

python -m benchmarks one_of_eight [--minutes 9] [--output FOLDER] [--cache FILE] [--rows NAMES] [--smoke]

Rows, worker and further flags are gpu.py's; results go to NAME.md and NAME.json there, by default one_of_eight. The
table sets tokens/s of a GPU beside what others published of eight or more. What is simulated, and what is not, is in
gpu_links.py: computation and memory are real, collectives last as long as NVLink's rate and NCCL's share of it say.
The rows with 16 micro-batches are the published batch of 128 sequences; they go on for 60 s without a pause, since
clocks of short bursts are higher. `--smoke` trains two tiny layers, on a CPU too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu
from benchmarks.gpu_rows import MODELS

if __name__ == "__main__":
    models = ",".join(name for name, shape in MODELS.items() if shape.ranks > 1)
    gpu.main([f"--models={models}", "--name=one_of_eight", *sys.argv[1:]])
