# Each target installs what is missing (deploy/bootstrap.sh). So it works alone on a fresh Debian 12
# with Python 3.11, and a second time without network.
PYTHON := .venv/bin/python
JOBS := 2
# More tests than processors run at the same time, because tests also wait.
TEST_JOBS := 3
FORMAT := clang-format-14
CXX_SOURCES = $(shell find native client bench tests -name '*.cc' -o -name '*.h')
PYTHON_FOLDERS = petps client docs examples bench tests

# Rounds and test processes of `make soak`; seconds of `make soak ONLY=hostile`, and of
# `make soak-pull` per gather mode.
SOAK_ROUNDS := 10
SOAK_JOBS := 5
SOAK_SECONDS := 600
# Seconds of `make fuzz` for each of its seven targets: an hour in all. FUZZ_ONLY: some of them.
FUZZ_SECONDS := 510
FUZZ_ONLY :=
# Of `make chaos`: three minutes in place of an hour; a number of seconds; a rule to break, or all.
QUICK :=
CHAOS_SECONDS :=
BROKEN :=
# The C++ suites of `make aarch64`: of rooms with code for a processor, without clocks and sockets.
# Death tests are left out, because an emulated program cannot start itself again.
AARCH64_SUITES := base epoch media index table codec

.PHONY: chaos drill help bootstrap build demo demo-train test test-train lab aarch64 crash fuzz soak soak-pull runbook bench docs wheels cpp-package format tidy clean page upgrade operate deploy-check
.DEFAULT_GOAL := help

help:
	@echo "make demo    build, then train, serve, kill and compare on real accesses (examples/demo)"
	@echo "make demo-train  installs PyTorch (6 GB), then trains a DLRM, streams, serves, kills"
	@echo "make test    build, then every check and test; one summary at the end"
	@echo "make test-train  installs PyTorch and Ray (6 GB) into .venv-train, then runs their tests"
	@echo "make upgrade the release before and this one, mixed; a rolling upgrade and rollback under load"
	@echo "make lab     persistent memory, RDMA, power cuts: suites in a small guest (tests/lab)"
	@echo "make deploy-check  the units, the image, compose and the chart of deploy/: lint, schemas, real runs"
	@echo "make aarch64  cross-compile for aarch64 and run the C++ suites in an emulated processor"
	@echo "make fuzz    libFuzzer on frames, rows, pools, TLS, records, stores, texts, requests; FUZZ_SECONDS=510 each"
	@echo "make operate  alert rules and dashboards against a real Prometheus (tests/operate)"
	@echo "make drill   breaks servers, and shows which alert fires, what they say, and what ends it"
	@echo "make chaos   breaks processes, links, clocks and disks of a cluster for an hour, and checks what clients saw; QUICK=1: 3 minutes"
	@echo "make crash   every state of the crash suite, of which make test builds a tenth"
	@echo "make soak    the C++ suites with more test processes than processors, SOAK_ROUNDS=10 times"
	@echo "make soak ONLY=hostile  fourteen attacks at once on a server, beside a client that must not notice; SOAK_SECONDS=600"
	@echo "make soak ONLY=hostile-router  the same attacks on a router before a server"
	@echo "make soak-pull  pulls under updates and reclaim in each gather mode; SOAK_SECONDS=600 each"
	@echo "make runbook every page of docs/runbook, with the failure that it is about; make test runs two"
	@echo "make bench   build, then measure; ONLY=pull,apply: parts; RESUME=1: continue; AGAIN=pull; BEFORE=FOLDER: compare"
	@echo "make build   everything that is needed to run, into .venv and build/release"
	@echo "make page    installs Chromium, then tests the status page in it: light, dark, on a phone"
	@echo "make docs    the documentation as a site in build/docs; a warning is an error"
	@echo "make wheels  both distributions into dist/, checked, and each tried in a clean environment"
	@echo "make cpp-package  the C++ client as a .tar.gz and a .deb in dist/"
	@echo "make format  rewrite the sources in the one format that make test accepts"
	@echo "make tidy    clang-tidy over native/ and client/cpp (slow; needs clang-tidy-14)"
	@echo "make clean   remove build/ and dist/ (not .venv)"

bootstrap:
	@deploy/bootstrap.sh

# An editable install: Python edits take effect at once. C++ is rebuilt incrementally in
# build/release, which the test programs share.
build: bootstrap
	@deploy/build.sh

demo: build
	$(PYTHON) -m examples.demo

# PyTorch is installed in the environment of test-train.
demo-train: build
	@deploy/bootstrap.sh train
	.venv-train/bin/python -m examples.demo --train --plots build/demo-train

test: build
	cmake --build build/release -j $(JOBS) --target petps_bench
	$(PYTHON) -m tests.run --jobs $(TEST_JOBS) $(if $(ONLY),--only $(ONLY))

# PyTorch and Ray have an environment of their own, which also sees the packages of .venv. If they
# cannot be installed, the suite is skipped and the summary shows it.
test-train: build
	$(PYTHON) -m tests.run --jobs $(TEST_JOBS) --only train

# Installs QEMU and everything else that the guest needs. If they are installed, `make test` runs
# the lab's smoke test.
lab: build
	@deploy/bootstrap.sh lab
	cmake --build build/release -j $(JOBS) --target petps_tests
	$(PYTHON) -m tests.run --jobs $(JOBS) --only lab

# Installs Debian's buildah, builds helm and others with Go (5 minutes), and builds the image. What
# cannot be installed is skipped, and the summary shows it. `make test` runs the short tests of them
# if their tools are installed.
deploy-check: build
	@deploy/bootstrap.sh deploy
	@deploy/bootstrap.sh operate
	$(PYTHON) -m tests.run --jobs $(JOBS) --only deploy

aarch64: bootstrap
	@deploy/bootstrap.sh aarch64
	cmake --preset aarch64 --log-level=WARNING
	cmake --build build/aarch64 -j $(JOBS) --target $(AARCH64_SUITES:%=test_%)
	ctest --test-dir build/aarch64 -j $(JOBS) --output-on-failure -E DeathTest \
	  -L "^($$(echo $(AARCH64_SUITES) | tr ' ' '|'))\$$"

# Feeds the targets of tests/fuzz with bytes that an attacker could send or leave in a file.
fuzz: build
	@deploy/bootstrap.sh fuzz
	cmake --preset fuzz --log-level=WARNING
	cmake --build build/fuzz -j $(JOBS) --target petps_fuzz
	$(PYTHON) -m tests.fuzz.run --seconds $(FUZZ_SECONDS) $(if $(FUZZ_ONLY),--only $(FUZZ_ONLY))

# Builds the release before in build/upgrade, once, and runs both side by side.
upgrade: build
	$(PYTHON) -m tests.upgrade.old
	$(PYTHON) -m tests.run --only upgrade

# Unpacks Prometheus. If it is there, `make test` runs these tests too.
operate: build
	@deploy/bootstrap.sh operate
	$(PYTHON) -m pytest -q -p no:cacheprovider tests/operate -n $(JOBS)

# Breaks real servers, which a real Prometheus watches, and mends them as the runbook says.
drill: build
	@deploy/bootstrap.sh operate
	$(PYTHON) -m tests.drill $(if $(ONLY),--only $(ONLY))

# A cluster in network namespaces, broken all the time (tests/chaos/README.md). Needs root. QUICK=1
# is a suite of the test runner, whose summary shows a skip if this machine cannot run it.
chaos: build
	@deploy/bootstrap.sh chaos
ifeq ($(QUICK)$(CHAOS_SECONDS)$(BROKEN),1)
	$(PYTHON) -m tests.run --only chaos
else
	$(PYTHON) -m tests.chaos $(if $(QUICK),--quick) $(if $(CHAOS_SECONDS),--seconds $(CHAOS_SECONDS)) $(if $(BROKEN),--broken $(BROKEN))
endif

crash: build
	cmake --build build/release -j $(JOBS) --target test_crash
	ctest --test-dir build/release -j $(TEST_JOBS) --output-on-failure -L '^crash$$'

# ONLY=hostile, hostile-router: attackers instead (tests/soak/hostile.py).
# Some races appear with five test processes on two processors, but not with two. The suites that
# count states are short here (see tests/run.py).
soak: build
ifneq ($(filter hostile hostile-router,$(ONLY)),)
	$(PYTHON) -m tests.soak.hostile --seconds $(SOAK_SECONDS) $(if $(findstring router,$(ONLY)),--router)
else
	$(PYTHON) -m tests.run --jobs $(SOAK_JOBS) --rounds $(SOAK_ROUNDS) --only release,asan,tsan
endif

# Pulls rows over tcp under full-speed updates and reclaim, and checks each row. ASan poisons freed
# slots. setarch -R fixes addresses where it is permitted: see tests/run.py.
soak-pull: build
	cmake --preset asan --log-level=WARNING
	cmake --build build/asan -j $(JOBS) --target test_server
	PETPS_SOAK_SECONDS=$(SOAK_SECONDS) \
	  $$(setarch -R true 2>/dev/null && echo setarch -R) build/asan/test_server --gtest_filter='*Soak*'

# Types the commands of every page of the runbook, in the failure that the page is about.
runbook: build
	PETPS_RUNBOOK=all $(PYTHON) -m pytest -q -p no:cacheprovider -n $(JOBS) tests/docs -k runbook

bench: build
	cmake --build build/release -j $(JOBS) --target petps_bench
	$(PYTHON) -m $(if $(BEFORE),bench.alternate $(BEFORE),bench.report) $(if $(ONLY),--only $(ONLY)) $(if $(RESUME),--resume) $(if $(AGAIN),--again $(AGAIN))

# The status page in a real browser (tests/page). It also takes the pictures of docs/how-to/page.md.
page: build
	$(PYTHON) -m tests.run --jobs $(JOBS) --only page

docs: build
	@deploy/bootstrap.sh docs
	@mkdir -p build/doxygen && doxygen docs/Doxyfile
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

wheels: bootstrap
	@deploy/wheels.sh

cpp-package: build
	cmake --build build/release -j $(JOBS) --target petps_client_package
	cpack --config build/release/CPackConfig.cmake -B dist

format: bootstrap
	$(FORMAT) -i $(CXX_SOURCES)
	.venv/bin/ruff format -q $(PYTHON_FOLDERS)
	.venv/bin/ruff check -q --fix $(PYTHON_FOLDERS)

tidy: build
	cmake --preset release >/dev/null
	find native client/cpp -name '*.cc' -not -path 'native/bindings/*' | \
	  xargs -P $(JOBS) -n 4 clang-tidy-14 -p build/release --quiet

clean:
	rm -rf build dist
