"""The logic of `benchmarks/`: intervals, traces, tables, and the handling of failing rows."""

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import figures, gemms, gpu, gpu_row, gpu_rows, throughput
from benchmarks.gpu_cache import load_cache, save_cache
from benchmarks.gpu_clock import Samples, find_reader, rates_over
from benchmarks.gpu_links import KeepOwnPart, Links, RepeatShard, rate_of_links, seconds_on_links
from benchmarks.gpu_report import report
from benchmarks.gpu_row import config_of, rows_of_step
from benchmarks.machine import Machine
from benchmarks.runs import ROOT, Observed, Result, Variant, observe, recompiled_after, timed_other, variables_first
from benchmarks.scaling import earlier
from benchmarks.step_split import length, step_split, time_by_class, union, without
from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.config.manager import tomllib
from torchtitan.device import Device
from torchtitan.engine.conversion import build_converted_model, decisions_of
from torchtitan.models import MODELS
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.simulation import target_on

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=6)


def test_every_benchmark_can_be_started() -> None:
    """What `python -m benchmarks NAME` imports, in a process that has not put other folders on its path."""
    code = "import importlib; from benchmarks.__main__ import benchmarks as found\n"
    code += "for name in found(): importlib.import_module(f'benchmarks.{name}')"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].replace("_", "-").lower()


@pytest.mark.full
def test_what_is_carried_to_a_gpu_is_all_that_training_imports(tmp_path: Path) -> None:
    """A machine without a network has torch and what `scripts/carry_for_gpu.sh` names."""
    script = (ROOT / "scripts" / "carry_for_gpu.sh").read_text().replace("\\\n", " ")
    carried = {
        "torch",
        "numpy",  # which is there wherever torch for CUDA is
        "torchtitan-toml",
        *map(name_of, requires("torch") or []),
        *re.findall(r"^download .*constraints.txt\" (.*)$", script, re.M)[0].split(),
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    left = set(map(name_of, lines)) - set(map(name_of, carried))
    absent = [module for module, owners in packages_distributions().items() if left.intersection(map(name_of, owners))]
    assert {"datasets", "tiktoken", "matplotlib"} <= set(absent)
    flags = [*TINY, "--training.steps=1", f"--job.dump_folder={tmp_path}", "--metrics.enable_tensorboard=false"]
    code = f"import sys, runpy; sys.modules.update(dict.fromkeys({absent})); import benchmarks.gpu_row; "
    code += f"sys.argv[1:] = {flags}; runpy.run_path('train.py', run_name='__main__')"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "finished after step 1" in done.stdout, done.stderr


@given(INTERVALS, INTERVALS)
def test_intervals_cover_the_same_seconds_as_sets_of_them(left: list[Any], right: list[Any]) -> None:
    def seconds(intervals: list[Any]) -> set[int]:
        return {second for start, end in intervals for second in range(start, end)}

    assert seconds(union(left)) == seconds(left)
    assert length(union(left)) == len(seconds(left))
    assert seconds(without(union(left), union(right))) == seconds(left) - seconds(right)
    assert length(without(union(left), union(right))) == len(seconds(left) - seconds(right))


def test_a_trace_is_split_into_its_phases(tmp_path: Path) -> None:
    matrix = torch.ones(256, 256)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("ProfilerStep#3"):
        with record_function("forward"):
            for _ in range(8):
                matrix @ matrix
        with record_function("optimizer"):
            matrix + matrix
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    split = step_split(tmp_path / "trace.json")
    assert split["forward"] > split["optimizer"] > 0 == split["backward"] == split["communication_wait"]
    assert split["forward"] + split["optimizer"] + split["rest"] == pytest.approx(split["step"])
    classes, longest = time_by_class(tmp_path / "trace.json")
    assert longest[0][0].startswith("aten::m") and longest[0][2] == 8
    assert 0 < classes["GEMMs"] < split["forward"]


def trace(folder: Path, *events: tuple[Any, ...]) -> Path:
    """(kind, name, start, end, thread) of each event, and the number of a launch; microseconds."""
    path = folder / "trace.json"
    keys = [
        {"ph": "X", "cat": c, "name": n, "ts": a, "dur": b - a, "tid": t, "args": {"correlation": rest and rest[0]}}
        for c, n, a, b, t, *rest in events
    ]
    path.write_text(json.dumps({"traceEvents": keys}))
    return path


def test_fsdps_copies_are_no_part_of_the_optimizer(tmp_path: Path) -> None:
    classes = {
        "multi_tensor_apply_kernel<TensorListMetadata<2>, at::native::CopyFunctor<float, c10::BFloat16, float, 2>>": (
            "copies"
        ),
        # On several ranks, of equal dtypes.
        "multi_tensor_apply_kernel<TensorListMetadata<2>, UnaryOpFunctor<float, 2, 1, 1>, at::native::Copy<float>>": (
            "copies"
        ),
        "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>": "optimizer",
        "multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarTensorFunctor<float>, std::multiplies>": (
            "optimizer"
        ),
    }
    assert kernels_by_class(tmp_path, classes) == classes


def test_rounding_and_the_copies_for_a_reduce_scatter_are_classes_of_their_own(tmp_path: Path) -> None:
    classes = {
        "void at::native::(anonymous namespace)::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "chunk_cat",
        "round_kernel": "rounding",
        "round_rows_kernel": "rounding",
        "amax_kernel": "rounding",
        "mx_pack_kernel": "rounding",
        "grouped_kernel": "GEMMs",
        "triton_tem_fused_mm_0": "GEMMs",
        # The compiler names a loop after what was fused.
        "triton_poi_fused__scaled_dot_product_cudnn_attention_linear_1": "compiled loops",
        "triton_red_fused__scaled_mm__to_copy_amax_round_kernel_0": "compiled loops",
    }
    assert kernels_by_class(tmp_path, classes) == classes


def kernels_by_class(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The class of each of these kernels. All of them must be listed by their full names."""
    found = {}
    for name in names:
        path = trace(folder, ("user_annotation", "ProfilerStep#8", 0, 100, 1), ("kernel", name, 0, 10, 7, 1))
        by_class, kernels = time_by_class(path)
        assert [(label, calls) for label, _, calls in kernels] == [(name, 1)]
        (found[name],) = (label for label, seconds in by_class.items() if seconds)
    return found


def test_communication_counts_where_nothing_else_runs(tmp_path: Path) -> None:
    on_cpu = trace(
        tmp_path,
        ("user_annotation", "ProfilerStep#8", 0, 100, 1),
        ("cpu_op", "autograd::engine::evaluate_function: AddBackward0", 0, 100, 1),  # FSDP's hooks wait in such frames
        ("cpu_op", "aten::mm", 10, 30, 1),
        ("cpu_op", "CompiledFunctionBackward", 60, 100, 1),
        ("cpu_op", "aten::mm", 60, 70, 1),
        ("cpu_op", "_c10d_functional::wait_tensor", 80, 90, 1),
        ("user_annotation", "gloo:all_gather", 20, 50, 2),
        ("user_annotation", "gloo:all_reduce", 70, 90, 2),
    )
    assert step_split(on_cpu)["communication_wait"] == pytest.approx(30e-6)
    by_class = time_by_class(on_cpu)[0]  # of the compiled region's 40, 30 are its own loops
    expected = {"GEMMs": 30e-6, "compiled loops": 30e-6}
    assert {name: seconds for name, seconds in by_class.items() if seconds} == pytest.approx(expected)
    on_gpu = trace(
        tmp_path,
        ("user_annotation", "ProfilerStep#8", 0, 100, 1),
        ("user_annotation", "forward", 0, 5, 1),
        ("cuda_runtime", "cudaLaunchKernelExC", 1, 2, 1, 11),
        ("cuda_runtime", "cudaLaunchKernelExC", 3, 4, 1, 12),
        ("kernel", "ncclDevKernel_AllGather", 10, 40, 7, 11),
        ("kernel", "nvjet_tst_128x256", 20, 60, 8, 12),
        ("user_annotation", "backward", 5, 9, 1),
        ("cuda_driver", "cuLaunchKernelEx", 6, 7, 2, 13),
        ("kernel", "triton_poi_fused_0", 60, 90, 8, 13),
    )
    split = step_split(on_gpu)
    assert split["communication_wait"] == pytest.approx(10e-6)
    assert split["forward"] == pytest.approx(50e-6)  # of its kernels, not of their launch
    assert split["backward"] == pytest.approx(30e-6)  # launched by autograd's thread


def test_a_recompilation_counts_after_the_warm_up_alone() -> None:
    compiled = "V1121 [0/1] [__recompiles] Recompiling function forward in model.py:52\n"
    lines = ["step  1/12 | loss 8\n", compiled, "step  2/12 | loss 8\n", "step 12/12 | loss 7\n"]
    observed = Observed(list(enumerate(lines)), 4, 0)
    assert recompiled_after(observed, 2) == []
    assert recompiled_after(observed, 1) == ["forward in model.py:52"]


def test_a_command_is_observed_from_outside() -> None:
    code = "import sys; x = bytearray(300 << 20); print('late: step:  1 tps: 1,500'); print('step:  2 tps: 500')"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    result = timed_other(
        Variant("other", {"NGPU": "2"}, [sys.executable, "-c", child]), r"tps: ([\d,]+)", "step: +1", 1
    )
    assert result.step_rates == [1000]  # the first report is warm-up; two processes
    assert result.first_step is not None and 0 < result.first_step < 60
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the smallest value that can be observed
    assert 300 << 20 < result.memory < max(600 << 20, own + (50 << 20))  # of the grandchild
    with pytest.raises(SystemExit, match=r"other exited with status 3:\n.*no such thing"):
        observe("other", [sys.executable, "-c", "import sys; print('no such thing'); sys.exit(3)"], {})


def test_variants_and_commands_are_told_apart_from_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variant = Variant.parse("FSDP 2: NGPU=2 OMP_NUM_THREADS=3 --training.seq_len=64 --a 'b c'")
    assert variant == Variant("FSDP 2", {"NGPU": "2", "OMP_NUM_THREADS": "3"}, ["--training.seq_len=64", "--a", "b c"])
    assert (variant.processes, variant.threads) == (2, 6)
    assert variables_first("A=1 torchrun x=2") == ({"A": "1"}, ["torchrun", "x=2"])


def test_ratios_are_taken_within_a_round() -> None:
    def run(rate: float, first_step: float) -> Result:
        return Result([rate, rate, 9 * rate], first_step, 2**30)

    results = {"a": [run(100, 10), run(10, 20)], "b": [run(150, 5), run(20, 12)]}
    flops = {"a": {"full": 4.0, "causal": 2.0}}
    table = throughput.rates_table(results, flops, {"a": 1000.0}, {})
    header, _, first, second = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert dict(zip(header, first, strict=True)) == {
        "variant": "a", "tokens/s": "55", "range": "1.00 to 1.00", "ratio": "1.00", "MFU full": "22.0%",
        "causal": "11.0%", "memory, GiB": "1.00", "first step, s": "15.0",
    }  # fmt: skip
    assert second[3] == "1.75" and second[5:7] == ["", ""] and second[-1] == "0.55"


MACHINE = {"device": "NVIDIA X", "gemm_rate": 1e6, "datasheet_rate": 2e6, "text": "NVIDIA X, torch 2", "driver": ""}


def row(recipe: str, seconds: float, layers: int = 4) -> dict[str, Any]:
    return {
        "model": "8B", "recipe": recipe, "layers": layers, "all_layers": 32, "compiled": True, "rate": 10 / seconds,
        "step_seconds": [seconds], "flops_per_token": {"full": 1e5, "causal": 5e4}, "memory": 2**30,
        "compile_seconds": 20.0, "converted": "", "note": "",
    }  # fmt: skip


def test_idle_time_is_that_of_a_step_without_a_trace() -> None:
    """A traced step waits for the host."""
    traced = {"split": {"step": 3.0, "forward": 2.0}, "device_seconds": {"GEMMs": 1.5, "other": 0.0}}
    page = report({"machine": MACHINE, "settings": {}}, [row("bf16", 2.0) | traced], "bf16", {})
    assert "| 1500 | 500 |" in page


def test_the_gpus_table_compares_like_with_like() -> None:
    done = [row("bf16", 2.0), row("float8", 1.6), row("int8", 1.0, layers=3)]
    gone = {"model": "8B", "recipe": "eager", "layers": 4, "failed": "out of memory"}
    page = report({"machine": MACHINE, "settings": {"seq_len": 10}}, [*done, gone], "bf16", {})
    lines = {
        line.split("|")[3].strip(): [c.strip() for c in line.split("|")] for line in page.splitlines() if "8B |" in line
    }
    assert lines["float8"][6:11] == ["1.25", "62.5%", "31.2%", "31.2%", "15.6%"]
    assert lines["int8"][6] == ""  # different number of layers
    assert "- 8B, eager: out of memory" in page


WORKER = """
import json, sys
from pathlib import Path
task = json.loads(sys.argv[sys.argv.index("--worker") + 1])
def send(message): print("@gpu " + json.dumps(message), flush=True)
with open(Path(__file__).with_name("starts"), "a") as file: file.write(Path(__file__).stem + " ")
if task["describe"]: send({"machine": %s, "settings": {}})
for row in task["rows"]:
    about = {"model": row["model"], "recipe": row["recipe"]["name"], "layers": row["layers"] or 8}
    if row["model"] == "8B" and about["layers"] > 6:
        send({**about, "failed": "out of memory"}); sys.exit(1)
    if row["recipe"]["name"] == "int8 rowwise": sys.exit(7)
    if row["recipe"]["name"] == "bf16 eager": send({**about, "failed": "a mistake"}); continue
    if row["model"] == "1B" and row["recipe"]["name"] == "float8 rowwise": import time; time.sleep(600)
    send({**%s, **about, "first_step": 1.0, "wall_seconds": 0.1})
"""


@pytest.fixture
def fake_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Run:
    """A run of the table with a worker that measures nothing, into `tmp_path`, for as long as it takes."""
    for name in ("gpu.py", "gpu_peer.py"):
        (tmp_path / name).write_text(WORKER % (MACHINE, row("bf16", 1.0)))
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(gpu, "RESERVE", 1.0)
    arguments = argparse.Namespace(steps=1, smoke=False, output=tmp_path, name="x", cache=None)
    return gpu.Run(time.monotonic() + 300, arguments)


def written(folder: Path) -> list[tuple[str, str, int | None, str]]:
    rows = json.loads((folder / "x.json").read_text())["rows"]
    return [(row["model"], row["recipe"], row["layers"], row.get("failed", "")) for row in rows]


def test_rows_that_fail_do_not_take_others_with_them(tmp_path: Path, fake_run: gpu.Run) -> None:
    recipes = (gpu_rows.BASE, gpu_rows.EAGER, gpu_rows.FILTERED, gpu_rows.INT8)
    fake_run.all([gpu_rows.Row(model, recipe) for model in ("8B", "3B") for recipe in recipes])
    filtered = "float8 rowwise, auto_filter_small_kn"
    assert written(tmp_path) == [
        ("8B", "bf16 compiled", 8, "out of memory"),
        ("8B", "bf16 compiled", 6, ""),  # the estimate was wrong: fewer layers, also for the following rows
        ("8B", "bf16 eager", 6, "a mistake"),
        ("8B", filtered, 6, ""),
        ("8B", "int8 rowwise", 6, "its process exited with status 7"),
        ("3B", "bf16 compiled", 8, ""),
        ("3B", "bf16 eager", 8, "a mistake"),
        ("3B", filtered, 8, ""),
        ("3B", "int8 rowwise", None, "its process exited with status 7"),
    ]
    # Anew after: out of memory; a process that died, which is only known to be the row's fault the second time (twice).
    assert (tmp_path / "starts").read_text().split() == ["gpu"] * 5


@pytest.mark.full
def test_a_row_that_hangs_is_stopped_and_the_time_for_all_rows_is_kept(
    tmp_path: Path, fake_run: gpu.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ROW_SECONDS", 7.0)  # an interpreter takes 2 to start on a busy machine
    fake_run.deadline = time.monotonic() + 33
    row = gpu_rows.Row("1B", gpu_rows.ROWWISE)
    fake_run.all([row, gpu_rows.Row("1B", gpu_rows.BASE), *[row] * 5, gpu_rows.Row("3B", gpu_rows.BASE)])
    reasons = [reason for *_, reason in written(tmp_path)]
    assert reasons[:3] == ["stopped after 7 s", "", "stopped after 7 s"]
    assert reasons[-2] == "dropped: no time left" == reasons[-1]
    assert "stopped: no time left" in reasons and "stopped: no time left" in (tmp_path / "x.md").read_text()


def test_the_peer_runs_in_a_process_of_its_own_with_as_many_layers(tmp_path: Path, fake_run: gpu.Run) -> None:
    fake_run.peer = str(tmp_path)
    peers = [gpu_rows.Row("3B", recipe) for recipe in gpu_rows.PEERS]
    fake_run.all([gpu_rows.Row("3B", gpu_rows.BASE, layers=5), *peers, gpu_rows.Row("3B", gpu_rows.TENSORWISE)])
    assert [layers for _, _, layers, _ in written(tmp_path)] == [5, 5, 5, 5]
    assert (tmp_path / "starts").read_text().split() == ["gpu", "gpu_peer", "gpu"]
    fake_run.peer, fake_run.results = "", []
    fake_run.all(peers)
    assert {reason for *_, reason in written(tmp_path)} == {
        "its packages are not in carried/ (run scripts/carry_for_gpu.sh)"
    }


def test_the_run_that_a_user_would_start_is_a_configuration() -> None:
    for file, *flags in (gpu_rows.USER, gpu_rows.SMOKE_USER):
        config = ConfigManager().parse_args([f"--job.config_file={ROOT / 'train_configs' / file}", *flags])
        check(config, 1, "cuda")
        assert config.training.steps == 20 and not config.checkpoint.enable_checkpoint


@pytest.mark.full
def test_the_gpus_table_says_what_a_user_gets(tmp_path: Path, fake_run: gpu.Run) -> None:
    fake_run.all([gpu_rows.Row("3B", gpu_rows.BASE)])
    fake_run.as_a_user((*gpu_rows.SMOKE_USER, "--training.steps=2", "--metrics.log_freq=1"))
    page = (tmp_path / "x.md").read_text()
    assert re.search(r"As a user starts it: [1-9][\d,]* tokens/s, MFU .*in steps up to 2 of .*run_train.sh --tr", page)
    assert "The rows are a block's speed" in page


def test_without_time_train_is_not_started(tmp_path: Path, fake_run: gpu.Run) -> None:
    fake_run.all([gpu_rows.Row("3B", gpu_rows.BASE)])
    fake_run.deadline = time.monotonic()
    fake_run.as_a_user(gpu_rows.USER)
    assert written(tmp_path) == [("3B", "bf16 compiled", 8, "")]
    assert "no figure (no time left)" in (tmp_path / "x.md").read_text()


def test_rows_run_in_order_of_worth() -> None:
    rows = gpu_rows.rows_by_worth(list(gpu_rows.MODELS), [], smoke=False)
    names = [str(row) for row in rows]
    assert names[:3] == ["8B, bf16 compiled", "8B, float8 tensorwise", "8B, float8 tensorwise, gathered"]
    assert len(set(names)) == len(names)
    every = itertools.product(gpu_rows.WITH_EVERY_RECIPE, gpu_rows.RECIPES)
    left_out = {f"{gpu_rows.SPARSE}, {gpu_rows.FILTERED.name}"}
    assert {f"{model}, {recipe.name}" for model, recipe in every} - left_out <= set(names)
    assert all(any(name.endswith(f", {recipe.name}") for name in names) for recipe in gpu_rows.MORE)
    assert names[-1] == "8B, bf16 compiled, cached"
    of_eight = gpu_rows.rows_by_worth([gpu_rows.OF_EIGHT, gpu_rows.RESHARDED], [], smoke=False)
    recipes = [gpu_rows.GATHERED_16, gpu_rows.BASE_16, gpu_rows.GATHERED, gpu_rows.BASE]
    assert [row.recipe for row in of_eight] == [*recipes, *recipes[:2]]  # for the others there is no time
    of_one = [row for row in rows if gpu_rows.MODELS[row.model].ranks == 1]
    assert all(names.index(f"{row.model}, bf16 compiled") <= names.index(str(row)) for row in of_one)


ROWS = [row for row in gpu_rows.rows_by_worth(list(gpu_rows.MODELS), [], smoke=False) if not row.recipe.peer]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_is_a_configuration_that_converts_layers(row: gpu_rows.Row) -> None:
    """On a GPU whose minutes are few."""
    shape = gpu_rows.MODELS[row.model]
    config = config_of(shape, row.recipe, 8192)
    dims = check(config, shape.ranks, "cuda")
    assert rows_of_step(shape, row.recipe) == shape.batch * row.recipe.micro_batches * shape.ranks
    assert config.training.local_batch_size == shape.batch
    device, family = named_device("H100"), MODELS.get(shape.family)
    args = replace(family.flavor(shape.flavor), n_layers=1)
    _, converters = build_converted_model(config, args, target_on(device, config, family, dims))
    converted = [decision.fqn for decision in decisions_of(converters) if decision.converted]
    assert bool(converted) == bool(row.recipe.converter)
    if "experts alone" in row.recipe.name:
        assert all(".experts." in fqn for fqn in converted) and len(converted) == 3


@given(st.integers(1, 10**10), st.integers(2, 8), st.floats(1e6, 1e12))
def test_a_simulated_collective_lasts_as_long_as_its_bytes_take(nbytes: int, ranks: int, rate: float) -> None:
    """Each rank receives, or sends, all but its own part."""
    assert seconds_on_links(nbytes, ranks, rate) == pytest.approx(nbytes * (ranks - 1) / ranks / rate)


def test_the_links_are_those_of_the_gpu_at_the_share_that_nccl_reaches() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "an unknown one"):
        device = Device("cuda", name, torch.device("cpu"))
        assert rate_of_links(device) == pytest.approx(370e9, rel=0.01)  # of 450, nccl-tests #212
    layer = 2 * 218_112_000  # bytes in bf16 of a block of Llama 3 8B
    assert seconds_on_links(layer, 8, 369e9) == pytest.approx(1.03e-3, rel=0.01)


def test_one_rank_of_eight_trains_an_eighth_of_a_whole_model() -> None:
    bench = gpu_row.Bench(smoke=True, seq_len=8192, steps=4, ranks=8)
    try:
        shape = gpu_rows.MODELS[gpu_rows.OF_EIGHT]
        layers = bench.layers_that_fit(shape)
        result = bench.run(shape, layers, replace(gpu_rows.BASE, compile=False), traced=False)
    finally:
        bench.close()
    # The first and the last step see the same batch.
    assert 0 < result["loss_per_token"] < result["first_loss_per_token"] < 7
    assert layers == 2 and result["rank"]["parameters"] * 8 == result["parameters"] > 0
    assert result["rank"]["bytes_per_second_on_links"] == pytest.approx(369e9)


def test_simulated_links_follow_the_clock_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, milliseconds: float) -> None:
            self.milliseconds = milliseconds

        def elapsed_time(self, other: "Event") -> float:
            return other.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    links = Links(8, Device("cpu", "a CPU", torch.device("cpu")))
    links._timed.extend([(1e-3, 1_980_000, Event(0), Event(milliseconds)) for milliseconds in (1.1, 1.1, 1.1, 9.0)])
    assert list(links.asked_and_taken()) == pytest.approx([4e-3, 12.3e-3])
    links.calibrate()  # one waited for the host
    assert links.cycles_per_second == pytest.approx(1.8e9) and links.asked_and_taken() == (0, 0)


def test_the_stream_of_a_simulated_collective_waits_as_long_as_links_take(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Stream:
        def __init__(self, name: str = "links") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            done.append(f"{self.name} waits for {other.name}")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("FSDP's"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    links = Links(8, Device("cuda", "NVIDIA H200", torch.device("cuda")))
    links.cycles_per_second = 1.5e9
    with links.busy(8 * 2**20):
        done.append("copy")
    cycles = int(1.5e9 * 7 * 2**20 / 369e9)
    first, *events, last = done
    assert (first, last) == ("links waits for FSDP's", "FSDP's waits for links")
    assert events == ["event", cycles, "event", "copy"]  # which runs beside it


def test_clock_and_power_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1755, 698.31'\necho '345, 70.00'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delattr(torch.cuda, "clock_rate")  # as without NVML's package
    reader = find_reader()
    assert reader is not None and reader() == (1755, 698.31)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert find_reader() is None


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM])
def test_simulated_collectives_copy_this_ranks_part(op: Any) -> None:
    links = Links(4, Device("cpu", "a CPU", torch.device("cpu")))
    gathered = torch.full((12,), torch.nan)
    gathered[:3] = torch.arange(3.0)
    RepeatShard(links)(gathered, gathered[:3], None)  # type: ignore[arg-type]
    assert gathered.tolist() == [0, 1, 2] * 4
    reduced = torch.empty(3)
    KeepOwnPart(links)(reduced, torch.arange(12.0), None, op)  # type: ignore[arg-type]
    assert reduced.tolist() == ([0, 4, 8] if op == dist.ReduceOp.SUM else [0, 1, 2])


def test_one_rank_is_reported_beside_what_others_published() -> None:
    rank: dict[str, Any] = {"ranks": 8, "parameters": 5, "bytes_per_second_on_links": 3.69e11}
    rank["last_collectives"] = {"seconds_asked": 2.0, "seconds_taken": 2.5}
    flops = {"flops_per_token": {"full": 5.791e10, "causal": 5.147e10}, "micro_batches": 16, "parameters": 40}
    ours = row("float8", 0.05) | flops | {"rank": rank, "first_loss_per_token": 12.0, "loss_per_token": 11.0}
    ours["sustained"] = {"seconds": 60.0, "steps": 6, "rates": [14000.0], "sm_clock_mhz": [], "power_watts": []}
    page = report({"machine": MACHINE, "settings": {}}, [ours], "bf16", {})
    assert re.search(r"Megatron-Bridge .* 14,451 \| 84.6% \| 75.2% \|", page)
    assert re.search(r"2.4 TB/s, 500 W \| bf16 \|.* 6,667 \| 39.0% \| 34.7% \|", page)
    assert re.search(r"ours .* 16 micro-batches, .* median of 60 s \| 14,000 \| 82.0% \| 72.9% \|", page)
    assert "took 1.25 of their time; loss 12.000 at first, 11.000 last" in page


def test_rows_of_one_rank_of_several_have_a_process_of_their_own(tmp_path: Path, fake_run: gpu.Run) -> None:
    alone, of_eight = (gpu_rows.Row(model, gpu_rows.TENSORWISE) for model in ("3B", gpu_rows.OF_EIGHT))
    fake_run.all([alone, of_eight, of_eight, alone])
    assert (tmp_path / "starts").read_text().split() == ["gpu"] * 3
    assert [model for model, *_ in written(tmp_path)] == ["3B", gpu_rows.OF_EIGHT, gpu_rows.OF_EIGHT, "3B"]


def test_a_minute_is_reported_by_its_windows() -> None:
    """Of steps of 0.5 s with 100 tokens each, which slow down to 2.5 s."""
    rates = rates_over([0.5] * 8 + [2.5, 0.5], 100, every=2.0)
    assert rates == [200, 200, 40]  # the last step is less than a window
    assert rates_over([0.5], 100, every=2.0) == [200] and rates_over([], 100, every=2.0) == []
    long = {"seconds": 7.0, "steps": 10, "rates": rates, "sm_clock_mhz": [1980.0, 1500.0], "power_watts": []}
    page = report({"machine": MACHINE, "settings": {}}, [row("float8", 0.05) | {"sustained": long}], "bf16", {})
    assert "| 7 | 10 | 40 / 200 / 200 | 1,500 / 1,740 / 1,980 | not read | 1.00 |" in page


def test_clock_and_power_are_read_while_steps_run() -> None:
    readings = iter([(1980.0, 600.0), (1500.0, 700.0)])
    with Samples(lambda: next(readings), every=0.001) as samples:
        deadline = time.monotonic() + 60
        while len(samples.clocks) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)  # then reading fails, which is no reason to stop the steps
    assert (samples.clocks, samples.watts) == ([1980, 1500], [600, 700])
    with Samples(None, every=0.001) as nothing:
        pass
    assert nothing.clocks == []


def test_the_table_says_what_the_compilers_cache_had() -> None:
    graphs = {"graphs": {"cached": 2, "compiled": 1}}
    page = report({"machine": MACHINE, "settings": {}}, [row("bf16", 2.0) | graphs, row("float8", 1.0)], "bf16", {})
    assert "| 20 (2 of 3 graphs cached) |" in page and "| 20 |" in page


def test_accumulated_rows_are_compared_with_each_other() -> None:
    once, summed = row("bf16", 2.0), row("bf16, 4 micro-batches", 1.0) | {"micro_batches": 4, "host_seconds": [0.25]}
    faster = row("float8, 4 micro-batches", 0.5) | {"micro_batches": 4, "host_seconds": [0.1]}
    lines = report({"machine": MACHINE, "settings": {}}, [once, summed, faster], "bf16", {}).splitlines()
    (cells,) = ([cell.strip() for cell in line.split("|")] for line in lines if "float8, 4 micro" in line)
    assert cells[6] == "2.00" and "20%" in cells  # of the summed row; what the host took of the step


def test_the_compilers_cache_comes_back_in_files_that_can_be_carried(tmp_path: Path) -> None:
    made_with = {"torch": "2.13.0", "GPU": "NVIDIA X"}
    artifacts = [os.urandom(1000), b"second" * 100]
    file = tmp_path / "cache"
    written = save_cache(file, artifacts, made_with, limit=500)
    assert [path.name for path in written] == ["cache", "cache.1", "cache.2"]
    assert all(path.stat().st_size <= 500 for path in written)
    assert load_cache(file, made_with)[0] == artifacts
    for other, said in (({"torch": "2.14.0"}, "torch 2.13.0"), ({"GPU": "NVIDIA Y"}, "GPU NVIDIA X")):
        loaded, sentence = load_cache(file, made_with | other)
        assert loaded == [] and "is not used" in sentence and said in sentence
    written[2].unlink()
    assert load_cache(file, made_with)[0] == [] and "bytes are there" in load_cache(file, made_with)[1]
    assert save_cache(file, [b"small"], made_with, limit=500) == [file] == list(tmp_path.iterdir())
    file.write_bytes(b"\x80\x04N.\n")  # a pickle
    assert load_cache(file, made_with)[0] == [] and "is no cache" in load_cache(file, made_with)[1]
    assert "not there yet" in load_cache(tmp_path / "none", made_with)[1]


def test_gemms_are_judged_by_the_sizes_on_a_rank_and_by_the_whole_layers() -> None:
    layers = {layer.name: layer for layer in gemms.layers()}
    wq, wo = layers["70B, TP 8 wq"], layers["70B, TP 8 wo"]
    assert (wq.k, wq.n, wq.full_n) == (8192, 1024, 8192) and (wo.k, wo.n, wo.full_k) == (1024, 8192, 8192)
    assert layers["70B, TP 8 wk, wv"].n == 128
    assert len({(layer.k, layer.n) for layer in layers.values()}) == len(layers) == 17

    def lines(ratio: float) -> dict[str, list[str]]:
        """Of each recipe, where low precision is this many times as fast."""
        base = {"forward": 1.0, "backward": 2.0, "both": 3.0}
        fast = {name: seconds / ratio for name, seconds in base.items()}
        recipes = ["float8 tensorwise", "float8 rowwise", "int8 rowwise"]
        seconds: dict[str, Any] = {f"bf16 beside {name}": base for name in recipes}
        rows = gemms.rows_of(wq, 8192, seconds | dict.fromkeys(recipes, fast), recipes)
        assert all(len(cells) == len(gemms.COLUMNS) for cells in rows)
        return {cells[4]: cells[8:] for cells in rows}

    both, full = "auto_filter_small_kn, auto_filter_small_kn_full", "auto_filter_small_kn_full"
    assert lines(0.8) == {
        "float8 tensorwise": ["0.80", "yes", "yes", both],  # converted, though slower
        "float8 rowwise": ["0.80", "no", "yes", full],  # N = 1,024 on a rank is too small, the layer's 8,192 is not
        "int8 rowwise": ["0.80", "no thresholds", "no thresholds", ""],
    }
    assert [cells[-1] for cells in lines(1.25).values()] == ["", "auto_filter_small_kn", ""]
    (failed,) = gemms.rows_of(wq, 8192, {"float8 rowwise": "out of memory"}, ["float8 rowwise"])
    assert failed[-1] == "out of memory" and len(failed) == len(gemms.COLUMNS)


def test_a_table_never_mixes_machines(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"machine": {"device": "A", "versions": {"torch": "2"}}, "axes": {"size": []}}))
    assert earlier(path, "A", {"torch": "2"}) == {"size": []}
    with pytest.raises(SystemExit, match="another machine"):
        earlier(path, "B", {"torch": "2"})


def test_a_machine_says_what_it_is() -> None:
    machine = Machine("NVIDIA H200", "cuda", 16, 8, {"torch": "2.11.0"}, "bfloat16", 7.9e14, {"8192": 7.9e14}, 9.89e14)
    assert str(machine) == (
        "NVIDIA H200, torch 2.11.0; bfloat16 GEMMs, measured: 790 TFLOP/s (8192: 790); data sheet 989"
    )


def test_labels_of_curves_that_end_together_do_not_overlap() -> None:
    _, axes = figures.pyplot().subplots()
    for number in range(8):
        axes.plot([0, 1], [0, 1 + 1e-3 * (number % 3)], label=f"run {number}")
    axes.axhline(0)  # without a label
    figures.label_ends(axes)
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 8
    assert not any(left.overlaps(right) for left, right in itertools.pairwise(boxes))


def test_labels_stay_where_there_is_room() -> None:
    assert figures.spread([0, 5, 5, 20], 2) == [0, 4, 6, 20]
    assert figures.spread([0, 1, 2], 2) == [-1, 1, 3]


def test_recipes_are_drawn_as_differences_in_front_of_what_chance_changes(tmp_path: Path) -> None:
    base = [8 - 0.04 * step for step in range(100)]
    scaled = {share: [loss * (1 + share) for loss in base] for share in (0.01, 0.02, 0.03, -0.01, 0.04, -0.04)}
    panels = {"near": {f"recipe {share}": [scaled[share]] for share in (0.01, 0.02, 0.03, -0.01)}}
    # Each seed against the baseline with the same seed.
    panels["far away"] = {"far": [[2 * loss for loss in base], [2 * loss for loss in scaled[0.04]]]}
    figure = figures.differences(
        panels, [base, scaled[0.04]], tmp_path / "x.png", width=10, chance=[base, scaled[0.04], scaled[-0.04]]
    )
    near, far = figure.axes
    labels = [text.get_text() for text in near.texts]
    assert sorted(labels) == sorted(f"recipe {share}  {100 * share:+.2f}%" for share in (0.01, 0.02, 0.03, -0.01))
    assert len({text.get_color() for text in near.texts}) == 4
    assert [text.get_text() for text in far.texts] == ["far  +100.00%, off the scale"]
    low, high = near.get_ylim()
    assert 2 < high == -low < 100
    (band,) = near.collections
    assert band.get_paths()[0].get_extents().ymax == pytest.approx(4.0)
    assert not figure.legends and not any(axes.get_legend() for axes in figure.axes)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
