# The live page in a container:
#   docker build -t sinkscope .
#   docker run --rm -p 8765:8765 sinkscope reference:softmax
# Open the address that it prints, with its token.
FROM python:3.12-slim
COPY . /src
# An index with CPU builds of torch makes the image gigabytes smaller: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir "/src[explore,gguf,plot]" && rm -rf /src
RUN useradd --create-home reader
USER reader
WORKDIR /home/reader
EXPOSE 8765
ENTRYPOINT ["sinkscope", "explore", "--host", "0.0.0.0", "--port", "8765", "--no-browser"]
