# Every command that a change needs. `make` lists them; .ci/run runs the same ones.

GO ?= go

# Extra arguments for go test, such as TEST_ARGS='-run TestEnforce -v'.
TEST_ARGS ?=

# What `make examples` passes to the replay: enough turns to see limits at work.
REPLAY_ARGS ?= -limit 500

# How long `make bench-steady` watches.
BENCH_STEADY ?= 2m

# The tools are built from source, from their own module, so that they are the
# same everywhere and none of their dependencies reach the library's go.mod. The
# path has Go's version in it: a linter refuses code for a newer Go than its own.
TOOLS_DIR := .cache/tools/$(shell $(GO) env GOVERSION)
GOLANGCI_LINT := $(TOOLS_DIR)/golangci-lint
GOVULNCHECK := $(TOOLS_DIR)/govulncheck

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: tools
tools: $(GOLANGCI_LINT) ## Build the linter (other commands do, when they need it)

.PHONY: fmt
fmt: $(GOLANGCI_LINT) ## Format the code and group its imports
	$(GOLANGCI_LINT) fmt

.PHONY: fmt-check
fmt-check: $(GOLANGCI_LINT) ## Show what fmt would change, and fail if that is anything
	$(GOLANGCI_LINT) fmt --diff

.PHONY: vet
vet: ## Run go vet
	$(GO) vet ./...

.PHONY: lint
lint: $(GOLANGCI_LINT) ## Run the linters of .golangci.yml
	$(GOLANGCI_LINT) config verify
	$(GOLANGCI_LINT) run

.PHONY: vuln
vuln: $(GOVULNCHECK) ## Look for known vulnerabilities (needs vuln.go.dev)
	$(GOVULNCHECK) -test ./...

.PHONY: build
build: ## Compile every package and every example
	$(GO) build ./...

.PHONY: test
test: ## Run the tests, against whichever PostgreSQL is at hand
	$(GO) test $(TEST_ARGS) ./...

.PHONY: test-race
test-race: ## Run the tests under the race detector
	$(GO) test -race -timeout=30m $(TEST_ARGS) ./...

.PHONY: test-docker
test-docker: ## Run the tests against a container (LEGION_TEST_IMAGE chooses the image)
	LEGION_TEST_POSTGRES=docker $(GO) test $(TEST_ARGS) ./...

.PHONY: test-long
test-long: export LEGION_TEST_COUNT ?= 10
test-long: ## Run the tests with ten times the rounds (LEGION_TEST_COUNT)
	$(GO) test -timeout=3h $(TEST_ARGS) ./...

.PHONY: test-function
test-function: export LEGION_TEST_SERVER_FUNCTION = 1
test-function: ## Run the limiter's tests by the server's function
	$(GO) test $(TEST_ARGS) -skip TestStatements ./limiter

# The modes of the driver, and the versions of PostgreSQL, that the tests are run in.
EXEC_MODES ?= cache_describe describe_exec exec simple_protocol
POSTGRES_VERSIONS ?= 14 15 16 17 18

.PHONY: test-modes
test-modes: ## Run the tests in every mode of the driver
	for mode in $(EXEC_MODES); do echo "== $$mode"; \
		LEGION_TEST_PARAMETERS=default_query_exec_mode=$$mode $(GO) test $(TEST_ARGS) -skip 'TestStatements|Fuzz' . ./limiter ./store || exit 1; done

.PHONY: test-versions
test-versions: ## Run the tests on every supported version of PostgreSQL
	for version in $(POSTGRES_VERSIONS); do echo "== $$version"; \
		PATH="$$(tools/postgres $$version):$$PATH" LEGION_TEST_POSTGRES=local \
		$(GO) test $(TEST_ARGS) . ./limiter ./models ./store ./internal/lease ./internal/migration || exit 1; done

# How long each target is fuzzed. Minimizing is left out: each run asks a database.
FUZZ_TIME ?= 1m

.PHONY: fuzz
fuzz: ## Fuzz each target for FUZZ_TIME
	$(GO) test -run '^$$' -fuzz '^FuzzEnforce$$' -fuzztime $(FUZZ_TIME) -fuzzminimizetime 1x ./limiter
	$(GO) test -run '^$$' -fuzz '^FuzzUsageInARow$$' -fuzztime $(FUZZ_TIME) -fuzzminimizetime 1x ./limiter
	$(GO) test -run '^$$' -fuzz '^FuzzSaveAndAppend$$' -fuzztime $(FUZZ_TIME) -fuzzminimizetime 1x ./store
	$(GO) test -run '^$$' -fuzz '^FuzzUsageUnmarshal$$' -fuzztime $(FUZZ_TIME) -fuzzminimizetime 1x ./models

.PHONY: cover
cover: ## Run the tests and write .cache/cover.html
	@mkdir -p .cache
	$(GO) test -coverpkg=./... -coverprofile=.cache/cover.out $(TEST_ARGS) ./...
	$(GO) tool cover -html=.cache/cover.out -o .cache/cover.html
	$(GO) tool cover -func=.cache/cover.out | tail -n 1

.PHONY: examples
examples: ## Run the examples, each against a PostgreSQL of its own
	$(GO) run ./examples/quickstart
	$(GO) run ./examples/hooks
	$(GO) run ./examples/agents
	$(GO) run ./examples/replay $(REPLAY_ARGS)

.PHONY: bench
bench: ## Measure everything and write docs/performance.md (on a quiet machine)
	$(GO) run ./bench -rounds 5 -out docs

.PHONY: bench-quick
bench-quick: ## Run each benchmark once on small tables: whether it runs, not how fast
	$(GO) run ./bench -quick

.PHONY: bench-steady
bench-steady: ## Watch vacuum and HOT under steady load (BENCH_STEADY for so long)
	$(GO) run ./bench -steady $(BENCH_STEADY)

.PHONY: tidy
tidy: ## Tidy both modules
	$(GO) mod tidy
	$(GO) -C tools mod tidy

.PHONY: tidy-check
tidy-check: ## Show what tidy would change, and fail if that is anything
	$(GO) mod tidy -diff
	$(GO) -C tools mod tidy -diff
	$(GO) mod verify

.PHONY: ci
ci: ## Run everything that must pass before a merge
	.ci/run

.PHONY: clean
clean: ## Remove what these commands have built
	rm -rf .cache

# One rule for every tool that tools/go.mod lists. The touch is for make: go
# leaves a binary that is up to date as it was.
$(TOOLS_DIR)/%: tools/go.mod tools/go.sum
	@mkdir -p $(@D)
	$(GO) build -C tools -o ../$@ $$($(GO) -C tools list -f '{{.ImportPath}}' tool | grep '/$*$$')
	@touch $@
