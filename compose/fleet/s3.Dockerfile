# versitygw, an S3 server with conditional writes, over a directory that holds the fleet's one bucket.
ARG BASE=debian:trixie-slim
FROM golang:1.25-trixie AS build
RUN CGO_ENABLED=0 GOBIN=/out go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

FROM ${BASE}
COPY --from=build /out/versitygw /usr/local/bin/versitygw
RUN useradd --uid 10002 --no-create-home s3 && install -d -o s3 -m 0700 /data /data/kvasir
USER s3
VOLUME /data
# The keys are in a file of the volume of secrets, and versitygw takes them from its environment.
ENTRYPOINT ["/bin/bash", "-c", "set -aeu; . /secrets/keys; exec versitygw \"$@\"", "versitygw"]
