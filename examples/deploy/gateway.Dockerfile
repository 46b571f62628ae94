# The gateway for servers elsewhere: no torch, no models. From the checkout's root:
#   docker build -f examples/deploy/gateway.Dockerfile -t agentspec-gateway:0.1.0 .
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/agentspec
ENV PATH=/opt/agentspec/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt .
RUN pip install --constraint constraints.txt scikit-build-core nanobind cmake ninja
COPY . .
RUN pip install --constraint constraints.txt --no-build-isolation '.[proxy,postgres]'

FROM python:3.13-slim
COPY --from=build /opt/agentspec /opt/agentspec
RUN useradd --create-home --uid 10001 agentspec
# Freed memory stays in the heap of its thread: a few heaps hold less than glibc's eight for each core.
ENV PATH=/opt/agentspec/bin:$PATH MALLOC_ARENA_MAX=4
USER 10001
EXPOSE 8700
ENTRYPOINT ["agentspec"]
CMD ["serve", "--config", "/etc/agentspec/agentspec.toml"]
