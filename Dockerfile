# dualrc on a CPU: docker build -t dualrc . ; docker run --rm -v "$PWD:/data" dualrc match a.jpg b.jpg --out matches.png
FROM python:3.11-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY src src
RUN DUALRC_STRICT=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# Additional package index for pip. The PyTorch index of CPU builds makes the image several gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL
# matplotlib and torch write caches into the home folder.
RUN useradd --uid 1000 --create-home user
COPY constraints.txt /tmp/
COPY --from=build /wheels /wheels
RUN wheel=$(ls /wheels/dualrc-*.whl) \
    && pip install --no-cache-dir -c /tmp/constraints.txt "${wheel}[colmap,heif]" \
    && rm -rf /wheels /tmp/constraints.txt
USER 1000
WORKDIR /data
ENTRYPOINT ["dualrc"]
CMD ["--help"]
