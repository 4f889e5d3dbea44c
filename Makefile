GOLANGCI_VERSION := v2.15.0

TOOLS    := $(CURDIR)/.tools
GOLANGCI := $(TOOLS)/golangci-lint
# ./... stops at a nested go.mod, so the linter visits each module.
MODULES  := . $(patsubst %/go.mod,%,$(wildcard */go.mod))

# How long stress runs, and the seed to replay. Without a seed each run draws one and prints it when it fails.
SIM_TIME ?= 60s
SIM_SEED ?=

.DEFAULT_GOAL := help
.PHONY: help test race stress bench lint

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

test: ## run all tests
	go test ./...

race: ## run all tests under the race detector
	go test -race ./...

# No test deadline: the simulation ends itself after SIM_TIME, which may be a night.
stress: ## simulate and explore at random; SIM_TIME=60s, SIM_SEED=<seed of a failure>
	SIM_TIME='$(SIM_TIME)' $(if $(SIM_SEED),SIM_SEED='$(SIM_SEED)') CLAIM_SEEDS=20000 \
		go test -count=1 -timeout 0 -run 'Sim|Expl' ./internal/sim/ ./internal/claim/

bench: ## run all benchmarks
	go test -run '^$$' -bench . -benchmem ./...

# The linter reads export data of the compiler in use, so it is rebuilt when the version of either changes.
lint: ## run the pinned linters and check the formatting
	@$(GOLANGCI) version 2>/dev/null | grep -qF "version $(GOLANGCI_VERSION:v%=%) built with $$(go env GOVERSION) " || \
		{ echo 'building golangci-lint $(GOLANGCI_VERSION), a few minutes' && \
		GOBIN='$(TOOLS)' go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION); }
	@set -e; for module in $(MODULES); do echo "golangci-lint run ($$module)"; (cd "$$module" && $(GOLANGCI) run ./...); done
	$(GOLANGCI) fmt --diff
