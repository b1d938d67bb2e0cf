# Posthorn. `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# go.work joins the product and the Go client. The other modules, whose dependencies the
# product must not get, are used alone.
ALONE := GOWORK=off
MODULES := analytics hack/bench/client hack/bench/http hack/bench/json hack/licenses test/compat/goclient test/kstatus test/monitoring
# Tools are pinned in a module of their own and built into bin/ once per version.
TOOLS := hack/tools
BIN := $(CURDIR)/bin
tool = $(ALONE) go build -C $(TOOLS) -o $(BIN)/$(1) $(2)

# Where envtest finds kube-apiserver and etcd; found, downloaded or built by the script.
ASSETS = $${KUBEBUILDER_ASSETS:-$$(hack/envtest-assets)}
# Packages to test and a pattern, for a quick look: make test PKG=./analytics/event RUN=TestFixedPoint
PKG ?= ./...
RUN ?=
# One set of flags for every build, here and in the tests' own builds, so that the Go
# build cache serves them all. Only the race detector compiles everything again.
export CGO_ENABLED := 0
export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS)) -trimpath
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)

.PHONY: help
help: ## List the targets.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use

.PHONY: build
build: ## Build bin/posthorn.
	go build -ldflags '$(LDFLAGS)' -o $(BIN)/posthorn ./cmd/posthorn

# The image, also without docker: ARCH is amd64, arm64, ppc64le or riscv64.
IMAGE ?= ghcr.io/posthorn/posthorn
ARCH ?= $(shell go env GOARCH)

.PHONY: image
image: ## Build the image from scratch, without a registry: bin/posthorn-linux-ARCH.tar.
	GOOS=linux GOARCH=$(ARCH) go build -ldflags '$(LDFLAGS)' -o $(BIN)/linux-$(ARCH)/posthorn ./cmd/posthorn
	hack/cluster/make-image $(IMAGE):$(VERSION) $(BIN)/linux-$(ARCH)/posthorn $(BIN)/posthorn-linux-$(ARCH).tar LICENSE THIRD_PARTY_LICENSES.md
	@echo "bin/posthorn-linux-$(ARCH).tar holds $(IMAGE):$(VERSION); docker load, podman load, ctr images import or kind load image-archive take it"

.PHONY: run
run: ## Show the main job on this machine: no cluster needed, nothing left behind.
	@go run ./hack/demo

##@ Test

.PHONY: test
test: ## Run all tests against a real kube-apiserver and etcd.
	@$(call tool,gotestsum,gotest.tools/gotestsum)
	@# Compiled once: packages that run in parallel and miss it would compile it once each.
	@if [[ '$(PKG)$(RUN)' == ./... ]]; then go build -o /dev/null ./cmd/posthorn; fi
	@export KUBEBUILDER_ASSETS=$(ASSETS); \
	hack/test $(if $(RUN),-run '$(RUN)') $(PKG)
	@# Alerts and dashboard, by Prometheus' own engine, in a module of its own.
	@if [[ '$(PKG)$(RUN)' == ./... ]]; then cd test/monitoring && $(ALONE) go test -count=1 ./...; fi
	@# How Flux, Helm and Argo CD read the conditions, by their own code, in a module of its own.
	@if [[ '$(PKG)$(RUN)' == ./... ]]; then cd test/kstatus && $(ALONE) go test -count=1 ./...; fi

.PHONY: e2e
e2e: ## Run the suite on a real cluster of its own (root, Debian); CLUSTER=kind for kind.
	CLUSTER=$(or $(CLUSTER),local) hack/e2e $(if $(RUN),--focus='$(RUN)')

.PHONY: bench
bench: ## Print speed: delivery, syncs of audiences, a cluster, HTTP clients, reading calls, the client library.
	go run ./hack/bench
	go run ./hack/bench/audience
	KUBEBUILDER_ASSETS=$(ASSETS) go run ./hack/bench/cluster
	cd hack/bench/http && $(ALONE) go run .
	cd hack/bench/json && $(ALONE) go run .
	cd hack/bench/client && $(ALONE) go run .

##@ Check

.PHONY: verify
verify: generate lint ## Generate everything, lint, and fail on any difference.
	@changed=$$(git status --porcelain --untracked-files=all); \
	if [[ -n "$$changed" ]]; then echo "verify: generated files differ from what is committed, or files are not committed; run 'make generate' and commit:"; echo "$$changed"; git --no-pager diff | head -50; exit 1; fi
	@echo "verify: clean"

.PHONY: generate
generate: ## Generate deep copies, CRDs, RBAC, the chart's copies of them, docs/api.md and THIRD_PARTY_LICENSES.md.
	@$(call tool,controller-gen,sigs.k8s.io/controller-tools/cmd/controller-gen)
	$(BIN)/controller-gen object crd paths=./api/... output:crd:dir=config/crd
	$(BIN)/controller-gen rbac:roleName=posthorn-operator paths=./controllers/... output:rbac:dir=config/rbac
	go run ./hack/chart
	@$(call tool,crd-ref-docs,github.com/elastic/crd-ref-docs)
	$(BIN)/crd-ref-docs --source-path api/v1alpha1 --config hack/apidocs/config.yaml --renderer markdown --output-path docs/api.md --log-level ERROR
	cd hack/licenses && $(ALONE) go run . ../..

.PHONY: lint
lint: words ## Check style, imports, common mistakes and language.
	@# golangci-lint with the linter of Kubernetes APIs built in.
	@$(call tool,golangci-lint,sigs.k8s.io/kube-api-linter/cmd/golangci-lint-kube-api-linter)
	$(ALONE) go mod tidy -diff
	$(BIN)/golangci-lint run ./... ./analytics/...
	export $(ALONE); for module in $(MODULES); do (cd $$module && go mod tidy -diff && go vet ./...) || exit 1; done

# Vale checks the language of everything but these paths, which are not revised yet.
UNREVISED := bin
.PHONY: words
words: ## Check the language of docs, comments and messages.
	@# Vale reads Go by a C library; its module stands apart, because its dependencies are old.
	@CGO_ENABLED=1 $(ALONE) go build -C hack/tools/vale -o $(BIN)/vale github.com/vale-cli/vale/v3/cmd/vale
	$(BIN)/vale --glob='!{{$(UNREVISED)}/**,docs/api.md,THIRD_PARTY_LICENSES.md}' .

.PHONY: clean
clean: ## Remove what was built here.
	rm -rf bin
