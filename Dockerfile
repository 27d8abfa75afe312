# gatespace on a CPU: docker build -t gatespace . && docker run --rm gatespace doctor
# With --build-arg TORCH_INDEX=URL torch comes from there: its CPU index saves gigabytes of CUDA.
FROM python:3.12-slim

ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} 'torch>=2.6'

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[study,service]'

# Not root; what a command writes lands in /work, which is where a volume goes.
RUN useradd --create-home --uid 1000 gatespace && mkdir /work && chown gatespace /work
USER 1000
WORKDIR /work
ENTRYPOINT ["gatespace"]
CMD ["--help"]
