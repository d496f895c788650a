# What a contributor runs. Everything works on a bare Debian machine with Go; what else is needed is
# installed by `make services`.
SHELL := /bin/bash
.DEFAULT_GOAL := test

SERVICES := ./internal/services/services.sh
LINT_VERSION := v2.15.0
LINT := .services/bin/golangci-lint-$(LINT_VERSION)

.PHONY: test quick vet lint planted conformance brokers linear walk e2e services services-stop services-status services-reset

## test: start the services, and run everything, with the race detector; a missing service is a failure
test: services vet
	UNECHO_REQUIRE_SERVICES=1 go test -race -count=1 -timeout 20m -p 2 $$(go list ./... | grep -v /internal/e2e)
	@# Alone, because how soon consumption is back after a crash is part of what it demands.
	UNECHO_REQUIRE_SERVICES=1 go test -race -count=1 -timeout 20m ./internal/e2e

## quick: what needs no services; says what it skipped
quick:
	@set -o pipefail; go test -short -p 1 -v ./... | grep -E '^(ok|FAIL|panic)|--- FAIL|^ +[a-z_]+\.go:[0-9]+: UNECHO_' | \
		sed -E 's/^ +[a-z_]+\.go:[0-9]+: (.*)/skipped for want of a service: \1/' | sort | uniq -c | sed -E 's/^ *1 (ok|FAIL)/\1/'

vet:
	go vet ./...

## lint: golangci-lint, built once
lint: $(LINT)
	$(LINT) run ./...

$(LINT):
	mkdir -p .services/bin
	GOBIN=$(CURDIR)/.services/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	mv .services/bin/golangci-lint $@

## planted: run the suites against broken implementations; every bug must be caught
planted: services
	@set -o pipefail; UNECHO_REQUIRE_SERVICES=1 go test -count=1 -v -run '^TestPlanted' ./... | tee .services/planted.log | grep -E 'PLANTED|^(FAIL|panic)' | sed 's/^ *//'; status=$${PIPESTATUS[0]}; \
	caught=$$(grep -c 'PLANTED .* caught' .services/planted.log); missed=$$(grep -cE 'PLANTED .* (missed|neither)' .services/planted.log); \
	echo "planted=$$((caught + missed)) caught=$$caught"; exit $$status

## conformance: the suite of the dedupe stores on every driver; prints drivers and cases, and fails on a skipped one
conformance: services
	@set -o pipefail; UNECHO_REQUIRE_SERVICES=1 go test -json -count=1 -timeout 20m -run 'Conformance' ./dedupe/... | go run ./internal/conformance

## brokers: the suite of the broker adapters on every broker, case by case; the wire; kills and rebalances; and the
## list of what clients and brokers really do, with the test that shows that it is minded
brokers: services
	@set -o pipefail; { UNECHO_REQUIRE_SERVICES=1 go test -json -count=1 -timeout 20m ./brokers/... ./internal/wire; \
		UNECHO_FULL=1 UNECHO_REQUIRE_SERVICES=1 go test -json -count=1 -timeout 20m -run 'Crash$$|Storm' ./internal/e2e; } | \
		tee .services/brokers.log | go run ./internal/conformance -matrix -traps internal/conformance/traps.txt; status=$$?; \
	grep -oE '(CRASH|STORM) [^"]*' .services/brokers.log | sed 's/\\n//'; exit $$status

## linear: 600 histories of concurrent clients, lost answers and expiries on each store, checked for linearizability, and
## long random sequences by the same model
linear: services
	@set -o pipefail; UNECHO_REQUIRE_SERVICES=1 UNECHO_HISTORIES=600 go test -count=1 -v -timeout 30m -run 'Linear|Script' ./internal/linear >.services/linear.log 2>&1; status=$$?; \
	if [ $$status = 0 ]; then grep -E 'LINEAR|^ *---|^ok' .services/linear.log; else cat .services/linear.log; fi; \
	UNECHO_REQUIRE_SERVICES=1 go test -count=1 -timeout 30m -run Machine ./internal/linear -rapid.checks=300 -rapid.steps=40 -rapid.nofailfile || status=1; \
	exit $$status

## walk: print the way of one message through relay, broker and handler
walk:
	go test -count=1 -v -run '^TestWalk$$' ./internal/walk

## e2e: the end-to-end runs alone, with their figures, and with all kills
e2e: services
	UNECHO_FULL=1 UNECHO_REQUIRE_SERVICES=1 go test -race -count=1 -v -timeout 30m ./internal/e2e

services:
	@$(SERVICES) up

services-stop:
	@$(SERVICES) stop

services-status:
	@$(SERVICES) status

services-reset:
	@$(SERVICES) reset
