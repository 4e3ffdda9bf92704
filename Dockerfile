# docker build -t torchtitan .                                                 for GPUs: PyPI's torch brings CUDA along
# docker build -t torchtitan --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .    for CPUs, 4 GB smaller
# See docs/containers.md.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
# At run time for CPU kernels and torch.compile, on GPUs too.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /
ARG PIP_EXTRA_INDEX_URL
# Alone, as it is by far the largest, and changes least. Of two builds of a version, pip takes the one with a suffix, such
# as +cpu.
RUN pip install --no-cache-dir -c /constraints.txt torch
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)[report,s3]"

# Compiled code and what is downloaded is kept in /cache, which only this user may write to.
RUN useradd --uid 10001 --create-home trainer && install --directory --owner=trainer --mode=0700 /cache /outputs
ENV XDG_CACHE_HOME=/cache
USER 10001
WORKDIR /outputs
ENTRYPOINT ["torchtitan-train"]
