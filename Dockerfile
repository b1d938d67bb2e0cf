# syntax=docker/dockerfile:1
# One image for every role: docker buildx build --platform linux/amd64,linux/arm64 .
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
COPY analytics/go.mod analytics/
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH VERSION=dev
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /posthorn ./cmd/posthorn
RUN mkdir /data

FROM gcr.io/distroless/static:nonroot
COPY --from=build /posthorn /posthorn
COPY LICENSE THIRD_PARTY_LICENSES.md /licenses/
# Without a volume the store lives here.
COPY --from=build --chown=65532:65532 /data /var/lib/posthorn
ENV PATH=/
USER 65532:65532
EXPOSE 8080 8081 8443
ENTRYPOINT ["/posthorn"]
