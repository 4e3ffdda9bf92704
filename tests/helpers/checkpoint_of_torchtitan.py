"""Makes checkpoint_of_torchtitan.tar.xz: a checkpoint of torchtitan 0.1.0, and how that run went on.

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 torchao==0.18.0 torchtitan==0.1.0 tyro tensorboard
    peer/bin/python tests/helpers/checkpoint_of_torchtitan.py

torchtitan has no CPU path, so its parts (model, FSDP with bfloat16, optimizer, schedule, data loader, checkpoints) are
used without its trainer. The archive holds checkpoint/step-3, and steps.json with tokens, labels and loss of each step.
"""

import json
import os
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.ft import init_ft_manager
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config_manager import ConfigManager
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import apply_fsdp

FLAGS = """--training.steps 6 --training.seq_len 16 --training.local_batch_size 2 --lr_scheduler.warmup_steps 2
    --optimizer.lr 0.01 --optimizer.implementation for-loop --checkpoint.enable_checkpoint --checkpoint.interval 3"""
SIZES = {"dim": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8, "rope_theta": 500000}


class Trainer:
    """As torchtitan's, what is saved as `train_state`."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(out: Path) -> None:
    config = ConfigManager().parse_args([*FLAGS.split(), "--job.dump_folder", str(out)])
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Transformer(TransformerModelArgs(vocab_size=512, max_seq_len=16, **SIZES))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    model.init_weights()
    ft, state = init_ft_manager(config), Trainer()
    optimizers = build_optimizers([model], config, ft)
    schedule = build_lr_schedulers(optimizers, config)
    rows = torch.randint(0, 256, (12, 17))
    data = [({"input": row[:-1]}, row[1:]) for row in rows]
    loader = ParallelAwareDataloader(data, 0, 1, 2)
    checkpoints = CheckpointManager(loader, [model], optimizers, schedule, {"train_state": state}, config, ft)
    steps = []
    for inputs, labels in loader:
        state.step += 1
        optimizers.zero_grad()
        loss = cross_entropy_loss(model(inputs["input"]), labels)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()
        schedule.step()
        steps.append({"tokens": inputs["input"].tolist(), "labels": labels.tolist(), "loss": loss.item()})
        if state.step == 3:
            checkpoints.save(state.step)
    (out / "steps.json").write_text(json.dumps(steps))
    with tarfile.open(Path(__file__).with_suffix(".tar.xz"), "w:xz") as archive:
        for name in ("steps.json", "checkpoint/step-3/.metadata", "checkpoint/step-3/__0_0.distcp"):
            archive.add(out / name, name)


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877"}
    dist.init_process_group("gloo")
    setattr(torch.cpu, "current_device", lambda: 0)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
    dist.destroy_process_group()
