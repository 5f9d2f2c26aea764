# The image of a node without GPUs: RollArt and Ray, for env workers, and for the head and the controller.
#
#     DOCKER_BUILDKIT=1 docker build -f deploy/docker/worker.Dockerfile -t rollart-worker .
#
# It contains neither torch nor a Docker engine. Packages of further plugins: EXTRA_PACKAGES="my-plugin==1.0".
# Without access to PyPI, set PIP_INDEX_URL, or PIP_NO_INDEX=1 and PIP_FIND_LINKS.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG PIP_INDEX_URL PIP_NO_INDEX PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/rollart
# The layer of dependencies is built again only if they change.
COPY pyproject.toml deploy/docker/constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
e = p['optional-dependencies']; \
print(*p['dependencies'], 'ray[default]', 'setuptools', *e['ray'], *e['gateway'], sep='\n')" > requirements.txt \
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

FROM ${BASE}
# bubblewrap: sandboxes. wget: health checks of KubeRay. procps: signals before a preemption.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home rollart
COPY --from=build /opt/rollart /opt/rollart
COPY scripts/head.sh scripts/node.sh /opt/rollart/bin/
# In /usr/local/bin, too: login shells reset PATH.
RUN for name in rollart ray; do ln -sf /opt/rollart/bin/$name /usr/local/bin/$name; done
ENV PATH=/opt/rollart/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_AUTH_MODE=token \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/rollart
CMD ["rollart", "--help"]
