# A peer in a container, as a user without rights.
#
#   docker build --tag diloco --build-arg TORCH_INDEX=<index of torch's builds for CPUs, see pytorch.org> .
#   docker build --tag diloco --build-arg TORCH=cuda .
#
#   docker run --network host --ulimit nofile=65536 --volume diloco:/data diloco peer --initial-peers <maddr>
#
# The volume keeps the peer's identity, runs and caches: without it a restarted container is a stranger to the swarm.
# With GPUs add `--gpus all`; for NCCL between GPUs of one machine also `--shm-size 1g`.

FROM python:3.11-slim-bookworm AS build
# Without an index pip takes torch for CUDA, which is ten times as large.
ARG TORCH_INDEX=""
ARG EXTRAS=data
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/diloco
ENV PATH=/opt/diloco/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# First what changes seldom.
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY diloco diloco
COPY peers peers
COPY provisioning provisioning
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim-bookworm
ARG TORCH=cpu
# torch.compile, which is on with GPUs, calls a compiler.
RUN if [ "$TORCH" = cuda ]; then \
      apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 --home-dir /data diloco
COPY --from=build /opt/diloco /opt/diloco
ENV PATH=/opt/diloco/bin:$PATH XDG_STATE_HOME=/data/state XDG_CACHE_HOME=/data/cache HF_HOME=/data/huggingface \
    PYTHONUNBUFFERED=1
USER diloco
WORKDIR /data
VOLUME /data
EXPOSE 30001 30002 30003
# By SIGTERM a peer leaves its swarm.
STOPSIGNAL SIGTERM
ENTRYPOINT ["diloco"]
CMD ["peer", "--help"]
