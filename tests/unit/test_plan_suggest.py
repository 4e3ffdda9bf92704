"""`job.plan_suggest`: the fastest settings that fit."""

import logging
import re
from pathlib import Path

import pytest

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.device import find_device
from torchtitan.engine.model_args import find_model_args
from torchtitan.errors import ConfigError
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models.moe import mixtures
from torchtitan.parallel.dims import ParallelDims
from torchtitan.tools.plan import planner
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.result import Plan, RankPlan
from torchtitan.tools.plan.step_model import work_of_step
from torchtitan.tools.plan.suggest import suggestions

BF16 = "--training.mixed_precision_param=bfloat16"
FILES = Path(__file__).parents[2] / "train_configs"


def parse(folder: Path, name: str, *flags: str) -> JobConfig:
    return ConfigManager().parse_args(
        [f"--job.config_file={FILES / name}.toml", f"--job.dump_folder={folder}", "--job.plan", BF16, *flags]
    )


def planned(config: JobConfig, world_size: int) -> Plan:
    """What suggestions read of a plan on H100s."""
    args, model = find_model_args(config.model), planner.build_on_meta(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    active = parameters - sum(mixture.unused_parameters for mixture in mixtures(model).values())
    per_token = flops_per_token(active - args.vocab_size * args.dim, args, config.training.seq_len)
    rank = RankPlan(0, [args.n_layers], 0, 0, 0, 0, 0, {}, {}, 1.0, 0.0, [], None)
    device = named_device("H100")
    return Plan("", "", world_size, device, parameters, active, per_token, 0, "", "", [rank], None, None, [])


@pytest.mark.parametrize(
    ("name", "world_size", "room", "first"),
    [
        ("llama3_8b", 8, ("full", "selective"), "FSDP 8 op never 1"),
        ("llama3_70b", 256, ("full",), "FSDP 256 full default 2"),
        ("qwen3_30b_a3b", 64, ("full",), "FSDP 64 full default 16"),
        ("llama3_405b", 512, ("full",), "FSDP 16 x TP 4 x PP 8 full default 32"),
    ],
)
def test_the_fastest_that_fit_are_valid_flags(
    name: str, world_size: int, room: tuple[str, ...], first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a made-up memory, in which only some modes of recomputation fit; and "op" with one sequence alone."""
    config = parse(tmp_path, name)

    def peak(tried: JobConfig, dims: ParallelDims) -> float:
        mode, local = tried.activation_checkpoint.mode, tried.training.local_batch_size
        if mode not in room:
            return 1e15
        kept = tried.parallelism.fsdp_reshard_after_forward == "never"
        heavy = 40 if mode == "selective" else 99 if room == ("full",) and kept else 1
        return (20 + heavy * local) * 2**30

    with caplog.at_level(logging.INFO, "torchtitan"):
        rows_of_step = config.training.global_batch_size
        assert isinstance(rows_of_step, int)
        text = suggestions(planned(config, world_size), find_model_args(config.model), config, rows_of_step, peak)
    assert not caplog.records  # the checks of settings that nobody chose are quiet
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"\s*\d  ", line)]
    assert " ".join(rows[0][1:5]) == first
    seconds = [float(row[6]) for row in rows]
    assert seconds == sorted(seconds) and all(float(row[5]) <= 72 for row in rows)
    pasted = re.findall(r"^\d: (.*)$", text, re.MULTILINE)
    assert len(rows) == len(pasted) > 1
    for line in pasted:
        setting = parse(tmp_path, name, *line.split())
        check(setting, world_size, "cuda")
        assert setting.training.global_batch_size == config.training.global_batch_size


def test_every_nth_layer_is_repeated(tmp_path: Path) -> None:
    works = []
    for mode in ("none", "2", "1", "full"):
        keys = {"mode": "selective", "selective_ac_option": mode} if mode.isdigit() else {"mode": mode}
        config = parse(tmp_path, "llama3_8b").changed(activation_checkpoint=keys)
        dims = check(config, 8, "cuda")
        works.append(work_of_step(planned(config, 8), find_model_args(config.model), config, dims, 512))
    none, half, every, full = works
    assert every == full and half.attention[0] == (none.attention[0] + full.attention[0]) / 2
    assert half.flops == pytest.approx((none.flops + full.flops) / 2)
    assert half.fused_bytes == pytest.approx((none.fused_bytes + full.fused_bytes) / 2)


def test_nothing_fits(tmp_path: Path) -> None:
    config = parse(tmp_path, "llama3_8b")
    text = suggestions(planned(config, 8), find_model_args(config.model), config, 512, lambda *_: 1e15)
    assert text == "No setting of these degrees fits into 90% of the device's memory; use more devices."


@pytest.mark.full
def test_a_plan_on_this_machine_suggests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `train.py --job.plan --job.plan_suggest`, without further flags."""
    with caplog.at_level(logging.INFO, "torchtitan"):
        planner.plan(
            parse(tmp_path, "debug_model", "--job.plan_suggest", "--training.local_batch_size=1"), find_device(0)
        )
    assert re.search(
        r"^1: --parallelism.data_parallel_shard_degree=1 .*--training.local_batch_size=\d+", caplog.text, re.M
    )


def test_suggestions_need_a_plan(tmp_path: Path) -> None:
    config = ConfigManager().parse_args([f"--job.dump_folder={tmp_path}", "--job.plan_suggest"])
    with pytest.raises(ConfigError, match=r"job\.plan_suggest has no effect without job\.plan"):
        check(config, 1, "cpu")
