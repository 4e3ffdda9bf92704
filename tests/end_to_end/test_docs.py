"""Commands of README.md, and the first of every page of docs/, as they are written there, but with less to do."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import without_slow_imports
from workers import PATIENCE, Forked

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_RUN, *_ = re.findall(r"^\./run_train\.sh.*$", README, re.MULTILINE)
SECTION = README.partition("## From training to transformers")[2]
TO_TRANSFORMERS = re.findall(r"^(?:\./|python ).*$", SECTION, re.MULTILINE)[:5]

# The first line of a block for a shell, or an indented one; lines that belong together are one command.
COMMAND = re.compile(
    r"^```bash\n(?P<block>(?:export .*\n)*(?:.*\\\n)*.*)$"
    r"|^    (?P<indented>(?:[A-Z_]+=\S+ )*(?:python|torchrun|\./|scripts/)(?:.*\\\n)*.*)$",
    re.MULTILINE,
)
CONSOLE = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
FIRST = {name: match["block"] or match["indented"] for name, text in PAGES.items() if (match := COMMAND.search(text))}
CONSOLES = {
    f"{name}: {match['command'][:50]}": match for name, text in PAGES.items() for match in CONSOLE.finditer(text)
}

# What each of these stands for is less work. A flag of the command itself comes later, and wins.
TINY = "--training.seq_len=64 --training.local_batch_size=4"
SMALLER = {
    "stages.toml ./run_train.sh": "stages.toml bash run_train.sh --training.steps=6",
    "./run_train.sh": f"./run_train.sh --training.steps=2 {TINY} --evaluation.limit=2 --validation.steps=1",
    "numerics_report.py --output numerics": f"numerics_report.py --output numerics --steps 2 {TINY}",
    "training.steps=100 ": "training.steps=2 --widths 32,64 --rates 1e-3,2e-3 ",
    "training.steps=300": "training.steps=2 --training.local_batch_size=4",
    "warmup_steps=20": "warmup_steps=1",
    "limit 200": "limit 10",
    "NGPU=8": "NGPU=4",
    # one machine, and no GPU
    "PET_NNODES=2": "PET_NNODES=1",
    "node0:29500": "127.0.0.1:0",
    "llama3_8b.toml": "debug_model.toml",
    # minutes
    "llama3_70b.toml": "llama3.2_1b.toml",
    "simulate_world_size=256": "simulate_world_size=8 --job.simulate_device=cpu",
}
BEFORE = {  # what README has made before, as the page says
    "report.md": [FIRST_RUN],
}
FRESH = {  # run by an interpreter that has imported nothing, as all commands of the other tests are
    "checkpoints.md": "shows that forks are set up as such an interpreter is",
    "tokens.md": "starts processes by multiprocessing, which a fork cannot",
}
NOT_RUN = {
    "versions.md": "takes hours",
    "containers.md": "takes Docker; the steps of the Dockerfile are run by test_container.py",
    "extension.md": "run by test_extension.py",
    "object_stores.md": "takes a bucket; run by test_object_store_data.py",
    "interchange.md": "run after what README makes before",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The repository as it is after checkout. What commands write there is beside its links."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # a command writes to docs/figures
    for name in ("pyproject.toml", "run_train.sh", "scripts", "torchtitan", "train.py", "train_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(command: str, folder: Path, programs: Path = PROGRAMS) -> subprocess.CompletedProcess[str]:
    for written, smaller in SMALLER.items():
        command = command.replace(written, smaller)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": path, "PYTHON": str(programs / "python")}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


# Runs what a command asks of Python at once, except a command of this project, which it notes. The shell goes on.
NOTING_PYTHON = f"""#!/usr/bin/env bash
case "$1" in
    */missing.py | */carried.py) ;;
    -m | *.py)
        [ ! -e "$NOTES/arguments" ] || exit 3  # only one is asked for
        printf '%s\\0' "$@" > "$NOTES/arguments"
        exec env --null > "$NOTES/variables" ;;
esac
exec {PROGRAMS / "python"} "$@"
"""


def run_forked(command: str, folder: Path, notes: Path) -> None:
    """Runs a command whose Python is a fork of one that has imported torch: most of its time would be imports."""
    notes.mkdir()
    (notes / "python").write_text(NOTING_PYTHON)
    (notes / "python").chmod(0o755)
    output_of(f"export NOTES={notes}\n{command}", folder, notes)
    arguments = (notes / "arguments").read_text().split("\0")[:-1]
    variables = dict(entry.split("=", 1) for entry in (notes / "variables").read_text().split("\0")[:-1])
    screen = notes / "screen"
    screen.touch()
    process = Forked([sys.executable, *arguments], variables, folder, str(screen))
    try:
        status = process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, f"{command}\n{screen.read_text()}"


def output_of(command: str, folder: Path, programs: Path = PROGRAMS) -> str:
    done = run(command, folder, programs)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("page", FIRST)
def test_the_first_command_of_a_page(page: str, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if page in NOT_RUN:
        pytest.skip(NOT_RUN[page])
    for command in (*BEFORE.get(page, ()), FIRST[page]):
        if page in FRESH:
            output_of(command, repository)
        else:
            run_forked(command, repository, tmp_path_factory.mktemp("notes") / "notes")


@pytest.mark.full
@pytest.mark.parametrize("console", [name for name in CONSOLES if "torchfrtrace" not in name])
def test_what_a_page_shows_is_what_a_command_prints(console: str, repository: Path) -> None:
    expected = CONSOLES[console]["output"]
    done = run(CONSOLES[console]["command"], repository)
    errors = without_slow_imports(done.stderr)
    assert expected == (errors if expected.startswith("Error:") else done.stdout)
    assert done.returncode == (2 if expected.startswith("Error:") else 0)


@pytest.mark.full
def test_scripts_find_the_package_beside_them() -> None:
    for script in (ROOT / "scripts").glob("*.py"):
        before, imports, _ = script.read_text(encoding="utf-8").partition("\nfrom torchtitan")
        assert "sys.path" in before or not imports, f"{script.name} needs PYTHONPATH"


def test_pages_begin_with_commands() -> None:
    assert FIRST.keys() > BEFORE.keys() | NOT_RUN.keys() and len(FIRST) > 15 and len(CONSOLES) > 3


def test_pages_that_tell_how_are_short() -> None:
    generated = {"config_keys.md", "modules.md"}
    assert {name: len(text.split()) for name, text in PAGES.items() if len(text.split()) > 2000}.keys() <= generated


def test_the_api_page_lists_what_examples_import() -> None:
    listed = re.findall(r"torchtitan(?:\.\w+)+", PAGES["api.md"])
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        for module, names in re.findall(
            r"^from (torchtitan\S*) import (.+)$", example.read_text(encoding="utf-8"), re.M
        ):
            for name in names.split(", "):
                assert module in listed or any(entry.endswith(f".{name}") for entry in listed), f"{module}.{name}"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The programs of an environment with the wheel, built from the sdist, which also sees the packages of this one."""
    pytest.importorskip("build")
    source, environment = tmp_path / "source", tmp_path / "environment"
    shutil.copytree(ROOT / "torchtitan", source / "torchtitan", symlinks=True)
    shutil.copytree(ROOT / "train_configs", source / "train_configs")
    for name in ("pyproject.toml", "README.md", "LICENSE", "torchtitan_toml.py"):
        shutil.copy(ROOT / name, source)
    for command in (
        f"python -m build --no-isolation --outdir {tmp_path / 'dist'} {source}",
        f"python -m venv --without-pip {environment}",
        f"python -m pip --python {environment / 'bin' / 'python'} install --no-index --no-deps --ignore-installed "
        f"{tmp_path / 'dist' / '*.whl'}",
    ):
        output_of(command, tmp_path)
    shutil.rmtree(source)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "these.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return environment / "bin"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_from_training_to_transformers_with_the_wheel_in_another_folder(
    installed: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    commands = [command.replace("./run_train.sh", "torchtitan-train") for command in TO_TRANSFORMERS]
    _, ours, scores, _, reference = [output_of(command, folder, installed) for command in commands]
    assert "def main(" in ours and ours.strip() == reference.strip()
    assert "stdlib_brackets" in scores and "stdlib_identifiers" in scores
    (repository / "outputs").symlink_to(folder / "outputs")
    output_of(FIRST["interchange.md"], repository)

    for command in (
        f"NGPU=2 CONFIG_FILE=debug_moe torchtitan-train --training.steps=2 {TINY} --job.dump_folder=two",
        "NGPU=8 CONFIG_FILE=debug_model torchtitan-train --job.plan",
        "python -m torchtitan.tools.explain --job.config_file=debug_model --model.converters=int8",
        f"NGPU=2 python -m torchtitan.tools.check_layout --job.config_file=debug_model {TINY}",
        "python -m torchtitan.tools.report two -o report.html",
    ):
        output_of(command, folder, installed)
    assert (folder / "report.html").stat().st_size > 100_000
    (other := folder / "torchtitan").mkdir()  # such as a checkout of another project
    (other / "__init__.py").write_text("raise Exception")
    done = run("torchtitan-train", folder, installed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and f"would give {other}, which is" in done.stderr
    other = next(installed.parent.glob("lib/python*/site-packages")) / "torchtitan-0.1.0.dist-info"
    other.mkdir()  # installed before this one
    (other / "RECORD").write_text("torchtitan/__init__.py,sha256=0,0\n")
    done = run("python -m torchtitan.tools.generate", ROOT / "docs", installed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "pip uninstall torchtitan " in done.stderr
