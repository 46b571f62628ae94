# The gateway with the local engine on CPU. Another torch build: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
#   docker build -t agentspec .
#   docker run -p 127.0.0.1:8700:8700 -v agentspec:/data agentspec    (other addresses: set server.api_keys first)
FROM python:3.13-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/agentspec
ENV PATH=/opt/agentspec/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt .
RUN pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch \
 && pip install --constraint constraints.txt scikit-build-core nanobind cmake ninja
COPY . .
RUN pip install --constraint constraints.txt --no-build-isolation '.[torch,proxy]'

FROM python:3.13-slim
COPY --from=build /opt/agentspec /opt/agentspec
RUN useradd --create-home --uid 10001 agentspec && install -d -o agentspec -g agentspec -m 0700 /data
ENV PATH=/opt/agentspec/bin:$PATH \
    AGENTSPEC_MODELS=/data/models \
    AGENTSPEC_CACHE__PATH=/data/cache \
    AGENTSPEC_SERVER__HOST=0.0.0.0
USER agentspec
VOLUME /data
EXPOSE 8700
HEALTHCHECK --interval=30s --timeout=5s --start-period=180s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8700/health', timeout=4)"]
ENTRYPOINT ["agentspec"]
CMD ["serve"]
