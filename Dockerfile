# Three images: `trainer` (the default) is the training program with torch's CUDA wheels; `mlflow` is only the tracking
# server; `store` is a small S3 server for docker-compose.s3.yml. All run as a numeric user, with a read-only root file
# system.
#
#   docker build -t ddp-pipeline .
#   docker build -t ddp-pipeline-mlflow --target mlflow .
#   docker build -t ddp-pipeline-store --target store .

# torch needs only the driver libraries of a base image: its wheels contain CUDA, cuDNN and NCCL, so the larger
# -cudnn-runtime- image would hold them twice. There is no `latest` tag. A tag can be moved, a digest cannot:
# --build-arg BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:… builds on exactly the image that you checked.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE_IMAGE} AS python
ENV DEBIAN_FRONTEND=noninteractive
RUN rm -f /etc/apt/apt.conf.d/docker-clean
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update && apt-get install --yes --no-install-recommends python3
# write nothing next to the code, and caches only to a tmpfs or a volume
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp \
    MLFLOW_DISABLE_TELEMETRY=true

FROM python AS build
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update && apt-get install --yes --no-install-recommends python3-venv
RUN python3 -m venv /opt/venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

FROM build AS trainer-packages
RUN --mount=type=cache,target=/tmp/.cache/pip --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    pip install --require-hashes --requirement /requirements.lock

FROM build AS mlflow-packages
RUN --mount=type=cache,target=/tmp/.cache/pip --mount=type=bind,source=requirements-mlflow.lock,target=/requirements.lock \
    pip install --require-hashes --requirement /requirements.lock

FROM build AS store-packages
RUN --mount=type=cache,target=/tmp/.cache/pip --mount=type=bind,source=requirements-store.lock,target=/requirements.lock \
    pip install --require-hashes --requirement /requirements.lock

FROM build AS wheel
RUN --mount=type=cache,target=/tmp/.cache/pip --mount=type=bind,source=requirements-build.lock,target=/requirements.lock \
    pip install --require-hashes --requirement /requirements.lock
COPY pyproject.toml README.md LICENSE /source/
COPY pipeline /source/pipeline
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel /source

FROM python AS mlflow
COPY --from=mlflow-packages /opt/venv /opt/venv
RUN install --directory --owner 10001 --group 10001 /mlflow
USER 10001:10001
WORKDIR /mlflow
VOLUME /mlflow
EXPOSE 5000
# one worker and no job runner: 2 processes and 0.4 GiB instead of 15 and 2.1 GiB; --allowed-hosts is left to the caller
ENV MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
ENTRYPOINT ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000", "--workers", "1", \
            "--backend-store-uri", "sqlite:////mlflow/mlflow.db", "--artifacts-destination", "/mlflow/artifacts"]

FROM python AS store
COPY --from=store-packages /opt/venv /opt/venv
RUN install --directory --owner 10001 --group 10001 /store
USER 10001:10001
WORKDIR /store
VOLUME /store
EXPOSE 8333
COPY docker/forward.py /opt/forward.py
# only the S3 protocol, which needs credentials, is open to other containers; the keys are AWS_ACCESS_KEY_ID and
# AWS_SECRET_ACCESS_KEY of the environment
ENTRYPOINT ["python3", "/opt/forward.py", "8333", "8334", \
            "weed", "-logtostderr=true", "-alsologtostderr=false", "server", "-dir=/store", "-ip=127.0.0.1", \
            "-ip.bind=127.0.0.1", "-s3", "-s3.port=8334", "-s3.port.iceberg=0", "-s3.port.lance=0", \
            "-s3.autoCreateBucket=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", \
            "-volume.max=0", "-volume.preStopSeconds=0"]

FROM python AS trainer
# Triton compiles its kernel launchers with gcc at run time, for torch.compile.
# numactl is for torchrun's --numa-binding, see docs/gpus.md.
# `pipeline data pack` recodes JPEGs with jpegtran of libjpeg-turbo-progs.
# tini is process 1: the kernel drops a SIGTERM to a process 1 that has no handler yet, as torchrun for its first seconds
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update && apt-get install --yes --no-install-recommends \
    gcc libc6-dev libjpeg-turbo-progs libpython3-dev numactl tini
COPY --from=trainer-packages /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir --no-deps --no-index --disable-pip-version-check --root-user-action ignore /wheel/*.whl
# 50 KB, to measure a GPU machine: docker run --env PYTHONSAFEPATH= --entrypoint python ddp-pipeline /opt/benchmarks/gpu.py
COPY benchmarks /opt/benchmarks
# any user may write compiled code: docker run --user 1234
RUN install --directory --owner 10001 --group 10001 /runs && install --directory --mode 1777 /cache
USER 10001:10001
# /runs: runs and the generated digits. /cache: compiled code. It is a volume, because Docker's tmpfs is mounted noexec,
# and one of the node, because Triton fails on file systems of a network (triton-lang/triton#11512)
WORKDIR /runs
VOLUME /runs /cache
ENV TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton
# torchrun starts ranks with `python -m`, which would import Python files that lie in the current folder, the volume
ENV PYTHONSAFEPATH=1
ARG REVISION=unknown
ARG VERSION=0.3.0.dev0
ENV PIPELINE_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="ddp-pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.version=${VERSION}
ENTRYPOINT ["tini", "--", "pipeline"]
CMD ["--help"]
