# The image of a node with NVIDIA GPUs: RollArt, Ray and torch with CUDA, and SGLang in an environment of its own.
#
#     DOCKER_BUILDKIT=1 docker build -f deploy/docker/gpu.Dockerfile -t rollart-gpu .
#
# BASE needs Python 3.12, as in worker.Dockerfile, because all nodes of a run have the same Python. It contains the
# CUDA compiler, because SGLang compiles kernels when a server starts.
# Without access to PyPI, set PIP_INDEX_URL, or PIP_NO_INDEX=1 and PIP_FIND_LINKS.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python AS sglang
ARG PIP_INDEX_URL PIP_NO_INDEX PIP_FIND_LINKS
ARG SGLANG=sglang==0.5.23
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/sglang && /opt/sglang/bin/pip install $SGLANG

FROM python AS build
ARG PIP_INDEX_URL PIP_NO_INDEX PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/rollart
# The layer of dependencies is built again only if they change.
COPY pyproject.toml deploy/docker/constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
e = p['optional-dependencies']; names = ('ray', 'gateway', 'train', 'lora', 'sglang'); \
print(*p['dependencies'], 'ray[default]', 'setuptools', *(r for n in names for r in e[n]), sep='\n')" \
    > requirements.txt \
    && /opt/rollart/bin/pip install -c constraints.txt -r requirements.txt
ARG EXTRA_PACKAGES=
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$EXTRA_PACKAGES" ]; then /opt/rollart/bin/pip install -c constraints.txt $EXTRA_PACKAGES; fi
COPY setup.py MANIFEST.in README.md LICENSE ./
COPY rollart_core rollart_core
COPY plugins plugins
COPY envs envs
COPY rewards rewards
COPY algorithms algorithms
COPY cookiecutter cookiecutter
RUN /opt/rollart/bin/pip install --no-deps --no-build-isolation .

FROM python
# libnuma1, libibverbs1: kernels of SGLang, and NCCL over InfiniBand. The others as in worker.Dockerfile.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && if ! id 1000 > /dev/null 2>&1; then useradd --uid 1000 --create-home rollart; fi \
    && mkdir -p /home/rollart && chown 1000:1000 /home/rollart
COPY --from=sglang /opt/sglang /opt/sglang
COPY --from=build /opt/rollart /opt/rollart
COPY scripts/head.sh scripts/node.sh /opt/rollart/bin/
RUN for name in rollart ray; do ln -sf /opt/rollart/bin/$name /usr/local/bin/$name; done
ENV HOME=/home/rollart \
    PATH=/opt/rollart/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_AUTH_MODE=token \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/rollart
CMD ["rollart", "--help"]
