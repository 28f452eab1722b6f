# Gradveil on a CPU, with the bundled images.
#   docker build -t gradveil --build-arg TORCH_ARGS="--index-url <index of torch's CPU builds>" .
#   docker run --rm -v "$PWD:/audit" -u "$(id -u):$(id -g)" gradveil audit faces
# Without TORCH_ARGS, torch brings gigabytes of CUDA libraries along.
FROM python:3.12-slim

ARG TORCH_ARGS=""
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_ARGS} torch

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[demo]" && rm -r /src

# Any user may run it (-u): torch and others ask for a name and a home.
ENV HOME=/audit USER=gradveil
WORKDIR /audit
USER 1000:1000
ENTRYPOINT ["gradveil"]
CMD ["--help"]
