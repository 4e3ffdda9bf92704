"""Random foreign inputs, right or wrong, each used as a user would: `foreign_input`, an attack, and `CASES`, its table.

What is expected of a case:
    equal    losses that equal the undisturbed run's bit for bit
    works    status 0, and losses that are finite
    refused  status 2, and one error that names the file or the key
    either   one of the last two
Never a traceback, nothing for QUIET seconds, or more memory than MEMORY.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import task_files
from attacks import ROOT, STEPS, Start, Trial, started
from runs import losses

from torchtitan.checkpoint.manifest import MANIFEST, _digest
from torchtitan.config.manager import tomllib
from torchtitan.files import sha256_of

QUIET, MEMORY = 60, 4 << 30  # seconds, bytes of one process
NAMES = ("a b", "comma, and", "brackets [1]", "ünïcödé 字", "quote's", "star*", "100%20", "{brace}", "$HOME", "-x")
HOSTILE = ("red \x1b[31m", "two\nlines")
VALUES: tuple[Any, ...] = (
    *(None, True, "", "text", [], [None], {}, -1, 0, 1, 1.5, -0.5, 10**9, 10**30, float("nan"), float("inf")),
    *("../../outside", "\x1b[31mred", "\ud800", "/dev/zero", "s3://bucket/key", "nested", [[-1]], {"a": {"b": None}}),
)
CUSTOM = ("--custom-import", "tiny")
Write = Callable[[Path, list[bytes], random.Random], object]


@dataclass
class Use:
    """A command (empty: train.py), its flags, what its error names, and its environment."""

    command: tuple[object, ...] = ()
    flags: tuple[str, ...] = ()
    names: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def foreign_input(trial: Trial) -> None:
    """A drawn case of CASES."""
    expected = trial.random.choices([*CASES], [share for share, _ in CASES.values()])[0]
    name = trial.random.choice([*CASES[expected][1]])
    trial.facts.update(phase=expected, case=name)
    use = CASES[expected][1][name](trial)
    command = tuple(map(str, use.command))
    trial.facts["command"] = " ".join((*command, *use.flags))
    if command:
        trial.facts["processes"] = 1
    with started(trial, *use.flags, command=command, **use.variables) as start:
        status = finish_within_bounds(start)
        output = start.output()
    trial.facts["status"] = status
    assert status in {"refused": (2,), "either": (0, 2)}.get(expected, (0,)), f"status {status}"
    errors = len(re.findall(r"\bError: |\.py: error: ", output))
    assert errors == (status == 2), f"{errors} errors at status {status}"
    assert "\x1b[31m" not in output, "the input's escape sequence reaches the terminal"
    if expected == "refused":
        assert use.names in output, f"the error does not name {use.names}"
    if expected in ("equal", "works") and not command:
        reported = losses(trial.run)
        assert sorted(reported) == [*range(1, STEPS + 1)], f"steps {sorted(reported)}"
        assert expected == "works" or reported == trial.undisturbed.losses, "the losses differ"


def finish_within_bounds(start: Start) -> int:
    size, since = 0, time.monotonic()
    while start.process.poll() is None:
        if size != (size := start.path.stat().st_size):
            since = time.monotonic()
        assert time.monotonic() - since < QUIET, f"no output for {QUIET} s"
        for pid in start.pids():
            assert memory(pid) < MEMORY, f"more than {MEMORY >> 30} GiB of memory"
        time.sleep(0.05)
    return start.finish()


def memory(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


def apart(function: Callable[..., object], *arguments: object) -> None:
    """Calls it in a process of its own, because libraries start threads, which would not survive a fork."""
    if (pid := os.fork()) == 0:
        try:
            function(*arguments)
        except BaseException as error:
            print(f"{function}: {error}")
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the input cannot be written"


# Data


def data(write: Write, name: str = "data.jsonl", readers: tuple[str, ...] = ("training",)) -> Callable[[Trial], Use]:
    """A command that reads the file or folder which `write` creates from the lines of the undisturbed run's data."""

    def use(trial: Trial) -> Use:
        path = trial.folder / "given" / name
        path.parent.mkdir()
        apart(write, path, trial.data.read_bytes().splitlines(), trial.random)
        trial.facts["used by"] = reader = trial.random.choice(readers)
        if reader == "training":
            trial.data = path
        out, task = trial.folder / "out.model", f"text:{path}"
        uses = {
            "training": Use(),
            "validation": Use(flags=(f"--validation.dataset_path={path}",)),
            "tokenizer": Use((script("train_tokenizer"), f"--dataset={path}", f"--output={out}")),
            "task": Use(("-m", "torchtitan.tools.evaluate", checkpoint(trial), "--tasks", task, *CUSTOM)),
        }
        return replace(uses[reader], names=name)

    return use


READERS = ("training", "training", "validation", "tokenizer", "task")


def joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def written_by_others(path: Path, lines: list[bytes], draw: random.Random) -> None:
    """JSONL with the same records in another form."""
    forms: dict[str, Callable[[bytes], bytes]] = {
        "byte order mark": lambda content: b"\xef\xbb\xbf" + content,
        "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
        "no final line end": lambda content: content.rstrip(b"\r\n"),
        "fields": lambda content: content.replace(b"}", b', "meta": {"n": [1, null]}, "\xc3\xa9": 1e5}'),
        "escapes": lambda content: content.replace(b"scale", b"sc\\u0061le"),
        "blanks": lambda content: content.replace(b'{"', b' {  "'),
    }
    content = joined(lines)
    for form in draw.sample([*forms], draw.randint(1, len(forms))):
        content = forms[form](content)
    path.write_bytes(content)


def table(lines: list[bytes], draw: random.Random) -> Any:
    import pyarrow as pa

    texts = pa.array([json.loads(line)["text"] for line in lines])
    types = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    types += [pa.string_view()] if hasattr(pa, "string_view") else []
    return pa.table({"id": pa.array(range(len(texts))), "text": texts.cast(draw.choice(types))})


def write_parquet(path: Path, lines: list[bytes], draw: random.Random) -> None:
    from pyarrow import parquet

    compression = draw.choice(("snappy", "zstd", "gzip", "none"))
    parquet.write_table(table(lines, draw), path, compression=compression, row_group_size=draw.choice((100, 10**6)))


def write_arrow(path: Path, lines: list[bytes], draw: random.Random) -> None:
    import pyarrow as pa

    rows = table(lines, draw)
    with draw.choice((pa.ipc.new_file, pa.ipc.new_stream))(path, rows.schema) as writer:
        writer.write_table(rows)


def write_data_set(path: Path, lines: list[bytes], draw: random.Random) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([json.loads(line) for line in lines])
    given = draw.choice((rows, DatasetDict(train=rows, validation=rows.select(range(20)))))
    given.save_to_disk(str(path))


def compressed(compress: Callable[[bytes], bytes]) -> Write:
    return lambda path, lines, draw: path.write_bytes(compress(joined(lines)))


def zstd(content: bytes) -> bytes:
    import zstandard

    compressor: Any = zstandard.ZstdCompressor()
    return bytes(compressor.compress(content))


def as_array(path: Path, lines: list[bytes], draw: random.Random) -> None:
    path.write_text(json.dumps([json.loads(line) for line in lines], indent=draw.choice((None, 2))))


WRITERS: dict[str, Write] = {
    ".jsonl": written_by_others,
    ".ndjson": written_by_others,
    ".json": as_array,
    ".jsonl.gz": compressed(gzip.compress),
    ".jsonl.bz2": compressed(bz2.compress),
    ".json.xz": compressed(lzma.compress),
    ".jsonl.zst": compressed(zstd),
    ".parquet": write_parquet,
    ".arrow": write_arrow,
    ".save_to_disk": write_data_set,
    ".txt": compressed(lambda content: 4 * content),
    "": compressed(lambda content: 4 * content),
}


def readable(suffix: str, trial: Trial) -> Use:
    """train.py on a file with an odd name, on its folder, a folder with splits, or a path that begins with `~`."""
    draw = trial.random
    where = draw.choice(("file", "folder", "splits", "home"))
    folder = trial.folder / draw.choice((*NAMES, *HOSTILE))
    folder.mkdir()
    stem = "train-00000-of-00001" if where == "splits" else draw.choice((*NAMES, *HOSTILE))
    lines = trial.data.read_bytes().splitlines()
    for name, chunk in (stem, lines), *((("validation-00000-of-00001", lines[:20]),) if where == "splits" else ()):
        apart(WRITERS[suffix], folder / f"{name}{suffix}", chunk, draw)
    trial.data = folder if where in ("folder", "splits") else folder / f"{stem}{suffix}"
    variables = {}
    if where == "home":
        trial.data = Path("~") / trial.data.relative_to(trial.folder)
        caches = {"XDG_CACHE_HOME": "", "HF_HOME": "/huggingface"}
        own = Path.home() / ".cache"
        variables = {"HOME": str(trial.folder), **{name: f"{own}{below}" for name, below in caches.items()}}
    return Use(variables=variables)


def tar(path: Path, lines: list[bytes], draw: random.Random) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("data.jsonl")
        info.size = len(content := joined(lines))
        archive.addfile(info, io.BytesIO(content))


def special(path: Path, lines: list[bytes], draw: random.Random) -> None:
    """No file: a named pipe, a device, links that lead nowhere or in a circle."""
    if draw.random() < 0.4:
        os.mkfifo(path)
    else:
        path.symlink_to(draw.choice(("/dev/zero", "/dev/tty", "nowhere", path.name)))


def holds(content: bytes) -> Write:
    return lambda path, lines, draw: path.write_bytes(content)


def cut(write: Write) -> Write:
    """A file that ends early, before the run has read enough."""

    def cut_file(path: Path, lines: list[bytes], draw: random.Random) -> None:
        write(path, lines, draw)
        os.truncate(path, draw.randrange(1, path.stat().st_size // 20))

    return cut_file


DEEP = b'{"text": ' + b"[" * 10_000 + b"]" * 10_000 + b"}\n"
REFUSED_DATA: dict[str, tuple[str, Write]] = {
    "truncated .gz": ("data.jsonl.gz", cut(compressed(gzip.compress))),
    "truncated .xz": ("data.jsonl.xz", cut(compressed(lzma.compress))),
    "truncated Parquet": ("data.parquet", cut(write_parquet)),
    "truncated Arrow": ("data.arrow", cut(write_arrow)),
    ".tar": ("data.tar", tar),
    ".tar as .txt": ("data.txt", tar),
    ".csv": ("data.csv", holds(b"id,text\n" + b'1,"some words"\n' * 5000)),
    "picture as .txt": ("data.txt", holds(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + random.Random(0).randbytes(50_000))),
    "picture as Parquet": ("data.parquet", holds(b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(50_000))),
    "no gzip": ("data.jsonl.gz", holds(b"some words\n" * 5000)),
    "zero bytes": ("data.txt", holds(bytes(100_000))),
    "UTF-16": ("data.txt", holds(("some words\n" * 5000).encode("utf-16"))),
    "Latin-1": ("data.txt", holds("détail\n".encode("latin-1") * 5000)),
    "empty": ("data.jsonl", holds(b"")),
    "empty .gz": ("data.jsonl.gz", holds(gzip.compress(b""))),
    "empty array": ("data.json", holds(b"[]")),
    "line ends": ("data.jsonl", holds(b"\r\n" * 5000)),
    "no such column": ("data.jsonl", lambda path, lines, _: path.write_bytes(joined(lines).replace(b"text", b"body"))),
    "numbers": ("data.jsonl", holds(b'{"text": 1}\n' * 5000)),
    "nested deeply": ("data.jsonl", holds(DEEP * 500)),
    "empty folder": ("data", lambda path, lines, draw: path.mkdir()),
    "nothing": ("data.jsonl", lambda path, lines, draw: None),
    **{f"special file as {suffix}": (f"data{suffix}", special) for suffix in (".jsonl", ".parquet", ".txt", ".arrow")},
}


# Configuration


def configuration(content: bytes | Write, names: str, *flags: str) -> Callable[[Trial], Use]:
    """train.py with a TOML file; the flags of the trial win over what it says."""

    def use(trial: Trial) -> Use:
        path = trial.folder / "given.toml"
        (holds(content) if isinstance(content, bytes) else content)(path, [], trial.random)
        return Use(flags=(f"--job.config_file={path}", *flags), names=names)

    return use


def other_key(trial: Trial) -> Use:
    """A key of some version, with a value of that version or any other."""
    keys = tomllib.loads((ROOT / "tests" / "unit" / "keys_of_other_versions.toml").read_text())
    key = trial.random.choice([*keys])
    value = trial.random.choice((*keys[key], *VALUES))
    *sections, name = key.split(".")
    text = f"[{'.'.join(sections)}]\n{name} = {toml(value)}\n"
    trial.facts["input"] = text
    content = text.encode(errors="surrogatepass").replace(b'"nested"', b"[" * 10_000 + b"]" * 10_000)
    return configuration(content, key, "--training.steps=2", "--comm.init_timeout_seconds=30")(trial)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return "[[]]" if value is None else json.dumps(value, ensure_ascii=True).replace("NaN", "nan").replace("Inf", "inf")


REFUSED_FILES: dict[str, tuple[bytes | Write, str]] = {
    "unknown key": (b"[training]\nsequence_length_of_all = 64\n", "training.sequence_length_of_all"),
    "unknown section": (b"[trainings]\nsteps = 64\n", "trainings"),
    "wrong type": (b"[optimizer]\nlr = [1, 2]\n", "optimizer.lr"),
    "future value": (b'[activation_checkpoint]\nmode = "quantum_2031"\n', "activation_checkpoint.mode"),
    "key given twice": (b"[training]\nsteps = 8\nsteps = 8\n", "given.toml"),
    "array nested deeply": (b"[training]\nsteps = " + b"[" * 10_000 + b"]" * 10_000, "given.toml"),
    "table nested deeply": (b"[" + b"a." * 10_000 + b"a]\nb = 1\n", "given.toml"),
    "zero bytes": (bytes(1000), "given.toml"),
    "UTF-16": ("[training]\nsteps = 8\n".encode("utf-16"), "given.toml"),
    "YAML": (b"training:\n  steps: 8\n", "given.toml"),
    "special file": (special, "given.toml"),
}


def uri(trial: Trial) -> Use:
    """A URI where a path is expected."""
    key = trial.random.choice(("training.dataset_path", "job.dump_folder", "model.tokenizer_path", "job.config_file"))
    value = trial.random.choice(("s3://bucket/data", "gs://bucket/data.jsonl", "https://example.com/data.jsonl"))
    return Use(flags=(f"--{key}={value}",), names=key)


# Folders of models, used by commands


def checkpoint(trial: Trial) -> Path:
    steps = [path for path in (trial.template / "checkpoint").glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, key=lambda path: int(path.name[5:]))


def published(trial: Trial) -> Path:
    """The template's last checkpoint in Hugging Face's format."""
    folder = trial.template.parent / "published"
    if not folder.exists():
        command = ("-m", "torchtitan.tools.convert", "to-hf", str(checkpoint(trial)), str(folder), *CUSTOM)
        with started(trial, command=command) as start:
            assert start.finish() == 0, start.output()
    return folder


def meta(trial: Trial) -> Path:
    """The same in Meta's format."""
    folder = trial.template.parent / "meta"
    if not folder.exists():
        apart(write_meta, checkpoint(trial), published(trial) / "tokenizer.model", folder)
    return folder


SIZES: dict[str, float] = {
    "dim": 64,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 4096,
    "multiple_of": 32,
}
SIZES |= {"ffn_dim_multiplier": 0.75, "norm_eps": 1e-5, "rope_theta": 500000.0}


def write_meta(source: Path, tokenizer: Path, folder: Path) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder.mkdir()
    dcp_to_torch_save(source, weights := folder / "consolidated.00.pth")
    tensors = {name: tensor for name, tensor in torch.load(weights).items() if not name.startswith("optimizer.")}
    torch.save(tensors, weights)
    (folder / "params.json").write_text(json.dumps(SIZES))
    shutil.copy(tokenizer, folder)


FOLDERS = {"checkpoint": checkpoint, "Hugging Face": published, "Meta": meta}


def script(name: str) -> str:
    return str(ROOT / "scripts" / f"{name}.py")


def commands(folder: Path, trial: Trial) -> dict[str, Use]:
    """What users do with a folder of a model."""
    out, tasks = trial.folder / "out", task_files.write(trial.folder, "arc", 2)
    prompt = ("--prompt", "loss of", "--max-new-tokens", 3)
    used: dict[str, Use] = {
        "generate": Use(("-m", "torchtitan.tools.generate", "--checkpoint", folder, *prompt, *CUSTOM)),
        "evaluate": Use(("-m", "torchtitan.tools.evaluate", folder, "--tasks", tasks, "--seq-len", 64, *CUSTOM)),
        "train": Use(flags=(f"--checkpoint.initial_load_path={folder}",)),
    }
    if (folder / MANIFEST).exists():
        used["average"] = Use((script("average_checkpoints"), folder, "--out", out, *CUSTOM))
        branch = ("--decay-steps", 2, "--folder", out, "--prepare-only")
        used["branch"] = Use((script("branch"), folder, *branch, *CUSTOM))
        used["convert"] = Use(("-m", "torchtitan.tools.convert", "to-hf", folder, out, *CUSTOM))
    else:
        used["convert"] = Use(("-m", "torchtitan.tools.convert", "from-hf", folder, out, *CUSTOM))
    return used


def copied(trial: Trial, source: Path, name: str = "given") -> Path:
    folder = trial.folder / name
    shutil.copytree(source, folder)
    return folder


def a_command(trial: Trial, folder: Path) -> Use:
    uses = commands(folder, trial)
    name = trial.random.choice([*uses])
    trial.facts["used by"] = name
    return uses[name]


def oddly_named(form: str, trial: Trial) -> Use:
    folder = copied(trial, FOLDERS[form](trial), trial.random.choice(NAMES))
    return a_command(trial, folder)


def mutated(form: str, trial: Trial) -> Use:
    """One field of a JSON file of a good folder has another value, or a file ends early."""
    folder = copied(trial, FOLDERS[form](trial))
    file = trial.random.choice([path for path in sorted(folder.iterdir()) if path.suffix == ".json"])
    if trial.random.random() < 0.2:
        file = trial.random.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
        os.truncate(file, trial.random.randrange(file.stat().st_size))
        trial.facts["input"] = f"{file.name} of {file.stat().st_size} bytes"
    else:
        trial.facts["input"] = f"{file.name}: {mutate(file, trial.random)}"
    if form == "checkpoint" and trial.random.random() < 0.8:
        list_again(folder, file.name)
    return a_command(trial, folder)


def mutate(file: Path, draw: random.Random) -> str:
    """Changes a value, at any depth, of a JSON file. Returns what it did."""
    content = json.loads(file.read_text())
    place, at = content, []
    while True:
        at.append(draw.choice([*place] if isinstance(place, dict) else range(len(place))))
        inner = place[at[-1]]
        if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.4:
            break
        place = inner
    value = draw.choice((*VALUES, "missing"))
    if value == "missing":
        del place[at[-1]]
    else:
        place[at[-1]] = value
    file.write_text(json.dumps(content).replace('"nested"', "[" * 10_000 + "]" * 10_000))
    return f"{'.'.join(map(str, at))} = {value!r}"


def list_again(folder: Path, name: str) -> None:
    """Makes the manifest fit a changed file, or itself, as a program would that writes checkpoints of its own."""
    with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):  # it has been made no manifest
        content = json.loads((folder / MANIFEST).read_text())
        content.pop("sha256")
        if name != MANIFEST:
            content["files"][name] = {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        content["sha256"] = _digest(content)
        (folder / MANIFEST).write_text(json.dumps(content))


def dump_folder(trial: Trial) -> Use:
    """The report of a run whose records are changed, or train.py in its folder."""
    shutil.copytree(trial.template, trial.run)
    file = trial.random.choice(
        [path for path in sorted(trial.run.iterdir()) if path.suffix in (".jsonl", ".toml", ".json")]
    )
    if file.suffix == ".json" or trial.random.random() < 0.3:
        os.truncate(file, trial.random.randrange(file.stat().st_size))
    else:
        lines = file.read_bytes().splitlines()
        place = trial.random.randrange(len(lines))
        junk = (
            b"null",
            b"[]",
            b"\xff\xfe",
            bytes(100),
            b"[" * 10_000,
            b'{"step": "x", "loss": []}',
            b'{"step": 1e400}',
        )
        lines[place] = trial.random.choice(junk)
        file.write_bytes(joined(lines))
    trial.facts["input"] = file.name
    plot = (script("plot_run"), trial.run, "--output", trial.folder / "plot.png")
    report = ("-m", "torchtitan.tools.report", trial.run, "-o", trial.folder / "page.html")
    return trial.random.choice((Use(plot), Use(report), Use()))


def task_file(trial: Trial) -> Use:
    """Evaluation of a task file with a changed example."""
    form = trial.random.choice([*task_files.KINDS])
    file = task_files.write(trial.folder, form, 2)
    first, *others = file.read_text().splitlines()
    file.write_text(first)
    trial.facts["input"] = f"{form}: {mutate(file, trial.random)}"
    file.write_text("\n".join((file.read_text(), *others)))
    return Use(("-m", "torchtitan.tools.evaluate", checkpoint(trial), "--tasks", file, "--seq-len", 64, *CUSTOM))


def argument(trial: Trial) -> Use:
    """A number or a text that a script does not expect."""
    flag = trial.random.choice(("--temperature", "--top-k", "--top-p", "--seed", "--max-new-tokens", "--prompt"))
    value = trial.random.choice(("-1", "0", "1e-40", "1e40", "nan", "inf", "1" + "0" * 30, "x", "", "\udcff", "字"))
    flags = ("--prompt", "loss", "--max-new-tokens", 3, f"{flag}={value}")
    return Use(("-m", "torchtitan.tools.generate", "--checkpoint", checkpoint(trial), *flags, *CUSTOM))


def special_argument(trial: Trial) -> Use:
    """A named pipe, a device, or nothing, where a command expects a file or a folder."""
    path = trial.folder / "given"
    special(path, [], trial.random)
    model = ("--checkpoint", checkpoint(trial), *CUSTOM)
    generate = ("-m", "torchtitan.tools.generate", *model, "--max-new-tokens", 3)
    commands = (
        (*generate, "--prompt", "loss", "--tokenizer-path", path),
        (*generate, "--prompts-file", path),
        ("-m", "torchtitan.tools.generate", "--prompt", "loss", "--checkpoint", path),
        ("-m", "torchtitan.tools.evaluate", checkpoint(trial), *CUSTOM, "--tasks", path),
        ("-m", "torchtitan.tools.convert", "from-hf", path, trial.folder / "out"),
        ("-m", "torchtitan.tools.convert", "to-hf", path, trial.folder / "out"),
        ("-m", "torchtitan.tools.report", path, "-o", trial.folder / "page.html"),
    )
    return Use(trial.random.choice(commands), names="given")


def special_in_folder(trial: Trial) -> Use:
    """A published folder in which a file is a named pipe or a device."""
    folder = copied(trial, published(trial))
    file = trial.random.choice([folder / "config.json", *folder.glob("*.safetensors")])
    file.unlink()
    special(file, [], trial.random)
    return Use(("-m", "torchtitan.tools.convert", "from-hf", folder, trial.folder / "out", *CUSTOM), names=file.name)


# What is expected -> its share of the trials, and the cases by name.
CASES: dict[str, tuple[int, dict[str, Callable[[Trial], Use]]]] = {
    "equal": (
        10,
        {
            "JSONL": data(written_by_others),
            "TOML": configuration(b"\xef\xbb\xbf# caf\xc3\xa9\r\n[training]\r\n\r\nsteps = 7 # fewer", ""),
        },
    ),
    "works": (
        25,
        {
            **{f"data {suffix or 'without suffix'}": partial(readable, suffix) for suffix in WRITERS},
            **{f"{form} folder, odd name": partial(oddly_named, form) for form in FOLDERS},
        },
    ),
    "refused": (
        30,
        {
            **{f"data, {name}": data(write, path, READERS) for name, (path, write) in REFUSED_DATA.items()},
            **{f"TOML, {name}": configuration(*given) for name, given in REFUSED_FILES.items()},
            "URI": uri,
            "special file as argument": special_argument,
            "special file in a folder": special_in_folder,
        },
    ),
    "either": (
        35,
        {
            **{f"{form} folder, {number}": partial(mutated, form) for form in FOLDERS for number in (1, 2, 3)},
            **{f"key of some version, {number}": other_key for number in (1, 2, 3)},
            "dump folder": dump_folder,
            "task file": task_file,
            "argument": argument,
        },
    ),
}
