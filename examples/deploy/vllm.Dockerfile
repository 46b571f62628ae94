# vLLM with our cache as its drafter. From the checkout's root:
#   docker build -f examples/deploy/vllm.Dockerfile -t agentspec-vllm:0.1.0 .
FROM vllm/vllm-openai:v0.32.0
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m pip install --no-cache-dir scikit-build-core nanobind cmake ninja \
 && python3 -m pip install --no-cache-dir --no-build-isolation '/source[postgres]' \
 && rm -rf /source
RUN useradd --create-home --uid 10001 vllm && install -d -o vllm -g vllm -m 0700 /data
ENV HF_HOME=/data/huggingface
USER 10001
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
