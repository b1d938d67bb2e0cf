# Posthorn. `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# go.work joins the product and the Go client. The other modules, whose dependencies the
# product must not get, are used alone.
ALONE := GOWORK=off
MODULES := analytics hack/licenses hack/release test/compat/testdata/cloudevents test/compat/goclient test/e2e/adapter test/kstatus test/monitoring
# Tools are pinned in a module of their own and built into bin/ once per version.
TOOLS := hack/tools
BIN := $(CURDIR)/bin
tool = $(ALONE) go build -C $(TOOLS) -o $(BIN)/$(1) $(2)

# Where envtest finds kube-apiserver and etcd; found, downloaded or built by the script.
ASSETS = $${KUBEBUILDER_ASSETS:-$$(hack/envtest-assets)}
# Packages to test and a pattern, for a quick look: make test PKG=./analytics/event RUN=TestFixedPoint
# work is every package of the modules in go.work.
PKG ?= work
RUN ?=
# One set of flags for every build, here and in the tests' own builds, so that the Go
# build cache serves them all. Only the race detector compiles everything again.
export CGO_ENABLED := 0
export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS)) -trimpath
VERSION ?= $(shell sed -n 's/^version: //p' charts/posthorn/Chart.yaml)
LDFLAGS := -s -w -X main.version=$(VERSION)

.PHONY: help
help: ## List the targets.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use

.PHONY: build
build: ## Build bin/posthorn.
	go build -ldflags '$(LDFLAGS)' -o $(BIN)/posthorn ./cmd/posthorn

.PHONY: cross
cross: ## Check that everything builds for macOS, and the kubectl plugin for Windows.
	GOOS=darwin GOARCH=arm64 go build ./cmd/...
	GOOS=windows GOARCH=amd64 go build -o /dev/null ./cmd/kubectl-posthorn

# Platforms of the program (the servers), and of the kubectl plugin.
PLATFORMS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64
PLUGIN_PLATFORMS := $(PLATFORMS) windows/amd64 windows/arm64

.PHONY: cross-all
cross-all: ## Build for every platform: the program, and the kubectl plugin.
	@for platform in $(PLATFORMS); do \
	  echo "./cmd/... for $$platform"; GOOS=$${platform%/*} GOARCH=$${platform#*/} go build ./cmd/... || exit 1; done
	@for platform in $(PLUGIN_PLATFORMS); do \
	  echo "./cmd/kubectl-posthorn for $$platform"; GOOS=$${platform%/*} GOARCH=$${platform#*/} go build -o /dev/null ./cmd/kubectl-posthorn || exit 1; done

# The image, also without docker: ARCH is amd64, arm64, ppc64le or riscv64.
IMAGE ?= ghcr.io/posthorn/posthorn
ARCH ?= $(shell go env GOARCH)

.PHONY: image
image: ## Build the image from scratch, without a registry: bin/posthorn-linux-ARCH.tar.
	GOOS=linux GOARCH=$(ARCH) go build -ldflags '$(LDFLAGS)' -o $(BIN)/linux-$(ARCH)/posthorn ./cmd/posthorn
	hack/cluster/make-image $(IMAGE):$(VERSION) $(BIN)/linux-$(ARCH)/posthorn $(BIN)/posthorn-linux-$(ARCH).tar LICENSE THIRD_PARTY_LICENSES.md
	@echo "bin/posthorn-linux-$(ARCH).tar holds $(IMAGE):$(VERSION); docker load, podman load, ctr images import or kind load image-archive take it"

# hack/release makes the files. KEY signs the checksums; its fingerprint is in SECURITY.md.
OUT ?= $(BIN)/release
KEY ?=
.PHONY: release
release: ## Make all files of a release in OUT: make release VERSION=1.0.0 KEY=FILE [OUT=DIR]
	cd hack/release && $(ALONE) go run . make -root ../.. -out '$(abspath $(OUT))' -version '$(VERSION:v%=%)' -platforms '$(PLATFORMS)' -plugin-platforms '$(PLUGIN_PLATFORMS)' $(if $(KEY),-key '$(abspath $(KEY))')

.PHONY: run
run: ## Show the main job on this machine: no cluster needed, nothing left behind.
	@go run ./hack/demo

##@ Test

.PHONY: test
test: ## Install what tests start (root on Debian), and run all tests against a real kube-apiserver and etcd.
	@# The program is compiled once: packages that run in parallel would compile it once each.
	@# With POSTHORN_TEST_ALL a test that cannot run here fails instead of being skipped (test/need).
	@export PATH=$$PATH:/usr/sbin; all=$$(hack/test-programs); export POSTHORN_TEST_ALL=$$all; \
	echo "make test: building bin/gotestsum, posthorn and the tests"; \
	$(call tool,gotestsum,gotest.tools/gotestsum); \
	if [[ '$(PKG)$(RUN)' == work ]]; then go build -o /dev/null ./cmd/posthorn; fi; \
	assets=$(ASSETS); export KUBEBUILDER_ASSETS=$$assets; \
	hack/test $(if $(RUN),-run '$(RUN)') $(PKG)

.PHONY: test-race
test-race: ## Run make test with the race detector for the packages that link Kubernetes' libraries, too: twice the time.
	RACE=all $(MAKE) --no-print-directory test

# Packages that test what depends on the version of Kubernetes: CEL rules, schemas, manifests,
# what the operator reads and writes.
VERSIONED := ./test/cel ./test/crds ./test/manifests ./test/helm ./controllers
.PHONY: test-oldest
test-oldest: ## Run the tests of CEL rules, manifests and controllers on the oldest supported Kubernetes.
	@assets=$$(hack/envtest-assets oldest) && export KUBEBUILDER_ASSETS=$$assets POSTHORN_TEST_ALL=$${POSTHORN_TEST_ALL-1} && \
	go test -count=1 $(VERSIONED)

# Packages whose tests start no built program; with -short they start no API server either.
UNIT := ./analytics/... ./api/... ./cmd/... ./contract/... ./controllers/... ./dispatcher/... ./internal/... ./test/crds ./test/imports
.PHONY: test-unit
test-unit: ## Run the tests that need only Go, in a minute: no API server, no race detector, few random trials.
	@# Some packages wait for timeouts, so more run at once than there are CPUs.
	go test -short -count=1 -vet=off -p 6 $(UNIT)

PERCENT ?= 100
.PHONY: test-long
test-long: ## Run the long forms of all tests, for about a day, and print a table; PERCENT=1 for fewer trials.
	hack/test-long -n $(PERCENT) '$(or $(RUN),.)'
	@if [[ -z '$(RUN)' ]]; then $(MAKE) --no-print-directory test-oldest; fi

.PHONY: e2e
e2e: ## Run the suite on a real cluster of its own (root, Debian); CLUSTER=kind for kind.
	CLUSTER=$(or $(CLUSTER),local) hack/e2e $(if $(RUN),--focus='$(RUN)')

.PHONY: bench
bench: ## Print speed: delivery, syncs of audiences, a cluster.
	go run ./hack/bench
	go run ./hack/bench/audience
	KUBEBUILDER_ASSETS=$(ASSETS) go run ./hack/bench/cluster

##@ Check

# Prints the tree of all files that git does not ignore, committed or not, by an index of its own.
SNAPSHOT := index=$$(mktemp) && cp "$$(git rev-parse --git-path index)" "$$index" && export GIT_INDEX_FILE=$$index && git add --all && git write-tree && rm "$$index"
.PHONY: verify
verify: lint ## Lint, generate everything, and fail if a generated file was out of date.
	@before=$$($(SNAPSHOT)); $(MAKE) --no-print-directory generate; after=$$($(SNAPSHOT)); \
	if [[ $$before != $$after ]]; then echo "verify: these files were out of date and have been generated again:"; git --no-pager diff --stat --patch $$before $$after | head -60; exit 1; fi
	@echo "verify: clean"

.PHONY: generate
generate: ## Generate deep copies, CRDs and their record, RBAC, the chart's copies of them, docs/api.md and THIRD_PARTY_LICENSES.md.
	@$(call tool,controller-gen,sigs.k8s.io/controller-tools/cmd/controller-gen)
	$(BIN)/controller-gen object crd paths=./api/... output:crd:dir=config/crd/experimental
	$(BIN)/controller-gen rbac:roleName=posthorn-operator paths=./controllers/... output:rbac:dir=config/rbac
	go run ./hack/chart
	@$(call tool,crd-ref-docs,github.com/elastic/crd-ref-docs)
	$(BIN)/crd-ref-docs --source-path api/v1beta1 --config hack/apidocs/config.yaml --renderer markdown --output-path docs/api.md --log-level ERROR
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
