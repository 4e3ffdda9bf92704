"""The Dockerfile: its steps are run in a root above this machine's files, for want of a base image."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, SMALL

TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
STEPS = re.findall(r"^([A-Z]+) +(.*)$", TEXT, re.MULTILINE)
CONTEXT = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
SITE = next(path for path in map(Path, sys.path) if path.name.endswith("-packages"))
# The base image is this machine. Nothing is downloaded: what pip installs is here, but for this project itself.
STAGE = f"""
mkdir -p $root $root.upper $root.work
mount -t overlay -o lowerdir=/,upperdir=$root.upper,workdir=$root.work none $root
for folder in dev proc; do mount --rbind /$folder $root/$folder; done
rm -rf $root{SITE}/torchtitan_toml* $root{SITE}/__editable__*torchtitan*
chmod a+x {" ".join(f"$root{folder}" for folder in [*Path(sys.executable).resolve().parents, *SITE.parents][:-1])}
printf '#!/bin/sh\\n' > $root/usr/local/bin/apt-get; chmod a+x $root/usr/local/bin/apt-get
"""
BASE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "PIP_QUIET": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
}


def script_of(place: Path, *flags: str) -> str:
    """What builds the image in the folder `place`/image, and runs it."""
    lines = ["set -eo pipefail", f"mount -t tmpfs none {place}"]
    folder, user, environment = "/", "root", BASE

    def inside(command: str) -> str:
        variables = shlex.join(f"{name}={value}" for name, value in environment.items())
        return f"chroot $root env -i {variables} bash -eo pipefail -c {shlex.quote(f'cd {folder}; {command}')}"

    for step, rest in STEPS:
        if step == "FROM":
            lines += [f"root={place}/{rest.partition(' AS ')[2] or 'image'}", STAGE]
            folder = "/"
        elif step == "WORKDIR":
            folder = rest
            lines.append(f"mkdir -p $root{folder}")
        elif step == "COPY":
            *names, target = rest.split()
            names = CONTEXT if names == ["."] else names
            lines.append(f"cp -r {' '.join(str(ROOT / name) for name in names)} $root{target.replace('.', folder)}")
        elif step in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            environment = {**environment, name: value.strip('"')}
        elif step == "RUN":
            if bind := re.match(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+) +", rest):
                stage, source, target = bind.groups()
                lines += [f"mkdir -p $root{target}", f"mount --bind {place}/{stage}{source} $root{target}"]
                rest = rest[bind.end() :]
            lines.append(inside(rest))
        elif step == "USER":
            user = rest
        elif step == "ENTRYPOINT":
            program = shlex.join([*json.loads(rest), *flags])
            lines.append(inside(f"exec setpriv --reuid {user} --regid {user} --clear-groups {program}"))
    return "\n".join(lines)


@pytest.mark.full
def test_the_steps_of_the_dockerfile_give_an_image_that_trains(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("cannot mount")
    script = script_of(tmp_path, *SMALL, "--training.steps=2")
    script += f"\ncd {tmp_path}/image; ls -l outputs/outputs/metrics.jsonl cache/torchtitan/kernels/*"
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training finished after step 2" in done.stdout and "no safe cache folder" not in done.stdout
    assert ".so" in done.stdout and "metrics.jsonl" in done.stdout, done.stdout
