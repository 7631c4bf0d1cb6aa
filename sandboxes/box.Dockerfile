# An image for the boxes of sandbox.id=docker. Build it in this folder:
#   docker build -t agentrl/sandbox:local -f box.Dockerfile .
# Any image with Python 3.9 or later as `python3` and with `env` will do: agentrl brings its own
# program along when a box starts, and runs everything as user 65534 on a read-only root.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
# What programs of the model may import goes here, for example:
#   RUN pip install --no-cache-dir numpy pandas
LABEL org.opencontainers.image.title="agentrl sandbox"
CMD ["python3"]
