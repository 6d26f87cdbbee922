# docker build -t gpuflow .                                 CPU
# docker build -t gpuflow:cuda --build-arg VARIANT=cuda .   NVIDIA GPU; run it with --gpus all
# docs/docker.md says how to run it with a read-only root.
ARG VARIANT=cpu

FROM python:3.11-slim-bookworm AS build
ARG VARIANT
# torch without CUDA, which would add 3 GB. What torch depends on comes from pip's own index, by the second call of pip.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/gpuflow
ENV PATH=/opt/gpuflow/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements.txt ./
RUN if [ "$VARIANT" = cpu ]; then \
      pip install -c requirements.txt --no-deps --index-url "$TORCH_INDEX" torch torchvision; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY gpuflow gpuflow
COPY stages stages
RUN if [ "$VARIANT" = cuda ]; then extras=serve,samples,gpu; else extras=serve,samples; fi \
 && pip install -c requirements.txt ".[$extras]" && python -m compileall -q /opt/gpuflow/lib/python3*/site-packages/gpuflow

FROM python:3.11-slim-bookworm AS cpu

FROM python:3.11-slim-bookworm AS cuda
# Triton compiles the code that launches its kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video

# hadolint ignore=DL3006
FROM ${VARIANT}
COPY --from=build /opt/gpuflow /opt/gpuflow
RUN groupadd -g 10001 gpuflow && useradd -u 10001 -g gpuflow -M -d /tmp -s /usr/sbin/nologin gpuflow \
 && install -d -o gpuflow -g gpuflow /gpuflow /gpuflow/data /gpuflow/runs
# Caches are in /tmp. Only that and /gpuflow must be writable.
ENV PATH=/opt/gpuflow/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
WORKDIR /gpuflow
EXPOSE 8888
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", \
  "import urllib.request as r; r.urlopen('http://127.0.0.1:8888/readyz', timeout=4)"]
ENTRYPOINT ["gpuflow"]
CMD ["--help"]
